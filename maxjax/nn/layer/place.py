"""Placement of the weights of a tree of Modules: on one device, on several, or on a mesh.

The rule of a weight is the first of these that exists: an entry of the caller's table of rules, the weight's
own sharding strategy, and a rule of the Modules above it, the outermost first.
``graph/placement`` turns the rule and the mesh into a PartitionSpec.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ...errors import UserInputError, closest, some
from ...graph.placement.arrays import device_of
from ...graph.placement.mesh import EXPERTS, TENSOR, axis_of, check_distinct, check_mesh, sizes_text
from ...graph.placement.specs import PartOf, by_pattern, names_in, place
from ...graph.placement.split import Placed, Split
from ...graph.placement.strategy import ShardingStrategy
from ...graph.weight.epoch import structure_changed
from ...graph.weight.weight import Weight, outside_traces
from ...rendering.row import bytes_text
from .call_stack import warn
from .walk import Walk

# Patterns that may match only some layers of a LayerStack: they have a number, "?" or "[".
_NUMBERED = re.compile(r"(^|[.*])\d|[?\[]")
# The reason given for a weight with symbolic sizes.
UNKNOWN_SIZES = "its sizes are not known yet"


class LeafPlace(NamedTuple):
    """The placement of one leaf of a Module.

    Attributes:
        holder: Weight, or StackedWeight of several layers.
        name: full name, with ``*`` for the indices of stacked layers.
        shape: shape of the weight; for a stack, that of one layer's weight.
        placed: PartitionSpec of one layer's weight, and the reason for it.
    """

    holder: Any
    name: str
    shape: tuple[int, ...]
    placed: Placed


def place_on(module: Any, devices: Sequence[Any], strategy: Any, rules: Any, memory: Any) -> None:
    """Implements ``Module.to``: determines the sharding of all weights, then moves them."""
    _check_alone(module)
    first = devices[0]
    mesh = _mesh(devices, strategy)
    if mesh is None:
        if rules is not None:
            raise UserInputError("rules= are for a mesh: to(mesh, rules=...)")
        sharding = (
            first
            if isinstance(first, Sharding)
            else jax.sharding.SingleDeviceSharding(device_of(first))
        )
        sharding = sharding if memory is None else sharding.with_memory_kind(memory)
        definition, holders = module._mx_definition()
        named = zip(holders, definition.names, strict=True)
        alone = {"sharding": sharding, "why": "", "layout": None, "split": ()}
        todo = [(holder, name, alone) for holder, name in named]
    else:
        todo, places = [], plan_places(module, mesh, strategy, rules)
        for holder, name, _, placed in places:
            sharding = NamedSharding(mesh, placed.spec, memory_kind=memory)
            changes = {"why": placed.why, "layout": placed.layout, "split": placed.split}
            todo.append((holder, name, {"sharding": sharding, **changes}))
        _warn_of_replicated(places, mesh)
    # Either all weights are placed or none: a device may run out of memory at any of them.
    moved = []
    for holder, name, changes in todo:
        with outside_traces(holder.leaf):
            moved.append(holder.moved(replace(holder.spec, **changes), name))
    for (holder, _, changes), leaf in zip(todo, moved, strict=True):
        holder.change(**changes)
        holder.put(leaf)
    structure_changed()


def _warn_of_replicated(places: Sequence[LeafPlace], mesh: Mesh) -> None:
    """Warns of the matrices that are not split as their rules want, because no size divides by the mesh axis.

    Vectors are not counted, because they take little memory.
    """
    found = []
    for holder, name, shape, placed in places:
        if placed.undivided and len(shape) > 1:
            over = [axis for entry in (*placed.spec, placed.split) for axis in names_in(entry)]
            leaf = holder.spec.blank()
            each = leaf.size * leaf.dtype.itemsize // math.prod(mesh.shape[axis] for axis in over)
            found.append((each, name, shape, placed))
    if not found:
        return
    found.sort(key=lambda one: -one[0])
    _, name, shape, placed = found[0]
    n = math.prod(mesh.shape[axis] for axis in placed.undivided)
    remedy = "a mesh whose axes divide these sizes splits them"
    divisible = [axis for axis, size in enumerate(shape) if size and size % n == 0]
    if divisible:
        over = placed.undivided[0] if len(placed.undivided) == 1 else placed.undivided
        spec = ", ".join([*["None"] * divisible[0], repr(over)])
        remedy += (
            f", as do rules for other axes: to(mesh, rules={{{name!r}: PartitionSpec({spec})}})"
        )
    each = [f"{one[1]} {list(one[2])} ({bytes_text(one[0])}: {one[3].why})" for one in found]
    total = bytes_text(sum(one[0] for one in found))
    weights = "1 weight" if len(found) == 1 else f"{len(found)} weights"
    over = dict.fromkeys(axis for *_, placed in found for axis in placed.undivided)
    warn(
        f"to(mesh) replicates {weights} over {sizes_text(mesh, tuple(over), ' and ')}, as sizes do not divide: "
        f"{total} on each device: {some(each, 3)}. Remedy: {remedy}"
    )


def _check_alone(module: Any) -> None:
    for holder in module._mx_definition()[1]:
        holder.refuse_in_stack("a placement")


def _mesh(devices: Sequence[Any], strategy: Any) -> Mesh | None:
    """The mesh to use; None for a single device or a complete Sharding."""
    if isinstance(devices[0], Mesh):
        if len(devices) > 1:
            raise UserInputError("to(mesh) takes one mesh and no other device")
        check_distinct(devices[0].devices.flat, "the mesh of to()")
        return devices[0]
    if len(devices) == 1 and strategy is None:
        return None
    if strategy is None:
        raise UserInputError(
            f"{len(devices)} devices need a sharding_strategy, as ShardingStrategy.tensor_parallel({len(devices)}); "
            "or pass a mesh: to(maxjax.make_mesh(model=…))"
        )
    found = [device_of(d) for d in devices]
    check_distinct(found, "to()")
    axis = "expert" if strategy.is_expert_parallel else "model"
    return jax.make_mesh(
        (len(found),), (axis,), axis_types=(jax.sharding.AxisType.Auto,), devices=found
    )


def plan_places(
    module: Any, mesh: Any, strategy: Any = None, rules: Mapping[str, Any] | None = None
) -> list[LeafPlace]:
    """The placement of every weight of a Module on a mesh; no data is moved.

    Raises:
        UserInputError, NotImplementedError: as for ``graph.placement.place``.
    """
    if rules is not None and not isinstance(rules, Mapping):
        raise UserInputError(
            f"rules= must map name patterns to PartitionSpecs, not be a {type(rules).__name__}"
        )
    if not rules:
        check_mesh(mesh)
    if strategy is not None:
        _check_strategy(strategy, mesh)
    walk = Walk(module, stacked=True)
    _, leaves, _ = walk.owners()
    rule_of = _module_rules(walk)
    places: dict[int, list[tuple[str, str, Weight]]] = {}
    for name, path, weight, *_ in walk.references:
        places.setdefault(id(walk.holder(weight)), []).append((name, path, weight))
    named = {} if not rules else _named_rules(places, leaves, rules)
    found = []
    for name, holder, _ in leaves:
        if id(holder) not in places:
            raise UserInputError(
                f"weight '{name}' is a shard: place the Weight that it is a part of"
            )
        where = places[id(holder)]
        spec = holder.spec
        shape = tuple(n if isinstance(n, int) else 0 for n in spec.sizes)
        if not spec.is_static:
            found.append(LeafPlace(holder, name, shape, Placed(PartitionSpec(), UNKNOWN_SIZES)))
            continue
        rule = _rule_for(holder, where, rule_of, strategy, named.get(id(holder)), len(shape))
        count = spec.lead[-1] if spec.spans else 1
        placed = place(name, tuple(map(int, spec.logical_shape)), rule, mesh, spec.block, count)
        found.append(LeafPlace(holder, name, shape, placed))
    return found


def _check_strategy(strategy: Any, mesh: Any) -> None:
    """Checks that the mesh has the axis over which a strategy for all weights splits."""
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(
            f"sharding_strategy must be a ShardingStrategy, not {type(strategy).__name__}"
        )
    kinds = EXPERTS if strategy.is_expert_parallel else TENSOR
    if not strategy.is_replicate and not any(axis_of(mesh, kind) for kind in kinds):
        raise UserInputError(
            f"the sharding_strategy splits over the axis '{kinds[0]}', and the mesh has "
            f"{', '.join(map(str, mesh.axis_names))}"
        )


def _module_rules(walk: Walk) -> dict[str, Any]:
    """Map from the attribute path of a weight to the rule of the outermost Module that has a rule for it.

    A rule for a linear layer is one for its weight and its bias. For the tensors of a quantised weight it is a
    PartOf, with the rule of the whole weight.
    """
    rule_of: dict[str, Any] = {}
    parts: dict[str, tuple[str, PartOf]] = {}
    layers = dict(zip(walk.paths, walk.modules, strict=True))
    for path, module in layers.items():
        for key, rule in module.sharding_rules().items():
            split = getattr(rule, "shard", rule)
            layer = layers.get(f"{path}{key}.")
            if isinstance(rule, PartOf):
                parts[path + key] = path + rule.weight, rule
            elif layer is not None and isinstance(split, Split):
                for name, own in split.of_linear(getattr(layer, "out_axis", 0)).items():
                    rule_of.setdefault(f"{path}{key}.{name}", own)
            else:
                rule_of.setdefault(f"{path}{key}.weight" if layer is not None else path + key, rule)
    found = {path: part._replace(rule=rule_of.get(of)) for path, (of, part) in parts.items()}
    return rule_of | found


def _named_rules(
    places: Mapping[int, Sequence[tuple[str, str, Weight]]],
    leaves: Sequence[tuple[str, Any, Any]],
    rules: Mapping[str, Any],
) -> dict[int, tuple[Any]]:
    """Map from id(holder) to the rule in the caller's table that matches a name of the holder, if any does.

    Raises:
        UserInputError: the rules for the layers of a LayerStack differ, or no rule matches any weight.
    """
    numbered = any(map(_NUMBERED.search, rules))
    found: dict[int, tuple[Any]] = {}
    for _, holder, _ in leaves:
        for name, _, _ in places.get(id(holder), ()):
            names = holder.spec.names(name)
            first = by_pattern(rules, names[0])
            for other in names[1:] if numbered else ():
                if by_pattern(rules, other) != first:
                    raise UserInputError(
                        f"rules= are not the same for {names[0]} and {other}, which are one array in a LayerStack: "
                        "take all of its layers, or unstack() first"
                    )
            if first[0]:
                found.setdefault(id(holder), (first[1],))
    if leaves and not found:
        every = [name for where in places.values() for name, _, _ in where]
        near = closest(next(iter(rules)), every)
        raise UserInputError(
            f"no weight has a name like {some(list(map(repr, rules)), 3)} of rules="
            + (f"; did you mean {near!r}?" if near else f"; there are {some(every, 3)}")
        )
    return found


def _rule_for(
    holder: Any,
    where: Sequence[tuple[str, str, Weight]],
    rule_of: Mapping[str, Any],
    strategy: Any,
    named: tuple[Any] | None,
    rank: int,
) -> Any:
    if named is not None:
        return named[0]
    own = next((rule_of[path] for _, path, _ in where if path in rule_of), None)
    if strategy is not None and not (strategy.is_tensor_parallel or strategy.is_expert_parallel):
        if isinstance(own, PartOf):
            return own._replace(rule=strategy)
        # A strategy for all weights applies only to weights that have its axis: a bias has no columns.
        axis = strategy.sharded_axis
        return strategy if axis is None or -rank <= axis < rank else None
    for _, _, weight in where:
        if weight.sharding_strategy is not None:
            return weight.sharding_strategy
    return own
