"""Checks the ARM kernels on any machine, in an emulator: `scripts/neon_check.py [--level neondot]`.

    pip install ziglang unicorn
    python scripts/neon_check.py

Compiles a level of maxjax/kernels/cpu for 64-bit ARM with the flags of an installation, runs
its functions in an emulator and compares them with NumPy in float64. Every array ends where
its memory ends, so a read or a write past it stops the run; and the processor is set to flush
numbers below 2^-126 to zero, as in XLA's threads. Prints a line with the largest error for each
check; the exit code is 1 if one is too large. It takes a few seconds, the first time about 15.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import unicorn
from unicorn import arm64_const as arm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from maxjax import native_library  # noqa: E402
from maxjax.kernels.blocks import DECODERS  # noqa: E402
from maxjax.kernels.packed_product import FORMATS  # noqa: E402
from tests.kernels.test_packed import blocks, reference  # noqa: E402

CPU = Path(__file__).resolve().parent.parent / "maxjax" / "kernels" / "cpu"
PAGE = 1 << 12
ARRAYS, STACK, RETURN = 0x10_0000_0000, 0x20_0000_0000, 0x30_0000_0000
STACK_BYTES = 1 << 20
FLUSH = 1 << 24  # FPCR.FZ
PAD, PART = 32, 256  # kPad and kPart of kernels.h
FLOAT, HALF, BRAIN = TYPES = [np.dtype(t) for t in ("f4", "f2", ml_dtypes.bfloat16)]
# The largest error of rounding to each type: relative, and absolute among subnormal numbers.
ROUNDING = {FLOAT: (0.0, 0.0), HALF: (2.0**-11, 2.0**-25), BRAIN: (2.0**-8, 2.0**-134)}
HEADER = re.sub("//.*", "", (CPU / "kernels.h").read_text())
# The types of members, other than pointers and structures.
MEMBERS = {
    "int64_t": ctypes.c_int64, "bool": ctypes.c_bool, "float": ctypes.c_float,
    "Type": ctypes.c_int, "Format": ctypes.c_int,
}  # fmt: skip


def body(name: str) -> str:
    """What is between the braces of a structure of kernels.h."""
    found = re.search(rf"^struct {name} \{{(.*?)^\}};", HEADER, re.M | re.S)
    assert found, f"kernels.h has no struct {name}"
    return found[1]


@functools.cache  # one class for a structure, also inside another
def structure(name: str) -> type[ctypes.Structure]:
    """A structure of kernels.h; its pointers are numbers."""
    fields = []
    for line in filter(None, map(str.strip, body(name).split(";"))):
        kind, members = line.removeprefix("const ").replace("*", " *").split(None, 1)
        for member in members.split(","):
            inner = ctypes.c_uint64 if "*" in member else MEMBERS.get(kind) or structure(kind)
            fields.append((member.strip(" *"), inner))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# The index of each function in maxjax::Level, in words of 8 bytes: the other members take the first two.
FUNCTIONS = {name: 2 + i for i, name in enumerate(re.findall(r"\(\*(\w+)\)\(", body("Level")))}
Activations, Int8 = structure("Activations"), structure("Int8")
Rows, PackedRows, Attend, Delta, Ssd = map(structure, "Rows PackedRows Attend Delta Ssd".split())


def compiled(level: str) -> bytes:
    """A program for ARM that contains only the level; its entry point is the level's table."""
    cxx = [sys.executable, "-m", "ziglang", "c++", "-target"]
    table = f"_ZN6maxjax{len('level_' + level)}level_{level}E"
    with tempfile.TemporaryDirectory() as folder:
        path, program = Path(folder) / "level.o", Path(folder) / "program"
        linux, bare = [*cxx, "aarch64-linux-gnu"], [*cxx, "aarch64-freestanding"]
        source = f"level_{level}.cc"
        flags = [*native_library.sources("aarch64")[source], "-Wall", "-Wextra", "-Werror"]
        native_library.compile_one(source, path, linux, flags)
        # memcpy, memset and expf come from the compiler's own libraries there.
        link = ["-static", f"-Wl,-e,{table}", str(path), "-o", str(program)]
        subprocess.run([*bare, *link], check=True)
        return program.read_bytes()


class Machine:
    """An emulated processor with a level's functions, and arrays in its memory."""

    def __init__(self, level: str):
        self.uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.uc.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)  # has dot product instructions
        self.flush = 0 if level == "portable" else FLUSH  # the portable level would not clear it
        self.arrays: list[tuple[int, int]] = []
        table = self._load(compiled(level))
        self.functions = {name: self._word(table + 8 * i) for name, i in FUNCTIONS.items()}
        self.uc.mem_map(STACK, STACK_BYTES)
        self.uc.mem_map(RETURN, PAGE)

    def _load(self, program: bytes) -> int:
        """Loads the segments of an ELF file at their addresses; returns its entry point."""
        entry, headers = struct.unpack_from("<QQ", program, 24)
        size, count = struct.unpack_from("<HH", program, 54)
        loads = []
        for i in range(count):
            kind, _, offset, at, _, length, space, _ = struct.unpack_from(
                "<IIQQQQQQ", program, headers + i * size
            )
            if kind == 1:
                loads.append((at, space, program[offset : offset + length]))
        first = min(at for at, _, _ in loads) // PAGE * PAGE
        last = max(at + space for at, space, _ in loads)
        self.uc.mem_map(first, -(-(last - first) // PAGE) * PAGE)
        for at, _, data in loads:
            self.uc.mem_write(at, data)
        return entry

    def _word(self, at: int) -> int:
        return int.from_bytes(self.uc.mem_read(at, 8), "little")

    def put(self, array: np.ndarray) -> int:
        """Copies an array to the end of a new piece of memory; returns its address."""
        size = max(1, -(-array.nbytes // PAGE)) * PAGE
        start = sum(self.arrays[-1]) + PAGE if self.arrays else ARRAYS
        self.uc.mem_map(start, size)
        self.arrays.append((start, size))
        at = start + size - array.nbytes
        self.uc.mem_write(at, np.ascontiguousarray(array).tobytes())
        return at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        """The array at an address, with the shape and dtype of ``like``."""
        data = bytes(self.uc.mem_read(at, like.nbytes))
        return np.frombuffer(data, like.dtype).reshape(like.shape)

    @contextmanager
    def room(self) -> Iterator[None]:
        """A context manager that frees the arrays that are put inside it."""
        try:
            yield
        finally:
            for start, size in self.arrays:
                self.uc.mem_unmap(start, size)
            self.arrays.clear()

    def call(self, name: str, *args: int | ctypes.Structure) -> None:
        """Calls a function; structures are passed by their address."""
        for i, value in enumerate(args):
            if isinstance(value, ctypes.Structure):
                value = self.put(np.frombuffer(bytes(value), np.uint8))
            self.uc.reg_write(arm.UC_ARM64_REG_X0 + i, value)
        self.uc.reg_write(arm.UC_ARM64_REG_SP, STACK + STACK_BYTES)
        self.uc.reg_write(arm.UC_ARM64_REG_LR, RETURN)
        self.uc.reg_write(arm.UC_ARM64_REG_FPCR, self.flush)
        self.uc.emu_start(self.functions[name], RETURN)
        if self.uc.reg_read(arm.UC_ARM64_REG_FPCR) != self.flush:
            raise AssertionError(f"{name} leaves the processor's flags other than they were")

    def widen(self, x: np.ndarray, w_type: np.dtype) -> np.ndarray:
        """Rows of activations as floats, with zeros up to a multiple of PAD."""
        out = np.full((len(x), -(-x.shape[1] // PAD) * PAD), 7, np.float32)
        for i, row in enumerate(x):
            with self.room():
                to = self.put(out[i])
                kinds = TYPES.index(x.dtype), TYPES.index(w_type)
                self.call("widen", self.put(row), kinds[0], x.shape[1], kinds[1], to, out.shape[1])
                out[i] = self.get(to, out[i])
        return out

    def narrow(self, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """A row of floats, in the order for float32 weights, in another dtype."""
        with self.room():
            out = np.zeros(x.shape, dtype)
            to = self.put(out)
            self.call("narrow_row", self.put(x), 0, x.size, to, TYPES.index(dtype))
            return self.get(to, out)

    def product(
        self, x: np.ndarray, w: np.ndarray, dtype: np.dtype, begin: int, end: int
    ) -> np.ndarray:
        """x @ w.T of widened activations; NaN before row `begin` of w, and from row `end`."""
        with self.room():
            y = np.full((len(x), len(w)), np.nan, dtype)
            to = self.put(y)
            self.call("product", Rows(
                Activations(self.put(x), x.shape[1]), len(x),
                self.put(w), TYPES.index(w.dtype), w.shape[1],
                to, TYPES.index(dtype), len(w), begin, end,
            ))  # fmt: skip
            return self.get(to, y)

    def quantise(self, x: np.ndarray) -> list[np.ndarray]:
        """For rows of a multiple of 256 floats: codes, scales, sums of groups of 32 and of 16, and sums
        of the codes in groups of 16."""
        count, size = x.shape
        found = [np.zeros((count, size), np.int8)]
        found += [np.zeros((count, size // n), np.float32) for n in (32, 32, 16)]
        found += [np.zeros((count, size // 16), np.int32)]
        for i, row in enumerate(x):
            with self.room():
                to = [self.put(one[i]) for one in found]
                self.call("quantise", self.put(row), size, *to)
                for one, at in zip(found, to, strict=True):
                    one[i] = self.get(at, one[i])
        return found

    def packed_product(
        self,
        x: np.ndarray,
        kind: int,
        w: np.ndarray,
        dtype: np.dtype,
        is_int8: bool,
        begin: int,
        end: int,
    ) -> np.ndarray:
        """x @ w.T for blocks of format `kind`; NaN outside of the rows from `begin` to `end`."""
        depth, floats = x.shape[1], np.pad(x, ((0, 0), (0, -x.shape[1] % PAD)))
        wide = np.pad(x, ((0, 0), (0, -depth % 256)))
        parts = self.quantise(wide) if is_int8 else []
        with self.room():
            y = np.full((len(x), len(w)), np.nan, dtype)
            to = self.put(y)
            self.call("packed_product", PackedRows(
                kind, self.put(w), depth, is_int8,
                Int8(*(map(self.put, parts) if is_int8 else [0] * 5), wide.shape[1]),
                0 if is_int8 else self.put(floats), floats.shape[1], len(x),
                to, TYPES.index(dtype), len(w), begin, end,
                0 if is_int8 else self.put(np.zeros(64 * 1024, np.float32)),
            ))  # fmt: skip
            return self.get(to, y)

    def attend(
        self,
        q: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        begin: int,
        end: int,
        cap: float,
        scales: Sequence[np.ndarray] = (),
        slopes: np.ndarray | None = None,
        block: int = 0,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The highest score of each query, the sum of its weights, and the weighted sum of the values.

        The new token is in the slot after the last one. With ``block`` the cache is in pages of as many
        slots, the last one first.
        """
        kind = FLOAT if scales else keys.dtype
        block = block or len(keys)
        pages = np.arange(-(-len(keys) // block), dtype=np.int32)[::-1]
        pooled = lambda a: self.put(np.pad(a, [(0, -len(a) % block), *[(0, 0)] * (a.ndim - 1)])
                                    .reshape(len(pages), block, -1)[::-1])  # fmt: skip
        with self.room():
            scalars = np.zeros(len(q), np.float32)
            top, total, out = map(self.put, (scalars, scalars, np.zeros_like(q)))
            key_scales, value_scales = map(pooled, scales) if scales else (0, 0)
            self.call("attend", Attend(
                q=self.put(q), q_stride=q.shape[1], queries=len(q), keys=pooled(keys), values=pooled(values),
                key_scales=key_scales, value_scales=value_scales,
                type=TYPES.index(kind), depth=keys.shape[1], begin=begin, end=end,
                blocks=self.put(pages), block=block, block_rows=block, cap=cap,
                slopes=0 if slopes is None else self.put(slopes), first=begin - end,
                top=top, sum=total, out=out,
            ))  # fmt: skip
            return self.get(top, scalars), self.get(total, scalars), self.get(out, q)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Raises unless two arrays are equal bit for bit, or NaN in the same places."""
    number, bits = ~np.isnan(wanted), f"u{wanted.itemsize}"
    np.testing.assert_array_equal(np.isnan(found), ~number)
    np.testing.assert_array_equal(found.view(bits)[number], wanted.view(bits)[number])


def check_widen(machine: Machine, _: np.random.Generator) -> str:
    """Checks every number of 16 bits, and every length of a row."""
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype, w_type in itertools.product((HALF, BRAIN), TYPES):
        same(machine.widen(every.view(dtype)[None], w_type)[0], every.view(dtype).astype("f4"))
    for dtype, size in itertools.product(TYPES, range(1, 70)):
        x = np.arange(1, size + 1).astype(dtype)
        found = machine.widen(x[None], dtype)[0]
        same(found, np.pad(x.astype("f4"), (0, found.size - size)))
    return "all 2^16 float16 and bfloat16, rows of 1 to 69: equal"


def check_narrow(machine: Machine, rng: np.random.Generator) -> str:
    """Checks 16-bit numbers, the values halfway between two, and the floats next to these."""
    several = [rng.integers(0, 1 << 32, 1 << 16, np.uint64).astype(np.uint32)]
    every = np.arange(1 << 16, dtype=np.uint32)
    several += [(every << 16) + np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001)]
    halves = every.astype(np.uint16).view(HALF).astype("f4").view(np.uint32)
    several += [halves + np.uint32(low) for low in (0, 1, 0xFFF, 0x1000, 0x1001)]
    small = (np.arange(1 << 11) * 2.0**-25).astype("f4").view(np.uint32)
    several += [small - np.uint32(1), small, small + np.uint32(1)]
    floats = np.concatenate(several).view(np.float32)
    for dtype in TYPES:
        with np.errstate(all="ignore"):
            same(machine.narrow(floats, dtype), floats.astype(dtype))
    return f"{floats.size} floats to each type: equal"


def error_of_product(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> float:
    """The error beyond the rounding of y, in units of 2^-24 of the sum of the absolute products."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    exact = x @ w.T
    relative, least = ROUNDING[y.dtype]
    error = np.abs(y.astype(np.float64) - exact) - (relative * np.abs(exact) + least)
    return float((error / (2.0**-24 * np.abs(x) @ np.abs(w).T)).max(initial=0))


def check_product(machine: Machine, rng: np.random.Generator) -> str:
    """Checks matmuls with every tile and its edges, for all types."""
    worst, count = 0.0, 0
    kinds = itertools.cycle(itertools.product(TYPES, TYPES))
    parts = [(1, 0, 1), (2, 0, 2), (5, 1, 4), (67, 3, 67)]
    depths = (1, 7, 8, 9, 16, 31, 32, 33, 40, 64, 100, 513, 1030)
    tokens = (1, 2, 3, 4, 5, 7, 17, 130)
    for w_type, n, (rows, begin, end), depth in itertools.product(TYPES, tokens, parts, depths):
        x_type, y_type = next(kinds)
        x, w = (rng.standard_normal((m, depth)).astype(t) for m, t in ((n, x_type), (rows, w_type)))
        wide = np.pad(x.astype("f4"), ((0, 0), (0, -depth % PAD)))
        y = machine.product(wide, w, y_type, begin, end)
        outside = np.delete(y, np.s_[begin:end], axis=1)
        assert np.isnan(outside.astype("f4")).all(), "rows of another part are written"
        worst = max(worst, error_of_product(x, w[begin:end], y[:, begin:end]))
        count += 1
    assert worst <= 4, worst
    return f"{count} products: {worst:.2f} of 2^-24 of the sum of absolute products"


def check_quantise(machine: Machine, rng: np.random.Generator) -> str:
    """Checks codes against NumPy, and the sums against the codes."""
    x = rng.standard_normal((40, 256)).astype(np.float32) * 10.0 ** rng.integers(-30, 30, (40, 1))
    x = x.astype(np.float32)
    x[3, :32] = 0
    codes, scales, sums, half_sums, code_sums = machine.quantise(x)
    groups = x.reshape(40, 8, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    by = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    same(codes, np.rint(groups * by).reshape(x.shape).astype(np.int8))
    same(scales, largest[..., 0] / np.float32(127))
    for found, n in ((sums, 32), (half_sums, 16)):
        of_codes = codes.reshape(40, -1, n).astype(np.float32).sum(-1)
        same(found, (of_codes * np.repeat(scales, 32 // n, 1)).astype(np.float32))
    same(code_sums, codes.reshape(40, -1, 16).astype(np.int32).sum(-1, dtype=np.int32))
    for bad in (np.nan, np.inf, -np.inf):
        x[5, 40] = bad
        codes, scales, *_ = machine.quantise(x)
        assert not np.isfinite(scales[5, 1]) and np.isfinite(scales[5, [0, 2]]).all()
        assert not codes[5, 32:64].any()
    return "as in NumPy"


def check_packed(machine: Machine, rng: np.random.Generator) -> str:
    """Checks every format with complete and partial units and panels, in int8 and in floats."""
    worst, count = 0.0, 0
    parts = [(1, 0, 1), (3, 0, 3), (9, 1, 8), (21, 0, 21)]
    cases = itertools.product(enumerate(FORMATS), (1, 2, 5, 9), parts, (32, 96, 256, 320, 768))
    for ((kind, name), tokens, (rows, begin, end), depth), y_type in zip(
        cases, itertools.cycle(TYPES)
    ):
        layout = DECODERS[name]
        if depth % layout.elements:
            continue
        w = blocks(name, rows, depth, count)
        x = rng.standard_normal((tokens, depth)).astype(np.float32)
        weights = reference(name, w)[begin:end]
        for is_int8 in (True, False):
            y = machine.packed_product(x, kind, w, y_type, is_int8, begin, end)
            assert np.isnan(np.delete(y, np.s_[begin:end], axis=1).astype("f4")).all(), "other rows"
            used = x
            if is_int8:
                codes, scales, *_ = machine.quantise(np.pad(x, ((0, 0), (0, -depth % 256))))
                used = codes.astype("f8") * np.repeat(scales.astype("f8"), 32, 1)
                used = used[:, :depth]
            worst = max(worst, error_of_product(used, weights, y[:, begin:end]))
            count += 1
    assert worst <= 8, worst
    return f"{count} products: {worst:.2f} of 2^-24 of the sum of absolute products"


def check_small(machine: Machine, rng: np.random.Generator) -> str:
    """Checks that numbers below 2^-126 count in activations, weights and results."""
    if not machine.flush:
        return "not for this level"
    tiny = (rng.standard_normal((3, 64)) * 2.0**-130).astype("f4")
    wide = (rng.standard_normal((5, 64)) * 2.0**60).astype("f4")
    worst = 0.0
    for dtype in (FLOAT, BRAIN):
        cases = [(tiny, wide.astype(dtype)), (wide, tiny.astype(dtype))]
        cases += [((tiny * 2.0**60).astype("f4"), (wide * 2.0**-120).astype(dtype))]
        for x, w in cases:
            y = machine.product(x, w, FLOAT, 0, len(w))
            exact = x.astype(np.float64) @ w.astype(np.float64).T
            size = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
            unit = np.maximum(2.0**-24 * size, 64 * 2.0**-149)
            worst = max(worst, float((np.abs(y - exact) / unit).max()))
    assert worst <= 4, worst
    halves = np.arange(1, 1 << 10, dtype=np.uint16).view(HALF)
    same(machine.widen(halves[None], HALF)[0, : halves.size], halves.astype("f4"))
    return f"{worst:.2f} of the same"


def check_exp(machine: Machine, rng: np.random.Generator) -> str:
    """Checks exp(x) for x from -110 to 0, by attention whose values are the identity matrix."""
    worst = lost = 0.0
    q = np.eye(1, PART, dtype="f4")
    for _ in range(24):
        keys = np.zeros((PART, PART), "f4")
        keys[1:, 0] = -rng.uniform(0, rng.choice([1e-3, 1, 30, 110]), PART - 1)
        found = machine.attend(q, keys, np.eye(PART, dtype="f4"), 0, PART, 0)[2][0]
        exact = np.exp(keys[:, 0].astype(np.float64))
        normal = exact >= 2.0**-125
        units = np.abs(found - exact) / np.spacing(exact.astype("f4"))
        worst = max(worst, float(units[normal].max()))
        lost = max(lost, float(np.abs(found - exact)[~normal].max(initial=0)))
    assert worst <= 2 and lost <= 2.0**-125, (worst, lost)
    return f"{worst:.2f} units in the last place"


def exact_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    cap: float,
    slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The highest scores, and the weighted means of the values."""
    q, keys, values = (a.astype(np.float64) for a in (q, keys, values))
    scores = q @ keys.T
    scores = cap * np.tanh(scores / cap) if cap else scores
    if slopes is not None:
        scores += slopes[:, None].astype(np.float64) * np.arange(-len(keys), 0)
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    return top, weights @ values / weights.sum(axis=1, keepdims=True)


def check_attend(machine: Machine, rng: np.random.Generator) -> str:
    """Checks groups of queries, depths and parts of a cache, with and without a cap, slopes and pages."""
    worst, count = 0.0, 0
    parts = [(0, 1), (2, 5), (0, 31), (3, PART + 3), (9, 80)]
    options = itertools.product(TYPES, range(1, 10), (4, 8, 20, 64, 80), parts)
    kinds = itertools.product((0, 3, 50), (False, True), (0, 16))
    for (dtype, queries, depth, (begin, end)), (cap, is_sloped, block) in zip(
        options, itertools.cycle(kinds)
    ):
        keys, values = rng.standard_normal((2, end, depth)).astype(dtype)
        q = (rng.standard_normal((queries, depth)) / depth**0.5).astype("f4")
        wide = np.pad(q, ((0, 0), (0, -depth % PAD)))
        slopes = rng.uniform(0, 0.5, queries).astype("f4") if is_sloped else None
        top, total, out = machine.attend(wide, keys, values, begin, end, cap, (), slopes, block)
        exact_top, exact = exact_attention(q, keys[begin:end], values[begin:end], cap, slopes)
        np.testing.assert_allclose(top, exact_top, rtol=1e-6, atol=4e-6)
        worst = max(worst, float(np.abs(out[:, :depth] / total[:, None] - exact).max()))
        count += 1
    options = itertools.product((1, 3, 6), (8, 20, 64), parts, (0, 16))
    for queries, depth, (begin, end), block in options:
        keys, values = rng.integers(-127, 128, (2, end, depth)).astype(np.int8)
        scales = rng.uniform(0.01, 0.02, (2, end)).astype("f4")
        q = (rng.standard_normal((queries, depth)) / depth**0.5).astype("f4")
        wide = np.pad(q, ((0, 0), (0, -depth % PAD)))
        top, total, out = machine.attend(wide, keys, values, begin, end, 0, [*scales], None, block)
        floats = [a * s[:, None] for a, s in zip((keys, values), scales, strict=True)]
        exact_top, exact = exact_attention(q, *(a[begin:end] for a in floats), 0)
        np.testing.assert_allclose(top, exact_top, rtol=1e-6, atol=4e-6)
        worst = max(worst, float(np.abs(out[:, :depth] / total[:, None] - exact).max()))
        count += 1
    assert worst <= 1e-5, worst
    return f"{count} parts: {worst:.1e} beside values of about 1"


def check_delta(machine: Machine, rng: np.random.Generator) -> str:
    """Checks the delta rule of one head, with complete and partial vectors, and SiLU."""
    worst, count = 0.0, 0
    for key_dim, value_dim in itertools.product((1, 5, 64), (1, 4, 7, 16, 37, 64)):
        q, k = rng.standard_normal((2, key_dim)).astype("f4") / np.float32(key_dim**0.5)
        v = rng.standard_normal(value_dim).astype("f4")
        state = rng.standard_normal((key_dim, value_dim)).astype("f4")
        with machine.room():
            at, to = machine.put(state), machine.put(v)
            machine.call("delta", Delta(
                *map(machine.put, (q, k, v)), 0.75, 0.5, at, key_dim, value_dim, to
            ))  # fmt: skip
            y, after = machine.get(to, v), machine.get(at, state)
        exact = 0.75 * state.astype("f8")
        exact += np.outer(k, 0.5 * (v - exact.T @ k))
        worst = max(worst, float(np.abs(after - exact).max()), float(np.abs(y - exact.T @ q).max()))
        count += 1
    x = np.append(rng.standard_normal(PAD - 4) * 20, [0, -200, 200, np.nan]).astype("f4")
    with machine.room():
        at = machine.put(x)
        machine.call("silu", at, x.size)
        found = machine.get(at, x)
    exact = x / (1 + np.exp(-np.clip(x.astype("f8"), -700, 700)))
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-30)
    assert worst <= 4e-6, worst
    return f"{count} heads: {worst:.1e}"


def check_ssd(machine: Machine, rng: np.random.Generator) -> str:
    """Checks Mamba 2's recurrence of one head, with complete and partial vectors."""
    worst, count = 0.0, 0
    for rows, size in itertools.product((1, 5, 64), (1, 4, 7, 16, 37, 128)):
        b, c = rng.standard_normal((2, size)).astype("f4")
        x, state = (rng.standard_normal(n).astype("f4") for n in (rows, (rows, size)))
        with machine.room():
            at, to = machine.put(state), machine.put(x)
            of = Ssd(machine.put(x), 0.75, *map(machine.put, (b, c)), at, rows, size, to)
            machine.call("ssd", of)
            y, after = machine.get(to, x), machine.get(at, state)
        exact = 0.75 * state.astype("f8") + np.outer(x, b)
        scale = np.maximum(1, np.abs(exact) @ np.abs(c))
        worst = max(worst, float((np.abs(y - exact @ c) / scale).max()))
        worst = max(worst, float(np.abs(after - exact).max()))
        count += 1
    assert worst <= 4e-6, worst
    return f"{count} heads: {worst:.1e}"


def check_not_numbers(machine: Machine, rng: np.random.Generator) -> str:
    """Checks that a NaN reaches every result that it is part of and no other, and that infinities are capped."""
    x, w = rng.standard_normal((6, PAD)).astype("f4"), rng.standard_normal((9, PAD)).astype("f4")
    x[2, 5] = w[4, 7] = np.nan
    found = np.isnan(machine.product(x, w, FLOAT, 0, 9))
    np.testing.assert_array_equal(found, np.isnan(x @ w.T))
    for cap, slot in itertools.product((0, 5), (0, 3, 12)):
        keys = rng.standard_normal((13, PAD)).astype("f4")
        keys[slot, 1] = np.nan
        top, total, out = machine.attend(x[:2], keys, keys, 0, 13, cap)
        assert np.isnan(total).all() and np.isnan(out).all(), (cap, slot)
    keys = np.full((4, PAD), -1, "f4")
    keys[1] = np.inf
    top, _, _ = machine.attend(np.abs(x[:2]), keys, np.ones_like(keys), 0, 4, 5)
    np.testing.assert_array_equal(top, [5, 5])
    return "as in NumPy"


CHECKS: dict[str, Callable[[Machine, np.random.Generator], str]] = {
    "widen": check_widen,
    "narrow": check_narrow,
    "product": check_product,
    "quantise": check_quantise,
    "packed product": check_packed,
    "below 2^-126": check_small,
    "exp": check_exp,
    "attend": check_attend,
    "delta rule": check_delta,
    "state space": check_ssd,
    "NaN and Inf": check_not_numbers,
}


def failed(name: str, check: Callable[[], str]) -> bool:
    """Prints the result of a check; returns whether it failed."""
    start = time.perf_counter()
    try:
        found, bad = check(), False
    except (AssertionError, unicorn.UcError) as error:
        found, bad = f"FAILED: {error}", True
    print(f"  {name:14s} {found} ({time.perf_counter() - start:.0f} s)", flush=True)
    return bad


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", default="neon", choices=("neon", "neondot", "portable"))
    level = parser.parse_args().level
    machine = Machine(level)
    print(f"the level {level!r}, compiled by zig for ARM, in unicorn {unicorn.__version__}")
    run: Any = lambda check: functools.partial(check, machine, np.random.default_rng(0))
    return int(sum(failed(name, run(check)) for name, check in CHECKS.items()) > 0)


if __name__ == "__main__":
    sys.exit(main())
