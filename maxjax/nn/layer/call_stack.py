"""The stack of Modules that run in this thread, which gives names to weights and scopes, and warnings.

Full names are relative to the outermost running Module. ``module.py`` wraps every ``__call__``
in :func:`run`. ``graph/weight/running.py`` holds the stack, in which weights and subgraphs look up
names.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer

from ...errors import UserInputError, some
from ...graph.kind import KIND, into_call
from ...graph.weight.running import RUNNING, names_below
from .definition import is_traced, weight_values
from .walk import deleted_arrays

_OWN = "maxjax.nn.layer."
_WARNED: set[tuple[str, type]] = set()


def run(module: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Run ``call`` with the module on the stack and, when traced, in a named scope for profiles.

    Values are of the kind that ``call`` computes with (``graph/kind.py``).
    """
    running, before = RUNNING, KIND.now
    outermost, marked = not running.modules, getattr(call, "_array_function", None)
    args, kwargs, kind, back = into_call(marked, args, kwargs, outermost)
    if outermost:
        running.traced = is_traced(module, args, kwargs)
        if running.traced:
            _warn_if_captured(module)
    elif not running.traced and args and isinstance(args[0], Tracer):
        _warn_if_captured(module, in_eager=True)
    scope = _scope_name(module) if running.traced and not outermost else None
    call = call if marked is None else marked.function
    running.modules.append(module)
    KIND.now = kind
    try:
        with contextlib.nullcontext() if scope is None else jax.named_scope(scope):
            found = call(module, *args, **kwargs)
    except (RuntimeError, TypeError) as error:
        if outermost and (problem := _without_values(module, str(error))):
            raise UserInputError(problem) from error
        raise
    finally:
        running.modules.pop()
        KIND.now = before
    return found if back is None else back(found)


def _without_values(module: Any, error: str) -> str:
    """What is wrong, if an error of JAX is due to weights without arrays; "" if it is not."""
    if "has been deleted" in error:
        return deleted_arrays(module)
    if "not a valid JAX type" not in error:
        return ""
    # Under jax.grad a placeholder is in a tracer, where it is noticed only when it is used.
    definition, weights = module._mx_definition()
    is_blank = lambda leaf: isinstance(getattr(leaf, "primal", leaf), jax.ShapeDtypeStruct)
    names = [
        name
        for name, weight in zip(definition.names, weights, strict=True)
        if is_blank(weight.leaf)
    ]
    if not names:
        return ""
    return (
        f"weights of {type(module).__name__} have no value: {some(names, 2)}. Load them, or make them: "
        "maxjax.init(model, key), or for LoRA maxjax.lora.add(model, …, key=jax.random.key(0))"
    )


def _scope_name(module: Any) -> str | None:
    caller = RUNNING.modules[-1]
    if module is caller:  # super().__call__()
        return None
    prefixes = names_below(RUNNING.modules[0], stacked=True).prefixes
    name = prefixes.get(id(module))
    if not name:
        return type(module).__name__
    return name.removeprefix(prefixes.get(id(caller), "")).rstrip(".") or None


def layer_name(layer: Any) -> str | None:
    """The full name of a layer below the outermost running Module, such as ``layers.3.mlp``.

    It is None if no Module is running. It is meant for hooks, and works for the copies of layers under ``jax.jit``.
    """
    if not RUNNING.modules:
        return None
    prefix = names_below(RUNNING.modules[0]).prefixes.get(id(layer))
    return None if prefix is None else prefix.rstrip(".")


def _warn_if_captured(module: Any, in_eager: bool = False) -> None:
    """Warns if weights are constants of a traced program, which would not see later values.

    Args:
        module: the Module that is called.
        in_eager: whether a Module that is not traced calls it. Then the program is kept only if JAX got the
            Module itself as the function, and not a new lambda.
    """
    if RUNNING.graphs:
        return  # there the weights are arguments of the program
    values = weight_values(module)
    if ("captured", type(module)) in _WARNED or any(isinstance(v, Tracer) for v in values):
        return
    if not any(isinstance(value, jax.Array) for value in values):
        return
    # Under jit even a new constant is a tracer; under an eager vmap or grad it is not.
    if not isinstance(jax.numpy.zeros(()), Tracer) or (in_eager and not _called_by_jax()):
        return
    name = type(module).__name__
    if in_eager:
        message = (
            f"a layer of type {name} was given to JAX as the function: JAX keeps its program for this layer, with "
            f"its weights as constants, and will not see later changes. Write jax.checkpoint(lambda x: layer(x)), "
            f"and so for lax.cond and lax.switch"
        )
    else:
        message = (
            f"{name} runs inside jax.jit with weights that are not arguments: they become constants of "
            f"the compiled program, which will not see later changes. Write "
            f"jax.jit(lambda m, x: m(x))(model, x)"
        )
    warn_once("captured", module, message)


def _called_by_jax() -> bool:
    """Whether JAX's own code has called the Module, not a lambda, such as the one that is in ``lax.map``."""
    callers = (name for name in _callers(sys._getframe()) if not name.startswith(_OWN))
    name = next(callers, "")
    return name.startswith("jax.") and not name.endswith(".loops")


def _callers(frame: Any) -> Iterator[str]:
    """The names of the modules whose functions are running, from this frame outward."""
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def warn_once(kind: str, module: Any, message: str) -> None:
    if (kind, type(module)) not in _WARNED:
        _WARNED.add((kind, type(module)))
        warn(message, _OWN)


def warn(message: str, own: str = "maxjax.") -> None:
    """Warns at the line that called the modules whose names begin with ``own``."""
    callers = enumerate(_callers(sys._getframe()), 1)
    others = (i for i, name in callers if not name.startswith((own, "jax.")))
    warnings.warn(message, stacklevel=next(others, 1))
