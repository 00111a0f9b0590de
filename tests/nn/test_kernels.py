"""MAX's kernels as jnp functions, against NumPy and against their definition on each sequence by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, TensorType, TensorValue
from maxjax.nn import RotaryEmbedding, kernels
from maxjax.nn.kernels import MHAMaskVariant as Mask

RNG = np.random.default_rng(1)
OFFSETS = np.array([0, 3, 3, 8], np.uint32)  # one sequence is empty


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def plain(q, k, v, seen, scale):
    """Attention of one row in NumPy; `seen` is boolean [T, S]."""
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale + np.where(seen, 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def seen_by(variant, queries, keys, window=2):
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    return {
        Mask.NULL_MASK: np.ones((queries, keys), bool), Mask.CAUSAL_MASK: j <= i,
        Mask.SLIDING_WINDOW_CAUSAL_MASK: (j <= i) & (j > i - window),
        Mask.CHUNKED_CAUSAL_MASK: (j <= i) & (j // window == i // window),
    }[variant]  # fmt: skip


VARIANTS = [m for m in Mask if m is not Mask.SLIDING_WINDOW_NONCAUSAL_MASK]


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_of_rows_and_of_ragged_batches(variant):
    q, k, v = draw(2, 5, 4, 8), draw(2, 5, 2, 8), draw(2, 5, 2, 8)
    got = kernels.flash_attention_gpu(q, k, v, variant, 0.3, 2, jnp.array([5, 3], jnp.uint32))
    assert isinstance(got, jax.Array)
    for row, length in ((0, 5), (1, 3)):
        seen = seen_by(variant, 5, 5) & (np.arange(5) < length)
        arrays = [np.asarray(x[row]) for x in (q[:, :length], k, v)]
        want = plain(*arrays, seen[:length], 0.3)
        np.testing.assert_allclose(got[row, :length], want, atol=1e-5)

    q, k, v = draw(8, 4, 8), draw(8, 2, 8), draw(8, 2, 8)
    got = kernels.flash_attention_ragged_gpu(
        *map(TensorValue, (q, k, v)), OFFSETS, 5, variant, 0.3, 2
    )
    assert isinstance(got, TensorValue)
    for start, stop in ((0, 3), (3, 8)):
        seen = seen_by(variant, stop - start, stop - start)
        want = plain(*(np.asarray(x[start:stop]) for x in (q, k, v)), seen, 0.3)
        np.testing.assert_allclose(got.value[start:stop], want, atol=1e-5)


def test_attention_with_an_added_mask():
    q, k, v, seen = (
        draw(1, 3, 2, 4),
        draw(1, 5, 2, 4),
        draw(1, 5, 2, 4),
        seen_by(Mask.CAUSAL_MASK, 3, 5),
    )
    want = plain(*(np.asarray(x[0]) for x in (q, k, v)), seen, 0.5)
    mask = jnp.asarray(np.where(seen, 0, -np.inf), jnp.float32)[None]
    for one in (mask, jnp.broadcast_to(mask[:, None], (1, 2, 3, 5))):
        np.testing.assert_allclose(
            kernels.masked_flash_attention_gpu(q, k, v, one, 0.5)[0], want, atol=1e-5
        )


def test_attention_that_is_refused():
    x = draw(1, 3, 2, 4)
    with pytest.raises(
        ValueError, match="SLIDING_WINDOW_CAUSAL_MASK needs a local_window_size, not -1"
    ):
        kernels.flash_attention_gpu(x, x, x, Mask.SLIDING_WINDOW_CAUSAL_MASK, 0.5)
    with pytest.raises(NotImplementedError, match="SLIDING_WINDOW_NONCAUSAL_MASK"):
        kernels.flash_attention_gpu(x, x, x, Mask.SLIDING_WINDOW_NONCAUSAL_MASK, 0.5, 2)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_is_that_of_the_layer(interleaved):
    rope = RotaryEmbedding(16, 2, 100.0, 16, interleaved=interleaved)
    x, freqs, start = draw(8, 2, 8), rope.freqs_cis, jnp.array([4, 0, 1])
    got = kernels.rope_ragged(x, OFFSETS, start, freqs, interleaved=interleaved)
    first = rope(TensorValue(x[None, :3]), 4).value[0]
    last = rope(TensorValue(x[None, 3:]), 1).value[0]
    np.testing.assert_allclose(got.value, jnp.concatenate([first, last]), atol=1e-6)
    positions = jnp.array([4, 5, 6, 1, 2, 3, 4, 5], jnp.uint32)
    again = kernels.rope_ragged_with_position_ids(x, freqs, positions, interleaved=interleaved)
    np.testing.assert_allclose(again.value, got.value, atol=1e-6)
    wide = jnp.concatenate([draw(8, 2, 4), x], axis=-1)
    part = kernels.rope_ragged(
        wide, OFFSETS, start, freqs, interleaved=interleaved, output_dtype="bfloat16"
    )
    np.testing.assert_allclose(
        part.value, jnp.concatenate([wide[..., :4], got.value], -1), atol=2e-2
    )
    turned = kernels.rope_ragged(
        jnp.roll(wide, -4, -1), OFFSETS, start, freqs, interleaved=interleaved, rope_first=True
    )
    np.testing.assert_allclose(
        turned.value, jnp.concatenate([got.value, wide[..., :4]], -1), atol=1e-6
    )
    turned = kernels.rope_ragged_with_position_ids(
        x, freqs, positions[None], interleaved=interleaved
    )
    np.testing.assert_array_equal(turned.value, again.value)


def test_rope_with_positions_along_axes():
    rope = RotaryEmbedding(16, 2, 100.0, 16)
    x, freqs = draw(8, 2, 8), rope.freqs_cis
    positions = np.random.default_rng(3).integers(0, 16, (3, 8)).astype(np.uint32)
    got = kernels.rope_ragged_with_position_ids(x, freqs, positions, mrope_section=[1, 1, 2])
    each = [kernels.rope_ragged_with_position_ids(x, freqs, one).value for one in positions]
    axes = np.repeat(
        [0, 1, 2, 0], 2
    )  # of each feature: every third pair is of the second and of the third axis
    want = np.stack(each, -1)[..., np.arange(8), axes]
    np.testing.assert_array_equal(got.value, want)
    for wrong, says in (([2, 2], "position_ids"), ([1, 1, 1], "does not add up to the 4 pairs")):
        with pytest.raises(ValueError, match=says):
            kernels.rope_ragged_with_position_ids(x, freqs, positions, mrope_section=wrong)
    with pytest.raises(ValueError, match="need mrope_section"):
        kernels.rope_ragged_with_position_ids(x, freqs, positions)


def test_experts_of_tokens():
    ids = jnp.array([3, 0, 3, 5, 0, 3, 7, 5], jnp.int32)
    order, starts, back, experts, stats = kernels.moe_create_indices(ids, 8)
    assert starts.tolist() == [0, 2, 2, 2, 5, 5, 7, 7, 8] and stats.tolist() == [3, 8]
    assert ids[order].tolist() == sorted(ids.tolist()) and order[back].tolist() == list(range(8))
    x, weight = draw(8, 4), draw(8, 6, 4)
    got = kernels.grouped_matmul_ragged(x[order], weight, starts, experts, stats)
    np.testing.assert_allclose(
        got[back], np.einsum("ni,noi->no", x, weight[ids]), rtol=1e-4, atol=1e-5
    )
    few = kernels.grouped_matmul_ragged(
        x, weight, jnp.array([0, 3, 4, 8]), jnp.array([2, 0, 7]), stats
    )
    np.testing.assert_allclose(few[3:4], x[3:4] @ weight[0].T, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="needs_scales_offset"):
        kernels.moe_create_indices(ids, 8, needs_scales_offset=True)


def test_small_ones():
    x = jnp.arange(6.0).reshape(2, 3)
    put = kernels.scatter_nd_skip_oob_indices(
        x, jnp.array([9.0, 8.0, 7.0]), jnp.array([[0, -1], [2, 0], [-3, 1]])
    )
    assert put.tolist() == [[0, 1, 9], [3, 4, 5]]
    rows = kernels.scatter_nd_skip_oob_indices(x, x + 10, jnp.array([[-1], [5]]))
    assert rows.tolist() == [[0, 1, 2], [10, 11, 12]]
    for dtype in ("int8", "uint8", "uint16", "uint32"):
        given = np.array([[2], [0], [250 if dtype[0] == "u" else -1]], dtype)
        found = kernels.scatter_nd_skip_oob_indices(jnp.zeros(200), jnp.ones(3), jnp.asarray(given))
        assert np.flatnonzero(found).tolist() == ([0, 2] if dtype[0] == "u" else [0, 2, 199])
    best = kernels.argmax_with_bias(
        jnp.stack([x, -x], axis=1), jnp.array([[0.0, 0, 0], [9.0, 0, 0]]), position=1
    )
    assert best.tolist() == [0, 0]
    values, places = kernels.top_k_per_row(x, jnp.array([1, 2]), 2)
    assert values.value.tolist() == [[2, -np.inf], [5, 4]] and places.value.tolist() == [
        [2, -1],
        [2, 1],
    ]
    with pytest.raises(ValueError, match="position 2 is not among the 2"):
        kernels.argmax_with_bias(jnp.zeros((1, 2, 3)), jnp.zeros((1, 3)), position=2)


def test_in_a_graph_of_named_sizes():
    cpu = DeviceRef.CPU()
    kinds = [TensorType("float32", ("t", 2, 8), cpu), TensorType("uint32", ("b",), cpu)]

    def run(x, offsets):
        return kernels.flash_attention_ragged_gpu(x, x, x, offsets, 5, Mask.CAUSAL_MASK, 0.5)

    graph = Graph("ragged", run, input_types=kinds)
    assert graph.output_types == kinds[:1]


def test_rope_of_a_named_number_of_tokens():
    rope = RotaryEmbedding(16, 2, 100.0, 16)
    kinds = [TensorType("float32", (1, "t", 2, 8), DeviceRef.CPU())]
    model = InferenceSession().load(Graph("rope", rope, input_types=kinds))
    x = draw(1, 5, 2, 8)
    np.testing.assert_allclose(model.execute(x)[0].value, rope(x), atol=1e-6)


def test_tokens_beyond_the_table_of_a_rope_are_nan():
    table, x = jnp.ones((2, 4)), jnp.ones((3, 1, 4))
    found = kernels.rope_ragged(x, jnp.array([0, 3]), jnp.array([0]), table)
    assert np.isfinite(found[:2]).all() and np.isnan(found[2]).all()
    found = kernels.rope_ragged_with_position_ids(x, table, jnp.array([1, 5, 0]))
    assert np.isnan(found[1]).all() and np.isfinite(found[::2]).all()


def test_choices_of_no_expert_are_last():
    order, starts, back, *_ = kernels.moe_create_indices(jnp.array([-1, 0, 2, 3]), 3)
    assert order.tolist() == [1, 2, 0, 3] and starts.tolist() == [0, 1, 1, 2]
    assert back.tolist() == [2, 0, 1, 3]
