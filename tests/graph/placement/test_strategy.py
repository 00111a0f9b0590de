"""ShardingStrategy: what each device gets, against NumPy, and what a strategy is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.graph.placement.split import Segment, even_range
from maxjax.graph.placement.strategy import ShardingStrategy, shard_shape

S = ShardingStrategy
MAKERS = {
    "rowwise": lambda: S.rowwise(2),
    "colwise": lambda: S.columnwise(2),
    "axiswise": lambda: S.axiswise(0, 2),
    "replicate": lambda: S.replicate(2),
    "stacked_qkv": lambda: S.stacked_qkv(2, 4, 8),
    "head_aware_colwise": lambda: S.head_aware_columnwise(2, 4, 8),
    "gate_up": lambda: S.gate_up(2),
    "segmented": lambda: S.segmented(2, 0, [Segment.even(4)]),
    "tensor_parallel": lambda: S.tensor_parallel(2),
    "expert_parallel": lambda: S.expert_parallel(2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_each_is_itself_alone_and_equal_when_the_same(name):
    one, other = MAKERS[name](), MAKERS[name]()
    assert [n for n in MAKERS if getattr(one, f"is_{n}")] == [name]
    assert one == other and hash(one) == hash(other)
    assert one != dataclasses.replace(one, num_devices=3)
    assert all(one != MAKERS[n]() for n in MAKERS if n != name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.num_devices = 3


@given(st.integers(0, 50), st.integers(1, 12))
def test_ranges_cover_everything_once(size, n):
    ranges = [even_range(size, i, n) for i in range(n)]
    assert [k for a, b in ranges for k in range(a, b)] == list(range(size))
    widths = [b - a for a, b in ranges]
    assert widths == sorted(widths, reverse=True) and max(widths) - min(widths) <= 1


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=4
    ),
    st.integers(1, 5),
)
def test_segments_cover_everything_once(parts, n):
    segments = [Segment.head_aware(h, d) if aware else Segment.even(h * d) for h, d, aware in parts]
    total = sum(segment.size for segment in segments)
    strategy = S.segmented(n, 0, segments)
    got = np.concatenate([np.asarray(strategy(np.arange(total), i)) for i in range(n)])
    assert sorted(got.tolist()) == list(range(total))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_stacked_qkv_keeps_heads_whole(n):
    w = np.arange(3 * 4 * 2 * 5).reshape(24, 5)
    got = [np.asarray(S.stacked_qkv(n, 4, 2)(w, i)) for i in range(n)]
    heads = w.reshape(3, 4, 2, 5)
    want = [heads[:, a:b].reshape(-1, 5) for a, b in (even_range(4, i, n) for i in range(n))]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("strategy", "shape", "error", "says"),
    [
        (S.columnwise(2), (4,), IndexError, "no axis 1"),
        (S.axiswise(-3, 2), (4, 4), IndexError, "no axis -3"),
        (S.stacked_qkv(2, 2, 2), (13, 4), ValueError, "= 12 values, got 13"),
        (
            S.stacked_qkv(2, 2, 2),
            (15, 4),
            ValueError,
            r"stacked_qkv: axis 0 must have 4 \+ 4 \+ 4 = 12 values, got 15",
        ),
        (
            S.head_aware_columnwise(2, 2, 4),
            (4, 7),
            ValueError,
            "axis 1 must have 8 values, got 7",
        ),
        (S.gate_up(2, axis=0), (5, 4), ValueError, "even size, got 5"),
        (
            S.segmented(2, 0, [Segment.even(4)]),
            (5, 4),
            ValueError,
            "segmented: axis 0 must have 4 values, got 5",
        ),
        (S.tensor_parallel(2), (4, 4), NotImplementedError, "tensor_parallel is for whole layers"),
        (S.expert_parallel(2), (4, 4), NotImplementedError, "for whole layers"),
    ],
)
def test_what_does_not_fit(strategy, shape, error, says):
    with pytest.raises(error, match=says):
        for i in range(2):
            shard_shape(strategy, shape, i)


def test_shapes_need_no_values():
    assert [shard_shape(S.rowwise(3), (7, 2), i) for i in range(3)] == [(3, 2), (2, 2), (2, 2)]
    assert shard_shape(S(2, lambda w, i, n: w[:, i : i + n]), (2, 3), 1) == (2, 2)


def test_under_jit_and_grad():
    strategy, w = S.gate_up(2, axis=0), jnp.arange(12.0).reshape(6, 2)
    want = np.asarray(strategy(np.asarray(w), 1))
    np.testing.assert_array_equal(jax.jit(lambda w: strategy(w, 1))(w), want)
    grad = jax.grad(lambda w: (strategy(w, 1) ** 2).sum())(w)
    assert float(grad.sum()) == 2 * want.sum()
