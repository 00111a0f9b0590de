"""ggml's blocks: the gguf package is the oracle, and where it has none, ggml's formula in plain Python."""

import struct
import threading
import tracemalloc
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf import quants
from gguf.scripts import gguf_convert_endian

from maxjax.dtype import DType
from maxjax.errors import CheckpointTruncatedError
from maxjax.storage import TensorEntry, TensorTable, open_regular
from maxjax.storage.blocks import (
    DECODERS,
    LAYOUTS,
    Decoded,
    decode,
    decode_into,
    decoders,
    layout_of,
    swap_blocks,
)
from maxjax.storage.blocks.scratch import MAX_VIEWS, Scratch, bits, nibbles, weave
from maxjax.storage.boxes import whole
from maxjax.storage.gguf.types import GGML_TYPES_BY_NAME
from maxjax.storage.parts import Part, read_parts

TYPES = sorted(DECODERS)
# What the package does not decode; `by_formula` has them.
OURS = ["Q1_0", "Q2_0", "Q8_1", "Q8_K"]
THEIRS = [name for name in TYPES if name not in OURS]
QUANTISED = [  # (type, mean error of values of a normal distribution)
    ("Q4_0", 0.12), ("Q4_1", 0.1), ("Q5_0", 0.06), ("Q5_1", 0.05), ("Q8_0", 0.01),
    ("TQ1_0", 0.8), ("TQ2_0", 0.8), ("MXFP4", 0.25),
]  # fmt: skip
UNDEFINED = ["IQ1_M", "IQ2_XXS", "IQ3_XXS", "Q5_0", "Q5_1"]
# Of float16: both zeros, subnormals, the largest, infinities, numbers that are none.
SPECIAL = np.array(
    [0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFD01], "<u2"
)


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes, `shape` in blocks; a third of the float16 fields have special values."""
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[name]
    rows = rng.integers(0, 256, (prod(shape), layout.nbytes), np.uint8)
    records = rows.view(layout.record)[:, 0]
    for field in layout.fields:
        if field.code == "f2":
            chosen = rng.random(len(rows)) < 1 / 3
            records[field.name].view("<u2")[chosen] = rng.choice(SPECIAL, int(chosen.sum()))
    return rows.reshape(*shape[:-1], shape[-1] * layout.nbytes)


def oracle(name: str, blocks: np.ndarray) -> np.ndarray:
    if name in OURS:
        return by_formula(name, blocks)
    with np.errstate(all="ignore"):
        return quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


def by_formula(name: str, blocks: np.ndarray) -> np.ndarray:
    """ggml-quants.c, value by value; the large blocks of Q8_K at once."""
    size = LAYOUTS[name].nbytes
    rows = blocks.shape[:-1]
    if name == "Q8_K":
        each = np.ascontiguousarray(blocks).reshape(-1, size)
        scales, q = each[:, :4].copy().view("<f4"), each[:, 4:260].view("i1")
        with np.errstate(all="ignore"):
            return (scales * q.astype(np.float32)).reshape(*rows, -1)
    values = []
    for at in range(0, blocks.size, size):
        block = blocks.reshape(-1)[at : at + size].tobytes()
        if name == "Q8_1":
            (d,), q = struct.unpack("<e", block[:2]), struct.unpack("32b", block[4:])
        elif name == "Q1_0":
            (d,), q = (
                struct.unpack("<e", block[:2]),
                [2 * (block[2 + j // 8] >> j % 8 & 1) - 1 for j in range(128)],
            )
        else:
            (d,), q = (
                struct.unpack("<e", block[:2]),
                [(block[2 + j // 4] >> 2 * (j % 4) & 3) - 1 for j in range(64)],
            )
        with np.errstate(all="ignore"):
            values += [np.float32(d) * np.float32(x) for x in q]
    return np.array(values, np.float32).reshape(*rows, len(values) // prod(rows))


def assert_same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal bits; of a NaN only that it is one."""
    assert found.dtype == wanted.dtype == np.float32
    assert found.shape == wanted.shape
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


# --- the values -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_random_bytes_decode_as_in_ggml(name):
    blocks = random_blocks(name, (7, 12))
    assert_same_bits(decode(name, blocks), oracle(name, blocks))


@pytest.mark.parametrize("name", TYPES)
def test_every_byte_of_a_block_decodes_as_in_ggml(name):
    """Each byte takes a quarter of its values while the rest stay as they are."""
    layout = LAYOUTS[name]
    blocks = np.repeat(random_blocks(name, (1, 1), seed=3), layout.nbytes * 64, axis=0)
    places = np.repeat(np.arange(layout.nbytes), 64)
    blocks[np.arange(len(blocks)), places] = (
        np.tile(np.arange(0, 256, 4), layout.nbytes) + places % 4
    )
    blocks = blocks[:: 8 if name in OURS else 1]
    assert_same_bits(decode(name, blocks), oracle(name, blocks))


@pytest.mark.parametrize(("name", "error"), QUANTISED)
def test_quantised_data_come_back(name, error):
    data = np.random.default_rng(1).standard_normal((16, 1024), np.float32)
    blocks = quants.quantize(data, gguf.GGMLQuantizationType[name])
    found = decode(name, blocks)
    assert_same_bits(found, oracle(name, blocks))
    assert 0 < np.abs(found - data).mean() < error


def test_the_types_that_have_no_oracle_in_the_package_are_few():
    decodable = {kind.name for kind in quants._type_traits} - {"BF16"}
    assert decodable == set(THEIRS)


def test_all_types_of_ggml_are_decoded():
    packed = {kind.name for kind in GGML_TYPES_BY_NAME.values() if kind.dtype is None}
    assert packed == set(TYPES) == set(LAYOUTS)


@pytest.mark.parametrize("name", TYPES)
def test_sizes_of_blocks(name):
    layout, kind = LAYOUTS[name], GGML_TYPES_BY_NAME[name]
    assert (layout.elements, layout.nbytes) == (kind.elements, kind.nbytes)
    assert layout.fields[-1].end == layout.nbytes
    for field, after in pairwise(layout.fields):
        assert field.end == after.offset
    assert layout.record.fields is not None
    assert [layout.record.fields[f.name][1] for f in layout.fields] == [
        f.offset for f in layout.fields
    ]
    member = getattr(gguf.GGMLQuantizationType, name, None)
    # The package still has Q8_1 with float32 fields.
    if member is not None and name != "Q8_1":
        assert gguf.GGML_QUANT_SIZES[member] == (layout.elements, layout.nbytes)


# --- pieces, threads, memory ------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few blocks, and threads for them."""
    monkeypatch.setattr(decoders, "PIECE", 1024)
    monkeypatch.setattr(decoders, "PARALLEL", 1)


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("name", TYPES)
def test_pieces_and_threads_change_nothing(name, threads, request):
    blocks = random_blocks(name, (5, 13), seed=2)
    wanted = decode(name, blocks, threads=1)
    request.getfixturevalue("small_pieces")
    assert_same_bits(decode(name, blocks, threads=threads), wanted)


def test_many_threads_decode_at_the_same_time(small_pieces):
    cases = {name: random_blocks(name, (6, 9), seed=4) for name in THEIRS}
    wanted = {name: oracle(name, blocks) for name, blocks in cases.items()}
    found, start = {}, threading.Barrier(len(cases))

    def run(name):
        start.wait()
        for _ in range(3):
            found[name] = decode(name, cases[name])

    threads = [threading.Thread(target=run, args=(name,)) for name in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in cases:
        assert_same_bits(found[name], wanted[name])


def test_an_error_in_a_thread_is_raised(small_pieces, monkeypatch):
    raised = threading.Event()

    def broken(blocks, out, scratch):
        if threading.current_thread() is threading.main_thread():
            raised.wait(60)
        else:
            raised.set()
            raise RuntimeError("in the thread")

    monkeypatch.setitem(DECODERS, "Q8_0", broken)
    with pytest.raises(RuntimeError, match="in the thread"):
        decode("Q8_0", random_blocks("Q8_0", (2, 64)), threads=2)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "IQ2_S"])
@pytest.mark.parametrize("kind", ["rows", "columns", "reversed", "transposed", "every other value"])
def test_memory_with_gaps(name, kind, small_pieces):
    layout = LAYOUTS[name]
    blocks = random_blocks(name, (3, 4, 5))
    wanted = decode(name, blocks)
    width = wanted.shape[-1]
    out = {
        "rows": lambda: np.full((3, 9, width), 7, np.float32)[:, 1::2],
        "columns": lambda: np.full((3, 4, width + 9), 7, np.float32)[:, :, 4:-5],
        "reversed": lambda: np.full((3, 4, width), 7, np.float32)[::-1, ::-1],
        "transposed": lambda: np.full((width, 4, 3), 7, np.float32).T,
        "every other value": lambda: np.full((3, 4, 2 * width), 7, np.float32)[:, :, 1::2],
    }[kind]()
    base = out.base
    decode_into(name, blocks, out)
    assert_same_bits(np.ascontiguousarray(out), wanted)
    assert base is not None
    assert (base == 7).sum() - (wanted == 7).sum() == base.size - wanted.size
    wide = np.concatenate((blocks, blocks), axis=2)[:, :, : 5 * layout.nbytes]
    assert not wide.flags.c_contiguous
    assert_same_bits(decode(name, wide), wanted)


def test_memory_beside_the_result_is_little():
    for name in ("Q4_K", "Q6_K", "IQ2_S", "IQ1_M", "TQ1_0", "Q1_0"):
        blocks = random_blocks(name, (64, 64 * 256 // LAYOUTS[name].elements))
        blocks = np.tile(blocks, (8, 1))  # 8M values
        tracemalloc.start()
        out = decode(name, blocks, threads=1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak - out.nbytes < 8 << 20, name


def test_scratch_memory_does_not_grow_with_the_number_of_shapes():
    scratch = Scratch()
    for size in (*range(1, 4 * MAX_VIEWS), *range(4 * MAX_VIEWS, 0, -1)):
        scratch.array("a", (size,), "u1")[:] = 1
        scratch.array("b", (3, size), "f4")[:] = 1
        scratch.order(2, size)
    assert len(scratch._views) <= MAX_VIEWS
    assert len(scratch._orders) <= MAX_VIEWS
    assert {name: len(memory) for name, memory in scratch._buffers.items()} == {
        "a": 4 * MAX_VIEWS,
        "b": 12 * 4 * MAX_VIEWS,
    }


def test_scratch_memory_that_became_too_small_is_dropped():
    scratch = Scratch()
    for size in (3, 5, 4):
        scratch.array("a", (size,), "u1")
    assert all(np.shares_memory(view, scratch._buffers["a"]) for view in scratch._views.values())


def test_scratch_memory_of_two_names_is_apart():
    scratch = Scratch()
    a, b = scratch.array("a", (9,), "u1"), scratch.array("b", (9,), "u1")
    assert not np.shares_memory(a, b)
    assert np.shares_memory(a, scratch.array("a", (3,), "u1"))


def test_weaving_and_bits():
    qs = (7 * np.arange(32)).astype(np.uint8).reshape(2, 16)
    low, high = qs & 15, qs >> 4
    np.testing.assert_array_equal(
        nibbles(Scratch(), qs, 8).reshape(2, 2, 2, 8),
        np.stack((low.reshape(2, 2, 8), high.reshape(2, 2, 8)), axis=2),
    )
    found = bits(Scratch(), qs, 2, 16).reshape(2, 4, 16)
    for k in range(4):
        np.testing.assert_array_equal(found[:, k], qs >> 2 * k & 3)
    planes = np.arange(24, dtype=np.uint8).reshape(3, 8)
    assert weave(Scratch(), "x", planes, 4)[:12].tolist() == [*range(4), *range(8, 12), *range(16, 20)]  # fmt: skip


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 4)])
@pytest.mark.parametrize("name", TYPES)
def test_nothing_to_decode(name, shape):
    layout = LAYOUTS[name]
    blocks = np.zeros((*shape[:-1], shape[-1] * layout.nbytes), np.uint8)
    found = decode(name, blocks)
    assert found.shape == (*shape[:-1], shape[-1] * layout.elements)


@pytest.mark.parametrize("name", TYPES)
def test_a_block_of_zeros_is_zero(name):
    found = decode(name, np.zeros(LAYOUTS[name].nbytes, np.uint8))
    # The scale of MXFP4 is a power of two, and no byte of it is zero: the codes are.
    assert not found.any()


@pytest.mark.parametrize("name", ["F32", "Q4_0_4_4", "", "q4_0"])
def test_unknown_types(name):
    with pytest.raises(NotImplementedError, match=repr(name)):
        decode(name, np.zeros(18, np.uint8))
    with pytest.raises(NotImplementedError, match=repr(name)):
        decode_into(name, np.zeros(18, np.uint8), np.zeros(32, np.float32))
    with pytest.raises(NotImplementedError, match=repr(name)):
        swap_blocks(name, np.zeros(18, np.uint8))


def test_what_does_not_fit_is_refused():
    blocks = np.zeros((2, 36), np.uint8)
    with pytest.raises(ValueError, match=r"multiple of 18 bytes, got shape \(2, 35\)"):
        decode("Q4_0", blocks[:, :-1])
    with pytest.raises(ValueError, match="multiple of 18"):
        decode("Q4_0", np.zeros((), np.uint8))
    with pytest.raises(TypeError, match="int8"):
        decode("Q4_0", blocks.view(np.int8))
    with pytest.raises(TypeError, match="float64"):
        decode_into("Q4_0", blocks, np.zeros((2, 64)))
    with pytest.raises(ValueError, match=r"to shape \(2, 64\), but the output has \(64, 2\)"):
        decode_into("Q4_0", blocks, np.zeros((64, 2), np.float32))


# --- byte order -------------------------------------------------------------------------------


def other_order(name: str, blocks: np.ndarray) -> np.ndarray:
    """The same blocks with the fields of a big-endian machine, written by NumPy's records."""
    record = LAYOUTS[name].record
    swapped = np.empty(blocks.size // record.itemsize, record.newbyteorder(">"))
    for field in LAYOUTS[name].fields:
        # As integers: a NaN keeps its bits.
        code = f"u{field.itemsize}"
        source = blocks.view(record)[field.name].reshape(len(swapped), -1)
        target = np.ascontiguousarray(source).view(f"<{code}").astype(f">{code}")
        swapped[field.name] = target.view(f">{field.code}").reshape(swapped[field.name].shape)
    return swapped.view(np.uint8).reshape(blocks.shape)


@pytest.mark.parametrize("name", sorted(set(TYPES) - set(UNDEFINED)))
def test_blocks_of_the_other_byte_order(name):
    blocks = random_blocks(name, (4 * 3,), seed=5)
    other = other_order(name, blocks)
    assert (name in ("MXFP4", "NVFP4")) == np.array_equal(other, blocks)
    swapped = swap_blocks(name, other)
    assert swapped is other
    np.testing.assert_array_equal(swapped, blocks)


@pytest.mark.parametrize("kind", gguf_convert_endian.byteswap_tensors, ids=lambda kind: kind.name)
def test_the_same_bytes_are_swapped_as_by_llama_cpp(kind):
    blocks = random_blocks(kind.name, (5,), seed=6)
    tensor = SimpleNamespace(data=blocks.copy())
    for at in range(0, blocks.size, LAYOUTS[kind.name].nbytes):
        gguf_convert_endian.byteswap_tensors[kind](tensor, at)
    np.testing.assert_array_equal(swap_blocks(kind.name, blocks), tensor.data)


@pytest.mark.parametrize("name", UNDEFINED)
def test_blocks_whose_other_byte_order_is_undefined(name):
    blocks = random_blocks(name, (2,))
    before = blocks.copy()
    with pytest.raises(NotImplementedError, match=name):
        swap_blocks(name, blocks)
    np.testing.assert_array_equal(blocks, before)


def test_swapping_needs_memory_without_gaps():
    with pytest.raises(ValueError, match="C-contiguous"):
        swap_blocks("Q8_0", np.zeros((4, 34), np.uint8)[::2])
    assert swap_blocks("Q8_0", np.zeros((0, 34), np.uint8)).shape == (0, 34)


# --- tensors of a file ------------------------------------------------------------------------


class Stored:
    """A file of one tensor of blocks at an odd place, and its values."""

    def __init__(self, folder: Path, name: str, shape: tuple[int, ...], *, swap: bool = False):
        layout = LAYOUTS[name]
        blocks = random_blocks(name, (*shape[:-1], shape[-1] // layout.elements), seed=8)
        self.values = oracle(name, blocks) if blocks.size else np.zeros(shape, np.float32)
        stored = other_order(name, blocks.reshape(-1)) if swap else blocks
        self.path = folder / "blocks.bin"
        self.path.write_bytes(b"\x00" * 3 + stored.tobytes() + b"\xff" * 5)
        coding = Decoded(name, swap=swap)
        entry = TensorEntry("w", DType.float32, shape, 0, 3, blocks.size, coding)
        self.coding, self.entry, self.layout = coding, entry, layout
        self.file = open_regular(self.path)
        self.table = TensorTable("test", [self.file], {"w": entry})

    def wanted(self, box) -> np.ndarray:
        return self.values[tuple(slice(*span) for span in box)]

    def enclosing_bytes(self, box) -> int:
        first, last = box[-1][0] // self.layout.elements, -(-box[-1][1] // self.layout.elements)
        rows = prod(stop - start for start, stop in box[:-1])
        return rows * (last - first) * self.layout.nbytes


def random_box(rng: np.random.Generator, shape: tuple[int, ...]):
    for size in shape:
        start, stop = sorted(map(int, rng.integers(0, size + 1, 2)))
        yield (0, size) if rng.integers(2) else (start, stop)


SHAPES = [(1280,), (6, 768), (3, 4, 512), (2, 3, 2, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "IQ3_S", "NVFP4", "Q8_1"])
def test_boxes_are_parts_of_the_whole(name, shape, tmp_path):
    stored, rng = Stored(tmp_path, name, shape), np.random.default_rng(0)
    for _ in range(25):
        box = tuple(random_box(rng, shape))
        array = np.full([b - a for a, b in box], 7, np.float32)
        nbytes = stored.coding.read(stored.file, stored.entry, [(box, array)])
        assert_same_bits(array, stored.wanted(box))
        assert nbytes == (stored.enclosing_bytes(box) if array.size else 0)


@pytest.mark.parametrize("name", TYPES)
def test_whole_tensors_are_read(name, tmp_path):
    stored = Stored(tmp_path, name, (5, 512))
    assert_same_bits(stored.table.read("w"), stored.values)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ4_XS", "MXFP4"])  # fmt: skip
def test_tensors_of_the_other_byte_order(name, tmp_path):
    stored = Stored(tmp_path, name, (4, 512), swap=True)
    assert_same_bits(stored.table.read("w"), stored.values)
    box, array = ((1, 3), (100, 290)), np.empty((2, 190), np.float32)
    stored.coding.read(stored.file, stored.entry, [(box, array)])
    assert_same_bits(array, stored.wanted(box))


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0,), (2, 0, 512)], ids=str)
def test_tensors_without_values(shape, tmp_path):
    stored = Stored(tmp_path, "Q4_K", shape)
    assert stored.table.read("w").shape == shape
    array = np.empty(shape, np.float32)
    assert stored.coding.read(stored.file, stored.entry, [(whole(shape), array)]) == 0


def test_shards_of_a_tensor_are_read_in_threads(tmp_path):
    stored = Stored(tmp_path, "Q4_K", (96, 2048 * 5))
    width = 2048 * 5 // 4
    parts = []
    for k in range(4):
        memory = np.full(96 * width * 4, 0xEE, np.uint8)
        parts.append(Part("w", ((0, 96), (k * width, (k + 1) * width)), memory))
    read_parts(stored.table, parts)
    for part in parts:
        found = part.memory.view(np.float32).reshape(96, width)
        assert_same_bits(found, stored.wanted(part.region))


def test_pieces_of_a_box_cover_it_once_and_are_small(tmp_path):
    stored = Stored(tmp_path, "Q4_K", (4, 2560))
    tall = TensorEntry("w", DType.float32, (9, 70, 30_000 * 256), 0, 0, 0, stored.coding)
    rng = np.random.default_rng(0)
    for _ in range(20):
        box = tuple(random_box(rng, (9, 70, 4000)))
        wide = (*box[:2], (1000 * box[2][0], 1000 * box[2][1]))
        for one in (box, wide):
            pieces = list(stored.coding.split(tall, one))
            assert sum(prod(b - a for a, b in piece) for piece in pieces) == prod(
                b - a for a, b in one
            )
            for piece in pieces:
                blocks = prod(b - a for a, b in piece[:-1]) * (
                    -(-piece[-1][1] // 256) - piece[-1][0] // 256
                )
                assert blocks <= 1024
                # Between two pieces of a row lies the border of a block.
                assert piece[-1][0] in (one[-1][0], piece[-1][0] // 256 * 256)


def test_memory_of_reading_is_bounded(tmp_path):
    stored = Stored(tmp_path, "Q6_K", (1500, 8 * 256))
    box = ((0, 1500), (255, 7 * 256 + 1))  # all blocks of every row, the first and last cut
    array = np.empty((1500, 6 * 256 + 2), np.float32)
    column = np.empty((1500, 1), np.float32)
    stored.coding.read(stored.file, stored.entry, [(((0, 1), (0, 1)), np.empty((1, 1), "f4"))])
    tracemalloc.start()
    stored.coding.read(stored.file, stored.entry, [(box, array)])
    stored.coding.read(stored.file, stored.entry, [(((0, 1500), (5, 6)), column)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert_same_bits(array, stored.wanted(box))
    assert_same_bits(column, stored.wanted(((0, 1500), (5, 6))))
    assert peak < 4 << 20


def test_a_file_that_became_shorter(tmp_path):
    stored = Stored(tmp_path, "Q4_0", (4, 64))
    with open(stored.path, "r+b") as file:
        file.truncate(40)
    with pytest.raises(CheckpointTruncatedError) as caught:
        stored.table.read("w")
    assert (caught.value.path, caught.value.tensor) == (str(stored.path), "w")


def test_codings_of_one_type_are_equal():
    assert Decoded("Q4_K") == Decoded("Q4_K") != Decoded("Q4_K", swap=True)
    assert len({Decoded("Q4_K"), Decoded("Q4_K"), Decoded("Q6_K")}) == 2
    assert layout_of("Q4_K").swappable
