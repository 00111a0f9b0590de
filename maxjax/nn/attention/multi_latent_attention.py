"""MAX's path of latent attention: a data class; the layers raise NotImplementedError with advice when they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...absent import absent as _absent


@dataclass
class MLAPrefillMetadata:
    """The parts of a cache that MAX's latent attention reads into a buffer at a time.

    Attributes:
        buffer_row_offsets: offsets of the sequences in a buffer.
        cache_offsets: index of the first token that is read from the cache.
        buffer_lengths: number of tokens in each buffer.
    """

    buffer_row_offsets: Any
    cache_offsets: Any
    buffer_lengths: Any


__getattr__ = _absent(__name__)
