"""``lift``, which makes ops out of functions of arrays, and checks that many ops share.

A lifted op accepts TensorValues, Weights and arrays, and returns the kind of value that it was given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, ValuesView
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...dtype import DType
from ..operands import check_broadcast, from_numpy, is_float
from ..operands import rounded as rounded
from ..operands import same as same
from ..operands import wide as wide
from ..shape import Dim
from ..shaping import axis_of as axis_of
from ..value import TensorValue, alike, unify, unwrap, wraps
from ..weight.transpose import WeightTranspose

_F = TypeVar("_F", bound=Callable[..., Any])

PLAIN, WEIGHT, VALUE = "plain", "weight", "value"


def lift(function: _F) -> _F:
    """Decorator that makes an op out of a function of arrays.

    The op accepts TensorValues, Weights, JAX or NumPy arrays and numbers, also in lists. It returns
    TensorValues if an operand is one or if all are Weights, otherwise plain arrays.
    """

    @functools.wraps(function)
    def op(*args: Any, **kwargs: Any) -> Any:
        kinds: set[str] = set()
        args = tuple([_lower(x, kinds) for x in args])
        if kwargs:
            kwargs = {name: _lower(x, kinds) for name, x in kwargs.items()}
        result = function(*args, **kwargs)
        if VALUE in kinds or (WEIGHT in kinds and PLAIN not in kinds):
            return wrapped(result)
        return result

    return op  # type: ignore[return-value]


def pairwise(function: _F) -> _F:
    """:func:`lift` for an op that combines its last two operands: a NumPy array is cast to a TensorValue's dtype."""
    op, signature = lift(function), inspect.signature(function)
    operands = {p.name for p in signature.parameters.values() if p.default is p.empty}

    @functools.wraps(function)
    def paired(*args: Any, **kwargs: Any) -> Any:
        if kwargs and operands.issuperset(kwargs):
            with contextlib.suppress(TypeError):  # the call itself says what is wrong
                args, kwargs = signature.bind(*args, **kwargs).args, {}
        if len(args) < 2 or kwargs:
            return op(*args, **kwargs)
        return op(*args[:-2], *alike(*args[-2:]))

    return paired  # type: ignore[return-value]


def sizing(*names: str) -> Callable[[_F], _F]:
    """Decorator for an op whose arguments of these names are sizes or axes: an array of them becomes a list.

    As operands, NumPy arrays would become arrays of JAX, whose numbers are not known while a program is traced.
    """

    def decorate(op: _F) -> _F:
        parameters = list(inspect.signature(op).parameters)
        places = [(parameters.index(name), name) for name in names]

        @functools.wraps(op)
        def sized(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            for place, name in places:
                if place < len(given):
                    given[place] = _listed(given[place])
                elif name in kwargs:
                    kwargs[name] = _listed(kwargs[name])
            return op(*given, **kwargs)

        return sized  # type: ignore[return-value]

    return decorate


def _listed(sizes: Any) -> Any:
    known = isinstance(sizes, (np.ndarray, jax.Array)) and not isinstance(sizes, Tracer)
    return sizes.tolist() if known else sizes


def creator(function: _F) -> _F:
    """Decorator for ops that create tensors, which always return TensorValues."""
    lifted = lift(function)

    @functools.wraps(function)
    def op(*args: Any, **kwargs: Any) -> Any:
        return wrapped(lifted(*args, **kwargs))

    return op  # type: ignore[return-value]


def wrapped(result: Any) -> Any:
    """TensorValues around the arrays of a result: one, or a list or tuple of them."""
    if isinstance(result, (list, tuple)):
        return type(result)([wrapped(x) for x in result])
    return TensorValue(result)


def _lower(x: Any, kinds: set[str]) -> Any:
    """An argument with all values in it replaced by arrays; their kinds are added to ``kinds``."""
    if isinstance(x, TensorValue):
        kinds.add(VALUE if wraps(x) else WEIGHT)
        return unwrap(x)
    if type(x) in (list, tuple):
        return type(x)([_lower(v, kinds) for v in x])
    if isinstance(x, (Iterator, ValuesView)):  # of tensors, for concat and stack
        return [_lower(v, kinds) for v in x]
    if isinstance(x, (jax.Array, np.ndarray)):
        kinds.add(PLAIN)
        return x if isinstance(x, jax.Array) else from_numpy(x)
    if isinstance(x, WeightTranspose):
        kinds.add(WEIGHT)
        return x.array()
    # NumPy scalars become Python numbers, so that np.float64 does not widen the other operand.
    return x.item() if isinstance(x, np.generic) else x


def array(x: Any) -> jax.Array:
    """An operand, which may be a number or a Dim, as an array."""
    return x if isinstance(x, jax.Array) else jnp.asarray(unwrap(x))


def floating(x: Any, op: str) -> jax.Array:
    """The operand of an op for floats only, as an array.

    Raises:
        ValueError: it is a tensor of integers or booleans.
    """
    if isinstance(x, (int, float)):
        return jnp.asarray(float(x))
    x = array(x)
    if not is_float(x.dtype):
        raise ValueError(f"{op} takes a tensor of floats, not of {x.dtype}; cast it first")
    return x


def boolean(x: Any, op: str) -> jax.Array:
    """The operand of an op for booleans only, as an array.

    Raises:
        ValueError: it has another dtype.
    """
    x = array(x)
    if x.dtype != jnp.bool_:
        raise ValueError(
            f"{op} takes a tensor of booleans, not of {x.dtype}; compare or cast it first"
        )
    return x


def numeric(x: Any, op: str) -> jax.Array:
    """The operand of an op for numbers only, as an array.

    Raises:
        ValueError: it is a tensor of booleans.
    """
    x = array(x)
    if x.dtype == jnp.bool_:
        raise ValueError(f"{op} takes a tensor of numbers, not of booleans; cast it first")
    return x


def integers(x: Any, op: str) -> jax.Array:
    """The indices of an op, as an array.

    Raises:
        ValueError: they are not integers.
    """
    x = array(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{op} takes indices of an integer dtype, not {x.dtype}")
    # The numbers of rows that are computed beside them may not fit into less than 32 bits.
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def binary_operands(a: Any, b: Any) -> tuple[Any, Any]:
    """Two operands promoted to one dtype, checked to broadcast; a number that fits stays a number.

    Raises:
        ValueError: one operand is an integer tensor and the other a float, a number does not fit in
            the other's dtype, or the shapes do not broadcast.
    """
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        if a.dtype == b.dtype and a.shape == b.shape:
            return a, b
        check_broadcast(a.shape, b.shape)
    return unify(a, b)


def canonical(dtype: Any) -> Any:
    """The dtype that JAX uses for a DType: without ``jax_enable_x64``, 32 bits instead of 64."""
    return jax.dtypes.canonicalize_dtype(DType.of(dtype).np)


def pair(value: Any, length: int, name: str, positive: bool = False) -> tuple[Any, ...]:
    """A tuple of ``length`` numbers, one for each axis; a single number is repeated.

    Raises:
        ValueError: there are not ``length`` numbers, or one that must be positive is not.
    """
    if isinstance(value, (str, float)):
        raise ValueError(f"{name} takes one number or {length}, not {value!r}")
    values = (value,) * length if isinstance(value, (int, Dim)) else tuple(value)
    if len(values) != length or (positive and any(isinstance(n, int) and n < 1 for n in values)):
        kind = "positive numbers" if positive else "numbers"
        raise ValueError(f"{name} takes {length} {kind}, not {values}")
    return values
