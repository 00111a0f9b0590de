"""Code that changes while a process runs: ``%autoreload``, and functions that a notebook defines again.

A jitted function is found again by the structure of its arguments, and what a Module does is no part of that.
So an edited model would go on as before. In IPython the code that a Module's classes reach is therefore a part of
its treedef (``nn/layer/definition.py``): programs are traced again when it has changed. It is looked at once
in each cell. Elsewhere code does not change, and nothing is looked at.
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
_cell = 0  # number of cells since watching began; 0 if nobody watches


def watch(listener: Callable[[], None], shell: Any = None) -> None:
    """Calls a function at the beginning of each cell, if this process is one of IPython.

    Args:
        listener: function to call.
        shell: shell of IPython; by default the one that runs.
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
    """A cell begins: whatever ``%autoreload`` does comes before its first call."""
    global _cell
    _cell += 1
    code_of.cache_clear()
    _stay_last()
    for listener in _LISTENERS:
        listener()


def _stay_last() -> None:
    """``%autoreload`` looks at its modules at the beginning of a cell, too: before, from the next on."""
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
    """The code objects, equal if they do the same, that classes and what they use consist of."""
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
    """The functions and classes that a function or class of the user's refers to."""
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
    """The user's functions and classes in a value: itself, or what a method or property is made of."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        value = value.__func__
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions(part)
        return
    # What jax.jit and functools make of a function has it as __wrapped__.
    if not isinstance(value, type | types.FunctionType):
        try:
            value = getattr(value, "__wrapped__", None)
        except Exception:  # a __getattr__ of whatever the user has there
            return
    if isinstance(value, types.FunctionType):
        # A wrapper is of the package that wrapped, and says the module of what is inside.
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
    if not isinstance(name, str):  # nobody knows
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
    """The code that a compiled program was made of, which says once if it is not that any more.

    Args:
        name: name of the program.
        classes: classes of its Modules.
    """

    def __init__(self, name: str, classes: Iterable[type]):
        self._name, self._classes = name, frozenset(classes)
        self._cell, self._code = _cell, code(self._classes)

    def check(self) -> None:
        """Warns if the code has changed since."""
        if self._cell == _cell:
            return
        self._cell, before = _cell, self._code
        self._code = code(self._classes)
        if self._code != before and before:
            warnings.warn(
                f"'{self._name}' was compiled before its code was changed, and still runs the code of before: "
                "compile it again",
                UserWarning,
                stacklevel=3,
            )
