"""The largest batch and the longest context for which weights, cache and temporaries fit a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...graph.placement.specs import BATCH, axis_of
from .footprint import Footprint, TensorGroup
from .meshes import PlanRequest, cache_of

# More rows than this are not looked for.
_MAX_BATCH = 1 << 20

Temporaries = Callable[[int, int], int | None]
"""(batch, length) → bytes of temporaries, or None if the compiler makes no such program."""


def largest(
    source: Footprint,
    groups: list[TensorGroup],
    mesh: Any,
    request: PlanRequest,
    room: int,
    temporaries: Temporaries | None = None,
) -> tuple[int | None, int | None]:
    """The largest batch for the planned length, and the longest context for the planned batch.

    The batch is a multiple of the devices that split it, and the context is no longer than the model
    takes. Temporaries are those of programs compiled for the planned sizes and for one larger size,
    and are taken to grow in a straight line between and beyond these.

    Args:
        source: the model.
        groups: its tensors on the mesh.
        mesh: the mesh, or None for one device.
        request: the planned sizes.
        room: bytes of a device that weights leave.
        temporaries: measures them; None: they are left out.

    Returns:
        Batch and length, 0 where not even the smallest fits; None for what is not known: of an
        encoder, or without planned sizes.
    """
    if request.batch is None or request.length is None or source.encoder:
        return None, None
    batch, length = request.batch, request.length
    cached = lambda b, s: cache_of(source, groups, mesh, replace(request, batch=b, length=s))[0]
    step = 1 if mesh is None else math.prod(
        mesh.shape[axis] for kind in BATCH if (axis := axis_of(mesh, kind))
    )  # fmt: skip
    first = None if temporaries is None else temporaries(batch, length)
    of_rows = _most(lambda n: cached(n * step, length), room, _MAX_BATCH // step)
    of_tokens = _most(lambda n: cached(batch, n), room, source.reading.max_length or _MAX_BATCH)
    if temporaries is not None and first is not None:
        grown = _line(lambda n: temporaries(n, length), batch, first, of_rows * step // 2)
        of_rows = _most(
            lambda n: cached(n * step, length) + grown(n * step), room, _MAX_BATCH // step
        )
        grown_long = _line(lambda n: temporaries(batch, n), length, first, of_tokens // 2)
        of_tokens = _most(lambda n: cached(batch, n) + grown_long(n), room, of_tokens)
    return of_rows * step, of_tokens


def _most(taken: Callable[[int], int], room: int, most: int) -> int:
    """The largest number up to ``most`` that takes no more than ``room``, where more takes more.

    Example:
        >>> _most(lambda n: 10 * n, 45, 100), _most(lambda n: 10 * n, 5, 100), _most(lambda n: n, 9, 3)
        (4, 0, 3)
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(middle) <= room else (low, middle - 1)
    return low


def _line(
    measure: Callable[[int], int | None], at: int, first: int, other: int
) -> Callable[[int], int]:
    """A straight line through what is measured at two sizes; in proportion if there is but one.

    Example:
        >>> _line(lambda n: 5 + n, 1, 6, 10)(100), _line(lambda n: None, 2, 6, 10)(4)
        (105, 12)
    """
    second = measure(other) if other > at else None
    if second is None:
        return lambda n: -(-first * max(n, at) // at)
    slope = max(0, second - first) / (other - at)
    return lambda n: math.ceil(first + slope * max(0, n - at))
