"""Which TPUs kernels in Pallas are compiled for."""

from __future__ import annotations

import functools
import re
from typing import Any

# Numbers in one line of a vector register. XLA keeps heads whose width this does not divide with the slots
# last in memory, so that no line is padded.
LANES = 128
# Pallas for TPUs begins with v4.
_OLDEST = 4


@functools.lru_cache
def unavailable(device: Any = None) -> str:
    """Why no Pallas kernel can be compiled for a kind of TPU; "" if one can.

    Args:
        device: a ``jax.sharding.AbstractDevice``; None: the local TPU, or any.

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
