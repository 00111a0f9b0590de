"""The GGUF writer against gguf's own, byte for byte, and against both readers."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.dtype import DType
from maxjax.errors import UserInputError
from maxjax.storage.gguf.reader import open_gguf
from maxjax.storage.gguf.types import GGML_TYPES_BY_NAME
from maxjax.storage.gguf.writer import plan_gguf
from maxjax.storage.save.outgoing import Outgoing, outgoing
from tests.properties import examples

gguf = pytest.importorskip("gguf")

PLAIN = [np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64]
RNG = np.random.default_rng(5)
ARRAYS = {
    **{f"plain.{np.dtype(t).name}": RNG.integers(-9, 9, (3, 5)).astype(t) for t in PLAIN},
    "one": np.arange(7, dtype=np.float32),
    "four": RNG.standard_normal((2, 3, 4, 5)).astype(np.float16),
    "empty": np.zeros((0, 4), np.float32),
}
METADATA = {
    "general.architecture": "llama",
    "text": "ü 漢 🙂",
    "u32": 7, "top": 2**32 - 1, "negative": -3, "large": 2**40, "largest": 2**64 - 1, "low": -(2**63),
    "float": 1e-5, "yes": True, "no": False,
    "u8": np.uint8(3), "i8": np.int8(-3), "u16": np.uint16(9), "i16": np.int16(-9),
    "i64": np.int64(5), "u64": np.uint64(5), "f64": np.float64(0.1), "f32": np.float32(0.1),
    "strings": ["a", "", "é"], "ints": [1, -2, 3], "floats": [0.5, 1.0], "bools": [True, False],
    "array": np.arange(4, dtype=np.float32), "types": np.array([1, 3], np.int32),
    "nested": [[1, 2], [3]],
}  # fmt: skip


def content(metadata, tensors) -> bytes:
    plan = plan_gguf(metadata, tensors)
    made = b"".join(bytes(piece) for piece in plan.pieces())
    assert plan.nbytes == len(made)
    return made


def written(path, metadata, tensors=()):
    path.write_bytes(content(metadata, tensors))
    return path


def by_gguf(path, arrays, packed=()):
    """The same file as gguf's writer makes it."""
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGUFValueType
    for key, value in METADATA.items():
        if isinstance(value, list) or isinstance(value, np.ndarray):
            values = value.tolist() if isinstance(value, np.ndarray) else value
            writer.add_array(key, values)
        elif isinstance(value, np.generic):
            name = {"u": "UINT", "i": "INT", "f": "FLOAT"}[value.dtype.kind]
            kind = kinds[f"{name}{8 * value.dtype.itemsize}"]
            writer.add_key_value(key, value.item(), kind)
        elif key in ("negative", "large", "largest", "low"):
            kind = {"negative": kinds.INT32, "large": kinds.INT64, "low": kinds.INT64}
            writer.add_key_value(key, value, kind.get(key, kinds.UINT64))
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif key != "general.architecture":  # which it adds by itself
            writer.add_string(key, value)
    for name, array in arrays.items():
        if array.dtype == ml_dtypes.bfloat16:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, array.view(np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    for name, array, kind in packed:
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def blocks(kind, rows=3, count=2):
    return RNG.integers(0, 60, (rows, count * GGML_TYPES_BY_NAME[kind].nbytes), np.uint8)


def test_bytes_are_those_of_ggufs_writer(tmp_path):
    arrays = {**ARRAYS, "bf16": RNG.standard_normal((4, 6)).astype(ml_dtypes.bfloat16)}
    packed = [(f"packed.{k}", blocks(k), k) for k in ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS")]
    tensors = [outgoing(name, array) for name, array in arrays.items()]
    tensors += [outgoing(name, array, kind) for name, array, kind in packed]
    assert content(METADATA, tensors) == by_gguf(tmp_path / "m.gguf", arrays, packed)


def test_ours_reads_what_was_written(tmp_path):
    kinds = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
    packed = {f"packed.{kind}": blocks(kind) for kind in kinds}
    tensors = [outgoing(name, array) for name, array in ARRAYS.items()]
    tensors += [outgoing(n, array, n.removeprefix("packed.")) for n, array in packed.items()]
    with open_gguf(written(tmp_path / "m.gguf", METADATA, tensors)) as table:
        assert list(table.entries) == [*ARRAYS, *packed]
        for name, array in {**ARRAYS, **packed}.items():
            found = table.read(name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found, array)
        for name in packed:
            assert table.entries[name].encoding == name.removeprefix("packed.")
        for key, value in METADATA.items():
            there = table.metadata[key]
            if key == "nested":
                assert [item.tolist() for item in there] == value
            elif isinstance(value, np.ndarray):
                assert there.dtype == value.dtype
                np.testing.assert_array_equal(there, value)
            elif key == "float":
                assert there == np.float32(value)
            else:
                listed = there.tolist() if isinstance(there, np.ndarray) else there
                assert listed == value


VALUES = (
    st.text(max_size=9)
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(width=32, allow_nan=False)
)
LISTS = (
    st.lists(st.text(max_size=4))
    | st.lists(st.booleans(), min_size=1)
    | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1)
    | st.lists(st.floats(width=32, allow_nan=False), min_size=1)
    | st.lists(st.lists(st.text(max_size=2)), min_size=1)
)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9)


@examples(60)
@given(st.dictionaries(KEYS.filter(lambda k: k != "general.alignment"), VALUES | LISTS, max_size=5))
def test_metadata_comes_back_as_it_was(tmp_path_factory, metadata):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    with open_gguf(written(path, metadata)) as table:
        found = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in table.metadata.items()
        }
    assert found == metadata
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in metadata.items()}


def test_text_that_is_not_utf8_comes_back(tmp_path):
    metadata = {"k": b"\xff\xfea".decode("utf-8", "surrogateescape")}
    with open_gguf(written(tmp_path / "m.gguf", metadata)) as table:
        assert table.metadata == metadata


@pytest.mark.parametrize("alignment", [1, 8, np.int64(64), np.uint32(4096)])
def test_alignment(tmp_path, alignment):
    tensors = [outgoing("a", np.ones(3, np.int8)), outgoing("b", np.ones(5, np.int8))]
    path = written(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors)
    with open_gguf(path) as table:
        offsets = [entry.offset for entry in table.entries.values()]
        assert all(offset % alignment == 0 for offset in offsets)
        assert offsets[1] - offsets[0] == max(alignment, 3 if alignment == 1 else alignment)
        assert table.read("b").tolist() == [1] * 5


def test_no_tensor_is_asked_before_its_turn():
    asked = []

    def pieces_of(name):
        asked.append(name)
        yield memoryview(bytes(4))

    tensors = [Outgoing(name, DType.int8, (4,), lambda name=name: pieces_of(name)) for name in "ab"]
    pieces = plan_gguf({}, tensors).pieces()
    next(pieces)
    assert asked == []
    next(pieces)
    assert asked == ["a"]
    assert [len(piece) for piece in pieces] == [28, 4, 28] and asked == ["a", "b"]


def test_a_tensor_that_gives_other_bytes_than_it_said():
    short = Outgoing("w", DType.int8, (4,), lambda: iter([memoryview(bytes(3))]))
    with pytest.raises(UserInputError, match="'w' has 3 bytes.*needs 4"):
        list(plan_gguf({}, [short]).pieces())


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (outgoing("w", np.ones(2, np.bool_)), "'w': GGUF cannot store bool"),
        (
            outgoing("w", np.ones(2, ml_dtypes.float8_e4m3fn)),
            "'w': GGUF cannot store float8_e4m3fn",
        ),
        (outgoing("w", np.ones(2, np.uint8)), "'w': GGUF cannot store uint8"),
        (outgoing("w", np.ones((1, 18), np.uint8), "GPTQ"), "no block type 'GPTQ'"),
        (outgoing("w", np.ones((1, 18), np.uint8), "F32"), "no block type 'F32'"),
        (outgoing("w", np.ones((1, 17), np.uint8), "Q4_0"), "complete Q4_0 blocks of 18 bytes"),
        (outgoing("w", np.ones((1, 18), np.int8), "Q4_0"), "complete Q4_0 blocks"),
        (outgoing("w", np.ones((), np.uint8), "Q4_0"), "complete Q4_0 blocks"),
        (outgoing("w", np.ones((1,) * 5, np.int8)), "5 axes"),
        (outgoing("", np.ones(2, np.int8)), "1 to 127 bytes"),
        (outgoing("w" * 128, np.ones(2, np.int8)), "1 to 127 bytes"),
        (outgoing("w\0", np.ones(2, np.int8)), "no NUL"),
        (outgoing("w\ud800", np.ones(2, np.int8)), "not valid Unicode"),
    ],
)
def test_tensors_that_the_format_cannot_hold(tensor, says):
    with pytest.raises(UserInputError, match=says):
        plan_gguf({}, [tensor])


def test_names_stand_once():
    one = outgoing("w", np.ones(2, np.int8))
    with pytest.raises(UserInputError, match="two tensors are named 'w'"):
        plan_gguf({}, [one, one])


@pytest.mark.parametrize(
    "value",
    [None, {"a": 1}, 2**64, -(2**63) - 1, [1, "a"], ["a", 1], [1, True], [[1], 2], 1j, b"bytes",
     np.array(["a"]), np.float16(1), [2**64], [None], [2**63, -1], "\ud800", ["\ud800"]],
)  # fmt: skip
def test_values_that_the_format_cannot_hold(value):
    with pytest.raises(UserInputError, match="metadata key 'the.key'"):
        plan_gguf({"the.key": value}, [])


@pytest.mark.parametrize("key", ["", "a\0b", "k" * 65536, "\udcff"])
def test_keys_that_the_format_cannot_hold(key):
    with pytest.raises(UserInputError, match="metadata key"):
        plan_gguf({key: 1}, [])


@pytest.mark.parametrize("alignment", [0, 3, -8, 1 << 32, True, "8", 8.0])
def test_alignments_that_cannot_be(alignment):
    with pytest.raises(UserInputError, match="power of two"):
        plan_gguf({"general.alignment": alignment}, [])
