"""Symbolic sizes: MAX's Dim on one side, the sizes of ``jax.export`` on the other.

While a Graph with named dimensions is traced, arrays have sizes like ``2*batch + 1``.
Both sides print as arithmetic over names, so one small evaluator reads both.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .shape import Dim, StaticDim


class _Known(threading.local):
    """Name → size of jax.export for what is being traced in this thread.

    Not a ContextVar: each greenlet has its own of those, and a Graph is written by two.
    """

    def __init__(self) -> None:
        self.sizes: Mapping[str, Any] = {}
        self.scope: Scope | None = None


_KNOWN = _Known()


class Check(NamedTuple):
    """Two sizes that have to be equal when a program runs.

    Attributes:
        have, want: as arithmetic over names.
        axis: of which axis they are.
        title: what begins the message.
    """

    have: str
    want: str
    axis: int
    title: str


class Scope:
    """What is found out about sizes while something is traced.

    Attributes:
        names: names that no input has → the sizes they were bound to.
        checks: conditions to check when the sizes are known.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.checks: list[Check] = []


@contextlib.contextmanager
def naming(sizes: Mapping[str, Any], scope: Scope | None = None) -> Iterator[None]:
    """Makes symbolic sizes known by name, besides those that are already.

    Args:
        scope: who checks what is found out about them; an outer one goes on without it.
    """
    before, outer = _KNOWN.sizes, _KNOWN.scope
    _KNOWN.sizes = {**before, **sizes}
    _KNOWN.scope = outer if scope is None else scope
    try:
        yield
    finally:
        _KNOWN.sizes, _KNOWN.scope = before, outer


def is_checked() -> bool:
    """Whether somebody checks what is found out about sizes."""
    return _KNOWN.scope is not None


def checks() -> list[Check] | None:
    """Where a check is left for when sizes are known; None where nobody would make it."""
    return None if _KNOWN.scope is None else _KNOWN.scope.checks


def define(name: str, size: Any) -> None:
    """From now on the name means this size, in the Graph being written."""
    assert _KNOWN.scope is not None
    _KNOWN.scope.names[name] = size


def is_known(name: str) -> bool:
    """Whether a dimension of that name has a size now."""
    return name in _KNOWN.sizes


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv, "mod": operator.mod, "min": min, "max": max,
}  # fmt: skip


def sizes_of(names: Iterable[str]) -> dict[str, Any]:
    """Fresh symbolic sizes of ``jax.export`` for the names, in one scope."""
    if not (names := sorted(set(names))):
        return {}
    from jax import export  # takes a while to import, and few Graphs have names

    return dict(zip(names, export.symbolic_shape(", ".join(names)), strict=True))


def to_dim(size: Any) -> Dim:
    """A size of an array as a Dim.

    Raises:
        NotImplementedError: jax.export made of it something that MAX's Dims cannot say.
    """
    if isinstance(size, (int, Dim)):
        return Dim(size)
    try:
        return Dim(evaluate(str(size), Dim))
    except TypeError:  # min(a, 2): names have no order
        raise NotImplementedError(f"the symbolic size {size} is not supported") from None


def to_size(dim: Any, *shapes: Iterable[Any]) -> Any:
    """A Dim, name or number as a size an array may have.

    Args:
        shapes: shapes of arrays at hand, whose symbolic sizes are known besides the Graph's.

    Raises:
        ValueError: a name is not a dimension here.
    """
    if not isinstance(dim, (str, Dim)):
        return dim if _is_symbolic(dim) else operator.index(dim)
    if isinstance(dim, StaticDim):
        return int(dim)
    known = dict(_KNOWN.scope.names) if _KNOWN.scope is not None else {}
    known.update(_KNOWN.sizes)
    for size in (size for shape in shapes for size in shape):
        if _is_symbolic(size) and str(size).isidentifier():
            known[str(size)] = size

    def look_up(name: str) -> Any:
        if name not in known:
            raise ValueError(
                f"the symbolic dimension '{name}' has no size here: it is no dimension of the inputs"
            )
        return known[name]

    return evaluate(str(dim), look_up)


def _is_symbolic(size: Any) -> bool:
    """Whether a size of an array is one of jax.export's, which are no integers."""
    return not hasattr(size, "__index__")


def to_sizes(shape: Iterable[Any], *shapes: Iterable[Any]) -> tuple[Any, ...]:
    """:func:`to_size` for each axis."""
    return tuple(to_size(dim, *shapes) for dim in shape)


def evaluate(text: str, name: Callable[[str], Any]) -> Any:
    """Arithmetic over names, with what ``name`` says each of them is."""

    def go(node: ast.AST) -> Any:
        match node:
            case ast.Expression():
                return go(node.body)
            case ast.Constant(value=int()):
                return node.value
            case ast.Name():
                return name(node.id)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](go(node.left), go(node.right))
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](go(node.operand))
            case ast.Call(func=ast.Name(id=function)) if function in _FUNCTIONS:
                return _FUNCTIONS[function](*map(go, node.args))
        raise NotImplementedError(f"the symbolic size {text} is not supported")

    return go(ast.parse(text, mode="eval"))
