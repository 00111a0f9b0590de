"""``load`` and ``tensors``: between checkpoints and the Variables of a flax nnx module."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import UnsupportedModelError, UserInputError
from ...graph.weights import WeightData, Weights, load_weights
from ...graph.weights.given import data_of
from ...kernels import explicit
from ...models import family
from ...nn.layer.state import LoadResult
from ...storage.limits import Limits
from ...storage.table import Verify
from ..layouts import AxisLayout
from ..renaming import Function, Origin, Renaming
from .filling import arrays
from .matching import Matching
from .variables import TargetVariable, random_paths, targets

# Named layouts: torch's weight of a linear layer, a weight that is not transposed, torch's weight
# of a convolution.
T = "o i -> i o"
"""The pattern of a linear layer: torch's ``[out, in]`` to the ``[in, out]`` of flax."""
AS_IS = "i o -> i o"
"""The pattern of a kernel that both sides store alike."""
OIHW_TO_HWIO = "o i h w -> h w i o"
"""The pattern of a convolution: torch's order of axes to that of flax."""

__all__ = ["AS_IS", "OIHW_TO_HWIO", "T", "load", "tensors"]


def load(
    module: Any,
    weights: str | os.PathLike[str] | Weights | Mapping[str, Any],
    *,
    rename: Any = None,
    transform: Mapping[str, Any] | None = None,
    cast: bool = False,
    strict: bool = True,
    verify: Verify = "auto",
    limits: Limits | None = None,
) -> LoadResult:
    """Loads a checkpoint into the Variables of an nnx module: all of them, or none on an error.

    Each array keeps the sharding of the Variable's present value; without a value
    (``nnx.eval_shape``) it gets the sharding of its metadata. Each device reads its own part.

    Args:
        module: nnx module; the paths of its Variables are dotted: ``blocks.0.attn.query.kernel``.
        weights: path or cursor of any format (a GGUF file has Hugging Face's names if maxjax
            supports the architecture), or arrays by name.
        rename: table of pattern of the checkpoint's names → name in the module; or → (name,
            layout); or → a list of these if a tensor is several arrays; or → None to leave the
            tensor out. ``*`` matches a part of a name between dots, ``**`` any text; the stars of
            the name are replaced with the matches in order, and the first pattern that matches
            counts. Names that match no pattern stay as they are. Instead of a table it may be a
            function of the name. ``torch_rules`` makes such a table.
        transform: table of pattern of the module's names → layout, for arrays to which ``rename``
            gives none.
        cast: whether to convert between float widths, and between integers that fit, and to
            dequantise quantised weights. If not, dtypes must be equal.
        strict: whether to refuse missing and unexpected names.
        verify: for a path, when checksums are compared (see ``load_weights``).
        limits: for a path, limits of what is read (see ``load_weights``).

    A layout says how axes correspond: ``"o i -> i o"`` (:data:`T`), ``"(h d) e -> e h d"``; see
    ``interop.layouts``. A function of an array can be used in place of a layout; a pair of
    functions is a conversion and its inverse.

    Every Param, and every Variable without a value, must be in the checkpoint; other Variables
    (BatchStat) keep their values if they are not. The state of random number generators is not
    changed.

    Returns:
        The missing paths and the unexpected names; both are empty if ``strict``.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes do not fit; its ``diff`` lists all of it.
        CheckpointError: the checkpoint cannot be read.
        UserInputError: the table is not valid.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> weights = {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)}
        >>> load(model, weights, rename={"weight": ("kernel", T)})
        LoadResult(missing=(), unexpected=())
        >>> model.kernel.shape
        (2, 3)
    """
    renaming = Renaming(rename, transform)
    with _opened(weights, verify, limits) as (named, path):
        data = {name: data_of(name, value) for name, value in named.items()}
        match = Matching(targets(module), renaming, data, cast, random_paths(module))
        if match.is_refused(strict):
            raise match.error(path, strict)
        found = arrays(match.fillings)
    for filling, array in zip(match.fillings, found, strict=True):
        filling.target.put(array)
    return LoadResult(match.diff.missing, match.diff.unexpected)


@contextmanager
def _opened(
    weights: Any, verify: Verify, limits: Limits | None
) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """The tensors by name, and the path; files opened here are closed here."""
    if isinstance(weights, (str, bytes, os.PathLike)):
        with load_weights(weights, verify=verify, limits=limits) as opened:
            yield _named(opened), opened._path
    elif isinstance(weights, Weights):
        yield _named(weights), weights._path
    elif isinstance(weights, Mapping):
        yield weights, None
    else:
        raise UserInputError(f"weights are a path, a Weights cursor or a mapping of arrays by name, not "
                             f"{type(weights).__name__}")  # fmt: skip


def _named(weights: Weights) -> dict[str, WeightData]:
    try:
        return family.tensors(weights)
    except UnsupportedModelError:  # a GGUF file of another architecture, by its own names
        return dict(weights._named_data())


def tensors(
    module: Any, *, rename: Any = None, transform: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the values of a module under the names and in the layouts of a checkpoint.

    It is the inverse of :func:`load`.

    Args:
        module: nnx module.
        rename, transform: the tables that :func:`load` takes.

    Returns:
        Arrays by name. Arrays whose layout does not change are the module's own, not copies. The
        state of random number generators is left out.

    Raises:
        UserInputError: the table has no inverse: it is a function, or gives two arrays one name.
        ValueError: a Variable has no value.

    Example:
        >>> from flax import nnx
        >>> from maxjax.interop.nnx import torch_rules
        >>> model = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
        >>> {name: a.shape for name, a in tensors(model, rename=torch_rules(model)).items()}
        {'weight': (5, 3)}
    """
    return written(targets(module), Renaming(rename, transform))


# --- writing ----------------------------------------------------------------------------------


class _TensorPart(NamedTuple):
    """A Variable that is a tensor of the checkpoint, or one of its parts.

    Attributes:
        target: the Variable.
        change: layout of the tensor.
        number: number of the layer, if the Variable stacks layers.
    """

    target: TargetVariable
    change: AxisLayout
    number: int = 0


def written(targets: Mapping[str, TargetVariable], renaming: Renaming) -> dict[str, Any]:
    """The arrays by name; see ``nnx.tensors``."""
    found: dict[str, Any] = {}
    pieces: dict[str, dict[int, _TensorPart]] = {}  # by name, then by part
    for target in targets.values():
        value = target.value
        if isinstance(value, jax.ShapeDtypeStruct):
            raise ValueError(f"'{target.name}' has no value: load one first")
        origin = renaming.origin(target.name)
        change = origin.change
        if isinstance(change, AxisLayout):
            for name, piece in _pieces(target, origin, change):
                _enter(pieces.setdefault(name, {}), change.part[0], piece, name)
        else:
            _enter(found, origin.name, _changed(target, change, value), origin.name)
    for name, parts in pieces.items():
        _enter(found, name, _joined_parts(name, parts), name)
    return found


def _enter(entries: dict[Any, Any], key: Any, value: Any, name: str) -> None:
    if key in entries:
        raise UserInputError(f"the table gives two arrays of the module the name '{name}'")
    entries[key] = value


def _changed(target: TargetVariable, change: Function | None, value: Any) -> Any:
    if change is None:
        return value
    if change.back is None:
        raise UserInputError(f"'{target.name}' is made by a function that has no inverse: use a "
                             "layout, or a pair of functions")  # fmt: skip
    return change.back(value)


def _pieces(
    target: TargetVariable, origin: Origin, change: AxisLayout
) -> Iterator[tuple[str, _TensorPart]]:
    """(name, part) of each tensor that a Variable is, or is a part of."""
    if len(change.axes) != len(target.shape):
        raise UserInputError(
            f"'{target.name}' has {len(target.shape)} axes, and the layout '{change}' has "
            f"{len(change.axes)}: correct the table"
        )
    if change.stacks is None or origin.number is None:
        yield origin.name, _TensorPart(target, change)
        return
    for number in range(target.shape[change.stacks]):
        yield origin.number(number), _TensorPart(target, change, number)


def _joined_parts(name: str, parts: Mapping[int, _TensorPart]) -> Any:
    """The tensor, made of all its parts."""
    pieces = [parts[place] for place in sorted(parts)]
    first = pieces[0]
    count = first.change.part[1]
    if len(pieces) < count:
        lacking = [place for place in range(count) if place not in parts]
        raise UserInputError(f"'{name}' has {count} parts, and the module has none for {lacking}")
    alike = {(one.change.all_parts, one.target.shape, one.number) for one in pieces}
    if len(alike) > 1:
        raise UserInputError(f"the parts of '{name}' differ: they need the same layout and shape")
    return _back(first.target, first.change, [one.target.value for one in pieces], first.number)


def _back(target: TargetVariable, change: AxisLayout, values: list[Any], number: int) -> Any:
    """The file's tensor; an axis stays sharded along its outermost factor."""
    bound = change.of(target.shape)
    assert bound is not None

    # The number is an array, so that one program slices all layers.
    def back(number: Any, *arrays: Any) -> Any:
        if change.stacks is not None:
            arrays = tuple(jnp.take(array, number, axis=change.stacks) for array in arrays)
        return bound.back(arrays, jnp)

    mesh = explicit.mesh_of(*values)
    if mesh is None:
        return back(jnp.int32(number), *values)
    # On a mesh with Explicit axes JAX refuses to merge axes that are split.
    axes_of = dict(zip(change.axes, explicit.entries(values[0]), strict=True))
    first = [group[0].name if group else None for group in change.groups]
    spec = [axes_of.get(name, ()) if name else () for name in first]
    return explicit.automatic(back, mesh, spec)(jnp.int32(number), *values)
