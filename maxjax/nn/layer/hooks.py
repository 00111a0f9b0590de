"""Layer, the base class of Module, and the process-wide hooks around each layer's call.

Hooks run at trace time: under ``jax.jit`` once per trace, with tracers; in eager code
at every call. While hooks are installed, ``definition.py`` puts :func:`token` into every
Module's treedef, so programs compiled without hooks are not affected and are reused later.

The ``__call__`` of a class is a wrapper, which names the layer and runs hooks around the user's function. After an
edit, IPython's ``%autoreload`` puts the user's new code into the wrapper itself: it would then run without names and
hooks, and look up globals in maxjax. :func:`wrap_edited` makes a function of this code and wraps it again.
A descriptor instead of the wrapper would not help: IPython sets the code of whatever object the class has, and
where that fails it goes on with the old code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from ...graph.weight.epoch import structure_changed
from .observe.frames import OBSERVERS, OBSERVING

Hook = Callable[["Layer", tuple[Any, ...], dict[str, Any], Any], Any]

Prehook = Callable[["Layer", tuple[Any, ...], dict[str, Any]], Any]

_HOOKS: list[Hook] = []
_PREHOOKS: list[Prehook] = []


def _checked(fn: Any) -> Any:
    if not callable(fn):
        raise TypeError(f"a hook is a function, not {type(fn).__name__}")
    return fn


def add_layer_hook(fn: Hook) -> None:
    """Calls ``fn(layer, args, kwargs, outputs)`` after every layer's ``__call__``.

    ``args`` and ``kwargs`` are bound by the signature of that ``__call__``: a positional
    parameter that was given by keyword is in ``args``; defaults are not filled in. A return
    value of the hook other than None replaces the outputs. Hooks run in the order in which they
    were added, inner layers first; a hook that is added twice runs twice. As in MAX, an ``fn`` that
    is not callable raises TypeError at the next call of a layer.

    Example:
        >>> from maxjax.nn import Module
        >>> from maxjax.nn.layer import add_layer_hook, clear_hooks
        >>> class Double(Module):
        ...     def __call__(self, x):
        ...         return 2 * x
        >>> add_layer_hook(lambda layer, args, kwargs, outputs: print(args, outputs))
        >>> Double()(x=3)
        (3,) 6
        6
        >>> clear_hooks()
    """
    _HOOKS.append(fn)
    structure_changed()


def layer_hook(fn: Hook) -> contextlib.AbstractContextManager[None]:
    """:func:`add_layer_hook` for the duration of a ``with`` block; only this hook is removed after it.

    Example:
        >>> from maxjax.nn import Module
        >>> from maxjax.nn.layer import layer_hook
        >>> class Double(Module):
        ...     def __call__(self, x):
        ...         return 2 * x
        >>> with layer_hook(lambda layer, args, kwargs, outputs: -outputs):
        ...     Double()(3)
        -6
        >>> Double()(3)
        6
    """
    return _during(add_layer_hook, fn)


def add_layer_prehook(fn: Prehook) -> None:
    """Calls ``fn(layer, args, kwargs)`` before every layer's ``__call__``.

    ``args`` and ``kwargs`` are bound as for :func:`add_layer_hook`. A prehook may return other arguments as
    ``(args, kwargs)``, which the layer and later prehooks get; None keeps the arguments. Prehooks run in the
    order in which they were added, outer layers first; :func:`clear_hooks` removes them too.

    Raises:
        TypeError: a prehook returned neither None nor ``(args, kwargs)``; the call of the layer raises it.

    Example:
        >>> from maxjax.nn import Module
        >>> from maxjax.nn.layer import add_layer_prehook, clear_hooks
        >>> class Double(Module):
        ...     def __call__(self, x):
        ...         return 2 * x
        >>> add_layer_prehook(lambda layer, args, kwargs: ((args[0] + 1,), kwargs))
        >>> Double()(x=3)
        8
        >>> clear_hooks()
    """
    _PREHOOKS.append(_checked(fn))
    structure_changed()


def layer_prehook(fn: Prehook) -> contextlib.AbstractContextManager[None]:
    """:func:`add_layer_prehook` for the duration of a ``with`` block; only this prehook is removed after it.

    Example:
        >>> from maxjax.nn import Module
        >>> from maxjax.nn.layer import layer_prehook
        >>> class Double(Module):
        ...     def __call__(self, x):
        ...         return 2 * x
        >>> with layer_prehook(lambda layer, args, kwargs: print(args)):
        ...     Double()(3)
        (3,)
        6
    """
    return _during(add_layer_prehook, fn)


@contextlib.contextmanager
def _during(add: Callable[[Any], None], fn: Any) -> Iterator[None]:
    mine = functools.partial(_checked(fn))  # distinct from the same function added elsewhere
    add(mine)
    try:
        yield
    finally:
        remove(mine)


def remove(hook: Hook | Prehook) -> None:
    """Removes one hook or prehook; others stay."""
    global _HOOKS
    # A new list, so that a dispatch that is running skips no hook of the old one.
    _HOOKS = [other for other in _HOOKS if other is not hook]
    _PREHOOKS[:] = [other for other in _PREHOOKS if other is not hook]
    structure_changed()


def clear_hooks() -> None:
    """Removes all hooks and prehooks."""
    _HOOKS.clear()
    _PREHOOKS.clear()
    structure_changed()


def token() -> tuple[Any, ...] | None:
    """The part of a treedef that identifies the installed hooks; None without hooks."""
    if _PREHOOKS:
        return tuple(_HOOKS), tuple(_PREHOOKS)
    return tuple(_HOOKS) or None


def is_plain() -> bool:
    """Whether no hooks are installed and no captures or patches observe layers."""
    return not (_HOOKS or _PREHOOKS or OBSERVING.frames or OBSERVERS.get())


def prepared(layer: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Runs the prehooks for a call that is about to start, and returns its arguments."""
    for hook in tuple(_PREHOOKS):
        bound = bind(layer, call, args, kwargs)
        replaced = hook(layer, bound.args[1:], bound.kwargs)
        if replaced is None:
            continue
        good = isinstance(replaced, tuple) and len(replaced) == 2
        if not (good and isinstance(replaced[0], (tuple, list)) and isinstance(replaced[1], dict)):
            raise TypeError(
                "a prehook returns None or (args, kwargs), a tuple and a dict, not "
                f"{type(replaced).__name__}"
            )
        args, kwargs = tuple(replaced[0]), replaced[1]
    return args, kwargs


def bind(layer: Any, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """The arguments of a call, bound by its signature; the first argument is the layer."""
    return _signature(call).bind(layer, *args, **kwargs)


def dispatch(layer: Any, call: Callable[..., Any], args: tuple, kwargs: dict, outputs: Any) -> Any:
    """Runs the hooks for a call that has returned, and returns the final outputs."""
    bound = bind(layer, call, args, kwargs)
    for hook in _HOOKS:  # the live list: a hook may clear it or append to it
        if not any(other is hook for other in _HOOKS):
            continue  # an earlier hook has removed it
        replaced = _checked(hook)(layer, bound.args[1:], bound.kwargs, outputs)
        if replaced is not None:
            outputs = replaced
    return outputs


@functools.lru_cache(maxsize=4096)
def _signature(call: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(call)


class Layer:
    """A callable with hooks and without weights: the base class of Module.

    It exists for code that subclasses it; new code should subclass Module. A ``__call__`` that a
    subclass defines is wrapped; an inherited one is not wrapped again.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        call = cls.__dict__.get("__call__")
        if call is not None:
            cls.__call__ = cls._wrap_call(call)

    @classmethod
    def _wrap_call(cls, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _PREHOOKS:
                args, kwargs = prepared(self, call, args, kwargs)
            outputs = call(self, *args, **kwargs)
            return dispatch(self, call, args, kwargs, outputs) if _HOOKS else outputs

        return wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The computation, which subclasses define."""
        return None


def wrap_edited() -> None:
    """Wraps the ``__call__`` of each class again whose wrapper's code IPython has replaced."""
    for cls in _below(Layer):
        call = vars(cls).get("__call__")
        if not isinstance(call, types.FunctionType):
            continue
        wrapper: Any = cls._wrap_call
        made_here = call.__globals__ is wrapper.__func__.__globals__
        # The code of an unchanged wrapper is a constant of the function that makes wrappers.
        if made_here and call.__code__ not in wrapper.__func__.__code__.co_consts:
            cls.__call__ = wrapper(_function(cls, call))


def _function(cls: type, edited: types.FunctionType) -> types.FunctionType:
    """The user's function, made from its code in a wrapper."""
    module, code = sys.modules[cls.__module__], edited.__code__
    cells = dict(zip(code.co_freevars, edited.__closure__ or (), strict=False))
    cells["__class__"] = types.CellType(cls)  # for super()
    if file := getattr(module, "__file__", None):
        code = code.replace(co_filename=file)
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, vars(module), "__call__", edited.__defaults__, closure)
    new.__kwdefaults__, new.__doc__ = edited.__kwdefaults__, edited.__doc__
    new.__module__, new.__qualname__ = cls.__module__, f"{cls.__qualname__}.__call__"
    new.__annotations__ = dict(edited.__annotations__)
    return new


def _below(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        yield one
        yield from _below(one)
