"""Values to be quantised, the same in every version of NumPy and on every machine.

Only the raw bits of PCG64 are promised never to change, and single operations on float32 are
rounded in one way; so all is made of these.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

# Of the rows of every kind, so many have their blocks in the golden file; of all, it has a digest.
SHOWN = 2
ROWS = 256
WIDTH = 256


class Source:
    """Random float32 of one seed."""

    def __init__(self, seed: int):
        self._bits = np.random.PCG64(seed)

    def raw(self, *shape: int) -> np.ndarray:
        return self._bits.random_raw(int(np.prod(shape))).reshape(shape)

    def uniform(self, *shape: int) -> np.ndarray:
        """0 to 1, in steps of 2 ** -24."""
        return (self.raw(*shape) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)

    def bell(self, *shape: int) -> np.ndarray:
        """Sums of four numbers of 16 bits: mean 0, deviation about 0.6."""
        parts = self.raw(*shape).view(np.uint16).reshape(*shape, 4).astype(np.int64) - 32768
        return parts.sum(axis=-1).astype(np.float32) * np.float32(2**-16)

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """low to high - 1."""
        return (self.raw(*shape) % np.uint64(high - low)).astype(np.int32) + np.int32(low)

    def powers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Powers of two."""
        return np.ldexp(np.float32(1), self.integers(low, high, *shape))


def _scaled_runs(source: Source, n: int, size: int, low: int, high: int) -> np.ndarray:
    """Runs of `size` values, each with its own power of two."""
    runs = WIDTH // size
    values = source.bell(n, runs, size) * source.powers(low, high, n, runs, 1)
    return values.reshape(n, WIDTH)


def _offset_runs(source: Source, n: int) -> np.ndarray:
    """Small runs far from zero: rounding the minimum of a run moves it by many of its steps."""
    values = source.bell(n, 8, 32) * source.powers(-30, 10, n, 8, 1)
    values -= source.uniform(n, 8, 1) * np.float32(60000)
    return values.reshape(n, WIDTH)


def _spikes(source: Source, n: int) -> np.ndarray:
    one = source.integers(0, 256, n, WIDTH) == 0
    return source.bell(n, WIDTH) * np.where(one, np.float32(1000), np.float32(0.01))


def _sparse(source: Source, n: int) -> np.ndarray:
    """Mostly zeros, of either sign."""
    return source.bell(n, WIDTH) * (source.integers(0, 10, n, WIDTH) == 0)


KINDS: dict[str, Callable[[Source, int], np.ndarray]] = {
    "bell": lambda s, n: s.bell(n, WIDTH),
    "uniform": lambda s, n: s.uniform(n, WIDTH) * 2 - 1,
    "positive": lambda s, n: s.uniform(n, WIDTH),
    "negative": lambda s, n: -s.uniform(n, WIDTH),
    "constant": lambda s, n: np.repeat(s.bell(n, 1), WIDTH, axis=1),
    "zero": lambda s, n: np.zeros((n, WIDTH), np.float32),
    "zeros of both signs": lambda s, n: np.copysign(np.float32(0), s.bell(n, WIDTH)),
    "sparse": _sparse,
    "weights": lambda s, n: s.bell(n, WIDTH) * np.float32(0.02),
    "subnormal scales": lambda s, n: s.bell(n, WIDTH) * np.float32(1e-6),
    "scales of zero": lambda s, n: s.bell(n, WIDTH) * np.float32(1e-8),
    "about the epsilon": lambda s, n: s.bell(n, WIDTH) * np.float32(1e-15),
    "infinite inverses": lambda s, n: s.bell(n, WIDTH) * np.float32(1e-38),
    "subnormal": lambda s, n: s.bell(n, WIDTH) * np.float32(1e-41),
    "huge": lambda s, n: s.bell(n, WIDTH) * np.float32(25000),
    "mixed": lambda s, n: s.bell(n, WIDTH) * s.powers(-30, 15, n, WIDTH),
    "mixed rows": lambda s, n: s.bell(n, WIDTH) * s.powers(-40, 15, n, 1),
    "mixed runs of 32": lambda s, n: _scaled_runs(s, n, 32, -140, 10),
    "mixed runs of 16": lambda s, n: _scaled_runs(s, n, 16, -60, 10),
    "offset": lambda s, n: s.bell(n, WIDTH) * np.float32(0.001) + np.float32(1000),
    "offset runs": _offset_runs,
    "integers": lambda s, n: s.integers(-8, 8, n, WIDTH).astype(np.float32),
    "halves": lambda s, n: s.integers(-31, 32, n, WIDTH).astype(np.float32) / 2,
    "signs": lambda s, n: s.integers(0, 2, n, WIDTH).astype(np.float32) * 2 - 1,
    "spikes": _spikes,
    "bfloat16": lambda s, n: (s.bell(n, WIDTH).view(np.uint32) & 0xFFFF0000).view(np.float32),
}


@cache
def rows(kind: str, n: int = ROWS) -> np.ndarray:
    """float32 `[n, 256]`, made once and not to be written to."""
    values = KINDS[kind](Source(list(KINDS).index(kind)), n)
    assert values.dtype == np.float32 and values.shape == (n, WIDTH)
    values.flags.writeable = False
    return values


def importance() -> np.ndarray:
    """The importance of each value of a row: mean squares of inputs, some of them zero."""
    squares = Source(7).bell(WIDTH) ** 2 * 4
    squares[::37] = 0
    return squares.astype(np.float32)
