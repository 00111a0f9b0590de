"""The call of a Module if hooks or prehooks are installed, or if captures or patches observe it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...graph.weight.running import RUNNING
from . import call_stack, hooks
from .definition import marked, unmarked
from .observe.frames import (
    INPUT,
    INPUTS,
    OBSERVING,
    OUTPUT,
    Frame,
    Observation,
    current_observers,
    live,
    next_level,
    opened,
    passing,
    wants,
)


class Wish(NamedTuple):
    """A plan for a Module that is about to run, the Module's name in the plan, and the values of the plan's patches."""

    plan: Observation
    name: str
    values: tuple[Any, ...]


def run(module: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Runs ``call`` with all hooks, captures and patches.

    Before the computation come prehooks, then patches and captures of the inputs; after it hooks, then
    patches and captures of the outputs.
    """
    observers = current_observers(module)
    if observers:
        return _watched(module, observers, args, kwargs)
    if hooks._PREHOOKS:
        args, kwargs = hooks.prepared(module, call, args, kwargs)
    # super().__call__ is a part of the Module's own call, and is not observed separately.
    inner = bool(RUNNING.modules) and RUNNING.modules[-1] is module
    observed = bool(OBSERVING.frames) and not inner
    if observed:
        args, kwargs = _inputs(module, call, args, kwargs)
    outputs = call_stack.run(module, call, args, kwargs)
    if hooks._HOOKS:
        outputs = hooks.dispatch(module, call, args, kwargs, outputs)
    if not observed:
        return outputs
    if passes_on(outputs):
        return passing(module, OUTPUT, outputs[0]), *outputs[1:]
    return passing(module, OUTPUT, outputs)


def passes_on(values: Any) -> bool:
    """Return whether a result is a value, followed by a cache that a layer passes on: captures see the value alone."""
    return isinstance(values, tuple) and any(
        getattr(type(one), "_mx_is_passed_on", False) for one in values[1:]
    )


def observe(
    module: Any, wishes: Sequence[Wish], function: Callable[[Any], Any]
) -> tuple[Any, Frame]:
    """The result of ``function`` for an observed copy of a Module, and the Frame with the recorded values."""
    copy = module
    for plan, name, _ in wishes:
        copy = marked(copy, plan, name)
    with opened(Frame({**live(), **{wish.plan: wish.values for wish in wishes}})) as frame:
        result = function(copy)
    if OBSERVING.frames:
        OBSERVING.frames[-1].add(frame.taps())
    for plan, _, _ in wishes:
        result = unmarked(result, plan)
    return result, frame


def _watched(module: Any, observers: Sequence[Any], args: tuple, kwargs: dict) -> Any:
    """The call of a Module object that ``maxjax.capture`` or ``maxjax.patch`` observes directly."""
    level = next_level()
    wishes = [one.wish(module, level + i) for i, one in enumerate(observers)]

    def call(module: Any, args: tuple, kwargs: dict, values: Any) -> Any:
        wanted = [wish._replace(values=own) for wish, own in zip(wishes, values, strict=True)]
        return observe(module, wanted, lambda copy: type(copy).__call__(copy, *args, **kwargs))

    operands = module, args, kwargs, [wish.values for wish in wishes]
    for one, wish in zip(observers, wishes, strict=True):
        one.check(call, wish, operands)
    result, frame = call(*operands)
    for one, wish in zip(observers, wishes, strict=True):
        one.take(wish.plan, frame)
    return result


def _inputs(module: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments after patches of the first argument, and of all positional arguments."""
    if not (wants(module, INPUT) or wants(module, INPUTS)):
        return args, kwargs
    bound = hooks.bind(module, call, args, kwargs)
    found, kwargs = bound.args[1:], bound.kwargs
    if wants(module, INPUTS):
        found = tuple(passing(module, INPUTS, found))
    if found and wants(module, INPUT):
        first, *rest = found
        if passes_on(first):
            first = (passing(module, INPUT, first[0]), *first[1:])
        else:
            first = passing(module, INPUT, first)
        found = (first, *rest)
    return found, kwargs
