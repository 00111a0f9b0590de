"""What the first of several processes tells the others comes as it was, and small where arrays are equal numbers."""

import jax
import numpy as np
import pytest

from maxjax.engine.batching.messages import decoded, encoded
from maxjax.engine.batching.programs import TextRows
from maxjax.engine.sampling.sequences import Sequences
from maxjax.lockstep import Broadcast


def rows(count, vocab_size=50):
    return TextRows.of([None] * count, 8, count, vocab_size=vocab_size, has_masks=True)


@pytest.mark.parametrize(
    "value",
    [
        ["run", None, 3, -2.5, "text", True, []],
        [np.int32(7), np.bool_(True), np.arange(6, dtype=np.int32).reshape(2, 3)],
        [np.zeros((0, 4), np.float32), np.full((3, 2), -np.inf, np.float32), np.ones(1, bool)],
        [np.asarray([np.nan, np.nan], np.float32), np.arange(12)[::3]],
        [rows(3), [np.zeros(3, np.int32)], None],
        [Sequences.of([((5, 6), -1.0)], [(3,), (1, 2, 3)], 8), "after"],
    ],
)
def test_values_come_as_they_were(value):
    found = decoded(encoded(tuple(value)))
    assert jax.tree.structure(found) == jax.tree.structure(value)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(value), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype and np.shape(one) == np.shape(other)


def test_masks_that_allow_everything_are_small():
    every = rows(64, 128_000)
    assert every.allowed.nbytes > 1e6 and len(encoded(every)) < 3000


def test_others_are_refused():
    with pytest.raises(TypeError):
        encoded([object()])


def test_one_process_tells_nobody():
    with Broadcast("Engine", [jax.devices()[0]]) as together:
        assert not together.is_shared and together.decide({"steps": 3}) == {"steps": 3}
        together.check()
        assert together.fetch({"a": jax.numpy.arange(2)})["a"].tolist() == [0, 1]
    together.close()
