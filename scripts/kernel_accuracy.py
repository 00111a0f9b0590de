"""The accuracy of the CPU's matmuls: random ones against NumPy in float64, on every instruction set.

The unit of an error is 2^-23 of the sum of the absolute products. Errors of up to 4 units are right; so
are Inf and NaN where float64 has them or where a sum in float32 overflows. Printed is the largest
error for each instruction set and pair of types; the exit code is 1 if one is wrong.
It takes about ten minutes for 10000.

    .venv/bin/python scripts/kernel_accuracy.py --count 10000
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
ALLOWED = 4.0  # in units of 2^-23 of the sum of the absolute products
UNIT = 2.0**-23
LEAST = 2.0**-126  # the least normal float32 and bfloat16
OVERFLOW = 2.0**128 * (1 - 2.0**-25)  # what float32 rounds to Inf
# Exponents of the smallest and the largest numbers of each type.
RANGES = {"float32": (-149, 127), "float16": (-24, 15), "bfloat16": (-133, 127)}


class Product(NamedTuple):
    """Operands of a matmul: activations ``[tokens, depth]``, weights ``[rows, depth]``, and their kind."""

    x: np.ndarray
    w: np.ndarray
    kind: str = "normal"

    @property
    def types(self) -> tuple[str, str]:
        """The names of the two dtypes, as :data:`TYPES` has them."""
        return self.x.dtype.name, self.w.dtype.name


# --- random products ---------------------------------------------------------------------------


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return values.astype(np.float32).astype(dtype)


def _powers(rng: np.random.Generator, shape: Any, low: float, high: float) -> np.ndarray:
    """Numbers of both signs whose exponents are uniform between ``low`` and ``high``."""
    return rng.choice([-1.0, 1.0], shape) * np.exp2(rng.uniform(low, high, shape))


def _normal(rng: Any, shapes: Any, names: Any) -> Any:
    return [rng.standard_normal(shape) for shape in shapes]


def _same(rng: Any, shapes: Any, names: Any) -> Any:
    """Constant operands, so that every addition is rounded in the same direction."""
    return [np.full(shape, rng.uniform(0.5, 2.0)) for shape in shapes]


def _cancelling(rng: Any, shapes: Any, names: Any) -> Any:
    """The second half of every sum cancels the first."""
    x, w = _normal(rng, shapes, names)
    half = x.shape[1] // 2
    x[:, half : 2 * half], w[:, half : 2 * half] = -x[:, :half], w[:, :half]
    return [x, w]


def _range(rng: Any, shapes: Any, names: Any) -> Any:
    """Numbers over the whole range of the types; in three of four cases no sum overflows float32."""
    (low, high), (other_low, other_high) = (RANGES[name] for name in names)
    if rng.random() < 0.75:
        high = rng.uniform(low, high)
        other_high = min(other_high, 126 - high - math.log2(shapes[0][1] + 1))
    other_low = min(other_low, other_high)
    found = _powers(rng, shapes[0], low, high), _powers(rng, shapes[1], other_low, other_high)
    return found


def _denormal(rng: Any, shapes: Any, names: Any) -> Any:
    """Subnormal numbers times ordinary ones; or normal numbers whose products are subnormal."""
    low = [RANGES[name][0] for name in names]
    least = [-14 if name == "float16" else -126 for name in names]
    kind = rng.integers(3)
    if kind == 2:
        return [_powers(rng, s, -76 if n != "float16" else -24, -60 if n != "float16" else -4)
                for s, n in zip(shapes, names, strict=True)]  # fmt: skip
    found = [_powers(rng, s, -12, 12) for s in shapes]
    found[kind] = _powers(rng, shapes[kind], low[kind] - 1, least[kind])
    mixed = rng.random(shapes[kind]) < 0.2
    return [np.where(mixed, 1.5, a) if i == kind else a for i, a in enumerate(found)]


def _huge(rng: Any, shapes: Any, names: Any) -> Any:
    """Sums near the largest float32, below it and above; in half of the cases all terms are positive."""
    top = RANGES[names[0]][1]
    other = min(rng.uniform(120, 129) - top - math.log2(shapes[0][1]), RANGES[names[1]][1])
    x, w = _powers(rng, shapes[0], top - 3, top + 1), _powers(rng, shapes[1], other - 3, other)
    return [np.abs(x), np.abs(w)] if rng.random() < 0.5 else [x, w]


def _special(rng: Any, shapes: Any, names: Any) -> Any:
    """A few Inf, NaN and zeros of both signs."""
    found = _normal(rng, shapes, names)
    for array in found:
        some = rng.random(array.shape) < rng.choice([0.0, 0.5 / array.shape[1], 0.05])
        array[some] = rng.choice([np.inf, -np.inf, np.nan, 0.0, -0.0], int(some.sum()))
    return found


KINDS: dict[str, Callable[..., Any]] = {
    "normal": _normal, "same": _same, "cancelling": _cancelling, "range": _range,
    "denormal": _denormal, "huge": _huge, "special": _special,
}  # fmt: skip


def _size(rng: np.random.Generator, most: int) -> int:
    """1 to ``most``: often small, sometimes any, sometimes the neighbour of a power of two."""
    how = rng.random()
    if how < 0.6:
        return int(np.exp(rng.uniform(0, math.log(most + 0.99))))
    if how < 0.75:
        return int(rng.integers(1, most + 1))
    power = 2 ** int(rng.integers(0, int(math.log2(most)) + 1))
    return max(1, min(most, power + int(rng.integers(-1, 2))))


def draw(rng: np.random.Generator) -> Product:
    """A random product, of random types."""
    # More rows of small weights are XLA's (kernels/product.py).
    tokens = 0 if rng.random() < 0.01 else _size(rng, 255)
    shapes = [(tokens, depth := _size(rng, 5000)), (_size(rng, 200), depth)]
    names = [str(rng.choice(list(TYPES))) for _ in range(2)]
    kind = str(rng.choice(list(KINDS)))
    values = KINDS[kind](rng, shapes, names)
    return Product(*(_cast(v, TYPES[n]) for v, n in zip(values, names, strict=True)), kind)


# --- what is right -----------------------------------------------------------------------------


def takes_small_as_zero(level: str, product: Product) -> bool:
    """Whether numbers and sums below 2^-126 are flushed to zero, as everywhere in XLA on a CPU.

    The instructions of ``amx`` and ``avx512bf16`` for products of bfloat16 with bfloat16 do that, and
    ``portable`` leaves the processor as XLA has set it.
    """
    pairs = product.types == ("bfloat16", "bfloat16")
    return level == "portable" or (level in ("amx", "avx512bf16") and pairs)


def _float64(array: np.ndarray, flushed: bool) -> np.ndarray:
    values = array.astype(np.float64)
    if flushed and array.dtype != np.float16:  # every float16 is normal as float32
        values = np.where(np.abs(values) < LEAST, np.copysign(0.0, values), values)
    return values


def error(got: np.ndarray, product: Product, flushed: bool = False) -> float:
    """The worst error of a result in units of 2^-23 of the sum of the absolute products.

    The rounding of a result of 16 bits is no error. The result is infinite if something is wrong: an
    error is too large, or a NaN or an Inf is missing or unexpected.

    Args:
        flushed: result of :func:`takes_small_as_zero`.
    """
    return _Exact.of(product, got.dtype, flushed).error(got)


class _Exact(NamedTuple):
    """What a product is exactly, and how far a result may be from it."""

    dtype: np.dtype
    exact: np.ndarray
    scale: np.ndarray
    ends: float
    low: np.ndarray
    high: np.ndarray
    up: np.ndarray
    down: np.ndarray
    value: np.ndarray | None

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, product: Product, dtype: np.dtype, flushed: bool) -> _Exact:
        x, w = (_float64(a, flushed) for a in (product.x, product.w))
        finite = [np.where(np.isfinite(a), a, 0.0) for a in (x, w)]
        exact, scale = finite[0] @ finite[1].T, np.abs(finite[0]) @ np.abs(finite[1]).T
        # Each operation may lose this much by underflow.
        ends = (2 * x.shape[1] + 8) * LEAST if flushed else (x.shape[1] + 8) * 2.0**-150
        slack = ALLOWED * UNIT * scale + ends
        as_float32 = lambda values: values.astype(np.float32).astype(dtype).astype(np.float64)
        # A partial sum may overflow to the sign of the terms whose own sum overflows.
        up, down = (((scale + sign * exact) / 2 + slack >= OVERFLOW) for sign in (1, -1))
        value = None
        if not all(np.isfinite(a).all() for a in (x, w)):
            value = np.einsum("td,od->to", x, w)  # no BLAS, which may skip products with zero
        low, high = as_float32(exact - slack), as_float32(exact + slack)
        return cls(dtype, exact, scale, ends, low, high, up, down, value)

    @np.errstate(all="ignore")
    def error(self, got: np.ndarray) -> float:
        y, up, down = got.astype(np.float64), self.up, self.down
        right = (self.low <= y) & (y <= self.high)
        right |= (up & (y == np.inf)) | (down & (y == -np.inf)) | (up & down & np.isnan(y))
        special = np.zeros(y.shape, bool)
        if self.value is not None:
            special = ~np.isfinite(self.value)
            same = (np.isnan(self.value) & np.isnan(y)) | (self.value == y)
            of_both = np.isnan(y) & np.where(self.value > 0, down, up)
            right = np.where(special, same | of_both, right)
        if not right.all():
            return math.inf
        counted = ~special & np.isfinite(y) & (self.scale > 0)
        if not counted.any():
            return 0.0
        half = _half_unit(y, self.dtype) if self.dtype.itemsize < 4 else 0.0
        away = np.maximum(np.abs(y - self.exact) - self.ends - half, 0)
        return float(np.max(np.where(counted, away / (UNIT * np.where(counted, self.scale, 1)), 0)))


def _half_unit(y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Half a unit in the last place of each result."""
    digits, least = (10, -14) if dtype == np.float16 else (7, -126)
    exponent = np.frexp(np.where(np.isfinite(y), y, 0.0))[1] - 1
    return np.ldexp(0.5, np.maximum(exponent, least) - digits)


# --- the campaign ------------------------------------------------------------------------------

Worst = dict[tuple[str, str, str], float]


def measured(
    products: Sequence[Product], levels: Iterable[str]
) -> list[tuple[str, Product, float]]:
    """(level, product, error) for every level and each of these products.

    They are compiled as one program, because compiling a program for each would take most of the time.
    """
    import jax

    from maxjax import kernels
    from maxjax.kernels import native

    together = jax.jit(lambda pairs: [kernels.matmul(x, w) for x, w in pairs])
    given, found = jax.device_put([(p.x, p.w) for p in products]), []
    exact: dict[tuple[int, bool], _Exact] = {}
    for level in levels:
        with native.level(level):
            results = jax.device_get(together(given))
        for i, (product, result) in enumerate(zip(products, results, strict=True)):
            flushed = takes_small_as_zero(level, product)
            if (i, flushed) not in exact:
                exact[i, flushed] = _Exact.of(product, result.dtype, flushed)
            found.append((level, product, exact[i, flushed].error(result)))
    return found


def campaign(
    count: int, seed: int = 0, levels: Sequence[str] | None = None,
    report: Callable[[int, Worst], None] = lambda done, worst: None,
) -> tuple[Worst, list[str]]:  # fmt: skip
    """The largest error by (level, activations' type, weights' type), and a list of what is wrong."""
    import jax

    from maxjax.kernels import native

    levels, together = native.levels() if levels is None else levels, 20
    worst: Worst = {}
    wrong: list[str] = []
    for start in range(0, count, together):
        numbers = range(start, min(start + together, count))
        products = [draw(np.random.default_rng((seed, i))) for i in numbers]
        for i, (level, product, units) in enumerate(measured(products, levels)):
            key = (level, *product.types)
            worst[key] = max(worst.get(key, 0.0), units)
            if not units <= ALLOWED:
                (x, w), number = product.types, numbers[i % len(numbers)]
                wrong.append(f"{number}, {product.kind}, {level}: x {x}{list(product.x.shape)}, "
                             f"w {w}{list(product.w.shape)}: {units:.3f}")  # fmt: skip
        jax.clear_caches()
        report(min(start + together, count), worst)
    return worst, wrong


def table(worst: Worst) -> str:
    """One line for each pair of types, one column for each level."""
    from maxjax.columns import columns

    levels = list(dict.fromkeys(level for level, *_ in worst))
    rows = [["activations", "weights", *levels]]
    for x in TYPES:
        for w in TYPES:
            units = [worst.get((level, x, w), math.nan) for level in levels]
            rows.append([x, w, *(f"{u:.3f}" for u in units)])
    return "\n".join(columns(rows, right=range(2, 2 + len(levels))))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many products (1000)")
    parser.add_argument("--seed", type=int, default=0, help="others with another number")
    parser.add_argument("--levels", default="", help="instruction sets, with commas; all")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MAXJAX_COMPILE_CACHE"] = "0"
    start = time.monotonic()

    def report(done: int, worst: Worst) -> None:
        if done % 1000 == 0:
            seconds = time.monotonic() - start
            print(f"{done} products, {seconds:.0f} s, worst {max(worst.values()):.3f}", flush=True)

    levels = options.levels.split(",") if options.levels else None
    worst, wrong = campaign(options.count, options.seed, levels, report)
    print(table(worst), *wrong[:20], sep="\n")
    print(f"{len(wrong)} of {options.count} products are wrong" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
