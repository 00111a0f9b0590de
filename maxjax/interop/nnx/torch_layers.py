"""``torch_rules``: makes the table that maps torch's weights to those of a flax nnx module.

The class of each nnx layer determines the names and layouts of the weights in torch's layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from ...errors import UserInputError
from ..renaming import STARS, compiled, filled
from .variables import places

_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)
_NORM_NAMES = {"scale": "weight", "mean": "running_mean", "var": "running_var"}
# torch.nn.MultiheadAttention stores the projections of queries, keys and values as one tensor.
_THREE = ("query", "key", "value")


def torch_rules(
    module: Any, names: Mapping[str, str] | None = None, *, fused: bool = False
) -> dict[str, Any]:
    """Makes a table from torch's names and layouts to those of an nnx module, for ``rename``.

    Args:
        module: nnx module, which may be abstract.
        names: pattern of the checkpoint's layers → pattern of the module's layers, for layers whose
            names differ: ``{"encoder.layer.*.attention.self": "blocks.*.attn"}``. A pattern also
            applies to the layers inside; the longest matching pattern is used, and "" is the root. If
            layers are stacked (``nnx.vmap``), the checkpoint's pattern has one more star, at the
            front: ``{"encoder.layer.*": "blocks"}``.
        fused: whether the checkpoint stores attention as ``torch.nn.MultiheadAttention`` does,
            with queries, keys and values in one tensor; if not, they are separate layers.

    Returns:
        Name in the checkpoint → (path in the module, layout), for every Variable of Linear,
        LinearGeneral, Conv, ConvTranspose, Embed, the norms and PReLU. The batch count of torch's
        BatchNorm is ignored. Variables of other classes keep their names and layouts.

    Raises:
        UserInputError: the numbers of stars in the two patterns do not fit together.

    Example:
        >>> from flax import nnx
        >>> model = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))])
        >>> torch_rules(model, {"fc.*": "*"})
        {'fc.0.bias': ('0.bias', None), 'fc.0.weight': ('0.kernel', 'o i -> i o')}
    """
    layers = _layers({} if names is None else names)
    attention = {
        ".".join(map(str, path))
        for path, one in nnx.iter_modules(module)
        if fused and isinstance(one, nnx.MultiHeadAttention)
    }
    table: dict[str, Any] = {}
    for path, owner, variable in places(module):
        rank = getattr(variable, "ndim", None)
        if isinstance(variable, nnx.RngState) or rank is None:
            continue
        layer, _, attribute = path.rpartition(".")
        name = _name(owner, attribute)
        outer, _, part = layer.rpartition(".")
        if outer in attention:
            _fuse(table, layers, outer, part, name, path)
            continue
        layer_name = _checkpoint_name(layer, layers)
        table[_joined(layer_name, name.name)] = (path, _stacked(path, name, rank, layer_name))
        if isinstance(owner, nnx.BatchNorm) and attribute == "mean":
            table[_joined(layer_name, "num_batches_tracked")] = None
    return table


class _Name(NamedTuple):
    """Torch's name of a weight, its layout, and its number of axes in nnx (None: any number)."""

    name: str
    layout: str | None = None
    rank: int | None = None


def _name(owner: Any, attribute: str) -> _Name:
    if isinstance(owner, nnx.Linear):
        known = {"kernel": _Name("weight", "o i -> i o", 2), "bias": _Name("bias", None, 1)}
    elif isinstance(owner, nnx.LinearGeneral) and not owner.batch_axis:
        known = _general(len(owner.in_features), len(owner.out_features))
    elif isinstance(owner, nnx.Conv | nnx.ConvTranspose):
        known = _filter(owner)
    elif isinstance(owner, nnx.Embed):
        known = {"embedding": _Name("weight", None, 2)}
    elif isinstance(owner, _NORMS):
        known = {attribute: _Name(_NORM_NAMES.get(attribute, attribute), None, 1)}
    elif isinstance(owner, nnx.PReLU):
        known = {"negative_slope": _Name("weight", "0/1 ->", 0)}
    else:
        known = {}
    return known.get(attribute, _Name(attribute))


def _general(inputs: int, outputs: int) -> dict[str, _Name]:
    """The names for LinearGeneral; torch merges all inputs into one axis, and all outputs into another."""
    ins = " ".join(f"i{n}" for n in range(inputs))
    outs = " ".join(f"o{n}" for n in range(outputs))
    return {
        "kernel": _Name("weight", f"({outs}) ({ins}) -> {ins} {outs}", inputs + outputs),
        "bias": _Name("bias", f"({outs}) -> {outs}", outputs),
    }


def _filter(owner: Any) -> dict[str, _Name]:
    """The names for convolutions; a transposed one has a spatially reversed kernel unless ``transpose_kernel``."""
    rank = len(owner.kernel_shape)
    sides = [f"s{n}" for n in range(rank - 2)]
    spatial = " ".join(sides)
    if isinstance(owner, nnx.Conv):
        layout = f"o i {spatial} -> {spatial} i o"
    elif owner.transpose_kernel:
        layout = f"i o {spatial} -> {spatial} o i"
    else:
        layout = f"i o {spatial} -> {' '.join('-' + side for side in sides)} i o"
    return {"kernel": _Name("weight", layout, rank), "bias": _Name("bias", None, 1)}


def _stacked(path: str, name: _Name, rank: int, layer_name: str) -> str | None:
    """The layout, with an axis of layers if the Variable has one."""
    is_stack = name.rank is not None and rank == name.rank + 1
    if is_stack is not ("*" in layer_name):
        if is_stack:
            why = "has an axis of layers: the pattern of the checkpoint's layers needs one star more than the module's"
        else:
            why = (
                "has no axis of layers: the pattern of the checkpoint's layers has a star too many"
            )
        raise UserInputError(f"'{path}' {why}")
    if not is_stack:
        return name.layout
    axes = " ".join(f"a{n}" for n in range(rank - 1))
    left, _, right = (name.layout or f"{axes} -> {axes}").partition("->")
    return f"{left}-> * {right.strip()}"


def _fuse(
    table: dict[str, Any], layers: list[_Layer], outer: str, part: str, name: _Name, path: str
) -> None:
    """Adds a weight of an attention layer to the table, as torch.nn.MultiheadAttention stores it."""
    layer_name = _checkpoint_name(outer, layers)
    if part not in _THREE:  # the output projection, and norms
        inner = "out_proj" if part == "out" else part
        table[_joined(layer_name, f"{inner}.{name.name}")] = (path, name.layout)
        return
    layout = (name.layout or "").replace("(", f"({_THREE.index(part)}/3 ", 1)
    table.setdefault(_joined(layer_name, f"in_proj_{name.name}"), []).append((path, layout))


# Function from a layer's name in the module to its name in the checkpoint; None if the pattern does not match.
_Layer = Callable[[str], str | None]


def _layers(names: Mapping[str, str]) -> list[_Layer]:
    """One function for each pattern; those with the longest patterns of the module's names come first."""
    order = sorted(names.items(), key=lambda one: (-one[1].count("."), -len(one[1])))
    return [_layer(theirs, ours) for theirs, ours in order]


def _layer(theirs: str, ours: str) -> _Layer:
    extra = len(STARS.findall(theirs)) - len(STARS.findall(ours))
    if extra not in (0, 1):
        raise UserInputError(
            f"'{theirs}' and '{ours}': stars do not carry over; both need the same number, or the "
            "first one more for stacked layers"
        )
    pattern = re.compile(f"{compiled(ours).pattern}{r'((?:[.].*)?)' if ours else '(.*)'}", re.S)

    def find(layer: str) -> str | None:
        match = pattern.fullmatch(layer)
        if match is None:
            return None
        *groups, rest = match.groups()
        return _joined(filled(theirs, [*["*"] * extra, *groups]), rest.lstrip("."))

    return find


def _checkpoint_name(layer: str, layers: list[_Layer]) -> str:
    return next((name for find in layers if (name := find(layer)) is not None), layer)


def _joined(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer and name else layer or name
