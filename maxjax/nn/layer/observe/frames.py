"""Frames, which record values of the Modules that run in this thread, and ``tap``, which names an inner value.

An observer runs a marked copy of the model in a :class:`Frame`: each Module of the copy has the observer's plan and its
own name in it (``definition.py`` keeps marks in the treedef, so that functions that were jitted before are traced
again). A value at a place of a marked Module goes to :func:`passing`, which applies patches and records the value in
the innermost frame. All of this happens while JAX traces: a compiled program returns the values as results, and a
program of an unmarked model has no trace of it.

A frame belongs to one trace: a value of another trace (of a ``jax.jit`` inside the function) could not leave that
trace. The loop of a LayerStack opens its own frames and returns their values as results of the loop (``loops.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from ....errors import UserInputError
from ....graph.weight.running import RUNNING
from .patches import patched, unwrapped
from .places import SITES, label_of
from .plans import Key, ObserverPlan, Taps, joined


class Loop(NamedTuple):
    """The loop of a LayerStack whose body runs in a frame.

    Attributes:
        first: for each plan, the name of the first of the layers, which represents them all in the body.
        members: indices of these layers.
        number: index of the layer that runs, an int32 scalar.
    """

    first: Mapping[ObserverPlan, str]
    members: Sequence[int]
    number: Any


NO_LOOP = Loop({}, (), None)


class Frame:
    """The values that one trace has recorded.

    Args:
        patches: active plans, with the values of their patches (None for a function).
        loop: loop in whose body the trace is.
    """

    def __init__(self, patches: Mapping[ObserverPlan, tuple[Any, ...]], loop: Loop = NO_LOOP):
        self.patches, self.loop = dict(patches), loop
        self.trace = trace()
        self.taps: Taps = {}

    def names(self, plan: ObserverPlan, name: str) -> dict[int | None, str]:
        """Return the name of a Module under None, or in the body of a loop its name in each of the layers."""
        first = self.loop.first.get(plan)
        if first is None or not _is_in(name, first):
            return {None: name}
        return {i: renumbered(name, first, i) for i in self.loop.members}

    def wanted(self, plan: ObserverPlan, name: str, site: str) -> tuple[int | None, ...]:
        """Return the layers (or None) in which the plan names a place that a value reaches, and record that it does.

        Raises:
            UserInputError: the plan names the place, and a value that is computed there cannot leave the trace.
        """
        names = self.names(plan, name)
        for one in names.values():
            self.taps.setdefault(Key(plan.level, one, site), ())
        wanted = tuple(i for i, one in names.items() if (one, site) in plan.places)
        is_lost = plan in self.loop.first and None in wanted and not plan.is_patch
        if wanted and (is_lost or self.trace != trace()):
            raise _unreachable(label_of(names[wanted[0]], site))
        return wanted

    def patched(self, plan: ObserverPlan, name: str, site: str, value: Any) -> Any:
        """Return the value after the patches of a plan."""
        names = self.names(plan, name)
        number = _number(name) if None in names else self.loop.number
        for target, new in zip(plan.targets, self.patches[plan], strict=True):
            rows = {i: target.rows.get((one, site)) for i, one in names.items()}
            if any(row is not None for row in rows.values()):
                value = patched(target, new, value, rows, number)
        return value

    def record(self, plan: ObserverPlan, name: str, site: str, value: Any) -> None:
        """Record a value if the plan captures it."""
        wanted = self.wanted(plan, name, site)
        if plan.is_patch or not wanted:
            return
        layers = tuple(i for i in wanted if i is not None)
        if layers:
            name = renumbered(name, self.loop.first[plan], "*")
        key = Key(plan.level, name, site, layers)
        self.taps[key] = (*self.taps.get(key, ()), unwrapped(value))

    def add(self, taps: Taps) -> None:
        """Add the values that an inner frame has recorded for plans that are active in this frame.

        Raises:
            UserInputError: a plan names a place of these values, and they cannot leave the trace of the inner frame.
        """
        for plan in self.patches:
            own = {key: values for key, values in taps.items() if key.level == plan.level}
            named = [key for key in own if (key.name, key.site) in plan.places]
            if named and self.trace != trace():
                raise _unreachable(label_of(named[0].name, named[0].site))
            self.taps = joined(self.taps, own)


def _unreachable(label: str) -> UserInputError:
    return UserInputError(
        f"'{label}' is computed inside a jax.jit, jax.vmap, jax.grad, jax.checkpoint or loop "
        "that the observed function contains, which hands out its results only. Put the "
        "transformation outside, jax.jit(maxjax.captured(f, ...)), or, for a loop over layers, "
        "use LayerStack.scan(..., remat=...)"
    )


class Observing(threading.local):
    """The frames of this thread, innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []


OBSERVING = Observing()

# The observers of Module objects in this thread or task, outermost first.
OBSERVERS: ContextVar[tuple[Any, ...]] = ContextVar("maxjax_observers", default=())


def enter(observer: Any) -> None:
    """Begin an observation, in this thread or task and in tasks that it starts."""
    OBSERVERS.set((*OBSERVERS.get(), observer))


def leave(observer: Any) -> None:
    """End an observation; in other tasks, the observer itself knows that it observes no longer."""
    OBSERVERS.set(tuple(other for other in OBSERVERS.get() if other is not observer))


def current_observers(module: Any) -> list[Any]:
    """Return the observers of the Module in this thread or task, outermost first."""
    return [one for one in OBSERVERS.get() if one.observes(module)]


def trace() -> Any:
    """Return the current trace of JAX, as an object that can be compared."""
    from jax.extend.core import get_opaque_trace_state  # slow to import: it imports Pallas

    return get_opaque_trace_state(convention="nnx")


@contextmanager
def opened(frame: Frame) -> Iterator[Frame]:
    """Run a block in a frame; the caller passes the recorded values on to outer frames."""
    OBSERVING.frames.append(frame)
    try:
        yield frame
    finally:
        OBSERVING.frames.pop()


def active() -> dict[ObserverPlan, tuple[Any, ...]]:
    """Return the active plans of this thread, with the values of their patches."""
    return dict(OBSERVING.frames[-1].patches) if OBSERVING.frames else {}


def next_level() -> int:
    """Return the level of a new plan."""
    return 1 + max((plan.level for plan in active()), default=-1)


def _marks(module: Any) -> list[tuple[ObserverPlan, str]]:
    """Return the active plans that observe a Module, each with the Module's name in it."""
    if not OBSERVING.frames:
        return []
    return [mark for mark in module._mx_marks if mark[0] in OBSERVING.frames[-1].patches]


def passing(module: Any, site: str, value: Any) -> Any:
    """Apply patches to a value at a place of a Module, and record it; return the patched value."""
    marks = _marks(module)
    for plan, name in marks:
        if plan.is_patch:
            value = OBSERVING.frames[-1].patched(plan, name, site, value)
    for plan, name in marks:
        OBSERVING.frames[-1].record(plan, name, site, value)
    return value


def is_wanted(module: Any, *sites: str) -> bool:
    """Return whether a plan captures or patches a Module at one of the sites, or without sites, anywhere."""
    for plan, name in _marks(module):
        names = OBSERVING.frames[-1].names(plan, name).values()
        own = sites or {site for _, site in plan.places}
        if any((one, site) in plan.places for one in names for site in own):
            return True
    return False


def tap(name: str, value: Any) -> Any:
    """Name a value inside a Module's computation, so that it can be captured and patched.

    Its full name is ``"<name of the module>:<name>"``, where the module is the innermost one that runs.
    Like :func:`jax.ad_checkpoint.checkpoint_name`, call it once for each value and continue with its result. Unless
    the model is captured or patched, it returns the value and adds nothing to the compiled program.

    Args:
        name: identifier, such as ``"gate"``, other than "output", "input" and "inputs".
        value: array, or a pytree of arrays.

    Returns:
        The value of a patch, or the given value.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> from maxjax import nn
        >>> class Square(nn.Module):
        ...     def __call__(self, x):
        ...         return nn.tap("double", 2 * x) ** 2
        >>> y, found = maxjax.captured(lambda m, x: m(x), ":double")(Square(), jnp.float32(3))
        >>> print(y, found[":double"])
        36.0 6.0
    """
    if not OBSERVING.frames or not RUNNING.modules:
        return value
    if not name.isidentifier() or name in SITES:
        raise UserInputError(
            f"tap({name!r}): a name is an identifier other than {', '.join(SITES)}"
        )
    return passing(RUNNING.modules[-1], name, value)


def is_tapped(name: str) -> bool:
    """Return whether the :func:`tap` of that name in the running Module is captured or patched.

    It is for values that are computed only then, such as the probabilities that fast attention never forms.
    """
    if not OBSERVING.frames or not RUNNING.modules:
        return False
    marks = _marks(RUNNING.modules[-1])
    wanted = [OBSERVING.frames[-1].wanted(plan, own, name) for plan, own in marks]
    return any(wanted)


# --- names --------------------------------------------------------------------------------------


def renumbered(name: str, first: str, number: int | str) -> str:
    """Return ``name``, which is at or below the layer ``first``, renamed for the layer ``number`` of its stack."""
    return f"{first[: first.rfind('.') + 1]}{number}{name[len(first) :]}"


def marks_of(layer: Any, module: Any, number: int) -> tuple[tuple[ObserverPlan, str], ...]:
    """Return the marks of a Module in the first layer, renamed for the same Module of another layer."""
    first = dict(layer._mx_marks)
    return tuple(
        (plan, renumbered(name, first[plan], number) if _is_in(name, first.get(plan)) else name)
        for plan, name in module._mx_marks
    )


def _is_in(name: str, layer: str | None) -> bool:
    return layer is not None and f"{name}.".startswith(f"{layer}.")


def _number(name: str) -> int | None:
    """Return the first number among the parts of a name."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)
