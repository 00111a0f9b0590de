"""safetensors files as safetensors writes them, byte for byte; sets as transformers makes them."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st

from maxjax.dtype import DType
from maxjax.errors import CheckpointMismatchError, UserInputError
from maxjax.storage import open_checkpoint
from maxjax.storage.safetensors.writer import (
    file_pieces,
    header,
    in_order,
    index,
    shards,
    size_in_bytes,
)
from maxjax.storage.save.outgoing import Outgoing, outgoing

RNG = np.random.default_rng(5)
# Types that the safetensors package has under the same names, which are torch's; their bytes are any.
KINDS = [DType[name] for name in (
    "float64", "float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool",
)]  # fmt: skip


def values(dtype, shape=(2, 3)):
    top = 2 if dtype is DType.bool else 256
    raw = RNG.integers(0, top, (*shape, dtype.np.itemsize)).astype(np.uint8)
    return raw.view(dtype.np).reshape(shape)


def written(arrays, metadata=None, ordered=True):
    tensors = [outgoing(name, array) for name, array in arrays.items()]
    tensors = in_order(tensors) if ordered else tensors
    return b"".join(map(bytes, file_pieces(tensors, metadata)))


def oracle(arrays, metadata=None):
    """The package's own file, whose writer is the same for torch and for NumPy."""
    return safetensors.numpy.save(arrays, metadata)


# -- one file


def test_all_types_are_tested():
    written_types = {kind.name for kind in DType if kind.safetensors} - {"float4_e2m1fn"}
    assert written_types - {kind.name for kind in KINDS} == {"float6_e2m3fn", "float6_e3m2fn"}


@pytest.mark.parametrize("dtype", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_the_bytes_of_each_type(dtype, shape):
    arrays = {"w": values(dtype, shape), "b": values(dtype, (3,))}
    assert written(arrays) == oracle(arrays)


def test_all_types_in_one_file():
    arrays = {f"{kind.name}.{i}": values(kind, (i,)) for kind in KINDS for i in range(3)}
    assert written(arrays) == oracle(arrays)
    backwards = dict(reversed(arrays.items()))
    assert written(backwards) == written(arrays)


def test_four_bits():
    codes = RNG.integers(0, 16, (3, 8)).astype(np.uint8)
    array = codes.view(ml_dtypes.float4_e2m1fn)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    both = {"w": ("float4_e2m1fn_x2", packed)}  # as torch has them
    assert written({"w": array}) == serialized(both)
    tensors = {
        "w": array,
        "b": values(DType.bool),
        "i": values(DType.int8),
        "f": values(DType.float32),
    }
    theirs = both | {k: (v.dtype.name, v) for k, v in tensors.items() if k != "w"}
    assert written(tensors) == serialized(theirs)


def serialized(tensors):
    """The package's file of arrays whose types it is told."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, (dtype, array) in tensors.items()
    }
    return bytes(safetensors.serialize(specs))


@pytest.mark.parametrize(
    "names",
    [
        ["a.weight", "a.bias", "A", "_"],
        ["ä", "日本", "😀", "é", "e\u0301"],
        ['quote"', "back\\slash", "new\nline", "tab\t", "\x01\x1f\x7f", "\u2028\u2029", "/slash"],
        ["", " ", "  "],
        [f"layers.{i}.w" for i in range(12)],
        ["a" * 1000, "b" * 7],
    ],
)
def test_names(names):
    arrays = {name: values(DType.float32, (2,)) for name in names}
    assert written(arrays) == oracle(arrays)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"ключ": 'a "b"\n', "": "\\"}])
def test_metadata(metadata):
    arrays = {"w": values(DType.int16)}
    ours, theirs = written(arrays, metadata), oracle(arrays, metadata)
    if metadata:
        assert len(ours) == len(theirs) and sorted(ours) == sorted(theirs)  # any order of two keys
        assert json.loads(ours[8 : ours.index(b"}}")] + b"}}")["__metadata__"] == metadata
    if metadata is None or len(metadata) == 1:
        assert ours == theirs


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=4)),
        max_size=8,
    )
)
def test_any_file(tensors):
    tensors.pop("__metadata__", None)
    arrays = {name: values(kind, tuple(shape)) for name, (kind, shape) in tensors.items()}
    assert written(arrays) == oracle(arrays)


def test_a_file_without_tensors():
    assert written({}) == oracle({})


def test_it_is_aligned_and_read_back(tmp_path):
    arrays = {kind.name: values(kind, (3, 5)) for kind in KINDS}
    (tmp_path / "m.safetensors").write_bytes(written(arrays))
    with open_checkpoint(tmp_path / "m.safetensors") as table:
        for name, entry in table.entries.items():
            assert entry.offset % entry.dtype.np.itemsize == 0
            np.testing.assert_array_equal(
                table.read(name).view(np.uint8), arrays[name].view(np.uint8)
            )


def test_an_order_that_is_given_is_kept(tmp_path):
    arrays = {"z": values(DType.int8), "a": values(DType.float64)}
    data = written(arrays, ordered=False)
    assert data.index(b'"z"') < data.index(b'"a"')
    found = safetensors.numpy.load(data)
    assert all((found[name] == arrays[name]).all() for name in arrays)


def test_blocks_say_what_they_are(tmp_path):
    blocks = values(DType.uint8, (2, 144))
    tensors = [outgoing("q", blocks, "Q4_K"), outgoing("w", values(DType.float32))]
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"".join(map(bytes, file_pieces(tensors, {"format": "pt"}))))
    with open_checkpoint(path) as table:
        assert table.entries["q"].encoding == "Q4_K" and table.entries["w"].encoding is None
        np.testing.assert_array_equal(table.read("q"), blocks)
    np.testing.assert_array_equal(safetensors.numpy.load_file(path)["q"], blocks)


def test_what_cannot_be_written():
    twice = [outgoing("w", values(DType.int8)), outgoing("w", values(DType.int8))]
    with pytest.raises(CheckpointMismatchError, match="'w'.*two tensors"):
        header(twice)
    with pytest.raises(CheckpointMismatchError, match="__metadata__"):
        header([outgoing("__metadata__", values(DType.int8))])
    six = outgoing("six", np.zeros(4, ml_dtypes.float6_e2m3fn))
    for function in (header, in_order):
        with pytest.raises(CheckpointMismatchError, match="'six'.*float6_e2m3fn"):
            function([six])
    odd = outgoing("odd", np.zeros((3, 3), ml_dtypes.float4_e2m1fn))
    with pytest.raises(CheckpointMismatchError, match="'odd'.*even.*9"):
        header([odd])


# -- sets of files


def fake(name, nbytes):
    """A tensor of which only the size matters."""
    return Outgoing(name, DType.uint8, (nbytes,), lambda: iter(()))


def split(tensors, limit):
    """What huggingface_hub makes of them: files → names, and the index."""
    return split_state_dict_into_shards_factory(
        {one.name: one.shape[0] for one in tensors},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )


@given(st.lists(st.integers(0, 120), min_size=1, max_size=30), st.integers(1, 300))
def test_shards_are_those_of_hugging_face(sizes, limit):
    tensors = [fake(f"t{i}", size) for i, size in enumerate(sizes)]
    theirs = split(tensors, limit)
    ours = shards(tensors, limit)
    found = {shard.name: sorted(one.name for one in shard.tensors) for shard in ours}
    assert found == {name: sorted(of) for name, of in theirs.filename_to_tensors.items()}
    if theirs.is_sharded:
        document = json.loads(index(ours))
        assert document["weight_map"] == theirs.tensor_to_filename
        assert document["metadata"]["total_size"] == theirs.metadata["total_size"] == sum(sizes)


def test_an_index_is_as_transformers_writes_it(tmp_path):
    tensors = [outgoing(name, values(DType.float32, (7, 3))) for name in ("b", "a", "c")]
    text = index(shards(tensors, 84)).decode()
    document = json.loads(text)
    assert text == json.dumps(document, indent=2, sort_keys=True) + "\n"
    assert document["metadata"] == {"total_parameters": 63, "total_size": 252}
    assert list(document["weight_map"]) == ["a", "b", "c"]


def test_names_that_are_taken():
    tensors = [fake(name, 3) for name in "abc"]
    first = [shard.name for shard in shards(tensors, 3)]
    second = [shard.name for shard in shards(tensors, 3, taken=first)]
    third = [shard.name for shard in shards(tensors, 3, taken=first[:1] + second[2:])]
    assert len({*first, *second, *third}) == 9
    assert all(
        re.fullmatch(r"model(-\d)?-0000[123]-of-00003\.safetensors", n) for n in first + second
    )
    with_other_count = shards(tensors, 6, taken=first)
    assert [shard.name for shard in with_other_count] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip


def test_order_within_a_file():
    tensors = [outgoing("b", values(DType.int8)), outgoing("a", values(DType.float32))]
    (ordered,) = shards(tensors, 1000)
    (given_,) = shards(tensors, 1000, as_given=True)
    assert [one.name for one in ordered.tensors] == ["a", "b"]
    assert [one.name for one in given_.tensors] == ["b", "a"]
    assert ordered.name == given_.name == "model.safetensors" and ordered.nbytes == 30


@pytest.mark.parametrize(
    "size, wanted",
    [
        (1, 1), (5_000_000_000, 5 * 10**9), ("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("200KB", 200_000),
        ("1MiB", 1 << 20), ("2GiB", 2 << 30), ("1.5TB", 1.5 * 10**12), ("17", 17), ("17B", 17),
    ],
)  # fmt: skip
def test_sizes(size, wanted):
    assert size_in_bytes(size) == wanted


@pytest.mark.parametrize(
    "size",
    [
        0,
        -1,
        "",
        "GB",
        "5XB",
        "5 G B",
        "-5GB",
        "1e9",
        True,
        None,
        "0GB",
        "0.5B",
        "nan",
        "5GB5",
        "9" * 400,
    ],
)
def test_what_is_no_size(size):
    with pytest.raises(UserInputError, match="is not a size"):
        size_in_bytes(size)
