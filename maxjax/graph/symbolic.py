"""Symbolic sizes: conversion between MAX's Dims and the symbolic sizes of ``jax.export``.

While a Graph with named dimensions is traced, arrays have sizes like ``2*batch + 1``. Both kinds print as
arithmetic over names, so one small evaluator converts both.
"""

from __future__ import annotations

import ast
import contextlib
import keyword
import math
import operator
import re
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

from .shape import Dim, StaticDim


class _State(threading.local):
    """The symbolic sizes of the trace in this thread, by name.

    Not a ContextVar, because each greenlet has its own, and building a Graph takes two.
    """

    def __init__(self) -> None:
        self.sizes: MutableMapping[str, Any] = {}
        self.scope: Scope | None = None


_STATE = _State()


class Check(NamedTuple):
    """A condition at run time: two sizes must be equal.

    Attributes:
        have, want: the two sizes, as arithmetic over names.
        axis: their axis.
        title: beginning of the error message.
    """

    have: str
    want: str
    axis: int
    title: str


class Scope:
    """The facts about sizes that a trace collects.

    Attributes:
        names: names that no input has → their sizes.
        checks: conditions to check when the sizes are known.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.checks: list[Check] = []


@contextlib.contextmanager
def naming(sizes: MutableMapping[str, Any], scope: Scope | None = None) -> Iterator[None]:
    """Context that adds symbolic sizes by name.

    Args:
        sizes: sizes by name, to which more may be added within the context.
        scope: scope that collects facts about sizes; None keeps the outer one.
    """
    before, outer = _STATE.sizes, _STATE.scope
    _STATE.sizes = ChainMap(sizes, before)
    _STATE.scope = outer if scope is None else scope
    try:
        yield
    finally:
        _STATE.sizes, _STATE.scope = before, outer


def is_checked() -> bool:
    """Whether there is a scope, so that conditions on sizes will be checked."""
    return _STATE.scope is not None


def checks() -> list[Check] | None:
    """The list that collects conditions; None if nothing would check them."""
    return None if _STATE.scope is None else _STATE.scope.checks


def define(name: str, size: Any) -> None:
    """Defines a name as a size in the Graph being built."""
    assert _STATE.scope is not None
    _STATE.scope.names[name] = size


def is_known(name: str) -> bool:
    """Whether a dimension of this name has a size now."""
    return name in _STATE.sizes


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.USub: operator.neg,
    # Dims have only products.
    ast.Pow: lambda base, exponent: math.prod([base] * exponent),
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv, "mod": operator.mod, "min": min, "max": max,
}  # fmt: skip

# Names that neither Python's parser nor that of jax.export reads as names have a suffix in expressions.
_RESERVED = re.compile(rf"\b({'|'.join(keyword.kwlist)})\b|\b({'|'.join(_FUNCTIONS)})\b(?!\()")
_SUFFIX = "__"


def _safe(text: str) -> str:
    """An expression in which reserved words that are names have the suffix."""
    return _RESERVED.sub(lambda word: word[0] + _SUFFIX, text)


def _own(name: str) -> str:
    """The name of a dimension, from its name in an expression."""
    stem = name.removesuffix(_SUFFIX)
    return stem if _safe(stem) == name else name


def size_text(size: Any) -> str:
    """A symbolic size as text, with the names of dimensions as they were given."""
    return re.sub(r"\w+", lambda word: _own(word[0]), str(size))


def sizes_of(names: Iterable[str]) -> dict[str, Any]:
    """Fresh symbolic sizes of ``jax.export`` for the names, in one scope: that of the sizes that have names now."""
    if not (names := sorted(set(names))):
        return {}
    from jax import export  # slow to import, and few Graphs have names

    scopes = (size.scope for size in _STATE.sizes.values() if _is_symbolic(size))
    sizes = export.symbolic_shape(_safe(", ".join(names)), scope=next(scopes, None))
    return dict(zip(names, sizes, strict=True))


def to_dim(size: Any) -> Dim:
    """A size of an array as a Dim.

    Raises:
        NotImplementedError: a Dim cannot express the size, and no name is defined as it.
    """
    if isinstance(size, (int, Dim)):
        return Dim(size)
    try:
        return Dim(evaluate(str(size), Dim))
    except TypeError:  # min(a, 2): Dims have no order
        names = {} if _STATE.scope is None else _STATE.scope.names
        for name, one in names.items():
            if one == size:
                return Dim(name)
        raise NotImplementedError(
            f"the symbolic size {size} is not supported without a name: rebind the tensor to a new dimension name"
        ) from None


def to_size(dim: Any, *shapes: Iterable[Any]) -> Any:
    """A Dim, name or number as the size of an array.

    Args:
        shapes: shapes of arrays, whose symbolic sizes are known in addition to the Graph's.

    Raises:
        ValueError: a name is unknown.
    """
    if not isinstance(dim, (str, Dim)):
        return dim if _is_symbolic(dim) else operator.index(dim)
    if isinstance(dim, StaticDim):
        return int(dim)
    known = dict(_STATE.scope.names) if _STATE.scope is not None else {}
    known.update(_STATE.sizes)
    for size in (size for shape in shapes for size in shape):
        if _is_symbolic(size) and str(size).isidentifier():
            known[_own(str(size))] = size

    def look_up(name: str) -> Any:
        if name not in known:
            raise ValueError(
                f"the symbolic dimension '{name}' is unknown here: it is not a dimension of the inputs"
            )
        return known[name]

    return evaluate(str(dim), look_up)


def _is_symbolic(size: Any) -> bool:
    """Whether a size of an array is a symbolic one of jax.export."""
    return not hasattr(size, "__index__")


def to_sizes(shape: Iterable[Any], *shapes: Iterable[Any]) -> tuple[Any, ...]:
    """:func:`to_size` for each axis."""
    return tuple(to_size(dim, *shapes) for dim in shape)


def evaluate(text: str, name: Callable[[str], Any]) -> Any:
    """The value of an arithmetic expression over names; ``name`` returns the value of each name."""

    def visit(node: ast.AST) -> Any:
        match node:
            case ast.Expression():
                return visit(node.body)
            case ast.Constant(value=int()):
                return node.value
            case ast.Name():
                return name(_own(node.id))
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](visit(node.left), visit(node.right))
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](visit(node.operand))
            case ast.Call(func=ast.Name(id=function)) if function in _FUNCTIONS:
                return _FUNCTIONS[function](*map(visit, node.args))
        raise NotImplementedError(f"the symbolic size {text} is not supported")

    # jax.export writes a power with ^.
    return visit(ast.parse(_safe(text).replace("^", "**"), mode="eval"))
