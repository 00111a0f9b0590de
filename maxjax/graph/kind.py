"""Kinds of values: where TensorValues become arrays, and arrays TensorValues.

Code written for MAX computes with TensorValues: while a Graph is built, or while a Module runs that was called with
one, the operators of Weights return TensorValues, too. maxjax's own layers compute with arrays alone. Their methods
are marked with :func:`on_arrays`: called with TensorValues, or by code that computes with them, they get arrays, and
their results are TensorValues again. If such a layer calls a Module of a user, that gets TensorValues.

Traces of the two kinds differ (``.mean()`` of a TensorValue keeps its axis). Therefore the kind is part of the
treedef of every Module and Weight, and so of the key of every trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from ..dtype import DType
from .operands import common, wraps
from .operators import Operators

F = TypeVar("F", bound=Callable[..., Any])


# The kinds: arrays; TensorValues; arrays in a method that is marked with ``on_arrays`` and got TensorValues.
ARRAYS, VALUES, ARRAYS_FOR_VALUES = range(3)


class _Kind(threading.local):
    """The kind of values in this thread, on which every trace depends."""

    # Not a ContextVar: each greenlet has its own, and building a Graph takes two.
    now = ARRAYS

    @property
    def values(self) -> bool:
        """Whether operators of Weights return TensorValues."""
        return self.now == VALUES


KIND = _Kind()


@contextlib.contextmanager
def computing_with(kind: int) -> Iterator[None]:
    """Context in which values are of a kind."""
    before = KIND.now
    KIND.now = kind
    try:
        yield
    finally:
        KIND.now = before


# --- functions of arrays ----------------------------------------------------------------------


class ArrayFunction(NamedTuple):
    """A function that computes with arrays, which code that computes with TensorValues may call.

    Attributes:
        function: the function.
        floats: whether its operands are floats: MAX refuses integers beside floats, which JAX promotes.
    """

    function: Callable[..., Any]
    floats: bool

    def arrays_of(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments with arrays in place of TensorValues.

        Raises:
            ValueError: an operand is a TensorValue of integers, and must be one of floats.
        """
        for operand in (*args, *kwargs.values()) if self.floats else ():
            if isinstance(operand, Operators) and not operand.dtype.is_float():
                common(operand.dtype, DType.float32)
        return to_arrays((args, kwargs))


def on_arrays(function: F, floats: bool = False) -> F:
    """Declare that a function, or a method of a layer, computes with arrays.

    It gets arrays in place of TensorValues among its arguments, at any depth of lists, tuples, dicts and other
    pytrees; then arrays in its result, or in a list, tuple or dict of results, are returned as TensorValues.
    So are those of a call without any arrays, such as that of a property, by code that computes with TensorValues.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import TensorValue
        >>> double = on_arrays(lambda x: (type(x) is TensorValue, 2 * x))
        >>> double(TensorValue(jnp.ones(1)))
        (False, TensorValue([2.], dtype=float32, shape=[Dim(1)], device=cpu:0))
        >>> double(jnp.ones(1))
        (False, Array([2.], dtype=float32))
    """
    marked = ArrayFunction(function, floats)

    @functools.wraps(function)
    def on_values_too(*args: Any, **kwargs: Any) -> Any:
        args, kwargs, kind, back = into_call(marked, args, kwargs)
        with computing_with(kind):
            found = function(*args, **kwargs)
        return found if back is None else back(found)

    # Where it is the __call__ of a Module, nn/layer/call_stack.py converts, and calls the function itself.
    on_values_too._array_function = marked  # type: ignore[attr-defined]
    return on_values_too  # type: ignore[return-value]


def into_call(
    marked: ArrayFunction | None, args: tuple, kwargs: dict, decides: bool = False
) -> tuple[tuple, dict, int, Callable[[Any], Any] | None]:
    """Convert the arguments of a call to the kind of values that it computes with.

    Args:
        marked: the function that is called; None for one that computes with what it is called with, as those of
            users do.
        decides: whether its arguments decide the kind, if it is not marked: those of a Module that no other calls.

    Returns:
        The arguments, the kind, and the function that converts the result; None if nothing does.
    """
    before = KIND.now
    if marked is not None:
        if wants_values((*args, *kwargs.values())):
            return *marked.arrays_of(args, kwargs), ARRAYS_FOR_VALUES, to_values
        return args, kwargs, ARRAYS if before == VALUES else before, None
    if (
        before == ARRAYS_FOR_VALUES
    ):  # a user's Module inside one of ours gets what ours was called with
        return *to_values((args, kwargs)), VALUES, to_arrays
    if decides and wants_values((*args, *kwargs.values())):
        return args, kwargs, VALUES, None
    return args, kwargs, before, None


def on_float_arrays(function: F) -> F:
    """Declare, as :func:`on_arrays` does, that a function computes with arrays, of floats."""
    return on_arrays(function, floats=True)


def for_max(function: F) -> F:
    """Declare that a method is one of MAX's, which only files written for MAX call: it computes with arrays, and its
    results are always TensorValues.
    """

    @functools.wraps(function)
    def as_values(*args: Any, **kwargs: Any) -> Any:
        with computing_with(ARRAYS if KIND.now == ARRAYS else ARRAYS_FOR_VALUES):
            return to_values(function(*args, **kwargs))

    return as_values  # type: ignore[return-value]


def for_caller() -> contextlib.AbstractContextManager[None]:
    """Context in which a method that a user has overridden computes with what the caller computes with."""
    return computing_with(VALUES if KIND.now == ARRAYS_FOR_VALUES else KIND.now)


# The types of arguments that contain no other values.
_PLAIN = (np.ndarray, int, float, str, bool, type(None))


def wants_values(args: Iterable[Any]) -> bool:
    """Return whether the results of a call are TensorValues.

    They are if there is a TensorValue among the arguments, at any depth of pytrees; without arrays among the
    arguments, if the caller computes with TensorValues.
    """
    has_array = False
    for arg in args:
        if isinstance(arg, jax.Array):
            has_array = True
        elif isinstance(arg, Operators):
            if wraps(arg):
                return True
        elif isinstance(arg, _PLAIN) or _is_leaf(arg):
            continue
        else:
            leaves = jax.tree.leaves(arg, is_leaf=_is_leaf)
            if any(map(wraps, leaves)):
                return True
            has_array = has_array or any(isinstance(leaf, jax.Array) for leaf in leaves)
    return KIND.now == VALUES and not has_array


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Operators) or hasattr(x, "_mx_definition")


def is_tensor_value(x: Any) -> bool:
    """Return whether an object is a TensorValue, and not a Weight, which only counts as one."""
    return isinstance(x, Operators) and getattr(type(x), "_wraps", None) is True


def as_array(x: Any) -> Any:
    """Return the array of a TensorValue or a Weight; anything else as it is."""
    return x.__jax_array__() if isinstance(x, Operators) else x


def to_arrays(tree: Any) -> Any:
    """Return arguments with arrays in place of TensorValues; what contains none is returned as it is."""
    if isinstance(tree, Operators):
        return tree.__jax_array__() if is_tensor_value(tree) else tree  # layers take Weights
    if isinstance(tree, (jax.Array, *_PLAIN)) or _is_leaf(tree):
        return tree
    leaves = jax.tree.leaves(tree, is_leaf=_is_leaf)
    return jax.tree.map(to_arrays, tree, is_leaf=_is_leaf) if any(map(wraps, leaves)) else tree


def to_values(tree: Any) -> Any:
    """Return a result, or a list, tuple or dict of results, with TensorValues in place of arrays."""
    if isinstance(tree, jax.Array):
        return to_value(tree)
    if isinstance(tree, dict):
        return {name: to_values(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        found = map(to_values, tree)
        return type(tree)(*found) if hasattr(tree, "_fields") else type(tree)(found)
    return tree


def to_value(array: Any) -> Any:
    """Return an array, or a Weight, as a TensorValue."""
    return value_class()(array)


@functools.cache
def value_class() -> Any:
    """Return MAX's TensorValue. Nothing of the core imports it, so it is imported on first use, by the package."""
    return sys.modules["maxjax.graph"].TensorValue
