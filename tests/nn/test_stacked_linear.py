"""StackedLinear against NumPy: one weight or several, the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn
from maxjax.graph import Segment, ShardingStrategy, TensorValue
from tests.nn.layers import CPU, filled, random, same_everywhere

NAMES = ["q_proj", "k_proj", "v_proj"]


class Attention(nn.Module):
    def __init__(self, stacked=False):
        super().__init__()
        self.qkv_proj = nn.StackedLinear(5, [4, 2, 2], NAMES, "float32", CPU, stacked, True)

    def __call__(self, x):
        return self.qkv_proj(x)


def test_children_leave_the_name_out():
    names = [f"{n}.{w}" for n in NAMES for w in ("weight", "bias")]
    assert list(Attention().raw_state_dict()) == names
    assert list(Attention(stacked=True).raw_state_dict()) == ["qkv_proj.weight", "qkv_proj.bias"]


@pytest.mark.sampled
@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_outputs_side_by_side(stacked, has_bias, clip):
    layer, w = filled(
        nn.StackedLinear(
            5, [4, 2, 2], NAMES, "float32", CPU, stacked, has_bias, clip_weight=clip
        )
    )  # fmt: skip
    x = random(2, 3, 5)
    weight, bias = (
        np.concatenate([w[n] for n in w if n.endswith(kind)] or [np.zeros(8)])
        for kind in ("weight", "bias")
    )
    weight = weight if clip is None else np.clip(weight, -clip, clip)
    y = same_everywhere(layer, x)
    np.testing.assert_allclose(y, x @ weight.T + bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer.stacked_weight, weight, rtol=1e-6)
    assert type(layer.stacked_weight) is TensorValue
    if has_bias:
        np.testing.assert_allclose(np.asarray(layer.stacked_bias), bias, rtol=1e-6)
    else:
        assert layer.stacked_bias is None
    assert [part.shape[-1] for part in layer.split(jnp.asarray(y))] == [4, 2, 2]
    np.testing.assert_array_equal(layer.split(jnp.asarray(y))[1], y[..., 4:6])


@pytest.mark.parametrize(
    ("out_dims", "names"), [([4, 2], ["q"]), ([4], ["q", "k"]), ([4, 2], ["q", "q"]), ([], [])]
)
def test_as_many_different_names_as_lengths(out_dims, names):
    with pytest.raises(ValueError, match="name"):
        nn.StackedLinear(5, out_dims, names, "float32", CPU)


@pytest.mark.parametrize("stacked", [False, True])
def test_shards_by_rows_have_rows_of_each_part_and_by_columns_are_summed(stacked):
    layer, _ = filled(nn.StackedLinear(4, [4, 2, 2], NAMES, "float32", CPU, stacked, True))
    x = random(3, 4)
    y = layer(x)
    if not stacked:  # MAX's files take the linear layers so
        assert layer._child(NAMES[1]) is getattr(layer, NAMES[1])
    rows = ShardingStrategy.rowwise(2)
    if stacked:
        segments = [Segment.even(size) for size in (4, 2, 2)]
        rows = ShardingStrategy.segmented(2, 0, segments)
    layer.sharding_strategy = rows
    parts = layer.shard([CPU, CPU])
    assert [part.out_dims for part in parts] == [(2, 1, 1)] * 2
    each = zip(*(part.split_projections(x) for part in parts), strict=True)
    assert [part.stacked_bias.shape for part in parts] == [(4,)] * 2
    np.testing.assert_allclose(
        np.concatenate([np.concatenate(one, -1) for one in each], -1), y, rtol=1e-6
    )
    for columns in (ShardingStrategy.columnwise(2), ShardingStrategy.axiswise(-1, 2)):
        layer.sharding_strategy = columns
        parts = layer.shard([CPU, CPU])
        assert [part.out_dims for part in parts] == [layer.out_dims] * 2
        np.testing.assert_array_equal(parts[0].stacked_bias, layer.stacked_bias)
        assert parts[1].stacked_bias is None
        found = sum(part(x[:, 2 * i : 2 * i + 2]) for i, part in enumerate(parts))
        np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (ShardingStrategy.rowwise(2), [(4, 0, 0), (0, 2, 2)]),
        (ShardingStrategy.rowwise(3), [(3, 0, 0), (1, 2, 0), (0, 0, 2)]),
        (ShardingStrategy.gate_up(2, 0), [(2, 2, 0), (2, 0, 2)]),
        (ShardingStrategy.axiswise(-2, 2), [(4, 0, 0), (0, 2, 2)]),
        (ShardingStrategy.gate_up(2, -2), [(2, 2, 0), (2, 0, 2)]),
    ],
)
def test_parts_of_one_weight_have_the_rows_that_their_strategy_gives(strategy, sizes):
    layer, _ = filled(nn.StackedLinear(4, [4, 2, 2], NAMES, "float32", CPU, True, True))
    layer.sharding_strategy = strategy
    parts, x = layer.shard([CPU] * len(sizes)), random(3, 4)
    assert [part.out_dims for part in parts] == sizes
    apart = zip(*(part.split_projections(x) for part in parts), strict=True)
    for found, want in zip(apart, layer.split_projections(x), strict=True):
        np.testing.assert_allclose(np.concatenate(found, -1), want, rtol=1e-6)


def test_parts_by_a_function_have_the_rows_that_it_gives():
    layer, _ = filled(nn.StackedLinear(4, [4, 2, 2], NAMES, "float32", CPU, True))
    layer.sharding_strategy = ShardingStrategy(2, lambda weight, i, n: weight[3 * i : 3 * i + 5])
    parts, x = layer.shard([CPU] * 2), random(3, 4)
    assert [part.out_dims for part in parts] == [(4, 1, 0), (1, 2, 2)]
    np.testing.assert_allclose(parts[1](x), layer(x)[..., 3:], rtol=1e-6)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_bound_of_nothing_is_no_bound(stacked):
    free, zero = (
        nn.StackedLinear(3, [2, 2], ["a", "b"], "float32", None, stacked, clip_weight=bound)
        for bound in (None, 0)
    )
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 1, [int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in free.raw_state_dict().items()
    }
    for layer in (free, zero):
        layer.load_state_dict(weights)
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(free(x), zero(x))
    assert np.abs(zero(x)).min() > 0


@pytest.mark.parametrize("stacked", [False, True])
def test_for_its_parts_it_creates_nothing(stacked):
    layer = nn.StackedLinear(5, [4, 2, 2], NAMES, stacked=stacked, has_bias=True, _is_sharding=True)
    assert not layer.raw_state_dict() and layer.bias is None
