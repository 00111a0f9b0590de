"""CRC-32 against zlib: every level that this processor has, all short lengths, any address."""

import ctypes
import functools
import os
import random
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from maxjax.native_library import find_or_build
from maxjax.storage import crc32 as module
from maxjax.storage.crc32 import combine, crc32, crc32_of, is_fast, level

SIZES = (0, 1, 2, 3, 7, 8, 255, 256, 4097, 65_536, 1_000_003)
LEVELS = ["portable", "clmul", "wide_clmul", "arm"]
DATA = np.random.default_rng(5).integers(0, 256, 300_000, np.uint8)


@functools.cache
def function():
    """The function of the library that computes sums on one level."""
    run = ctypes.CDLL(str(find_or_build()[0])).maxjax_crc32_on
    run.restype = ctypes.c_bool
    run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return run


def on(name: str, data: np.ndarray, value: int = 0) -> int | None:
    """The sum on one level of the library, or None where there is no such level."""
    crc = ctypes.c_uint32(value)
    there = function()(name.encode(), ctypes.byref(crc), data.ctypes.data, data.size)
    return crc.value if there else None


@pytest.fixture(params=LEVELS)
def one_level(request) -> str:
    if find_or_build()[0] is None:
        pytest.skip("the kernels were not built")
    if on(request.param, DATA[:1]) is None:
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def test_all_short_lengths_on_every_level(one_level):
    for size in range(1001):
        data = DATA[size % 67 : size % 67 + size]
        value = size * 0x9E3779B1 & 0xFFFFFFFF
        assert on(one_level, data, value) == zlib.crc32(data, value), size


def test_any_address_on_every_level(one_level):
    for start in range(70):
        for size in (63, 64, 65, 255, 256, 257, 511, 512, 1023, 5000):
            data = DATA[start : start + size]
            assert on(one_level, data) == zlib.crc32(data), (start, size)


@pytest.mark.parametrize("size", [12_287, 12_288, 12_289, 65_536, 99_999, 299_937])
def test_long_runs_on_every_level(one_level, size):
    assert on(one_level, DATA[3 : 3 + size], 7) == zlib.crc32(DATA[3 : 3 + size], 7)


def test_zeros_and_ones(one_level):
    for byte in (0, 255):
        for size in (1, 64, 4096, 100_000):
            data = np.full(size, byte, np.uint8)
            assert on(one_level, data) == zlib.crc32(data)


def test_all_lengths_and_chains():
    for size in range(0, 20_000, 61):
        cut = size * 3 // 7
        first = crc32(memoryview(DATA)[:cut])
        assert crc32(DATA[cut:size], first) == zlib.crc32(DATA[:size])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.asarray])
@pytest.mark.parametrize("size", [0, 5, 100_000])
def test_kinds_of_buffers(kind, size):
    assert crc32(kind(DATA[:size].tobytes() if kind is not np.asarray else DATA[:size])) == (
        zlib.crc32(DATA[:size])
    )


def test_arrays_of_any_type_and_order():
    array = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    for one in (
        array,
        array.T,
        array[::2],
        array.astype(ml_dtypes.bfloat16),
        array[:0],
        array[3, 4],
    ):
        assert crc32(one) == zlib.crc32(one.tobytes())


def test_read_only_memory():
    data = DATA[:50_000].copy()
    data.flags.writeable = False
    assert crc32(data) == crc32(memoryview(data)) == zlib.crc32(data.tobytes())


def test_pieces():
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.randrange(DATA.size) for _ in range(9))
        pieces = np.split(DATA, cuts)
        assert crc32_of(pieces) == zlib.crc32(DATA)
    assert crc32_of([]) == 0


def test_many_threads():
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: crc32(DATA[k:]), range(64)))
    assert found == [zlib.crc32(DATA[k:]) for k in range(64)]


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(module, "_compiled", lambda: None)
    assert crc32(DATA, 9) == zlib.crc32(DATA, 9)
    assert level() == "zlib" and not is_fast()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"MAXJAX_KERNELS": "off"}, "zlib"),
        ({"MAXJAX_KERNELS_LIBRARY": "/no/such/library.so"}, "zlib"),
        ({}, None),
    ],
    ids=["off", "missing", "there"],
)
def test_the_library_is_found(variables, wanted):
    code = "import zlib; from maxjax.storage.crc32 import *; d = bytes(99999); "
    code += "import sys; assert 'jax' not in sys.modules; print(level(), crc32(d) == zlib.crc32(d))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAXJAX_KERNELS")}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    found, agrees = said.stdout.split()
    assert agrees == "True"
    if wanted:
        assert found == wanted
    elif find_or_build()[0] is not None:
        assert found in LEVELS


@pytest.mark.parametrize("second", SIZES)
@pytest.mark.parametrize("first", SIZES)
def test_combine_is_the_crc_of_both(first, second):
    data = random.Random(first * 7919 + second).randbytes(first + second)
    one, other = zlib.crc32(data[:first]), zlib.crc32(data[first:])
    assert combine(one, other, second) == zlib.crc32(data)


def test_combine_of_many_blocks():
    rng = random.Random(1)
    for _ in range(50):
        blocks = [rng.randbytes(rng.choice(SIZES[:-2])) for _ in range(rng.randint(1, 9))]
        crc = 0
        for block in blocks:
            crc = combine(crc, zlib.crc32(block), len(block))
        assert crc == zlib.crc32(b"".join(blocks))
