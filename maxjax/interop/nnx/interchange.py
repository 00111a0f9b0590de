"""``load`` and ``tensors``: between checkpoints and the Variables of a flax nnx module."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import UnsupportedModelError, UserInputError
from ...graph.weights import FileWeights, WeightData, load_weights
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

# Layouts with names.
T = "o i -> i o"
"""The layout of a linear layer's weight: torch's ``[out, in]`` to flax's ``[in, out]``."""
AS_IS = "i o -> i o"
"""The layout of a kernel whose axes have the same order in the checkpoint and in flax."""
OIHW_TO_HWIO = "o i h w -> h w i o"
"""The layout of a convolution's weight: torch's order of axes to flax's."""

__all__ = ["AS_IS", "OIHW_TO_HWIO", "T", "load", "tensors"]


def load(
    module: Any,
    weights: str | os.PathLike[str] | FileWeights | Mapping[str, Any],
    *,
    rename: Any = None,
    transform: Mapping[str, Any] | None = None,
    cast: bool = False,
    strict: bool = True,
    verify: Verify = "auto",
    limits: Limits | None = None,
) -> LoadResult:
    """Loads a checkpoint into the Variables of an nnx module, in place: all of them, or none on an error.

    Each array gets the sharding of the Variable's current value; without a value
    (``nnx.eval_shape``) it gets the sharding in the Variable's metadata. Each device reads its own shard.

    Args:
        module: nnx module. Names in the module are dotted paths: ``blocks.0.attn.query.kernel``.
        weights: path of a checkpoint in any format, a Weights cursor, or arrays by name. A GGUF file has
            Hugging Face's names if maxjax supports its architecture.
        rename: table from patterns of the checkpoint's names to a name in the module; to (name,
            layout); to a list of these if a tensor becomes several arrays; or to None to ignore the
            tensor. ``*`` matches a part of a name between dots, ``**`` any text; the stars of
            the name are replaced with the matches in order. The first pattern that matches is used,
            and names that match no pattern are not changed. A function of the name can be used instead
            of a table. ``torch_rules`` makes a table.
        transform: table from patterns of the module's names to layouts, for arrays to which
            ``rename`` gives no layout.
        cast: whether to convert between float widths, and between integers that fit, and to
            dequantise quantised weights. Otherwise dtypes must be equal.
        strict: whether missing and unexpected names are errors.
        verify: for a path, when checksums are compared (see ``load_weights``).
        limits: for a path, limits of what is read (see ``load_weights``).

    A layout describes how axes correspond: ``"o i -> i o"`` (:data:`T`), ``"(h d) e -> e h d"``; see
    ``interop.layouts``. Instead of a layout there may be a function of the array, or a pair of
    functions: the conversion and its inverse.

    Every Param, and every Variable without a value, must be in the checkpoint. Other Variables
    (BatchStat) keep their values if they are not in it. The state of random number generators is
    not changed.

    Returns:
        The missing paths and the unexpected names; both are empty if ``strict``.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes do not fit; its ``diff`` lists all differences.
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
    """(The tensors by name, the path); a file that it opens is closed at the end of the context."""
    if isinstance(weights, (str, bytes, os.PathLike)):
        with load_weights(weights, verify=verify, limits=limits) as opened:
            yield _named(opened), opened._path
    elif isinstance(weights, FileWeights):
        yield _named(weights), weights._path
    elif isinstance(weights, Mapping):
        yield weights, None
    else:
        raise UserInputError(f"weights are a path, a Weights cursor or a mapping of arrays by name, not "
                             f"{type(weights).__name__}")  # fmt: skip


def _named(weights: FileWeights) -> dict[str, WeightData]:
    try:
        return family.tensors(weights)
    except UnsupportedModelError:  # a GGUF file of an unknown architecture keeps its own names
        return dict(weights._named_data())


def tensors(
    module: Any, *, rename: Any = None, transform: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the values of a module under the names and in the layouts of a checkpoint.

    This function is the inverse of :func:`load`.

    Args:
        module: nnx module.
        rename, transform: the tables that :func:`load` takes.

    Returns:
        Arrays by name. Arrays without a conversion are the module's own, not copies. The state of
        random number generators is left out.

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
    """A Variable that becomes a tensor of the checkpoint, or a part of one.

    Attributes:
        target: the Variable.
        change: layout of the tensor.
        number: index of the layer, if the Variable stacks layers.
    """

    target: TargetVariable
    change: AxisLayout
    number: int = 0


def written(targets: Mapping[str, TargetVariable], renaming: Renaming) -> dict[str, Any]:
    """The values of the Variables under the checkpoint's names; see :func:`tensors`."""
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
    """(name, part) of each tensor that a Variable becomes, or becomes a part of."""
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
    """Makes a tensor from all its parts."""
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
    """Makes the file's tensor; each axis keeps the sharding of its outermost factor."""
    bound = change.of(target.shape)
    assert bound is not None

    # The index is an array, so that one compiled program slices all layers.
    def back(number: Any, *arrays: Any) -> Any:
        if change.stacks is not None:
            arrays = tuple(jnp.take(array, number, axis=change.stacks) for array in arrays)
        return bound.back(arrays, jnp)

    mesh = explicit.mesh_of(*values)
    if mesh is None:
        return back(jnp.int32(number), *values)
    # On a mesh with Explicit axes, JAX refuses to merge axes that are sharded.
    axes_of = dict(zip(change.axes, explicit.entries(values[0]), strict=True))
    first = [group[0].name if group else None for group in change.groups]
    spec = [axes_of.get(name, ()) if name else () for name in first]
    return explicit.automatic(back, mesh, spec)(jnp.int32(number), *values)
