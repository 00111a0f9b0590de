"""Frames, which record values of the Modules that run in this thread, and ``tap``, which names an inner value.

An observer (a capture or patch) marks a copy of the model and runs the copy in a Frame. Each Module of the copy has
the observer's plan and its own name in it (``definition.py`` keeps marks in the treedef, so that functions that were
jitted before are traced again). A value at a place of a marked Module goes to :func:`passing`, which applies patches
and records the value in the innermost frame. All of this happens while JAX traces: a compiled program returns the
values as results, and a program of an unmarked model has no trace of it.

A frame belongs to one trace: a value of another trace (of a ``jax.jit`` inside the function) could not leave that
trace. The loop of a LayerStack opens its own frames and returns their values as results of the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import UserInputError
from ....graph.value import TensorValue, unwrap
from ....graph.weight.running import RUNNING
from ....kernels import explicit

# (level of the plan, name, site, what), where what is "value", "patched" for a place that was patched, or "seen" for a
# place that a value has passed, whether or not a plan names it. The last two have no values: as keys they are part of
# the results of a compiled loop, so that they are known also if the loop is not traced again.
Key = tuple[int, str, str, str]
Mark = tuple["Observation", str]
OUTPUT, INPUT, INPUTS = "output", "input", "inputs"
SITES = (OUTPUT, INPUT, INPUTS)


class CallerFunction:
    """A function of a caller, compared by identity: functions may compare equal and compute different values."""

    def __init__(self, call: Callable[..., Any], takes_number: bool):
        self.call, self.takes_number = call, takes_number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallerFunction) and other.call is self.call

    def __hash__(self) -> int:
        return id(self.call)

    def __call__(self, value: Any, number: Any) -> Any:
        return self.call(value, number) if self.takes_number else self.call(value)


class Patch(NamedTuple):
    """One patch of a plan. If it is a value and not a function, the frame has the value.

    Attributes:
        label: pattern of the patch, for messages.
        function: function that computes the new value; None if the frame has the value.
        places: (name, site) of the patched places, in the order of the model.
    """

    label: str
    function: CallerFunction | None
    places: tuple[tuple[str, str], ...]


class Observation(NamedTuple):
    """The plan of one observer: which values are captured and patched. It is hashable and part of treedefs.

    Attributes:
        captures: (name, site) of the places whose values are recorded.
        patches: patches of other values.
        level: nesting level of the plan, different for all active plans of a thread.
    """

    captures: frozenset[tuple[str, str]]
    patches: tuple[Patch, ...]
    level: int

    @property
    def places(self) -> set[tuple[str, str]]:
        """(name, site) of all places that are captured or patched."""
        return {*self.captures, *(place for patch in self.patches for place in patch.places)}


class Loop(NamedTuple):
    """The loop of a LayerStack whose body runs in a frame.

    Attributes:
        where: for each plan, the name of the layer that represents all layers (``layers.*``).
        members: indices of these layers.
        number: index of the layer that runs, an int32 scalar.
    """

    where: Mapping[Observation, str]
    members: Sequence[int]
    number: Any


@jax.tree_util.register_pytree_with_keys_class
class StackedValues:
    """Values of n layers of a stack: a pytree of arrays ``[n, ...]``, and the indices of the layers."""

    def __init__(self, tree: Any, numbers: tuple[int, ...]):
        self.tree, self.numbers = tree, numbers

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("layers"), self.tree),), self.numbers

    @classmethod
    def tree_unflatten(cls, numbers: Any, children: Any) -> StackedValues:
        return cls(children[0], numbers)


Taps = dict[Key, tuple[Any, ...]]


class Frame:
    """The observation of one trace.

    Args:
        values: active plans, with the values of their patches (None for a function).
        loop: loop in whose body the trace is, or None.

    Attributes:
        found: recorded values of each place, in the order in which they were computed.
    """

    def __init__(self, values: Mapping[Observation, tuple[Any, ...]], loop: Loop | None = None):
        self.values, self.loop = dict(values), loop
        self.trace = trace()
        self.found: dict[Key, list[Any]] = {}

    def taps(self) -> Taps:
        """The recorded values, as a pytree."""
        return {key: tuple(values) for key, values in self.found.items()}

    def add(self, taps: Taps) -> None:
        """Adds the values that an inner frame has recorded for plans that are active in this frame."""
        levels = {plan.level for plan in self.values}
        for key, values in taps.items():
            if key[0] in levels:
                if key[3] != "seen":
                    self._check_trace(key[1], key[2])
                self.found.setdefault(key, []).extend(values)

    def numbered(self, plan: Observation, name: str) -> list[tuple[int, str]] | None:
        """The indices and names of the layers that a name in the body of a loop represents; None outside a loop."""
        where = None if self.loop is None else self.loop.where.get(plan)
        if where is None or not _is_below(name, where):
            return None
        assert self.loop is not None
        return [(i, renumbered(name, where, i)) for i in self.loop.members]

    def names(self, plan: Observation, name: str) -> list[str]:
        """The names of a Module: one, or in the body of a loop one for each of its layers."""
        layers = self.numbered(plan, name)
        return [concrete(name)] if layers is None else [full for _, full in layers]

    def wants(self, plan: Observation, name: str, site: str) -> bool:
        """Whether a plan captures or patches the place, in at least one of its layers."""
        return not plan.places.isdisjoint((full, site) for full in self.names(plan, name))

    def patched(self, plan: Observation, name: str, site: str, value: Any) -> Any:
        """The value after the patches of a plan."""
        layers = self.numbered(plan, name)
        for patch, given in zip(plan.patches, self.values[plan], strict=True):
            rows = {place: row for row, place in enumerate(patch.places)}
            if layers is None:
                row = rows.get((concrete(name), site))
                if row is None:
                    continue
                names = [concrete(name)]
                new = _new(patch, given, value, row, _number(name))
            else:
                assert self.loop is not None
                at = {i: rows[full, site] for i, full in layers if (full, site) in rows}
                if not at:
                    continue
                names = [full for i, full in layers if i in at]
                new = _in_loop(patch, given, value, at, self.loop)
            self._check_trace(name, site)
            self.found.update({(plan.level, full, site, "patched"): [] for full in names})
            value = new
        return value

    def record(self, plan: Observation, name: str, site: str, value: Any) -> None:
        """Records a value if the plan captures it."""
        names = self.see(plan, name, site)
        if any((full, site) in plan.captures for full in names):
            self._check_trace(name, site)
            self.found.setdefault((plan.level, name, site, "value"), []).append(unwrapped(value))

    def see(self, plan: Observation, name: str, site: str) -> list[str]:
        """Notes that a place exists; returns its name, or the names for all layers of a loop."""
        names = self.names(plan, name)
        self.found.update({(plan.level, full, site, "seen"): [] for full in names})
        return names

    def _check_trace(self, name: str, site: str) -> None:
        if self.trace != trace():
            label = label_of(name, site)
            raise UserInputError(
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


# The observers of Module objects: all in the process, and those of this thread or task.
OBSERVERS: list[Any] = []
_CURRENT: ContextVar[tuple[Any, ...]] = ContextVar("maxjax_observers", default=())


def enter(observer: Any) -> None:
    """Begins an observation, in this thread or task and in tasks that it starts."""
    OBSERVERS.append(observer)
    _CURRENT.set((*_CURRENT.get(), observer))


def leave(observer: Any) -> None:
    """Ends an observation, in all threads and tasks."""
    OBSERVERS[:] = [other for other in OBSERVERS if other is not observer]
    _CURRENT.set(tuple(other for other in _CURRENT.get() if other is not observer))


def current_observers(module: Any) -> list[Any]:
    """The observers of the Module in this thread or task, outermost first."""
    if not OBSERVERS:
        return []
    return [one for one in _CURRENT.get() if one.observes(module)]


def trace() -> Any:
    """The current trace of JAX, as an object that can be compared."""
    from jax.extend.core import get_opaque_trace_state  # slow to import: it imports Pallas

    return get_opaque_trace_state(convention="nnx")


@contextmanager
def opened(frame: Frame) -> Iterator[Frame]:
    """Runs a block in a frame; the caller passes the recorded values on to outer frames."""
    frames = OBSERVING.frames
    frames.append(frame)
    try:
        yield frame
    finally:
        frames.pop()


def marked_places(taps: Taps, plan: Observation, what: str) -> set[tuple[str, str]]:
    """(name, site) of the places that are marked as "patched" or "seen" for a plan."""
    return {(name, site) for level, name, site, own in taps if (level, own) == (plan.level, what)}


def live() -> dict[Observation, tuple[Any, ...]]:
    """The active plans of this thread, with the values of their patches."""
    return dict(OBSERVING.frames[-1].values) if OBSERVING.frames else {}


def next_level() -> int:
    """The level of a new plan."""
    return 1 + max((plan.level for plan in live()), default=-1)


def _live_marks(module: Any) -> list[Mark]:
    if not OBSERVING.frames:
        return []
    values = OBSERVING.frames[-1].values
    return [(plan, name) for plan, name in module._mx_marks if plan in values]


def passing(module: Any, site: str, value: Any) -> Any:
    """Applies patches to a value at a place of a Module, and records it; returns the patched value."""
    marks = _live_marks(module)
    if not marks:
        return value
    frame = OBSERVING.frames[-1]
    for plan, name in marks:
        value = frame.patched(plan, name, site, value)
    for plan, name in marks:
        frame.record(plan, name, site, value)
    return value


def wants(module: Any, site: str) -> bool:
    """Whether a plan captures or patches a place of a Module."""
    marks = _live_marks(module)
    return any(OBSERVING.frames[-1].wants(plan, name, site) for plan, name in marks)


def is_wanted(module: Any) -> bool:
    """Whether a plan captures or patches any place of a Module, so that its ``__call__`` must run."""
    for plan, name in _live_marks(module):
        names = set(OBSERVING.frames[-1].names(plan, name))
        if any(one in names for one, _ in plan.places):
            return True
    return False


def tap(name: str, value: Any) -> Any:
    """Names a value inside a Module's computation, so that it can be captured and patched.

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
    """Whether the :func:`tap` of that name in the running Module is captured or patched.

    It is for values that are computed only then, such as the probabilities that fast attention never forms.
    """
    if not OBSERVING.frames or not RUNNING.modules:
        return False
    module, frame = RUNNING.modules[-1], OBSERVING.frames[-1]
    for plan, own in _live_marks(module):
        frame.see(plan, own, name)
    return wants(module, name)


# --- names --------------------------------------------------------------------------------------


def label_of(name: str, site: str) -> str:
    """The label of a place: the name of the Module for its output, otherwise the name and the site."""
    return name if site == OUTPUT else f"{name}:{site}"


def is_span(part: str) -> bool:
    """Whether a part of a name represents several layers of a stack (``Span.pattern``)."""
    return part == "*" or ":" in part


def concrete(name: str) -> str:
    """A name with the first layer's index instead of a stack's pattern."""
    parts = name.split(".")
    first = (part.split(":")[0] if ":" in part else "0" for part in parts if is_span(part))
    return ".".join(next(first) if is_span(part) else part for part in parts)


def renumbered(name: str, where: str, number: int | str) -> str:
    """``name``, which is at or below the representing layer ``where``, renamed for the layer ``number``."""
    head, dot, _ = where.rpartition(".")
    return f"{head}{dot}{number}{name[len(where) :]}"


def of_layer(name: str, number: int | str) -> str:
    """``name`` with the index of a layer instead of the last pattern of a stack's layers."""
    parts = name.split(".")
    parts[max(i for i, part in enumerate(parts) if is_span(part))] = str(number)
    return ".".join(parts)


def marks_of(layer: Any, module: Any, number: int) -> tuple[Mark, ...]:
    """The marks of a Module in the representing layer, renamed for the same Module of another layer."""
    where = dict(layer._mx_marks)
    return tuple(
        (plan, renumbered(name, where[plan], number) if _is_below(name, where.get(plan)) else name)
        for plan, name in module._mx_marks
    )


def _is_below(name: str, where: str | None) -> bool:
    return where is not None and (name == where or name.startswith(f"{where}."))


def _number(name: str) -> int | None:
    """The first number among the parts of a name."""
    return next((int(part) for part in concrete(name).split(".") if part.isdecimal()), None)


# --- patches ------------------------------------------------------------------------------------


def unwrapped(tree: Any) -> Any:
    """The tree with arrays instead of TensorValues."""
    return jax.tree.map(unwrap, tree, is_leaf=lambda v: isinstance(v, TensorValue))


def _new(patch: Patch, given: Any, value: Any, row: Any, number: Any) -> Any:
    """The new value of a patch; ``row`` is the index of the place among the places of the patch."""
    if patch.function is not None:
        return _fitted(patch, patch.function(value, number), value)
    count = len(patch.places)
    if jax.tree.structure(given) == jax.tree.structure(value) and all(
        np.shape(new) == (count, *np.shape(old))
        for new, old in zip(jax.tree.leaves(given), jax.tree.leaves(value), strict=True)
    ):
        given = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, row, keepdims=False), given)
    return _fitted(patch, given, value)


def _in_loop(patch: Patch, given: Any, value: Any, at: Mapping[int, int], loop: Loop) -> Any:
    """:func:`_new` in the body of a loop, for the layers in ``at``, a map from layer to row."""
    table = np.full(max(loop.members) + 1, -1, np.int32)
    table[list(at)] = list(at.values())
    row = jnp.asarray(table)[loop.number]
    hit = None if len(at) == len(loop.members) else row >= 0
    if patch.function is None:
        new = _new(patch, given, value, jnp.maximum(row, 0), None)
        return new if hit is None else jax.tree.map(lambda a, b: jnp.where(hit, a, b), new, value)
    if hit is None:
        return _new(patch, None, value, row, loop.number)
    return jax.lax.cond(hit, lambda v: _new(patch, None, v, row, loop.number), lambda v: v, value)


def _fitted(patch: Patch, new: Any, old: Any) -> Any:
    """``new`` if it has the structure, shapes and dtypes of ``old``; a Python number fills its shape."""
    kept = jax.tree.structure(old)  # with TensorValues, if there are any
    new, old = unwrapped(new), unwrapped(old)
    leaves, tree = jax.tree.flatten(old)
    if _is_number(new):
        new = jax.tree.map(lambda a: jnp.full_like(a, new), old)
    given, structure = jax.tree.flatten(new)
    if structure == tree and all(map(_equal_types, given, leaves)):
        return jax.tree.unflatten(kept, map(_placed, given, leaves))
    what = "the function gives" if patch.function is not None else "the patch is"
    raise UserInputError(
        f"patch '{patch.label}': the value there is {types_of(old)}, and {what} {types_of(new)}"
        + (
            ""
            if len(patch.places) == 1 or patch.function is not None
            else f" (or one for each of the {len(patch.places)} places, along a first axis)"
        )
    )


def _is_number(value: Any) -> bool:
    """Whether the value is a Python number, or a weakly typed scalar, which JAX makes from one."""
    if isinstance(value, (bool, int, float, complex)):
        return True
    return isinstance(value, jax.Array) and value.ndim == 0 and value.weak_type


def _equal_types(new: Any, old: Any) -> bool:
    return jnp.shape(new) == jnp.shape(old) and jnp.result_type(new) == jnp.result_type(old)


def _placed(new: Any, old: Any) -> Any:
    new, mesh = jnp.asarray(new), explicit.mesh_of(old)
    if mesh is None:
        return new
    return jax.sharding.reshard(new, explicit.sharding(mesh, explicit.entries(old)))


def types_of(tree: Any) -> str:
    """The dtypes and shapes of a tree of arrays, as text.

    Example:
        >>> types_of((np.zeros((2, 3), np.float32), np.int32(1)))
        '(float32[2,3], int32[])'
    """
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(types_of, tree))})"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {types_of(value)}' for key, value in tree.items())}}}"
    if not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
        return type(tree).__name__
    return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
