"""Captures in the loop of a LayerStack: the compiled loop returns the captured values.

If a value is captured in every layer that the body represents, it is a stacked output of the loop. If it is captured
in only some layers, the loop carries a buffer with a row for each of these and one row for all others, and
each layer writes its own row, so that only the captured layers take memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .frames import (
    OBSERVING,
    Frame,
    Key,
    Loop,
    Observation,
    StackedValues,
    Taps,
    is_span,
    live,
    of_layer,
    opened,
)


def values_of(stack: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """For each mark of a stack, the values of its plan's patches, and whether the plan is active."""
    plans = live()
    found = [plans.get(plan) for plan, _ in stack._mx_marks]
    return tuple(one or () for one in found), tuple(one is not None for one in found)


def holds_functions(stack: Any) -> bool:
    """Whether a patch of an active plan of a stack is a function."""
    plans = live()
    return any(
        patch.function is not None
        for plan, _ in stack._mx_marks
        if plan in plans
        for patch in plan.patches
    )


def hand_on(taps: Taps) -> None:
    """Adds the values that a loop has recorded to the frame in which the loop ran."""
    if taps:
        OBSERVING.frames[-1].add(taps)


def zeros(rows: int, like: Any) -> jax.Array:
    """Zeros ``[rows, ...]`` for values with the shape, dtype and, on Explicit meshes, the sharding of ``like``."""
    where = like.sharding
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec(None, *where.spec))
    return jnp.zeros((rows, *like.shape), like.dtype, device=where)


class LoopFrame:
    """The observation of a loop.

    Args:
        values: active plans, with the values of their patches, which are operands of the loop.
        members: for each pattern of names, the indices of its layers.
    """

    def __init__(self, values: dict[Observation, Any], members: dict[str, Sequence[int]]):
        self.values, self.members = values, members

    @classmethod
    def of(cls, stack: Any, live: Sequence[bool], given: Any, layout: Any) -> LoopFrame | None:
        """The observation of the layers of a stack with the pattern ``layout``; None if no plan is active."""
        values = {
            plan: values
            for (plan, _), is_live, values in zip(stack._mx_marks, live, given, strict=True)
            if is_live
        }
        members = {layout.span(s).pattern: layout.members(s) for s in range(layout.slots)}
        return cls(values, members) if values else None

    @contextmanager
    def layer(self, layer: Any, number: Any) -> Iterator[Frame]:
        """Opens the frame of one layer."""
        where = {plan: name for plan, name in layer._mx_marks if plan in self.values}
        part = next(iter(where.values())).rpartition(".")[2]
        loop = Loop(where, self.members[part], number) if is_span(part) else None
        with opened(Frame(self.values, loop)) as frame:
            yield frame


class Kept:
    """The captured values of the layers at one position of the pattern.

    Args:
        observed: observation of the loop, or None.
        members: indices of these layers.
    """

    def __init__(self, observed: LoopFrame | None, members: Sequence[int]):
        self._plans = {} if observed is None else {p.level: p for p in observed.values}
        self._members = members

    def _wanted(self, key: Key) -> list[int]:
        """The layers whose values are captured."""
        level, name, site, _ = key
        captures = self._plans[level].captures
        return [i for i in self._members if (of_layer(name, i), site) in captures]

    def _is_few(self, key: Key) -> bool:
        return key[3] == "value" and len(self._wanted(key)) < len(self._members)

    def empty(self, taps: Taps) -> Any:
        """The buffers before the first layer, for values with the shapes and dtypes of ``taps``."""
        found = {}
        for key, values in taps.items():
            if self._is_few(key):
                rows = len(self._wanted(key)) + 1
                found[key] = jax.tree.map(partial(zeros, rows), values)
        return found

    def taken(self, few: Any, taps: Taps, number: Any) -> tuple[Any, Taps]:
        """The buffers after one layer, and the values that are outputs of the loop."""
        if not taps:
            return few, {}
        few, many = dict(few), {}
        for key, values in taps.items():
            if not self._is_few(key):
                many[key] = values
                continue
            wanted = self._wanted(key)
            rows = np.full(max(self._members) + 1, len(wanted), np.int32)
            rows[wanted] = range(len(wanted))
            row = jnp.asarray(rows)[number]
            put = lambda all_, new, row=row: jax.lax.dynamic_update_index_in_dim(all_, new, row, 0)
            few[key] = jax.tree.map(put, few[key], values)
        return few, many

    def taps(self, few: Any, many: Taps) -> Taps:
        """All captured values, with the indices of their layers."""
        found = {}
        for key, values in {**dict(few), **many}.items():
            if key[3] != "value":
                found[key] = values
                continue
            wanted = tuple(self._wanted(key))
            if self._is_few(key):
                values = jax.tree.map(lambda a: a[:-1], values)
            found[key] = tuple(StackedValues(value, wanted) for value in values)
        return found
