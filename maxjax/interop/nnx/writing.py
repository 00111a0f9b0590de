"""The values of a flax nnx module under the names and in the layouts of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import UserInputError
from ...kernels import explicit
from ..layouts import AxisLayout
from ..renaming import Function, Origin, Renaming
from .variables import Target


class _TensorPart(NamedTuple):
    """A Variable that is a tensor of the checkpoint, or one of its parts.

    Attributes:
        target: the Variable.
        change: layout of the tensor.
        number: number of the layer, if the Variable stacks layers.
    """

    target: Target
    change: AxisLayout
    number: int = 0


def written(targets: Mapping[str, Target], renaming: Renaming) -> dict[str, Any]:
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


def _enter(held: dict[Any, Any], key: Any, value: Any, name: str) -> None:
    if key in held:
        raise UserInputError(f"the table gives two arrays of the module the name '{name}'")
    held[key] = value


def _changed(target: Target, change: Function | None, value: Any) -> Any:
    if change is None:
        return value
    if change.back is None:
        raise UserInputError(f"'{target.name}' is made by a function that has no inverse: use a "
                             "layout, or a pair of functions")  # fmt: skip
    return change.back(value)


def _pieces(
    target: Target, origin: Origin, change: AxisLayout
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


def _back(target: Target, change: AxisLayout, values: list[Any], number: int) -> Any:
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
    held = dict(zip(change.axes, explicit.entries(values[0]), strict=True))
    first = [group[0].name if group else None for group in change.groups]
    wanted = [held.get(name, ()) if name else () for name in first]
    return explicit.automatic(back, mesh, wanted)(jnp.int32(number), *values)
