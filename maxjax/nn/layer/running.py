"""Floor 4. The Modules now running in this thread: names of weights and scopes, and warnings.

Full names are those below the outermost running Module. ``module.py`` calls :func:`run`
round every ``__call__``; weights and subgraphs ask here what a weight is called.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from ...graph import weight as weight_module
from ...graph.graph import Graph
from ...graph.subgraph import LOOKUPS
from ...graph.weight import Weight
from .definition import Walk, flatten


class _Running(threading.local):
    """The Modules whose ``__call__`` is running in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.traced = False
        self.names: dict[int, str] | None = None


RUNNING = _Running()
_WARNED: set[tuple[str, type]] = set()


def run(module: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls with the module on the stack, and under its name in profiles when traced."""
    running = RUNNING
    outermost = not running.stack
    if outermost:
        running.traced, running.names = _is_traced(module, args, kwargs), None
        if running.traced:
            _warn_if_captured(module)
    scope = _scope_name(module) if running.traced and not outermost else None
    running.stack.append(module)
    try:
        if scope is None:
            return call(module, *args, **kwargs)
        with jax.named_scope(scope):
            return call(module, *args, **kwargs)
    finally:
        running.stack.pop()


def _is_traced(module: Any, args: tuple, kwargs: dict) -> bool:
    if any(isinstance(leaf, Tracer) for leaf in flatten(module)[0]):
        return True
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs)))


def _names() -> dict[int, str]:
    """id(Module) → prefix, for what is below the outermost running Module."""
    if RUNNING.names is None:
        walk = Walk(RUNNING.stack[0])
        RUNNING.names = {id(m): p for m, p in zip(walk.modules, walk.prefixes, strict=True)}
    return RUNNING.names


def _scope_name(module: Any) -> str | None:
    caller = RUNNING.stack[-1]
    if module is caller:  # super().__call__()
        return None
    names = _names()
    name = names.get(id(module))
    if not name:
        return type(module).__name__
    return name.removeprefix(names.get(id(caller), "")).rstrip(".") or None


def running_name(weight: Weight) -> str | None:
    if not RUNNING.stack:
        return None
    for name, _, other, _ in Walk(RUNNING.stack[0]).places:
        if other is weight:
            return name
    return None


weight_module.running_name = running_name


def running_weights(names: list[str], templates: list[Weight]) -> list[Weight] | None:
    """The Weights of these names below the innermost running Module that has them all."""
    for module in reversed(RUNNING.stack):
        known = {name: weight for name, _, weight, _ in Walk(module).places}
        if all(name in known for name in names):
            return [known[name] for name in names]
    return None


LOOKUPS.insert(0, running_weights)


def _warn_if_captured(module: Any) -> None:
    """Weights that are constants of a traced program go stale without a word."""
    leaves = flatten(module)[0]
    if Graph.is_writing():
        return  # there they are arguments of the program
    if ("captured", type(module)) in _WARNED or any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    if not any(isinstance(leaf, jax.Array) for leaf in leaves):
        return
    # Under jit even a new constant is a tracer; under an eager vmap or grad it is not.
    if isinstance(jax.numpy.zeros(()), Tracer):
        name = type(module).__name__
        warn_once(
            "captured",
            module,
            f"{name} runs inside jax.jit with weights that are not arguments: they become constants of "
            f"the compiled program, which will not see later changes. Write "
            f"jax.jit(lambda m, x: m(x))(model, x)",
        )


def warn_once(kind: str, module: Any, message: str) -> None:
    if (kind, type(module)) not in _WARNED:
        _WARNED.add((kind, type(module)))
        warnings.warn(message, stacklevel=4)
