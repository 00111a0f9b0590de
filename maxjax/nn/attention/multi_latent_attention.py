"""MAX's path of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...absent import absent as _absent


@dataclass
class MLAPrefillMetadata:
    """Which parts of a cache latent attention reads at a time, as data.

    Attributes:
        buffer_row_offsets: where each sequence begins in a buffer.
        cache_offsets: from which token on the cache is read.
        buffer_lengths: tokens in each buffer.
    """

    buffer_row_offsets: Any
    cache_offsets: Any
    buffer_lengths: Any


__getattr__ = _absent(__name__)
