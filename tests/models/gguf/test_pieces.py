"""Tensors made of rows, of columns or of all of other tensors; packed ones keep their blocks where they can."""

import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.errors import CheckpointFormatError
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.graph.weights import WeightData
from maxjax.models.gguf.metadata import settings
from maxjax.models.gguf.pieces import columns, computed, rows
from maxjax.models.gguf.sources import read_box
from maxjax.models.gguf.table import GGUF_TABLES
from maxjax.storage.blocks import decode, encode

RNG = np.random.default_rng(0)


def packed(shape, kind="Q8_0"):
    """A quantised tensor, and its values."""
    blocks = encode(kind, RNG.normal(0, 1, shape).astype(np.float32))
    data = WeightData(blocks, "packed", DType.uint8, blocks.shape, QuantizationEncoding(kind))
    return data, decode(kind, blocks)


def values(data):
    """The values of a tensor, and whether it is packed."""
    box = tuple((0, int(n)) for n in data.shape)
    array, _ = read_box(data, box)
    kind = data.quantization_encoding
    return (decode(kind.value, array) if kind else array), kind is not None


def test_rows_of_packed_tensors_stay_packed():
    (a, x), (b, y) = packed((6, 64)), packed((3, 64))
    order = RNG.permutation(9)
    found, is_packed = values(rows("new", [a, b], order))
    assert is_packed
    np.testing.assert_array_equal(found, np.concatenate([x, y])[order])
    other, z = packed((3, 64), "Q4_0")
    found, is_packed = values(rows("new", [a, other], order[:4]))
    assert not is_packed
    np.testing.assert_array_equal(found, np.concatenate([x, z])[order[:4]])
    part = rows("new", [a, b], order)
    np.testing.assert_array_equal(
        read_box(part, ((2, 5), (0, 34)))[0],
        np.concatenate([a.data, b.data])[order][2:5, :34],
    )
    for wrong in ([a, packed((3, 32))[0]], [a]):
        with pytest.raises(CheckpointFormatError, match="do not fit together"):
            rows("new", wrong, order)


def test_columns_of_packed_tensors_stay_packed_if_blocks_fit_in_heads():
    order = np.array([2, 0, 1])
    for width, stays in ((64, True), (32, True), (16, False)):
        data, x = packed((4, 3 * width)) if width > 16 else packed((4, 96))
        heads = order if width > 16 else np.array([2, 0, 1, 5, 4, 3])
        found, is_packed = values(columns("new", data, heads, width))
        assert is_packed is stays
        np.testing.assert_array_equal(
            found, x.reshape(4, -1, width)[:, heads].reshape(x.shape), err_msg=str(width)
        )
    with pytest.raises(CheckpointFormatError, match="not a matrix for the heads"):
        columns("new", data, order, 32 + 1)


def test_computed_is_read_in_pieces():
    data, x = packed((6, 64))
    whole = computed("new", [data], lambda a: a.T.copy(), (64, 6))
    for first in range(0, 64, 16):
        found, _ = read_box(whole, ((first, first + 16), (0, 6)))
        np.testing.assert_array_equal(found, x.T[first : first + 16])


def test_layers_that_predict_further_tokens_are_left_out_of_qwen_3_5():
    given = settings(
        {
            "general.architecture": "qwen35", "qwen35.block_count": 2, "qwen35.nextn_predict_layers": 1,
            "qwen35.ssm.inner_size": 8, "qwen35.ssm.time_step_rank": 4, "qwen35.ssm.group_count": 2,
            "qwen35.ssm.state_size": 2,
        }
    )  # fmt: skip
    names = [f"model.layers.{i}.input_layernorm.weight" for i in range(2)] + ["model.norm.weight"]
    tensors = {name: WeightData.from_numpy(np.zeros(2, np.float32), name) for name in names}
    assert list(GGUF_TABLES["qwen35"].join(given, tensors)) == [names[0], names[2]]
    bad = settings(given.metadata | {"qwen35.ssm.time_step_rank": 3})
    with pytest.raises(CheckpointFormatError, match="inner_size"):
        GGUF_TABLES["qwen35"].join(bad, tensors)
