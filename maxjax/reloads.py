"""Code that changes while a process runs: ``%autoreload``, and functions that a notebook defines again.

``jax.jit`` finds a compiled program by the structure of its arguments, which does not include the code of a Module.
So an edited model would still run its old program. In IPython the code that a Module's classes use is therefore part
of its treedef (``nn/layer/definition.py``), and programs are traced again when it has changed. The code is checked
once in each cell. Outside of IPython code does not change, and nothing is checked.
"""

from __future__ import annotations

import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from typing import Any

_IPYTHON = "IPython"
_LISTENERS: list[Callable[[], None]] = []
_shell: Any = None
_cell = 0  # number of cells since the first call of watch; 0 before it


def watch(listener: Callable[[], None], shell: Any = None) -> None:
    """Calls a function at the beginning of each cell, if this process runs IPython.

    Args:
        listener: function to call.
        shell: IPython shell; by default the running one.
    """
    global _cell, _shell
    if shell is None and _IPYTHON in sys.modules:
        shell = sys.modules[_IPYTHON].get_ipython()
    if shell is None:
        return
    _LISTENERS.append(listener)
    _shell = shell
    if _begin not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", _begin)
    _cell = max(_cell, 1)


def _begin(*info: Any) -> None:
    """Handles the beginning of a cell; ``%autoreload`` also reloads before the cell's first statement."""
    global _cell
    _cell += 1
    code_of.cache_clear()
    _stay_last()
    for listener in _LISTENERS:
        listener()


def _stay_last() -> None:
    """Moves ``_begin`` to the end of the callbacks, so that ``%autoreload`` runs first from the next cell on."""
    if _begin in _shell.events.callbacks["pre_run_cell"][:-1]:
        _shell.events.unregister("pre_run_cell", _begin)
        _shell.events.register("pre_run_cell", _begin)


def code(classes: Iterable[type]) -> Hashable:
    """The code that runs when instances of some classes are called; () where code does not change.

    Example:
        >>> code([int]) if _cell == 0 else ()
        ()
    """
    if not _cell:
        return ()
    own = sorted({kind for kind in classes if not _is_installed(kind.__module__)}, key=str)
    return code_of(tuple(own)) if own else ()


@lru_cache(maxsize=1024)
def code_of(classes: tuple[type, ...]) -> tuple[types.CodeType, ...]:
    """The code objects of classes and of all that they use; equal code compares equal."""
    found: dict[int, types.CodeType] = {}
    left: list[Any] = list(classes)
    seen = {id(one) for one in left}
    while left:
        for one in _used(left.pop(), found):
            if id(one) not in seen:
                seen.add(id(one))
                left.append(one)
    return tuple(found.values())


def _used(one: Any, found: dict[int, types.CodeType]) -> Iterator[Any]:
    """The functions and classes that one of the user's functions or classes refers to."""
    if isinstance(one, type):
        for kind in one.__mro__:
            if not _is_installed(kind.__module__):
                yield from (inner for v in vars(kind).values() for inner in _functions(v))
        return
    found[id(one.__code__)] = one.__code__
    values = [getattr(one, "__wrapped__", None)]
    for cell in one.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    names = set(_names(one.__code__))
    for name in names & one.__globals__.keys():
        value = one.__globals__[name]
        values.append(value)
        if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
            values += [vars(value)[inner] for inner in names & vars(value).keys()]
    for value in values:
        yield from _functions(value)


def _functions(value: Any) -> Iterator[Any]:
    """The user's functions and classes in a value: itself, or those inside a method or property."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        value = value.__func__
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions(part)
        return
    # A function that jax.jit or functools has wrapped is in __wrapped__.
    if not isinstance(value, type | types.FunctionType):
        try:
            value = getattr(value, "__wrapped__", None)
        except Exception:  # a __getattr__ of whatever the user has there
            return
    if isinstance(value, types.FunctionType):
        # A wrapper's __module__ is that of the function inside, even if a package made the wrapper.
        if not _is_installed(value.__module__):
            yield value
    elif isinstance(value, type) and not _is_installed(value.__module__):
        yield value


def _names(one: types.CodeType) -> Iterator[str]:
    """The names that a function looks up, with those of functions inside of it."""
    yield from one.co_names
    for inner in one.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


@lru_cache(maxsize=4096)
def _is_installed(name: Any) -> bool:
    """Whether a module is Python's, maxjax's or that of an installed package."""
    if not isinstance(name, str):  # unknown
        return True
    top = name.partition(".")[0]
    if top in (__name__.partition(".")[0], "builtins", *sys.stdlib_module_names):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return name != "__main__" and (file is None or file.startswith(_places()))


@lru_cache(maxsize=1)
def _places() -> tuple[str, ...]:
    """The directories of installed packages."""
    paths = sysconfig.get_paths()
    return f"{paths['purelib']}/", f"{paths['platlib']}/"


class Compiled:
    """The code that a program was compiled from; :meth:`check` warns once if it has changed.

    Args:
        name: name of the program.
        classes: classes of its Modules.
    """

    def __init__(self, name: str, classes: Iterable[type]):
        self._name, self._classes = name, frozenset(classes)
        self._cell, self._code = _cell, code(self._classes)

    def check(self) -> None:
        """Warns if the code has changed since the program was compiled."""
        if self._cell == _cell:
            return
        self._cell, before = _cell, self._code
        self._code = code(self._classes)
        if self._code != before and before:
            warnings.warn(
                f"'{self._name}' was compiled before its code was changed, and still runs the old code: "
                "compile it again",
                UserWarning,
                stacklevel=3,
            )
