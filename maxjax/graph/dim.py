"""``Dim``: one size of a shape, known, named, or computed from names.

A static Dim works wherever Python, NumPy or JAX expect an integer. A computed one is stored as
a polynomial over names and quotients, so that equal sizes compare equal and print alike.
"""

from __future__ import annotations

import math
import numbers
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Dim:
    """One size of a shape: ``Dim(3)`` is static, ``Dim("batch")`` symbolic.

    ``+ - * //`` with Dims, integers and names give Dims: static where the result is known,
    otherwise an AlgebraicDim in normal form. ``//`` truncates toward zero. A Dim equals the
    integer or the name it holds and hashes like it. Other types raise TypeError; text that is
    no identifier and integers beyond 64 bits raise ValueError.

    Example:
        >>> Dim(-7) // 2, Dim("a") + 1 + 1 == Dim("a") + 2, Dim("a") - "a"
        (Dim(-3), True, Dim(0))
        >>> (Dim("a") * 4 // 2).substitute({"a": 5}), range(Dim(2))
        (Dim(10), range(0, 2))
    """

    # Makes NumPy scalars on the left defer to this class.
    __array_ufunc__ = None

    def __new__(cls, value: DimLike) -> Dim:
        if cls is not Dim:
            return object.__new__(cls)
        if isinstance(value, Dim):
            return value
        if isinstance(value, str):
            return object.__new__(SymbolicDim)
        if isinstance(value, numbers.Integral):
            return object.__new__(StaticDim)
        raise TypeError(f"Unsupported dimension type {value!r} ({type(value)})")

    @property
    def parameters(self) -> Iterable[SymbolicDim]:
        """The symbolic dims in it, in printed order, with repetitions."""
        return [leaf for leaf in _leaves(_tree(self)) if isinstance(leaf, SymbolicDim)]

    def substitute(self, mapping: Mapping[str, DimLike]) -> Dim:
        """This size with names replaced; names that ``mapping`` lacks stay."""
        raise NotImplementedError

    def __int__(self) -> int:
        raise TypeError(f"int({self!r}): Int conversions only supported for static dims")

    def __index__(self) -> int:
        return int(self)

    def __str__(self) -> str:
        return _text(_tree(self), str)

    def __repr__(self) -> str:
        return _text(_tree(self), lambda leaf: f"Dim({getattr(leaf, 'name', leaf)!r})")

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __add__(self, other: DimLike) -> Dim:
        return _combine(self, other, _add)

    def __mul__(self, other: DimLike) -> Dim:
        return _combine(self, other, _multiply)

    # Sums and products commute, and their normal form does not depend on the order.
    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: DimLike) -> Dim:
        return _combine(self, other, lambda a, b: a + -b)

    def __rsub__(self, other: DimLike) -> Dim:
        return -self + other

    def __floordiv__(self, other: DimLike) -> Dim:
        return _combine(self, other, _divide)

    def __rfloordiv__(self, other: DimLike) -> Dim:
        return _combine(self, other, lambda a, b: _divide(b, a))


DimLike = int | str | Dim
"""Type of an argument that is converted to a Dim: a size, the name of a symbolic size, or a Dim."""


@total_ordering
@dataclass(frozen=True, eq=False, repr=False)
class StaticDim(Dim):
    """A known size, which works as an index and compares with numbers. ``dim`` is the integer.

    Example:
        >>> Dim(3), int(Dim(3)) + 1, Dim(3) < 4, [10, 20, 30][Dim(1)]
        (Dim(3), 4, True, 20)
    """

    dim: int

    def __init__(self, dim: int | StaticDim):
        if not isinstance(dim, numbers.Integral | StaticDim):
            raise TypeError(f"StaticDim takes an int or a StaticDim, got {type(dim).__name__}")
        if not -(2**63) <= int(dim) < 2**63:
            raise ValueError("Dim value must be -2**63 <= dim < 2**63")
        object.__setattr__(self, "dim", int(dim))

    def substitute(self, mapping: Mapping[str, DimLike]) -> Dim:
        return self

    def __int__(self) -> int:
        return self.dim

    def __eq__(self, other: object) -> bool:
        number = _number(other)
        return NotImplemented if number is None else bool(self.dim == number)

    def __lt__(self, other: int | StaticDim) -> bool:
        number = _number(other)
        return NotImplemented if number is None else bool(self.dim < number)

    def __hash__(self) -> int:
        return hash(self.dim)

    def __reduce__(self) -> tuple[Any, ...]:
        return StaticDim, (self.dim,)


@dataclass(frozen=True, eq=False, repr=False)
class SymbolicDim(Dim):
    """A size known only by its ``name``, a Python identifier in ASCII.

    Example:
        >>> Dim("seq"), Dim("seq") == "seq", Dim("seq").substitute({"seq": 4})
        (Dim('seq'), True, Dim(4))
    """

    name: str

    def __init__(self, name: str | SymbolicDim):
        name = name.name if isinstance(name, SymbolicDim) else name
        if not isinstance(name, str):
            raise TypeError(f"SymbolicDim takes a str or a SymbolicDim, got {type(name).__name__}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"Invalid name for symbolic dimension: {name!r}")
        object.__setattr__(self, "name", name)

    def substitute(self, mapping: Mapping[str, DimLike]) -> Dim:
        return Dim(mapping[self.name]) if self.name in mapping else self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicDim):
            return self.name == other.name
        return self.name == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return SymbolicDim, (self.name,)


@dataclass(frozen=True, repr=False)
class AlgebraicDim(Dim):
    """A size computed from symbolic ones; made by arithmetic on Dims, never from a value.

    ``terms`` is the sum, a tuple of pairs (factors, integer coefficient) in printed order. The
    factors of a term are names and quotients; the constant term has none.

    Example:
        >>> 2 * (Dim("b") + 1) + Dim("a") // 3
        (Dim('a') // Dim(3)) + (Dim('b') * Dim(2)) + Dim(2)
    """

    terms: tuple[tuple[Factors, int], ...]

    def __init__(self, dim: AlgebraicDim):
        if not isinstance(dim, AlgebraicDim):
            raise TypeError(f"AlgebraicDim takes an AlgebraicDim, got {type(dim).__name__}")
        object.__setattr__(self, "terms", dim.terms)

    def substitute(self, mapping: Mapping[str, DimLike]) -> Dim:
        total = Dim(0)
        for factors, coefficient in self.terms:
            term = Dim(coefficient)
            for factor in factors:
                term = term * factor.substitute(mapping)
            total = total + term
        return total

    def __reduce__(self) -> tuple[Any, ...]:
        return _normal, (dict(self.terms),)


@dataclass(frozen=True)
class _Quotient:
    """A division with an unknown result: a factor of a term, like a name."""

    numerator: Dim
    denominator: Dim

    def substitute(self, mapping: Mapping[str, DimLike]) -> Dim:
        return self.numerator.substitute(mapping) // self.denominator.substitute(mapping)


Factors = tuple[SymbolicDim | _Quotient, ...]
Polynomial = dict[Factors, int]
# The printed form of a Dim: a name, a number, or an operator with its operands.
Tree = SymbolicDim | int | tuple[str, list["Tree"]]


def _number(value: object) -> Any:
    """``value`` as a number to compare with, or None."""
    if isinstance(value, StaticDim):
        return value.dim
    return value if isinstance(value, numbers.Real) else None


# --- the algebra: polynomials {factors: coefficient} ---


def _combine(a: Dim, b: DimLike, operation: Callable[[Dim, Dim], Dim]) -> Dim:
    if not isinstance(b, Dim | str | numbers.Integral):
        return NotImplemented
    return operation(a, Dim(b))


def _polynomial(dim: Dim) -> Polynomial:
    if isinstance(dim, StaticDim):
        return {(): dim.dim}
    if isinstance(dim, SymbolicDim):
        return {(dim,): 1}
    assert isinstance(dim, AlgebraicDim)
    return dict(dim.terms)


def _normal(polynomial: Polynomial) -> Dim:
    """The Dim of a polynomial: static or symbolic where possible."""
    terms = [(factors, c) for factors, c in polynomial.items() if c]
    if not terms or terms == [((), terms[0][1])]:
        return StaticDim(terms[0][1] if terms else 0)
    factors, coefficient = terms[0]
    if len(terms) == len(factors) == coefficient == 1 and isinstance(factors[0], SymbolicDim):
        return factors[0]
    dim = object.__new__(AlgebraicDim)
    terms.sort(key=lambda term: _rank(_term_tree(*term)))
    object.__setattr__(dim, "terms", tuple(terms))
    return dim


def _add(a: Dim, b: Dim) -> Dim:
    total = Counter(_polynomial(a))
    for factors, coefficient in _polynomial(b).items():
        total[factors] += coefficient
    return _normal(total)


def _multiply(a: Dim, b: Dim) -> Dim:
    product: Polynomial = Counter()
    for factors_a, ca in _polynomial(a).items():
        for factors_b, cb in _polynomial(b).items():
            factors = sorted(factors_a + factors_b, key=lambda factor: _rank(_factor_tree(factor)))
            product[tuple(factors)] += ca * cb
    return _normal(product)


def _divide(a: Dim, b: Dim) -> Dim:
    """``a / b`` truncated toward zero; common factors are cancelled where that is exact."""
    if b == 0:
        raise ZeroDivisionError(f"{a!r} // {b!r}")
    numerator, denominator = _polynomial(a), _polynomial(b)
    if len(denominator) == 1:
        [divisor] = denominator.items()
        reduced = [_cancel(term, divisor) for term in numerator.items()]
        if all(below == ((), 1) for _, below in reduced):
            return _normal(dict(above for above, _ in reduced))
        if len(reduced) == 1:
            [(above, below)] = reduced
            if above[0] == below[0] == ():
                return StaticDim(_truncated(above[1], below[1]))
            a, b = _normal(dict([above])), _normal(dict([below]))
    return _normal({(_Quotient(a, b),): 1})


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


Term = tuple[Factors, int]


def _cancel(above: Term, below: Term) -> tuple[Term, Term]:
    """Two terms divided by their common names and the greatest common divisor of their coefficients."""
    names: Counter[Any] = Counter(f for f in below[0] if isinstance(f, SymbolicDim))
    common = names & Counter(above[0])
    divisor = math.gcd(above[1], below[1])
    if above[1] < 0 and below[1] < 0:
        divisor = -divisor
    return _without(above, common, divisor), _without(below, common, divisor)


def _without(term: Term, common: Counter[Any], divisor: int) -> Term:
    left, factors = common.copy(), []
    for factor in term[0]:
        if left[factor]:
            left[factor] -= 1
        else:
            factors.append(factor)
    return tuple(factors), term[1] // divisor


# --- the printed form, which also defines the order ---

_OPERATORS = ("+", "//", "*")


def _tree(dim: Dim) -> Tree:
    if isinstance(dim, StaticDim | SymbolicDim):
        return dim.dim if isinstance(dim, StaticDim) else dim
    operands = [_term_tree(*term) for term in _polynomial(dim).items()]
    return operands[0] if len(operands) == 1 else ("+", operands)


def _term_tree(factors: Factors, coefficient: int) -> Tree:
    operands = [_factor_tree(factor) for factor in factors]
    if coefficient != 1 or not factors:
        operands.append(coefficient)
    return operands[0] if len(operands) == 1 else ("*", operands)


def _factor_tree(factor: SymbolicDim | _Quotient) -> Tree:
    if isinstance(factor, SymbolicDim):
        return factor
    return "//", [_tree(factor.numerator), _tree(factor.denominator)]


def _leaves(tree: Tree) -> Iterator[SymbolicDim | int]:
    if not isinstance(tree, tuple):
        yield tree
        return
    for operand in tree[1]:
        yield from _leaves(operand)


def _rank(tree: Tree) -> tuple[Any, ...]:
    """Sort key: operations (by operator, then the longest first), names, the number last."""
    if isinstance(tree, tuple):
        operator, operands = tree
        return 0, _OPERATORS.index(operator), -len(operands), [_rank(x) for x in operands]
    return (2, tree) if isinstance(tree, int) else (1, tree.name)


def _text(tree: Tree, leaf: Callable[[SymbolicDim | int], str]) -> str:
    if isinstance(tree, SymbolicDim):
        return tree.name if leaf is str else leaf(tree)
    if isinstance(tree, int):
        return leaf(tree)
    operator, operands = tree
    texts = [_text(x, leaf) for x in operands]
    inner = [f"({t})" if isinstance(x, tuple) else t for x, t in zip(operands, texts, strict=True)]
    return f" {operator} ".join(inner)
