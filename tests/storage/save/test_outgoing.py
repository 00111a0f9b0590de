"""Tensors on their way into a file: the bytes of any array, in pieces."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.storage.save import outgoing as module
from maxjax.storage.save.outgoing import PIECE_BYTES, outgoing, pieces

RNG = np.random.default_rng(3)
# Of a whole number of bytes each; float4 has tests of its own.
DTYPES = [kind.np for kind in DType if kind.safetensors and kind.size_in_bits % 8 == 0]


def whole(array):
    return b"".join(bytes(piece) for piece in pieces(array))


def values(dtype, shape):
    raw = RNG.integers(0, 2 if np.dtype(dtype) == bool else 256, (*shape, np.dtype(dtype).itemsize))
    return np.ascontiguousarray(raw.astype(np.uint8)).view(dtype).reshape(shape)


@pytest.fixture
def small(monkeypatch):
    """Pieces of a few bytes, as if the tensors were large."""
    monkeypatch.setattr(module, "PIECE_BYTES", 24)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (2, 3, 7), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, shape, small):
    array = values(dtype, shape)
    one = outgoing("w", array)
    assert b"".join(map(bytes, one.pieces())) == array.tobytes()
    assert (one.nbytes, one.shape, one.dtype) == (array.nbytes, shape, DType.of(dtype))
    assert one.encoding is None and b"".join(map(bytes, one.pieces())) == array.tobytes()


LAYOUTS = {
    "transposed": lambda a: a.T,
    "every second": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1, :, ::-1],
    "one for all": lambda a: np.broadcast_to(a[:1], a.shape),
    "Fortran": lambda a: np.asfortranarray(a),
    "other bytes": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "other bytes, transposed": lambda a: a.astype(a.dtype.newbyteorder(">")).T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int16, np.float64])
def test_any_layout(layout, dtype, small):
    array = LAYOUTS[layout](values(dtype, (4, 3, 6)))
    wanted = array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert whole(array) == wanted


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_layouts_of_types_that_numpy_lacks(dtype, small):
    array = values(dtype, (4, 3, 6))
    for changed in (array.T, array[:, ::2], array[::-1]):
        assert whole(changed) == np.ascontiguousarray(changed).tobytes()


def nibbles(array):
    """Two values a byte, the first in the low bits, done slowly."""
    flat = [int(value) & 15 for value in np.asarray(array).reshape(-1).view(np.uint8)]
    flat += [0] * (len(flat) % 2)
    return bytes(low | high << 4 for low, high in zip(flat[::2], flat[1::2], strict=True))


@pytest.mark.parametrize("shape", [(), (2,), (5,), (3, 4), (7, 9, 11), (0, 2)], ids=str)
def test_four_bits(shape, small):
    array = RNG.integers(0, 16, shape).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    array = array.reshape(shape)
    one = outgoing("w", array)
    assert whole(array) == nibbles(array) and one.nbytes == len(nibbles(array))
    assert whole(array.T) == nibbles(np.ascontiguousarray(array.T))
    assert all(len(piece) <= 24 for piece in one.pieces())


def test_pieces_are_small_and_not_copied():
    array = np.zeros((5, PIECE_BYTES // 2), np.uint8)
    found = list(pieces(array))
    assert [len(piece) for piece in found] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2]
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in found)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float4_e2m1fn])
def test_memory_is_that_of_a_piece(dtype, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 20)
    array = np.zeros((64, 1 << 16), dtype).T
    tracemalloc.start()
    total = sum(len(piece) for piece in pieces(array))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == outgoing("w", array).nbytes
    assert peak < 4 << 20


def test_blocks_say_what_they_are():
    assert outgoing("w", np.zeros((2, 144), np.uint8), "Q4_K").encoding == "Q4_K"
