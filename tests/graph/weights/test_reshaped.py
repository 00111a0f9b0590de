"""Tensors of files that are read in another shape."""

import numpy as np
import pytest

from maxjax.graph.weights import reshaped as module
from maxjax.graph.weights.reshaped import ReshapedSource, in_file
from maxjax.graph.weights.weight_data import PartSource
from maxjax.storage.boxes import count, extents, within
from maxjax.storage.parts import Part


class ArraySource(PartSource):
    """A DataSource of one array, which counts what is read."""

    def __init__(self, array):
        self.array, self.read_bytes = array, 0

    def dtype_and_shape(self, name):
        return self.array.dtype, self.array.shape

    def read_parts(self, parts):
        for part in parts:
            into = part.memory.view(self.array.dtype).reshape(extents(part.region))
            into[...] = self.array[within(part.region, tuple((0, n) for n in self.array.shape))]
            self.read_bytes += part.memory.nbytes
        return sum(part.memory.nbytes for part in parts)


def read(source, boxes):
    parts = [Part("w", box, np.zeros(4 * count(box), np.uint8)) for box in boxes]
    source.read_parts(parts)
    return [part.memory.view(np.float32).reshape(extents(part.region)) for part in parts]


@pytest.mark.parametrize("most", [24, 64, 1 << 20])
def test_boxes_of_another_shape(most, monkeypatch):
    monkeypatch.setattr(module, "_READ_BYTES", most)
    values = np.arange(60, dtype=np.float32)
    for own, shape in (
        ((60, 1), (10, 6)),
        ((10, 6), (60, 1)),
        ((60,), (5, 4, 3)),
        ((6, 10), (10, 6)),
    ):
        inner = ArraySource(values.reshape(own))
        source = ReshapedSource(inner, "w", shape)
        assert source.dtype_and_shape("w") == (np.float32, shape)
        whole = tuple((0, n) for n in shape)
        boxes = [whole, ((2, 4), *whole[1:]), ((1, 5), (0, 1), *whole[2:]), ((3, 3), *whole[1:])]
        boxes += [((0, 5), (n // 2, n), *whole[2:]) for n in shape[1:2]]
        for box, found in zip(boxes, read(source, boxes), strict=True):
            np.testing.assert_array_equal(found, values.reshape(shape)[within(box, whole)])
        np.testing.assert_array_equal(source.read("w"), values.reshape(shape))


def test_columns_of_several_devices_are_read_once():
    inner = ArraySource(np.arange(60, dtype=np.float32).reshape(60, 1))
    source = ReshapedSource(inner, "w", (10, 6))
    left, right = read(source, [((0, 10), (0, 3)), ((0, 10), (3, 6))])
    np.testing.assert_array_equal(np.hstack([left, right]).reshape(-1), np.arange(60))
    assert inner.read_bytes == 60 * 4


def test_complete_rows_are_read_from_the_file_itself():
    inner = ArraySource(np.zeros((60, 1), np.float32))
    source, memory = ReshapedSource(inner, "w", (10, 6)), np.zeros(48, np.uint8)
    found, part = in_file(source, Part("w", ((2, 4), (0, 6)), memory))
    assert found is inner and part.region == ((12, 24), (0, 1)) and part.memory is memory
    given = Part("w", ((2, 4), (0, 3)), memory)
    assert in_file(source, given) == (source, given) and in_file(inner, given) == (inner, given)
