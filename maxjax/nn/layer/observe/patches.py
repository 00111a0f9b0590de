"""Patches: what a caller may give, and the new value at a place, checked against what the Module has computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import UserInputError
from ....graph.kind import as_array
from ....graph.operators import Operators
from ....kernels import explicit
from ....kernels.operation import varying_with
from .plans import CallerFunction, Target

_NUMBERS = (bool, int, float, complex)


class PatchError(UserInputError):
    """A patch does not fit the value at its place."""


def checked_patches(patches: Any, caller: str) -> dict[str, Any]:
    """Return the patches, with functions wrapped as CallerFunction and numbers as arrays.

    Raises:
        UserInputError: ``patches`` is not a mapping or is empty, or a value is neither arrays nor a function.
    """
    if not isinstance(patches, Mapping) or not patches:
        raise UserInputError(
            f"{caller} takes a mapping from patterns to values or functions, such as "
            f"{{'layers.3.mlp': 0.0}}, not {patches!r:.60}"
        )
    return {pattern: _value_or_function(pattern, new, caller) for pattern, new in patches.items()}


def _value_or_function(pattern: Any, new: Any, caller: str) -> Any:
    if callable(new) and not isinstance(new, jax.Array):
        count = _required(new)
        if count > 2:
            raise UserInputError(
                f"{caller}: the function for '{pattern}' has {count} required parameters: it is called with the "
                "value, or with the value and the number of the layer"
            )
        return CallerFunction(new, count == 2)
    if isinstance(new, _NUMBERS):
        return jnp.asarray(new)  # the array's weak type marks it as a Python number
    if any(not hasattr(leaf, "dtype") for leaf in jax.tree.leaves(new)) or not jax.tree.leaves(new):
        raise UserInputError(
            f"{caller}: '{pattern}' is given a {type(new).__name__}: a patch is an array (or a tree of "
            "arrays), a number, or a function of the value"
        )
    return jax.tree.map(jnp.asarray, new)


def _required(function: Callable[..., Any]) -> int:
    """Return the number of positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return 1
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in plain and p.default is inspect.Parameter.empty for p in parameters)


def patched(
    target: Target, given: Any, value: Any, rows: Mapping[int | None, int | None], number: Any
) -> Any:
    """Return the value after a patch.

    Args:
        given: value of the patch; None if it is a function.
        value: value at the place; in the body of a loop, that of the layer that runs.
        rows: for each layer of the loop, or for None outside of loops, the index of the place among those
            of the patch; None if the patch leaves the layer as it is.
        number: index of the layer: a scalar array in a loop, otherwise an int, or None if the name has none.

    Raises:
        PatchError: the new value has another structure, shape or dtype.
    """
    if None in rows:
        return _new(target, given, value, rows[None], number)
    row = row_of({i: row for i, row in rows.items() if row is not None}, number, -1)
    if None not in rows.values():
        return _new(target, given, value, row, number)
    new = lambda value: _new(target, given, value, row, number)
    return jax.lax.cond(row >= 0, new, lambda value: value, value)


def row_of(rows: Mapping[Any, int], number: Any, default: int) -> jax.Array:
    """Return ``rows[number]`` for a traced number, or the default."""
    table = np.array([rows.get(i, default) for i in range(max(rows) + 1)], np.int32)
    return jnp.asarray(table).at[number].get(mode="fill", fill_value=default)


def _new(target: Target, given: Any, value: Any, row: Any, number: Any) -> Any:
    if target.function is not None:
        return _fitted(target, target.function(value, number), value)
    count = len(target.places)
    if jax.tree.structure(given) == jax.tree.structure(value) and all(
        np.shape(new) == (count, *np.shape(old))
        for new, old in zip(jax.tree.leaves(given), jax.tree.leaves(value), strict=True)
    ):
        given = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, row, keepdims=False), given)
    return _fitted(target, given, value)


def _fitted(target: Target, new: Any, old: Any) -> Any:
    """Return ``new`` if it has the structure, shapes and dtypes of ``old``; a Python number fills its shape."""
    kept = jax.tree.structure(old)  # with TensorValues, if there are any
    new, old = unwrapped(new), unwrapped(old)
    if isinstance(new, _NUMBERS) or (getattr(new, "weak_type", False) and jnp.ndim(new) == 0):
        new = jax.tree.map(lambda a: jnp.full_like(a, new), old)
    given, leaves = jax.tree.leaves(new), jax.tree.leaves(old)
    if jax.tree.structure(new) == jax.tree.structure(old) and all(map(_fits, given, leaves)):
        return jax.tree.unflatten(kept, map(_placed, given, leaves))
    what, each = "the function gives", ""
    if target.function is None:
        what, count = "the patch is", len(target.places)
        if count > 1:
            each = f" (or one for each of the {count} places, along a first axis)"
    raise PatchError(
        f"patch '{target.pattern}': the value there is {types_of(old)}, and {what} {types_of(new)}{each}"
    )


def _fits(new: Any, old: Any) -> bool:
    return jnp.shape(new) == jnp.shape(old) and jnp.result_type(new) == jnp.result_type(old)


def _placed(new: Any, old: Any) -> Any:
    new, mesh = varying_with(jnp.asarray(new), old), explicit.mesh_of(old)
    if mesh is None:
        return new
    return jax.sharding.reshard(new, explicit.sharding(mesh, explicit.entries(old)))


def unwrapped(tree: Any) -> Any:
    """Return the tree with arrays instead of TensorValues."""
    return jax.tree.map(as_array, tree, is_leaf=lambda v: isinstance(v, Operators))


def types_of(tree: Any) -> str:
    """Return the dtypes and shapes of a tree of arrays, as text.

    Example:
        >>> types_of((np.zeros((2, 3), np.float32), np.int32(1)))
        '(float32[2,3], int32[])'
    """
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(types_of, tree))})"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {types_of(value)}' for key, value in tree.items())}}}"
    if not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
        return type(tree).__name__
    return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
