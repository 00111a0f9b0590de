"""Texts laid end to end in rows: every text once, few shapes, little padding."""

import numpy as np
import pytest

from maxjax.engine.packing import (
    LONGEST,
    PackedBatch,
    packed_batches,
    packed_tokens,
    places,
)
from maxjax.text.tokenizer.tokenizer import Encoding

LIMITS = [1, 10, 64, 100, 256, 512]


def texts_of(lengths):
    ids = iter(range(1, 1 + sum(lengths)))
    return [Encoding([next(ids) for _ in range(n)], [n % 2] * n) for n in lengths]


@pytest.mark.parametrize("batch_size", [1, 3, 32, 100])
@pytest.mark.parametrize("limit", LIMITS)
def test_every_text_is_in_one_row_of_few_shapes(batch_size, limit):
    lengths = np.random.default_rng(0).integers(0, min(limit, LONGEST) + 1, 1000).tolist()
    found = packed_batches(lengths, batch_size, limit)
    assert sorted(i for batch in found for row in batch.rows for i in row) == list(range(1000))
    for batch in found:
        assert 1 <= len(batch.rows) <= batch.count <= batch_size
        assert batch.length <= limit and batch.count * batch.length <= max(64 * batch_size, limit)
        for row in batch.rows:
            assert 1 <= len(row) <= places(batch.length)
            assert sum(lengths[i] for i in row) <= batch.length
    shapes = {(batch.count, batch.length) for batch in found}
    assert len(shapes) <= 2 * 3  # three lengths, a full and a last batch of each


@pytest.mark.parametrize(
    ("low", "high", "most"), [(3, 64, 1.06), (3, 256, 1.06), (12, 13, 1.09), (40, 41, 1.61)]
)
def test_little_is_padding(low, high, most):
    lengths = np.random.default_rng(1).integers(low, high, 4096).tolist()
    padded = sum(batch.count * batch.length for batch in packed_batches(lengths, 32, 512))
    assert padded <= most * sum(lengths)


def test_the_order_of_texts_of_other_lengths_changes_no_shape():
    lengths = list(range(1, 200))
    shape = lambda found: [(batch.count, batch.length) for batch in found]
    assert shape(packed_batches(lengths, 8, 512)) == shape(packed_batches(lengths[::-1], 8, 512))


def test_one_short_text_is_a_short_row():
    assert packed_batches([5], 32, 512) == [PackedBatch([[0]], 1, 16)]
    assert packed_batches([5], 32, 10) == [PackedBatch([[0]], 1, 10)]
    assert packed_batches([17, 3], 32, 512) == [PackedBatch([[0, 1]], 1, 32)]
    assert packed_batches([], 32, 512) == []


def test_a_text_without_tokens_has_a_place():
    found = packed_batches([0, 3, 0], 32, 512)
    assert found == [PackedBatch([[1, 0, 2]], 1, 32)]


def test_tokens_lie_where_the_batch_says():
    lengths = [7, 0, 30, 64, 3, 22]
    texts = texts_of(lengths)
    [batch] = packed_batches(lengths, 32, 64)
    ids, types, positions, numbers = packed_tokens(texts, batch, pad_id=99)
    assert ids.shape == (batch.count, 64)
    assert all(array.dtype == np.int32 for array in (ids, types, positions, numbers))
    for i, row in enumerate(batch.rows):
        for k, member in enumerate(row, 1):
            n = lengths[member]
            at = numbers[i] == k
            assert ids[i][at].tolist() == texts[member].ids
            assert types[i][at].tolist() == texts[member].type_ids
            assert positions[i][at].tolist() == list(range(n))
    assert (ids[numbers == 0] == 99).all() and (numbers > 0).sum() == sum(lengths)
