"""Plans: what an observer (a capture or a patch) records or replaces, and the keys of recorded values.

An :class:`ObserverPlan` is hashable: it is part of the treedef of the model's copy that runs, so that a compiled
program belongs to one plan. The values of patches are not in it: they are arguments of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ....errors import UserInputError, closest, some
from .places import SITES, Place, label_of, natural, places


class CallerFunction:
    """A function of a caller, compared by identity: functions may compare equal and compute different values."""

    def __init__(self, call: Callable[..., Any], takes_layer: bool):
        self.call, self.takes_layer = call, takes_layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallerFunction) and other.call is self.call

    def __hash__(self) -> int:
        return id(self.call)

    def __call__(self, value: Any, layer: Any) -> Any:
        return self.call(value, layer) if self.takes_layer else self.call(value)


@dataclass(frozen=True)
class Target:
    """One pattern of a plan.

    Attributes:
        pattern: as the caller wrote it, for messages.
        places: the places that it matches, in the order of the model.
        function: function that computes the new value at a place; None for a capture, or a patch by a value.
    """

    pattern: str
    places: tuple[Place, ...]
    function: CallerFunction | None

    @cached_property
    def rows(self) -> dict[Place, int]:
        """The index of each place: a patch by a value may have a row for each."""
        return {place: row for row, place in enumerate(self.places)}


@dataclass(frozen=True)
class ObserverPlan:
    """What one observer records or replaces.

    Attributes:
        caller: function of maxjax that was called: "captured", "patched", "capture" or "patch".
        targets: one for each pattern.
        level: nesting level, different for all active plans of a thread.
        root: name of the Module that is called, below the model whose names the targets have.
    """

    caller: str
    targets: tuple[Target, ...]
    level: int = 0
    root: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # computed once: each call of a Module looks its plans up
        return hash((self.caller, self.targets, self.level, self.root))

    @property
    def is_patch(self) -> bool:
        return self.caller in ("patched", "patch")

    @cached_property
    def places(self) -> frozenset[Place]:
        """All places that are captured or patched."""
        return frozenset(place for target in self.targets for place in target.places)


class Key(NamedTuple):
    """The key of recorded values.

    Attributes:
        level: level of the plan.
        name: name of the Module; for several layers of a stack, with ``*`` instead of the layer.
        site: site of the values.
        layers: indices of the layers, whose values are one array with a leading axis; () if it is none of a stack.
    """

    level: int
    name: str
    site: str
    layers: tuple[int, ...] = ()

    @property
    def names(self) -> list[str]:
        """The name of the Module, or of each layer's."""
        return [self.name.replace("*", str(i)) for i in self.layers] or [self.name]

    @property
    def label(self) -> str:
        """The label of the place; for several layers as ``layers.{0..29}`` or ``layers.{1, 3}``."""
        layers = ", ".join(map(str, self.layers))
        if self.layers and self.layers == tuple(range(self.layers[0], self.layers[-1] + 1)):
            layers = f"{self.layers[0]}..{self.layers[-1]}"
        return label_of(self.name.replace("*", f"{{{layers}}}"), self.site)


# The values of each run of a Module in one call. The entry of a place that a value has passed, but for which no plan
# asks, is empty. As a key it is part of the results of a compiled loop, and known also if that is not traced again.
Taps = dict[Key, tuple[Any, ...]]


def joined(*parts: Taps) -> Taps:
    """Return what several parts of a run have recorded, one after the other."""
    found: Taps = {}
    for taps in parts:
        for key, values in taps.items():
            found[key] = (*found.get(key, ()), *values)
    return found


def plan_of(
    model: Any, caller: str, patterns: Iterable[tuple[Any, Any]], level: int = 0
) -> tuple[ObserverPlan, tuple[Any, ...]]:
    """Return a plan, and the values of its patches, which are None for functions and captures.

    Args:
        patterns: pairs of a pattern and, for patches, what :func:`checked_patches` returns.

    Raises:
        UserInputError: a pattern matches no Module.
    """
    targets, values = [], []
    for pattern, new in patterns:
        function = new if isinstance(new, CallerFunction) else None
        targets.append(Target(str(pattern), places(model, pattern, caller), function))
        values.append(None if function is not None else new)
    return ObserverPlan(caller, tuple(targets), level), tuple(values)


def passed(plan: ObserverPlan, taps: Taps) -> set[Place]:
    """Return all places that values have passed, whether or not the plan names them."""
    return {(key.name, key.site) for key in taps if key.level == plan.level and not key.layers}


def check(plan: ObserverPlan, taps: Taps, *, must_run: bool = False) -> None:
    """Raise an error if no value has passed the places of a pattern.

    Args:
        taps: what was recorded in the run.
        must_run: whether a Module that did not run is an error; a site that a Module does not have always is.

    Raises:
        UserInputError: a Module does not have the site, or did not run.
    """
    seen = passed(plan, taps)
    ran = {name for name, _ in seen}
    for target in plan.targets:
        if not seen.isdisjoint(target.places):
            continue
        name, site = next((one for one in target.places if one[0] in ran), target.places[0])
        if name in ran:
            known = sorted({s for n, s in seen if n == name} | {*SITES})
            like = closest(site, known)
            hint = f" (did you mean '{like}'?)" if like else ""
            others = [
                label_of(n, site) for n in sorted({n for n, s in seen if s == site}, key=natural)
            ]
            more = f"; {some(others, 3)} would be one" if others else ""
            raise UserInputError(
                f"{plan.caller}: '{name}' has no '{site}'{hint}: it has {', '.join(known)}{more}"
            )
        if must_run:
            raise UserInputError(
                f"{plan.caller}: '{label_of(name, site)}' did not run: the function does not call this module, or "
                "it does so in a function compiled for another model object"
            )
