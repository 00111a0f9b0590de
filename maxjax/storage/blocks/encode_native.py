"""The compiled encoders of ggml's blocks, in the native library of ``kernels/cpu`` (``encode.cc``)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...native_library import function


@functools.cache
def _compiled() -> tuple[Callable[..., int], str] | None:
    """The compiled function and its level, or None without the library."""
    text, pointer, number = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64
    types = [text, text, pointer, pointer, number, number, pointer]
    return function(
        "maxjax_encode_blocks", "maxjax_encode_level", ctypes.c_int, types, compile=True
    )


def level() -> str:
    """The implementation in use: "avx512", "avx2", "portable" (which is NEON on ARM), or "numpy".

    Example:
        >>> level() in ("avx512", "avx2", "portable", "numpy")
        True
    """
    compiled = _compiled()
    return "numpy" if compiled is None else compiled[1]


def encode_native(
    encoding: str,
    values: np.ndarray,
    importance: np.ndarray | None,
    blocks: np.ndarray,
    *,
    level: str | None = None,
) -> bool | None:
    """Fills blocks with the same bytes as the NumPy encoders; the GIL is released meanwhile.

    Args:
        encoding: ggml's name of the type.
        values: C-contiguous float32 ``[n, elements]``.
        importance: C-contiguous float32 of one row of values, which are complete rows then.
        blocks: C-contiguous uint8 ``[n, nbytes]``.
        level: name of the level to use, for tests; the best by default.

    Returns:
        Whether all values and scales are finite; if not, the blocks are incomplete. None if there is
        no compiled encoder for this type (or no such level).
    """
    compiled = _compiled()
    if compiled is None:
        return None
    row = 1 if importance is None else importance.size // values.shape[1]
    address: Any = None if importance is None else importance.ctypes.data
    found = compiled[0](
        None if level is None else level.encode(), encoding.encode(),
        values.ctypes.data, address, row, len(values), blocks.ctypes.data,
    )  # fmt: skip
    return None if found == 2 else found == 0
