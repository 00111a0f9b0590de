"""Which TPUs the Pallas kernels can be compiled for."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

# Elements in one row of a vector register. Where it does not divide the head dimension, XLA lays out a cache
# with the slots last in memory, so that no row is padded.
LANES = 128
# The oldest TPU that Pallas supports is v4.
_OLDEST = 4


def in_order(array: jax.Array) -> jax.Array:
    """The array itself, laid out in memory in the order of its axes; XLA would choose another order for some loops."""
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def is_turned(shape: Sequence[int], itemsize: int) -> bool:
    """Whether XLA lays out a matrix with its rows last in memory, because registers are then padded less.

    Example:
        >>> is_turned((2880, 1530), 1), is_turned((512, 192), 4), is_turned((512, 256), 4)
        (False, True, False)
    """
    rows, columns = shape
    return _padded(columns, rows, itemsize) < _padded(rows, columns, itemsize)


def _padded(rows: int, columns: int, itemsize: int) -> int:
    """The elements of the registers that hold a matrix; a register has 8 rows of 32 bits."""
    each = 32 // itemsize
    return -(-rows // each) * each * -(-columns // LANES) * LANES


@functools.lru_cache
def unavailable(device: Any = None) -> str:
    """Why no Pallas kernel can be compiled for a kind of TPU; "" if one can.

    Args:
        device: a ``jax.sharding.AbstractDevice``; None: not known, and taken to be new enough.

    Example:
        >>> import jax
        >>> unavailable(jax.sharding.AbstractDevice("TPU v3", 2, "tpu"))
        'Pallas needs a TPU v4 or newer, this is a TPU v3'
    """
    kind = "" if device is None else device.device_kind
    number = re.match(r"TPU v?(\d+)", kind)
    if number and int(number[1]) < _OLDEST:
        return f"Pallas needs a TPU v{_OLDEST} or newer, this is a {kind}"
    try:
        from jax.experimental.pallas import tpu
    except ImportError as error:
        return f"this JAX has no Pallas for TPUs: {error}"
    missing = {"PrefetchScalarGridSpec", "CompilerParams", "VMEM"} - set(dir(tpu))
    return f"Pallas of this JAX has no {', '.join(sorted(missing))}" if missing else ""
