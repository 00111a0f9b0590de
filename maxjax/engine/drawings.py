"""``maxjax.draw_sharding``: which device holds which part of arrays, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..columns import columns
from ..errors import UserInputError
from ..graph.placement.division import division_of, labels_of, mesh_text
from ..graph.placement.strategy import ShardingStrategy, strategy_division
from ..graph.weight.weight import Weight
from ..kernels import explicit
from ..kernels.stack_slice import stack_of
from ..models.name_rules import generic
from ..nn.layer import Module
from ..rendering.division import Division, device_table
from ..rendering.rendered import boxed, card
from ..rendering.row import short


@dataclass(frozen=True)
class ShardingDrawing:
    """Which device holds which part of one or several arrays; it shows itself as a picture.

    Attributes:
        divisions: the parts of each array, by name; the name is "" for a single array without one.
        labels: the coordinates of each device on the mesh, by device id.
    """

    divisions: Mapping[str, Division]
    labels: Mapping[int, str]

    def __repr__(self) -> str:
        if len(self.divisions) > 1:
            head = ["", "shape", "placement", "devices of each part"]
            rows = [
                [name, str(list(one.shape)), one.title, one.line()]
                for name, one in self.divisions.items()
            ]
            return "\n".join(columns([head, *rows], right=()))
        ((name, one),) = self.divisions.items()
        sizes = f"[{', '.join(map(str, one.shape))}]"
        return f"{f'{name} ' if name else ''}{sizes} {one.title}: {one.sentence}\n{one.text()}"

    def _repr_html_(self) -> str:
        if len(self.divisions) > 1:
            return boxed(device_table(self.divisions, self.labels))
        (name, one), *_ = self.divisions.items()
        facts = {"placement": one.title, "shape": str(list(one.shape)), "parts": one.sentence}
        return card(name or "Sharding", facts, one.svg())


def draw_sharding(given: Any, shape: Sequence[int] | None = None) -> ShardingDrawing:
    """Draws which device holds which part of an array. Nothing is read from a device.

    Args:
        given: an array, a Weight, a ``jax.ShapeDtypeStruct``, a Sharding, a ShardingStrategy or a mesh; a dict of
            these by name, which gives a table with a column for each device; or a Module, whose weights are
            drawn, those of equal layers once.
        shape: shape of the array, for a Sharding; by default the smallest shape that has all the parts.

    Returns:
        A drawing: a picture in a notebook, text elsewhere. For an array with more than two axes, the two that
        are split most are drawn.

    Raises:
        UserInputError: ``given`` is a tracer, has no sharding, or cannot be drawn; ``shape`` is no shape.
        TypeError: ``given`` is none of these objects.

    Example:
        >>> import jax, maxjax
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
        >>> mesh = AbstractMesh((2, 2), ("data", "model"))
        >>> maxjax.draw_sharding(NamedSharding(mesh, PartitionSpec(None, "model")), (4, 8))
        [4, 8] (None, 'model') on data=2, model=2: 2 parts of [4, 4], each on 2 devices
        ┌─────┬─────┐
        │ 0,2 │ 1,3 │
        └─────┴─────┘
    """
    labels: dict[int, str] = {}
    if isinstance(given, Module):
        given = _weights(given)
    if isinstance(given, Mapping):
        if not given:
            raise UserInputError("there is no array to draw")
        divisions = {short(name, 60): _division(one, shape, labels) for name, one in given.items()}
    else:
        name = given.name if isinstance(given, Weight) else ""
        divisions = {name: _division(given, shape, labels)}
    return ShardingDrawing(divisions, labels)


def _weights(module: Module) -> dict[str, Any]:
    """The weights of a Module; of layers with equal shapes and shardings, only the first's."""
    found: dict[str, Any] = {}
    seen: set[Any] = set()
    for name, weight in module.raw_state_dict().items():
        general = generic(name)
        key = general, str(weight.shape), weight.sharding
        if key not in seen and len(weight.shape) > 0:
            seen.add(key)
            found[general if general not in found else name] = weight
    return found


def _division(given: Any, shape: Sequence[int] | None, labels: dict[int, str]) -> Division:
    if isinstance(given, ShardingStrategy):
        if (drawn := strategy_division(given)) is None:
            raise UserInputError(f"{given!r} says nothing about a single array")
        return drawn
    if isinstance(given, (Mesh, AbstractMesh)):
        given = NamedSharding(given, PartitionSpec(*given.axis_names))
    layout = None
    if isinstance(given, Sharding):
        sharding, sizes = given, _smallest(given) if shape is None else _sizes(shape)
    else:
        sharding, sizes = _held(given)
        layout = given.spec.layout if isinstance(given, Weight) else None
    if isinstance(sharding, NamedSharding):
        labels.update(labels_of(sharding.mesh))
    found = division_of(sharding, sizes, layout)
    if found is None:
        where = mesh_text(sharding.mesh) if isinstance(sharding, NamedSharding) else str(sharding)
        raise UserInputError(f"the parts of {list(sizes)} on {where} cannot be drawn")
    return found


def _held(given: Any) -> tuple[Any, tuple[int, ...]]:
    """The sharding and the shape of something that is, or will be, an array."""
    if isinstance(given, Weight):
        sharding = given.sharding
        leaf = stack_of(given.leaf)
        if sharding is None and not given.is_lazy:
            sharding = getattr(leaf, "sharding", None)
        name, sizes = f"weight '{given.name}'", tuple(given.shape)
    elif isinstance(given, Tracer):
        raise UserInputError(
            "a traced value has no devices yet: draw_sharding is for use outside of jax.jit"
        )
    elif hasattr(given, "shape") and hasattr(given, "sharding"):
        sharding, name, sizes = given.sharding, "the array", tuple(given.shape)
    else:
        raise TypeError(
            "draw_sharding() takes an array, a Weight, a Sharding, a mesh, a Module or a dict of such, "
            f"not {type(given).__name__}"
        )
    if not isinstance(sharding, Sharding):
        raise UserInputError(f"{name} has no sharding: to(mesh) of its Module gives it one")
    if not all(str(size).isdigit() for size in sizes):
        raise UserInputError(f"{name} has sizes that are not known yet: {list(sizes)}")
    return sharding, tuple(map(int, sizes))


def _sizes(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(index, shape))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise UserInputError(f"shape is a tuple of sizes, such as (4, 8), not {shape!r}")
    return sizes


def _smallest(sharding: Any) -> tuple[int, ...]:
    """The smallest shape that a Sharding splits into all its parts."""
    if isinstance(sharding, NamedSharding):
        entries = explicit.padded(sharding.spec, len(sharding.spec))
        sizes = [1] * len(entries)
        for i, entry in enumerate(entries):
            for name in entry:
                sizes[i] *= sharding.mesh.shape[name]
        return tuple(sizes) or (1,)
    return (len(sharding.device_set),)
