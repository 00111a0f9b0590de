"""Rebinding: gives the sizes of a tensor another name, number or expression.

XLA must know that two symbolic sizes are equal. Therefore the array is padded by their difference, which
is 0 at run time and costs nothing; the Model that runs the Graph checks this at each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .operands import same
from .shape import AlgebraicDim, Dim, Shape, SymbolicDim
from .symbolic import Check, checks, define, evaluate, size_text, to_dim, to_size


def rebound(array: jax.Array, shape: Iterable[Any], message: str = "") -> jax.Array:
    """The array with the given sizes declared.

    In a Graph, a new name is defined as the size; elsewhere it matches any size. None leaves a size as it is.

    Raises:
        ValueError: the rank or a size is different, or a size would have to be checked at run time
            outside of a Graph.
    """
    wanted, title = [None if size is None else Dim(size) for size in shape], message or "rebind"
    if len(wanted) != array.ndim:
        raise ValueError(
            f"{title}: the tensor has shape {_shape_text(array)}, but {wanted!r} has {len(wanted)} axes"
        )
    sizes = [
        have if want is None else _bind(array, axis, have, want, title)
        for axis, (have, want) in enumerate(zip(array.shape, wanted, strict=True))
    ]
    changes = [
        (0, 0 if same(old, new) else new - old, 0)
        for old, new in zip(array.shape, sizes, strict=True)
    ]
    if all(change == (0, 0, 0) for change in changes):
        return array
    return jax.lax.pad(array, jnp.zeros((), array.dtype), changes)


def sized_as(array: jax.Array, sizes: Sequence[Any], message: str) -> jax.Array:
    """The array, whose sizes must be these; in a Graph, a named size that may differ is checked at each call.

    Args:
        sizes: sizes of other arrays.

    Raises:
        ValueError: the rank or a size is different, with ``message``.
    """
    if len(sizes) == array.ndim and all(map(same, array.shape, sizes)):
        return array
    differ = [(n, size) for n, size in zip(array.shape, sizes, strict=False) if not same(n, size)]
    known = any(isinstance(n, int) and isinstance(size, int) for n, size in differ)
    if len(sizes) != array.ndim or known or checks() is None:
        raise ValueError(message)
    return rebound(array, [to_dim(size) for size in sizes], message)


def _bind(array: jax.Array, axis: int, have: Any, want: Dim, title: str) -> Any:
    """The new size of an axis; adds a check if tracing cannot decide whether it is right."""
    try:
        size = to_size(want, array.shape)
    except ValueError:  # a new name
        pending = checks()
        if pending is not None and not isinstance(want, SymbolicDim):
            pending.append(Check(str(have), str(want), axis, title))
        elif pending is not None:
            define(str(want), have)
        return have
    if same(have, size):
        return have
    # A constant difference other than 0 is wrong for all sizes.
    if isinstance(have - size, int):
        raise ValueError(
            f"{title}: the tensor has shape {_shape_text(array)}, and axis {axis} is {have}, not {want}"
        )
    pending = checks()
    if pending is None:
        raise ValueError(
            f"{title}: whether {have} equals {want} is known only at run time, and only a Graph's is checked "
            "then: declare the input with its actual size"
        )
    pending.append(Check(size_text(have), size_text(size), axis, title))
    return size


def has_declared_sizes(parts: Sequence[Any], source: Sequence[Any]) -> bool:
    """Whether an index may declare sizes of its result: one is given, or an axis has a symbolic size."""
    return any(type(part) is tuple for part in parts) or not all(type(n) is int for n in source)


def has_traced_bounds(part: Any) -> bool:
    """Whether a part of an index is a slice with a tracer as a bound."""
    return isinstance(part, slice) and any(
        isinstance(bound, Tracer) for bound in (part.start, part.stop, part.step)
    )


def sliced(array: jax.Array, parts: Sequence[Any], key: Sequence[Any]) -> tuple[jax.Array, list]:
    """Applies the slices whose bounds are tracers; returns the new array and the rest of the index.

    Args:
        parts: index, in which such a slice is given with its size, ``(slice, size)``.
        key: the same index without the sizes.

    Raises:
        NotImplementedError: the size is not known, or there is a step.
    """
    left, axis = list(key), 0
    used = sum(part is not None and part is not Ellipsis for part in key)
    for i, (part, made) in enumerate(zip(parts, key, strict=True)):
        if has_traced_bounds(made):
            try:
                size = to_size(part[1], array.shape) if isinstance(part, tuple) else None
            except ValueError:  # a new name
                size = None
            if size is None or made.step not in (None, 1):
                raise NotImplementedError(
                    "a slice whose bounds are tensors of a program needs a size that is a number or a dimension of the "
                    "inputs, and no step: x[(slice(start, stop), size)]"
                )
            start = 0 if made.start is None else made.start
            # Not dynamic_slice, which cannot decide whether a symbolic size fits into the axis.
            start = jnp.where(start < 0, start + array.shape[axis], start)
            array = jnp.take(array, start + jnp.arange(size), axis=axis, mode="clip")
            left[i] = slice(None)
        if made is not None:
            axis += array.ndim - used if made is Ellipsis else 1
    return array, left


def sliced_sizes(
    parts: Sequence[Any], key: Sequence[Any], source: Sequence[Any], shape: Sequence[Any]
) -> list[Any]:
    """The sizes that an index declares for its result; None for axes without a declared size.

    A size is declared by ``(slice, size)``; in a Graph, as in MAX, also by ``x[:2]`` or ``x[-2:]`` on an axis of
    symbolic size, although that axis may be shorter when the program runs.

    Args:
        parts: index.
        key: the same index without the given sizes.
        source: the shape of the tensor.
        shape: the shape of the result.

    Raises:
        ValueError: the index gives sizes and also contains a tensor, which moves axes.
    """
    sizes: list[Any] = [None] * len(shape)
    if any(getattr(part, "ndim", 0) for part in key):
        if any(type(part) is tuple for part in parts):
            raise ValueError(
                "an index with (slice, size) can contain only numbers and slices besides"
            )
        return sizes
    gap = next((i for i, part in enumerate(key) if part is Ellipsis), len(key))
    front = axis = 0
    for part, made in zip(parts[:gap], key[:gap], strict=True):
        if made is None or isinstance(made, slice):
            sizes[front] = _declared(part, made, source[axis] if made else None)
            front += 1
        axis += made is not None
    back = axis = 0
    for part, made in zip(parts[:gap:-1], key[:gap:-1], strict=True):
        axis -= made is not None
        if made is None or isinstance(made, slice):
            back -= 1
            sizes[back] = _declared(part, made, source[axis] if made else None)
    return sizes


def _declared(part: Any, made: slice | None, length: Any) -> Any:
    """The size that a part of an index declares for an axis of this length; None if it does not."""
    if isinstance(part, tuple):
        return part[1]
    if made is None or isinstance(length, int) or checks() is None:
        return None
    start, stop, step = made.start or 0, made.stop, made.step or 1
    stop = length if stop is None else stop
    if not all(isinstance(n, int) or n is length for n in (start, stop, step)) or step < 0:
        return None
    start, stop = (length + n if isinstance(n, int) and n < 0 else n for n in (start, stop))
    size = (stop - start + step - 1) // step
    # JAX cannot decide whether a size such as `batch - 2` is negative.
    return size if isinstance(size, int) else None


def sizes_of_names(program: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all names in the types of a program's inputs.

    Args:
        program: name of the program.
        sizes: sizes of the inputs' dimensions, which are names or arithmetic over names.

    Raises:
        ValueError: a name has the size 0, or no sizes of the names give the sizes of the inputs.
    """
    known = {dim: size for dim, size in sizes.items() if dim.isidentifier()}
    left = [dim for dim in sizes if dim not in known]
    solved = True
    while left and solved:
        solved = False
        for dim in left[:]:
            unknown, one = _evaluated(dim, known, 1)
            if len(unknown) > 1:
                continue  # jax.export needs another input that has one of them
            # The arithmetic is linear in the name, or jax.export refuses the program.
            for name in unknown:
                slope = _evaluated(dim, known, 2)[1] - one
                known[name] = 1 + (sizes[dim] - one) // slope if slope else 1
            want = evaluate(dim, known.__getitem__)
            if sizes[dim] != want:
                other = "" if unknown else f", which is {want}"
                given = ", ".join(f"{n} = {size}" for n, size in known.items() if n not in unknown)
                raise ValueError(
                    f"'{program}': an input has the size {sizes[dim]} where its type has {dim}{other}"
                    + (f" (with {given})" if given else "")
                )
            left.remove(dim)
            solved = True
    for name, size in known.items():
        if isinstance(size, int) and size < 1:  # not a size of a program around it
            raise ValueError(
                f"'{program}': the dimension '{name}' is {size}, and named dimensions are 1 or more: for an empty "
                "tensor, declare the input or weight with numbers"
            )
    return known


def check_determined(graph: str, shapes: Iterable[Iterable[Dim]], cause: Exception) -> None:
    """Checks that the sizes of inputs and weights of these shapes determine all their names.

    Raises:
        ValueError: no size is linear in a name, or only one that has another such name; from ``cause``.
    """
    dims = [dim for shape in shapes for dim in shape]
    if names := sorted(_undetermined(dims)):
        raise ValueError(
            f"Graph '{graph}': the sizes of the inputs {dims} do not determine {', '.join(names)}: declare "
            "a dimension that is the name itself, or a name of its own for the computed size"
        ) from cause


def _undetermined(dims: Iterable[Dim]) -> set[str]:
    names_of = {dim: {str(name) for name in dim.parameters} for dim in dims}
    names, known = set().union(*names_of.values()), set[str]()
    while found := {
        name
        for dim in names_of
        for name in names_of[dim] - known
        if names_of[dim] - known == {name} and _is_linear(dim, name)
    }:
        known |= found
    return names - known


def _is_linear(dim: Dim, name: str) -> bool:
    return isinstance(dim, SymbolicDim) or (
        isinstance(dim, AlgebraicDim)
        and [str(part) for part in dim.parameters].count(name) == 1
        and any(factors == (SymbolicDim(name),) for factors, _ in dim.terms)
    )


def _evaluated(dim: str, known: Mapping[str, int], size: int) -> tuple[set[str], int]:
    """The names that are not known in a dimension, and its value if they have a size."""
    unknown = set()

    def look_up(name: str) -> int:
        if name not in known:
            unknown.add(name)
        return known.get(name, size)

    return unknown, evaluate(dim, look_up)


def check(pending: Iterable[Check], names: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Runs the checks that tracing left, now that all sizes are known.

    Args:
        pending: checks.
        names: sizes of the names that no input has.
        sizes: sizes of the names of the inputs.

    Raises:
        ValueError: two sizes that were declared equal differ.
    """
    known = dict(sizes)
    for name, size in names.items():
        known.setdefault(name, evaluate(str(size), known.__getitem__))
    for one in pending:
        try:
            have, want = (evaluate(text, known.__getitem__) for text in (one.have, one.want))
        except KeyError:
            continue  # an undefined name matches any size
        if have != want:
            given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            raise ValueError(
                f"{one.title}: axis {one.axis} was rebound to {_named(one.want, want)}, and is "
                f"{_named(one.have, have)} (with {given})"
            )


def _named(text: str, size: int) -> str:
    return text if text == str(size) else f"{text} = {size}"


def _shape_text(array: jax.Array) -> str:
    return repr(Shape(map(to_dim, array.shape)))
