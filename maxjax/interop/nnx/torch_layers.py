"""The table that brings torch's weights into a flax nnx module, made of its own layers.

Each layer of nnx says by its class what torch calls its weights and how their axes lie.
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
# torch's own attention has the maps of queries, keys and values as one tensor of three parts.
_THREE = ("query", "key", "value")


def torch_rules(
    module: Any, names: Mapping[str, str] | None = None, *, fused: bool = False
) -> dict[str, Any]:
    """The table from torch's names and layouts to those of an nnx module, for ``rename``.

    Args:
        module: The nnx module, which may be abstract.
        names: Pattern of the checkpoint's layers → pattern of the module's, for those that are
            called otherwise: ``{"encoder.layer.*.attention.self": "blocks.*.attn"}``. What is
            below such a layer goes with it; the longest pattern counts, and "" is the root.
            For layers stacked in one (``nnx.vmap``) the checkpoint's has one star more, the
            first: ``{"encoder.layer.*": "blocks"}``.
        fused: MultiHeadAttention as ``torch.nn.MultiheadAttention`` has it, with queries, keys
            and values in one tensor; otherwise they are layers of their own.

    Returns:
        Name in the checkpoint → (path in the module, layout), for every place of a Variable of
        Linear, LinearGeneral, Conv, ConvTranspose, Embed, the norms and PReLU. The
        count of batches that torch's BatchNorm has is left out. Variables of other classes
        keep name and layout.

    Raises:
        UserInputError: A pattern whose stars do not carry over.

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
        name = _name(owner, attribute, rank)
        outer, _, part = layer.rpartition(".")
        if outer in attention:
            _fuse(table, layers, outer, part, name, path)
            continue
        there = _there(layer, layers)
        table[_joined(there, name.name)] = (path, _stacked(path, name, rank, there))
        if isinstance(owner, nnx.BatchNorm) and attribute == "mean":
            table[_joined(there, "num_batches_tracked")] = None
    return table


class _Name(NamedTuple):
    """What torch calls a weight, its layout, and how many axes it has in nnx (None: any)."""

    name: str
    layout: str | None = None
    rank: int | None = None


def _name(owner: Any, attribute: str, rank: int) -> _Name:
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
    """torch has all inputs as one axis, and all outputs."""
    ins = " ".join(f"i{n}" for n in range(inputs))
    outs = " ".join(f"o{n}" for n in range(outputs))
    return {
        "kernel": _Name("weight", f"({outs}) ({ins}) -> {ins} {outs}", inputs + outputs),
        "bias": _Name("bias", f"({outs}) -> {outs}", outputs),
    }


def _filter(owner: Any) -> dict[str, _Name]:
    """Filters; torch's of a transposed convolution run the other way, unless flax turns them."""
    rank = len(owner.kernel_shape)
    sides = [f"s{n}" for n in range(rank - 2)]
    there = " ".join(sides)
    if isinstance(owner, nnx.Conv):
        layout = f"o i {there} -> {there} i o"
    elif owner.transpose_kernel:
        layout = f"i o {there} -> {there} o i"
    else:
        layout = f"i o {there} -> {' '.join('-' + side for side in sides)} i o"
    return {"kernel": _Name("weight", layout, rank), "bias": _Name("bias", None, 1)}


def _stacked(path: str, name: _Name, rank: int, there: str) -> str | None:
    """The layout, with the axis of layers where the Variable has one."""
    is_stack = name.rank is not None and rank == name.rank + 1
    if is_stack is not ("*" in there):
        why = "has" if is_stack else "has not"
        raise UserInputError(
            f"'{path}' {why} an axis of layers: the pattern of the checkpoint's layers needs one "
            "star more than the module's for such a Variable, and only for such"
        )
    if not is_stack:
        return name.layout
    axes = " ".join(f"a{n}" for n in range(rank - 1))
    left, _, right = (name.layout or f"{axes} -> {axes}").partition("->")
    return f"{left}-> * {right.strip()}"


def _fuse(
    table: dict[str, Any], layers: list[_Layer], outer: str, part: str, name: _Name, path: str
) -> None:
    """Enters a weight of an attention as torch's own has it."""
    there = _there(outer, layers)
    if part not in _THREE:  # what comes after the heads, and norms
        inner = "out_proj" if part == "out" else part
        table[_joined(there, f"{inner}.{name.name}")] = (path, name.layout)
        return
    layout = (name.layout or "").replace("(", f"({_THREE.index(part)}/3 ", 1)
    table.setdefault(_joined(there, f"in_proj_{name.name}"), []).append((path, layout))


# (whether a layer of ours is, or is below, what the pattern says: its name there)
_Layer = Callable[[str], str | None]


def _layers(names: Mapping[str, str]) -> list[_Layer]:
    """Of each pattern what finds a layer's name, those of the longest of ours first."""
    order = sorted(names.items(), key=lambda one: (-one[1].count("."), -len(one[1])))
    return [_layer(theirs, ours) for theirs, ours in order]


def _layer(theirs: str, ours: str) -> _Layer:
    extra = len(STARS.findall(theirs)) - len(STARS.findall(ours))
    if extra not in (0, 1):
        raise UserInputError(f"'{theirs}' and '{ours}': stars do not carry over")
    pattern = re.compile(f"{compiled(ours).pattern}{r'((?:[.].*)?)' if ours else '(.*)'}", re.S)

    def there(layer: str) -> str | None:
        match = pattern.fullmatch(layer)
        if match is None:
            return None
        *groups, rest = match.groups()
        return _joined(filled(theirs, [*["*"] * extra, *groups]), rest.lstrip("."))

    return there


def _there(layer: str, layers: list[_Layer]) -> str:
    return next((name for find in layers if (name := find(layer)) is not None), layer)


def _joined(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer and name else layer or name
