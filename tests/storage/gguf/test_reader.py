"""The GGUF parser: the corpus of bad files, and the gguf package as the oracle of good ones."""

import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter

from maxjax.dtype import DType
from maxjax.errors import CheckpointError, CheckpointLimitError
from maxjax.storage import Limits, TensorTable, aligned_empty
from maxjax.storage.entry import Strided
from maxjax.storage.gguf import values as gguf_values
from maxjax.storage.gguf.reader import KEPT, open_gguf
from maxjax.storage.gguf.types import GGML_TYPES, GGML_TYPES_BY_NAME, REMOVED
from maxjax.storage.parts import Part, read_parts
from tests.storage.gguf import corpus as corpus
from tests.storage.gguf.corpus import GGUF, GGUF_BAD, INFOS, PAIRS, SPLITS, write
from tests.storage.gguf.corpus import gguf as build
from tests.storage.mutate import mutations
from tests.storage.test_corpus import assert_refused
from tests.storage.watch import watched

MUTATIONS = 1500
MEBIBYTE = 1 << 20


# --- the oracle ---------------------------------------------------------------------------


def reader_value(field: gguf.gguf_reader.ReaderField) -> object:
    """A value as `TensorTable.metadata` has it; of arrays of arrays only the bytes of the items."""
    kinds = field.types
    if kinds.count(GGUFValueType.ARRAY) > 1:
        items = [field.parts[i] for i in field.data]
        return b"".join(item.astype(item.dtype.newbyteorder("=")).tobytes() for item in items)
    texts = [
        bytes(field.parts[i]).decode("utf-8", "surrogateescape")
        for i in field.data
        if kinds[-1] is GGUFValueType.STRING
    ]
    if kinds[0] is GGUFValueType.STRING:
        return texts[0]
    if kinds[0] is not GGUFValueType.ARRAY:
        return field.parts[-1].tolist()[0]
    if kinds[-1] is GGUFValueType.STRING:
        return texts
    return np.array([field.parts[i][0] for i in field.data])


def flat_bytes(value: object) -> bytes:
    if isinstance(value, list):
        return b"".join(map(flat_bytes, value))
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return value.tobytes()


def assert_equals_reader(path: Path, table: TensorTable, number: int = 0) -> None:
    """The file `number` of a table, value by value and bit by bit what the gguf package reads."""
    reader = GGUFReader(path)
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    if number == 0:
        assert list(table.metadata) == list(fields)
    for key, field in fields.items() if number == 0 else ():
        ours, theirs = table.metadata[key], reader_value(field)
        if isinstance(theirs, np.ndarray) and theirs.size:
            assert ours.dtype == theirs.dtype.newbyteorder("=") and ours.dtype.isnative
            assert ours.tobytes() == theirs.astype(ours.dtype).tobytes()
        elif isinstance(theirs, bytes):
            assert flat_bytes(ours) == theirs
        elif isinstance(theirs, list):
            assert ours == theirs
        elif not isinstance(theirs, np.ndarray):
            assert type(ours) is type(theirs) and repr(ours) == repr(theirs)
    mine = [name for name, entry in table.entries.items() if entry.file == number]
    assert mine == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert_equals_tensor(table, tensor, reader.byte_order == "S")


def assert_equals_tensor(table: TensorTable, tensor: gguf.ReaderTensor, swap: bool) -> None:
    entry, kind = table.entries[tensor.name], GGML_TYPES[int(tensor.tensor_type)]
    array, data = table.read(tensor.name), np.ascontiguousarray(tensor.data)
    assert entry.offset == tensor.data_offset and entry.nbytes == tensor.n_bytes
    assert array.dtype == entry.dtype.np and array.shape == entry.shape
    assert array.flags.c_contiguous and array.flags.writeable
    logical = tuple(tensor.shape.tolist())[::-1]
    if kind.dtype is not None:
        assert entry.dtype is kind.dtype and entry.shape == logical and entry.encoding is None
        if kind.name == "BF16" and swap:
            data = data.view(">u2").astype("<u2")
        assert array.tobytes() == data.astype(data.dtype.newbyteorder("=")).tobytes()
        return
    data = blocks_in_order(data, kind.name) if swap else data
    if kind.name in KEPT:
        assert (entry.dtype, entry.encoding) == (DType.uint8, kind.name)
        assert array.shape == data.shape and array.tobytes() == data.tobytes()
    else:
        assert (entry.dtype, entry.encoding, entry.shape) == (DType.float32, None, logical)
        with np.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(data, tensor.tensor_type)
        np.testing.assert_array_equal(array, theirs)


def blocks_in_order(data: np.ndarray, name: str) -> np.ndarray:
    """Blocks of a big-endian file as a little-endian one has them."""
    halves = {
        "Q4_0": [0],
        "Q8_0": [0],
        "Q4_K": [0, 2],
        "Q5_K": [0, 2],
        "Q6_K": [208],
        "Q4_1": [0, 2],
        "IQ4_NL": [0],
        "IQ4_XS": [0, 2],
    }
    blocks = data.reshape(-1, GGML_TYPES_BY_NAME[name].nbytes).copy()
    for at in halves.get(name, []):
        blocks[:, [at, at + 1]] = blocks[:, [at + 1, at]]
    return blocks.reshape(data.shape)


# --- the corpus ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", GGUF_BAD, ids=str)
def test_bad_file_is_refused_in_no_memory(case, tmp_path):
    """A count out of the file is believed by no allocation."""
    path = case.build(tmp_path)
    tracemalloc.start()
    try:
        assert_refused(case, path, open_gguf)
        assert tracemalloc.get_traced_memory()[1] < 5 * MEBIBYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", [c for c in GGUF if not c.error], ids=str)
def test_good_file_equals_the_package(case, tmp_path):
    path = case.build(tmp_path)
    with watched() as acts, open_gguf(path) as table:
        table.read_many()
    assert not acts
    with open_gguf(path) as table:
        assert_equals_reader(path, table)


def test_every_case_of_the_list_is_here():
    assert {c.name for c in GGUF} >= set(LISTED.split())
    assert len({c.name for c in GGUF}) == len(GGUF)
    assert not [c.name for c in GGUF if c.error and not (c.names or c.says)]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_blocks_of_any_size_are_read_alike(size, tmp_path, monkeypatch):
    paths = [c.build(tmp_path) for c in GGUF if not c.error]
    whole = [open_gguf(path) for path in paths]
    monkeypatch.setattr(gguf_values, "BLOCK_BYTES", size)
    for path, table in zip(paths, whole, strict=True):
        pieces = open_gguf(path)
        assert pieces.entries == table.entries
        assert repr(pieces.metadata) == repr(table.metadata)


def test_strings_across_blocks_of_any_size(tmp_path, monkeypatch):
    strings = ["é" * (i % 7) + "x" * (i % 5) for i in range(60)]
    body = b"".join(map(corpus.text, strings))
    pairs = [corpus.pair("x.s", corpus.ARRAY, corpus.array(corpus.STRING, 60, body))]
    path = write(tmp_path / "m.gguf", build(pairs, INFOS, corpus.D64))
    for size in range(1, 150):
        monkeypatch.setattr(gguf_values, "BLOCK_BYTES", size)
        assert open_gguf(path).metadata["x.s"] == strings


# --- files that the package writes ----------------------------------------------------------

SCALARS = {
    GGUFValueType.UINT8: 255, GGUFValueType.INT8: -128, GGUFValueType.UINT16: 65535,
    GGUFValueType.INT16: -32768, GGUFValueType.UINT32: 2**32 - 1, GGUFValueType.INT32: -(2**31),
    GGUFValueType.FLOAT32: 0.1, GGUFValueType.BOOL: True, GGUFValueType.STRING: "zwölf",
    GGUFValueType.UINT64: 2**64 - 1, GGUFValueType.INT64: -(2**63), GGUFValueType.FLOAT64: 0.1,
}  # fmt: skip


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    values = {
        f"t.{name}": rng.integers(-100, 100, shape).astype(name)
        for name, shape in (("int8", (5,)), ("int16", (3, 4)), ("int32", (2, 3, 4)),
                            ("int64", (2, 1, 3, 2)))
    }  # fmt: skip
    floats = {
        f"t.{n}": rng.normal(size=(7, 3)).astype(n) for n in ("float16", "float32", "float64")
    }
    return {**values, **floats}


def write_all(path: Path, order: GGUFEndian, alignment: int, **options) -> dict[str, np.ndarray]:
    """A file with every type of value and every plain type; gives the arrays."""
    writer = GGUFWriter(path, "llama", endianess=order, **options)
    writer.add_custom_alignment(alignment)
    for kind, value in SCALARS.items():
        writer.add_key_value(f"k.{kind.name}", value, kind)
        writer.add_key_value(f"a.{kind.name}", [value] * 5, GGUFValueType.ARRAY, sub_type=kind)
    writer.add_array("tokenizer.ggml.tokens", [f"▁{i}" for i in range(1000)])
    wanted = arrays()
    for name, array in wanted.items():
        writer.add_tensor(name, array)
    bf16 = wanted["t.float32"].astype(ml_dtypes.bfloat16)
    stored = bf16.view(np.uint16)
    stored = stored.byteswap() if order is GGUFEndian.BIG else stored
    raw = stored.view(np.uint8)
    writer.add_tensor("t.bfloat16", raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {**wanted, "t.bfloat16": bf16}


@pytest.mark.parametrize("alignment", [8, 32, 4096])
@pytest.mark.parametrize("order", list(GGUFEndian), ids=lambda order: order.name)
def test_reads_what_the_package_writes(order, alignment, tmp_path):
    path = tmp_path / "m.gguf"
    wanted = write_all(path, order, alignment)
    with open_gguf(path) as table:
        assert_equals_reader(path, table)
        arrays = table.read_many()
        metadata = table.metadata
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)
    assert metadata["general.architecture"] == "llama"
    for kind, value in SCALARS.items():
        value = float(np.float32(value)) if kind is GGUFValueType.FLOAT32 else value
        assert metadata[f"k.{kind.name}"] == value
        assert type(metadata[f"k.{kind.name}"]) is type(value)
        items = metadata[f"a.{kind.name}"]
        assert (items if isinstance(items, list) else items.tolist()) == [value] * 5
    assert metadata["tokenizer.ggml.tokens"] == [f"▁{i}" for i in range(1000)]


@pytest.mark.parametrize(
    "kind", [t for t in GGML_TYPES.values() if not t.dtype], ids=lambda t: t.name
)
def test_packed_types_stay_packed_or_are_decoded(kind, tmp_path):
    rows = np.random.default_rng(4).integers(0, 256, (3, 2 * kind.nbytes), np.uint8)
    content = build(PAIRS, [corpus.info("a", [2 * kind.elements, 3], kind.number)], rows.tobytes())
    table = open_gguf(write(tmp_path / "m.gguf", content))
    entry, array = table.entries["a"], table.read("a")
    if kind.name in KEPT:
        assert (entry.dtype, entry.encoding, entry.coding) == (DType.uint8, kind.name, None)
        np.testing.assert_array_equal(array, rows, strict=True)
        return
    assert (entry.dtype, entry.encoding) == (DType.float32, None)
    assert entry.shape == array.shape == (3, 2 * kind.elements)
    if kind.name in ("Q8_1", "Q8_K", "Q1_0", "Q2_0"):
        return  # the package decodes none of these: tests/storage/blocks/test_blocks.py has them
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(rows, GGMLQuantizationType(kind.number))
    np.testing.assert_array_equal(array, theirs)


@pytest.mark.parametrize("name", [name for name in KEPT if name not in ("Q5_0", "Q5_1")])
def test_packed_types_of_a_big_endian_file(name, tmp_path):
    kind = GGML_TYPES_BY_NAME[name]
    rows = np.random.default_rng(5).integers(0, 60, (3, 2 * kind.nbytes), np.uint8)
    row = corpus.info("a", [2 * kind.elements, 3], kind.number, order=corpus.BIG)
    path = write(tmp_path / "m.gguf", build([], [row], rows.tobytes(), order=corpus.BIG))
    table = open_gguf(path)
    assert_equals_reader(path, table)
    if name in ("Q4_0", "Q8_0"):
        assert table.read("a")[0, :3].tolist() == rows[0, [1, 0, 2]].tolist()


def test_bytes_of_a_big_endian_file_have_no_coding(tmp_path):
    write_all(tmp_path / "m.gguf", GGUFEndian.BIG, 32)
    entries = open_gguf(tmp_path / "m.gguf").entries
    assert entries["t.int8"].coding is None
    content = build([], [corpus.info("a", [32], 39, order=corpus.BIG)], bytes(17), order=corpus.BIG)
    assert open_gguf(write(tmp_path / "q.gguf", content)).entries["a"].coding is None
    assert entries["t.int32"].coding == Strided((12, 4, 1), swap=True)


@pytest.mark.parametrize("order", [corpus.LITTLE, corpus.BIG], ids=["little", "big"])
def test_parts_of_tensors_equal_the_slices(order, tmp_path):
    rng = np.random.default_rng(6)
    shapes = {
        "a": (0, [600 * 32, 70]),
        "b": (8, [600 * 32, 70]),
        "c": (3, [96, 5, 4]),
        "d": (26, [9]),
    }
    rows, data = [], b""
    for name, (kind, dims) in shapes.items():
        rows.append(corpus.info(name, dims, kind, len(data), order=order))
        size = np.prod(dims) // GGML_TYPES[kind].elements * GGML_TYPES[kind].nbytes
        data += rng.integers(0, 60, size, np.uint8).tobytes() + bytes(-size % 32)
    content = build([], rows, data, order=order)
    with open_gguf(write(tmp_path / "m.gguf", content)) as table:
        assert_equals_reader(tmp_path / "m.gguf", table)
        for name, whole in table.read_many().items():
            for _ in range(20):
                box = tuple(tuple(sorted(rng.integers(0, n + 1, 2).tolist())) for n in whole.shape)
                wanted = whole[tuple(slice(*span) for span in box)]
                memory = aligned_empty(wanted.nbytes)
                read_parts(table, [Part(name, box, memory)])
                assert memory.tobytes() == wanted.tobytes()


# --- sets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(GGUFEndian), ids=lambda order: order.name)
@pytest.mark.parametrize("first_is_empty", [False, True])
def test_a_set_is_opened_by_any_of_its_parts(order, first_is_empty, tmp_path):
    options = {"split_max_tensors": 3, "small_first_shard": first_is_empty}
    wanted = write_all(tmp_path / "m.gguf", order, 32, **options)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) == 3 + first_is_empty
    for opened in paths:
        with open_gguf(opened) as table:
            assert [file.path for file in table.files] == [str(path) for path in paths]
            read = table.read_many()
            assert list(read) == list(wanted)
            for number, path in enumerate(paths):
                assert_equals_reader(path, table, number)
        for name, array in wanted.items():
            np.testing.assert_array_equal(read[name], array, strict=True)
        assert table.metadata["split.no"] == 0


def test_parts_of_a_set_may_be_links_to_other_names(tmp_path):
    """So the Hugging Face cache has them."""
    good = SPLITS[1].build(tmp_path)
    write(tmp_path / "m-00002-of-00003.gguf", corpus.part(1, 3, 4, "b", "c"))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(tmp_path.glob("*.gguf"))):
        path.rename(tmp_path / f"blob{number}")
        (snapshot / path.name).symlink_to(tmp_path / f"blob{number}")
    with open_gguf(snapshot / good.name) as table:
        assert [(n, e.file) for n, e in table.entries.items()] == list(
            zip("abcd", (0, 1, 1, 2), strict=True)
        )
        assert table.read("d").tolist() == [2.0 + i for i in range(8)]


def test_an_unfinished_download_of_a_part_is_named(tmp_path):
    path = SPLITS[1].build(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf.incomplete").touch()
    with pytest.raises(CheckpointError, match="not complete: download it again"):
        open_gguf(path)


def test_one_part_of_one_is_a_whole_model(tmp_path):
    content = build([*PAIRS, *corpus.split_pairs(0, 1, 2)], INFOS, corpus.D64)
    with open_gguf(write(tmp_path / "any name.gguf", content)) as table:
        assert list(table.entries) == ["a", "b"]


# --- limits ------------------------------------------------------------------------------------

DEEP = corpus.pair("x.n", corpus.ARRAY, corpus.nested(3))
STRINGS = corpus.pair("x.s", corpus.ARRAY, corpus.array(corpus.STRING, 5, 5 * corpus.text("x")))
ALIGN_64 = corpus.pair("general.alignment", corpus.U32, corpus.number(corpus.U32, 64))


@pytest.mark.parametrize(
    ("option", "content", "enough"),
    [
        ("header_bytes", corpus.GOOD, corpus.END),
        ("tensors", corpus.GOOD, 2),
        ("tensor_bytes", corpus.GOOD, 32),
        ("metadata_keys", corpus.GOOD, 2),
        ("array_depth", build([DEEP], INFOS, corpus.D64), 3),
        ("array_items", build([STRINGS], INFOS, corpus.D64), 5),
        ("alignment_bytes", build([ALIGN_64], INFOS[:1], corpus.D32, align=64), 64),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_limits_can_be_raised(option, content, enough, tmp_path):
    if not hasattr(Limits(), option):
        pytest.skip("not a field of Limits")
    path = write(tmp_path / "m.gguf", content)
    assert open_gguf(path, limits=Limits(**{option: enough})).entries
    with pytest.raises(CheckpointLimitError, match=rf"limits=maxjax.Limits\({option}=") as caught:
        open_gguf(path, limits=Limits(**{option: enough - 1}))
    assert caught.value.found == enough


# --- types ---------------------------------------------------------------------------------


def test_types_are_those_of_the_package():
    known = {t.number: (t.name, t.elements, t.nbytes) for t in GGML_TYPES.values()}
    theirs = {int(t): (t.name, *sizes) for t, sizes in gguf.GGML_QUANT_SIZES.items()}
    # Two float16 since March 2024; the package still counts two float32.
    assert theirs.pop(9) == ("Q8_1", 32, 40) and known.pop(9) == ("Q8_1", 32, 36)
    assert theirs.items() <= known.items()
    assert {known[number][0] for number in known.keys() - theirs.keys()} <= {"Q2_0"}
    assert not REMOVED.keys() & GGML_TYPES.keys()
    assert all(
        kind.dtype is None or kind.dtype.np.itemsize == kind.nbytes for kind in GGML_TYPES.values()
    )
    assert set(KEPT) <= GGML_TYPES_BY_NAME.keys()


# --- damage ----------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    return [
        corpus.GOOD,
        corpus.BIG_FILE,
        build(corpus.every_pair(), INFOS, corpus.D64),
        build([], [corpus.info("a", [64], 8), corpus.info("b", [4, 2], 1, 96)],
              corpus.Q8 + corpus.Q8 + bytes(28) + corpus.HALVES),
        build([DEEP, STRINGS, ALIGN_64], INFOS[:1], corpus.D32, align=64),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_damaged_files_are_refused_cleanly_or_read_as_the_package_does(seed, tmp_path):
    content = seeds()[seed]
    path, accepted, compared = tmp_path / "m.gguf", 0, 0
    for number, damaged in enumerate(mutations(content, MUTATIONS // 5, seed)):
        write(path, damaged)
        try:
            with open_gguf(path) as table:
                table.read_many()
                accepted += 1
                compared += equals_reader_where_it_reads(path, table)
        except CheckpointError as error:
            assert str(path) in str(error), (number, damaged)
        except AssertionError as error:
            raise AssertionError(number, damaged) from error
        path.unlink()  # the package maps the file, and may still do
    assert 0.02 * MUTATIONS / 5 < accepted < 0.8 * MUTATIONS / 5
    assert compared > 0.8 * accepted


def equals_reader_where_it_reads(path: Path, table: TensorTable) -> bool:
    # Another size of block; no decoding.
    if {getattr(e.coding, "type_name", "") for e in table.entries.values()} & {"Q8_1", "Q8_K"}:
        return False
    try:
        GGUFReader(path)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError):
        return False
    assert_equals_reader(path, table)
    return True


LISTED = """
ok_basic ok_v2 ok_align_64 ok_align_8 ok_no_tail_padding ok_empty ok_all_kv ok_q8_0 ok_q4_0
ok_f16 ok_q8_nan_scale ok_zero_dim ok_trailing empty_file magic_bad magic_ggml version_0
version_1 version_4 version_4294967295 big_endian_v3 trunc_at_3 trunc_at_6 trunc_at_20
trunc_at_24 trunc_in_kv trunc_in_ti trunc_before_data trunc_data_1 trunc_data_half
n_tensors_2e64 n_kv_2e64 n_tensors_2e63 n_kv_2e63 n_tensors_2e32 n_kv_2e32 n_tensors_plus1
n_kv_plus1 n_kv_bomb_zeros n_tensors_bomb_zeros key_len_2e63 key_len_2e64 key_len_1gb key_empty
key_70000 key_bad_utf8 key_dup val_type_13 val_type_max val_bool_2 val_str_past_eof val_str_2e63
val_str_bad_utf8 arr_len_2e63_u8 arr_len_2e62_u32 arr_len_2e63_str arr_len_2e40_str_zeros
arr_len_past_eof arr_type_13 arr_nested arr_nested_50000 align_0 align_3 align_13 align_2e31
align_type_u64 align_type_str name_empty name_dup name_long name_nul name_bad_utf8 name_len_2e63
ndims_5 ndims_2e32 ndims_1e6 ndims_0 dim_negative dim_wrap_8 dim_wrap_to_fit dim_wrap_8_exact
dim_bytes_wrap dim_1tb dim_too_many type_4 type_5 type_31 type_99 type_2147483648
type_4294967295 q8_row_33 q4_row_16x2 q4k_row_128 q8_short off_past_eof off_2e64 off_2e63
off_misaligned off_overlap off_partial_overlap off_hole off_order split_alone is_safetensors
is_lfs_pointer
"""
