"""Rebinding: gives the sizes of a tensor another name, number or expression.

XLA must be told that two symbolic sizes are equal: the array is padded by their difference,
which is 0 at run time and then costs nothing. The Model that runs the Graph checks at each call
that it is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .shape import Dim, Shape, SymbolicDim
from .symbolic import Check, checks, define, evaluate, to_dim, to_size


def rebound(array: jax.Array, shape: Iterable[Any], message: str = "") -> jax.Array:
    """The array, with the sizes called so.

    A name that no dimension has yet means this size from now on in a Graph; elsewhere it goes
    with any size.

    Raises:
        ValueError: the rank or a size is another, or would have to be checked where no Graph
            does.
    """
    wanted, title = Shape(shape), message or "rebind"
    if len(wanted) != array.ndim:
        raise ValueError(
            f"{title}: the tensor has shape {_shown(array)}, and {wanted!r} is {len(wanted)} axes"
        )
    sizes = [
        _bind(array, axis, have, want, title)
        for axis, (have, want) in enumerate(zip(array.shape, wanted, strict=True))
    ]
    changes = [
        (0, 0 if same else new - old, 0)
        for old, new, same in zip(array.shape, sizes, map(_same, array.shape, sizes), strict=True)
    ]
    if all(change == (0, 0, 0) for change in changes):
        return array
    return jax.lax.pad(array, jnp.zeros((), array.dtype), changes)


def _bind(array: jax.Array, axis: int, have: Any, want: Dim, title: str) -> Any:
    """The size that axis gets; what is not known yet is left to be checked."""
    try:
        size = to_size(want, array.shape)
    except ValueError:  # a name that is no dimension yet
        pending = checks()
        if pending is not None and not isinstance(want, SymbolicDim):
            pending.append(Check(str(have), str(want), axis, title))
        elif pending is not None:
            define(str(want), have)
        return have
    if _same(have, size):
        return have
    # A difference that is a number is one, whatever the names stand for.
    if isinstance(have - size, int):
        raise ValueError(
            f"{title}: the tensor has shape {_shown(array)}, and axis {axis} is {have}, not {want}"
        )
    pending = checks()
    if pending is None:
        raise ValueError(
            f"{title}: whether {have} is {want} is known when the program runs, and only a Graph's is checked "
            "then: give the input the size it has"
        )
    pending.append(Check(str(have), str(size), axis, title))
    return size


def beside(parts: Sequence[Any], key: Sequence[Any], shape: Sequence[Any]) -> list[Any]:
    """The sizes that a result should have, where an index says one beside a slice.

    Raises:
        ValueError: there is an index tensor as well, which moves axes.
    """
    if any(getattr(part, "ndim", 0) for part in key):
        raise ValueError("an index with (slice, size) takes numbers and slices besides, no tensors")
    sizes, front, back = list(shape), 0, 0
    gap = next((i for i, part in enumerate(key) if part is Ellipsis), len(key))
    for part, made in zip(parts[:gap], key[:gap], strict=True):
        if made is None or isinstance(made, slice):
            sizes[front] = part[1] if isinstance(part, tuple) else sizes[front]
            front += 1
    for part, made in zip(parts[:gap:-1], key[:gap:-1], strict=True):
        if made is None or isinstance(made, slice):
            back += 1
            sizes[-back] = part[1] if isinstance(part, tuple) else sizes[-back]
    return sizes


def check(pending: Iterable[Check], names: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """What was left to be checked, now that sizes are known.

    Args:
        names: sizes bound to names that no input has.
        sizes: sizes of the inputs' dimensions.

    Raises:
        ValueError: two sizes that were said to be one differ.
    """
    known = dict(sizes)
    for name, size in names.items():
        known.setdefault(name, evaluate(str(size), known.__getitem__))
    for one in pending:
        try:
            have, want = (evaluate(text, known.__getitem__) for text in (one.have, one.want))
        except KeyError:
            continue  # a name that nothing was ever bound to goes with any size
        if have != want:
            given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            raise ValueError(
                f"{one.title}: axis {one.axis} was rebound to {_named(one.want, want)}, and is "
                f"{_named(one.have, have)} (with {given})"
            )


def _named(text: str, size: int) -> str:
    return text if text == str(size) else f"{text} = {size}"


def _same(a: Any, b: Any) -> bool:
    return bool(a == b)


def _shown(array: jax.Array) -> str:
    return repr(Shape(map(to_dim, array.shape)))
