"""Runs the call of a Module if hooks or prehooks are installed, or if captures or patches observe it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...graph.weight.running import RUNNING
from . import call_stack, hooks
from .observe.frames import OBSERVING, current_observers, is_wanted, passing
from .observe.functions import observe, plans_of
from .observe.places import INPUT, INPUTS, OUTPUT
from .observe.plans import check


def run(module: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Run ``call`` with all hooks, captures and patches.

    Before the computation come prehooks, then patches and captures of the inputs; after it hooks, then
    patches and captures of the outputs.
    """
    observers = current_observers(module)
    if observers:
        return _observed(module, observers, args, kwargs)
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


def _observed(module: Any, observers: Sequence[Any], args: tuple, kwargs: dict) -> Any:
    """Run a call of a Module object that ``maxjax.capture`` or ``maxjax.patch`` observes directly."""
    plans = plans_of(observers, module)
    function, checked = type(module).__call__, observers[-1].checked
    result, taps = observe(module, plans, function, args, kwargs, checked)
    for one, plan in zip(observers, plans, strict=True):
        check(plan, taps)
        one.take(plan, taps)
    return result


def _inputs(module: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments after patches of the first argument, and of all positional arguments."""
    if not is_wanted(module, INPUT, INPUTS):
        return args, kwargs
    bound = hooks.bind(module, call, args, kwargs)
    found, kwargs = tuple(passing(module, INPUTS, bound.args[1:])), bound.kwargs
    if found:
        first, *rest = found
        if passes_on(first):
            first = (passing(module, INPUT, first[0]), *first[1:])
        else:
            first = passing(module, INPUT, first)
        found = (first, *rest)
    return found, kwargs
