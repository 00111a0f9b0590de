"""Blocks of keys that no query of a tile may see are not read."""

import jax.numpy as jnp
import numpy as np

from maxjax.kernels.blocked_attention import Attending
from maxjax.kernels.key_ranges import key_ranges


def test_each_sequence_has_its_own():
    at = jnp.arange(256)[None, None] + jnp.array([[[0], [1000]]])
    keys = jnp.broadcast_to(jnp.arange(1300), (2, 1300))
    attending = Attending(1.0, None, None, np.dtype(np.float32))
    low, high = key_ranges(attending, 128, 64, at, keys)
    assert low[0].tolist() == [[0, 0], [0, 0]] and high[0].tolist() == [[2, 18], [4, 20]]
    low, high = key_ranges(attending._replace(window=100), 128, 64, at, keys)
    assert low[0].tolist() == [[0, 14], [0, 16]] and high[0].tolist() == [[2, 18], [4, 20]]
    # Of block 14 the first query of the second sequence sees the last key alone.
    low, high = key_ranges(attending._replace(window=42), 128, 64, at, keys)
    assert low[0].tolist() == [[0, 14], [1, 16]] and high[0].tolist() == [[2, 18], [4, 20]]
