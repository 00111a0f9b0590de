"""Classes of Modules whose ``__call__`` a notebook's ``%autoreload`` has exchanged.

What a class has as ``__call__`` is a function that names the layer and runs hooks around the user's.
IPython puts the code of an edited one straight into that function, where it would run without either and
look names up in maxjax. Here the edited code becomes the user's function again, inside of a new wrapper.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from .hooks import Layer


def wrap_edited() -> None:
    """Wraps the ``__call__`` of each class again in which IPython has put other code."""
    for cls in _below(Layer):
        call = vars(cls).get("__call__")
        if not isinstance(call, types.FunctionType):
            continue
        wrapper: Any = cls._wrap_call
        made_here = call.__globals__ is wrapper.__func__.__globals__
        # A wrapper's own code is a constant of the function that makes wrappers.
        if made_here and call.__code__ not in wrapper.__func__.__code__.co_consts:
            cls.__call__ = wrapper(_function(cls, call))


def _function(cls: type, edited: types.FunctionType) -> types.FunctionType:
    """The user's function for code that stands in a wrapper."""
    module, code = sys.modules[cls.__module__], edited.__code__
    cells = dict(zip(code.co_freevars, edited.__closure__ or (), strict=False))
    cells["__class__"] = types.CellType(cls)  # of super()
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
