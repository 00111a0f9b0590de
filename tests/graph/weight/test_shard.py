"""Weight.shard: views of a Weight's parts."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, Shardable, ShardingStrategy, TensorType, Weight, ops
from maxjax.graph.weights import load_weights
from maxjax.nn import Module

CPU = DeviceRef.CPU()
VALUE = np.arange(10, dtype=np.float32).reshape(5, 2)


def weight(strategy, value=VALUE, shape=(5, 2)):
    w = Weight("w", "float32", shape, CPU, sharding_strategy=strategy)
    if value is not None:
        w.value = jnp.asarray(value)
    return w


def test_names_devices_and_shapes_need_no_value():
    w = weight(ShardingStrategy.rowwise(2), None)
    one, other = w.shard([DeviceRef.GPU(0), DeviceRef.GPU(1)])
    assert (one.name, other.name, one.shard_idx, other.shard_idx) == ("w[0]", "w[1]", 0, 1)
    assert one.shape == [3, 2] and other.shape == [2, 2] and other.device == DeviceRef.GPU(1)
    assert other.value is None and isinstance(w, Shardable)
    assert repr(one) == "Weight(w[0], DType.float32, [Dim(3), Dim(2)], gpu:0)"
    with pytest.raises(ValueError, match="'w' has no value"):
        one + 1


def test_they_follow_the_weight():
    w = weight(ShardingStrategy.rowwise(2), None)
    one, other = w.shard([CPU] * 2)
    for factor in (1, 2):
        w.value = jnp.asarray(VALUE * factor)
        np.testing.assert_array_equal(jnp.concatenate([one, other]), VALUE * factor)
    x = jnp.ones((4, 2))
    np.testing.assert_allclose(x @ other.T, x @ (2 * VALUE[3:]).T)


def test_parts_of_a_weight_that_is_quantised_later_are_quantised():
    head = maxjax.init(nn.ColumnParallelLinear(32, 64, "float32", [CPU] * 2), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 32))
    whole = maxjax.quantize(head, "q8_0").model
    np.testing.assert_array_equal(whole([x, x])[0], whole(x))
    part = whole.distributed_linear_layers[1].weight
    assert part.shape == [32, 34] and part.logical_shape == [32, 32]


def test_each_lies_on_its_device():
    w = weight(ShardingStrategy.rowwise(2))
    w.value = jax.device_put(w.value, jax.devices()[3])
    refs = [DeviceRef.CPU(2), DeviceRef.CPU(1)]
    parts = w.shard(refs)
    assert [part.value.devices() for part in parts] == [{ref.to_jax()} for ref in refs]
    with pytest.raises(ValueError, match="cpu"):
        w.shard([CPU, DeviceRef.CPU(99)])[1].value


def test_under_jit_and_grad():
    w = weight(ShardingStrategy.rowwise(2))

    def loss(w):
        return (w.shard([CPU, CPU])[1] * 3).sum()

    grad = jax.jit(jax.grad(loss))(w)
    np.testing.assert_array_equal(grad.value, [[0, 0]] * 3 + [[3, 3]] * 2)


def test_in_a_graph_the_whole_weight_is_one():
    w = weight(ShardingStrategy.rowwise(2), None)
    with Graph("g", input_types=[TensorType("float32", (2,), CPU)]) as graph:
        parts = [s @ graph.inputs[0] for s in w.shard([CPU, CPU])]
        graph.output(ops.concat(parts, 0))
    assert [entry.names for entry in graph.entries] == [["w"]]
    (got,) = InferenceSession().load(graph, weights_registry={"w": VALUE})(np.ones(2, np.float32))
    np.testing.assert_allclose(got, VALUE.sum(1))


def test_on_its_own_it_is_a_plain_leaf():
    one, _ = weight(ShardingStrategy.rowwise(2)).shard([CPU, CPU])
    doubled = jax.tree.map(lambda a: 2 * a, one)
    assert type(doubled) is Weight and not hasattr(doubled, "host")
    np.testing.assert_array_equal(doubled.value, 2 * VALUE[:3])
    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        np.testing.assert_array_equal(again.value, VALUE[:3])


@pytest.mark.parametrize(
    ("strategy", "shape", "error", "says"),
    [
        (None, (5, 2), ValueError, "Weight w cannot be sharded"),
        (ShardingStrategy.columnwise(2), (5,), IndexError, "no axis 1"),
        (ShardingStrategy.rowwise(2), ("n", 2), TypeError, "size is unknown"),
        (ShardingStrategy.tensor_parallel(2), (5, 2), NotImplementedError, "for whole layers"),
    ],
)
def test_what_cannot_be(strategy, shape, error, says):
    with pytest.raises(error, match=says):
        weight(strategy, None, shape).shard([CPU, CPU])


def test_a_shard_is_neither_split_nor_set():
    one, _ = weight(ShardingStrategy.rowwise(2)).shard([CPU, CPU])
    with pytest.raises(ValueError, match="already sharded"):
        one.shard([CPU])
    for value in (jnp.ones((3, 2)), None):
        with pytest.raises(ValueError, match="is a shard: set the value of 'w'"):
            one.value = value


class Split(Module):
    """Holds the parts of its weight as attributes."""

    def __init__(self):
        super().__init__()
        self.w = weight(ShardingStrategy.rowwise(2))
        self.one, self.other = self.w.shard([CPU, CPU])

    def __call__(self, x):
        return x @ self.one.T, x @ self.other.T


class Lone(Module):
    """Holds a part of a weight that belongs to nobody below it."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def __call__(self, x):
        return x @ self.part.T


def test_as_attributes_they_follow_their_weight_through_jit_and_tree_map():
    model, x = Split(), jnp.ones((3, 2))
    assert list(model.raw_state_dict()) == ["w"] and len(jax.tree.leaves(model)) == 1
    for m in (model, jax.tree.map(lambda a: 2 * a, model), copy.deepcopy(model)):
        factor = float(m.w.value[0, 1])
        for got, rows in zip(jax.jit(lambda m, x: m(x))(m, x), (VALUE[:3], VALUE[3:]), strict=True):
            np.testing.assert_allclose(got, factor * np.ones((3, 2)) @ rows.T)
    grads = jax.grad(lambda m: m(x)[1].sum())(model)
    np.testing.assert_array_equal(grads.w.value, [[0, 0]] * 3 + [[3, 3]] * 2)


def test_without_its_weight_a_shard_is_a_value_like_another():
    part = weight(ShardingStrategy.rowwise(2)).shard([CPU, CPU])[1]
    model, x = Lone(part), jnp.ones((1, 2))
    assert list(model.raw_state_dict()) == ["w[1]"]
    np.testing.assert_array_equal(model.state_dict()["w[1]"], VALUE[3:])
    doubled = jax.tree.map(lambda a: 2 * a, model)
    np.testing.assert_allclose(
        jax.jit(lambda m, x: m(x))(doubled, x), 2 * np.ones((1, 2)) @ VALUE[3:].T
    )
    assert list(doubled.raw_state_dict()) == ["w[1]"]
    assert jax.tree.structure(jax.tree.map(lambda a: a, doubled)) == jax.tree.structure(doubled)
    with pytest.raises(ValueError, match="is a shard: set the value of 'w'"):
        model.load_state_dict({"w[1]": VALUE[3:]})
    model.part = None
    assert not model.raw_state_dict()


@pytest.mark.parametrize(
    "strategy",
    [
        ShardingStrategy.rowwise(2),
        ShardingStrategy.replicate(2),
        ShardingStrategy(2, lambda w, i, n: w[i:]),
    ],
)
def test_more_devices_than_the_strategy_has_are_refused(strategy):
    w = Weight("layers.0.w", "float32", (4, 2), CPU, sharding_strategy=strategy)
    with pytest.raises(
        ValueError, match=r"'layers.0.w' is split over 2 devices .* got 3: .* strategy for 3"
    ):
        w.shard([CPU] * 3)
    with pytest.raises(ValueError, match="device 2 .* from 0 to 1"):
        strategy(np.ones((4, 2)), 2)
    # Fewer take the first parts, as in MAX; a generator of devices is read once.
    assert [part.name for part in w.shard(iter([CPU]))] == ["layers.0.w[0]"] and w.shard([]) == []


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Linear(4, 8, "float32", CPU), lambda: nn.MLP("float32", None, 4, 8, [CPU]),
     lambda: nn.Embedding(8, 4, "float32", CPU), lambda: nn.RMSNorm(4, "float32")],
)  # fmt: skip
def test_nor_do_layers_take_more_devices(layer):
    layer = layer()
    tensor = isinstance(layer, nn.MLP)
    layer.sharding_strategy = (
        ShardingStrategy.tensor_parallel(2) if tensor else ShardingStrategy.replicate(2)
    )
    assert len(layer.shard([CPU] * 2)) == 2
    with pytest.raises(ValueError, match="over 2 devices .* got 3"):
        layer.shard([CPU] * 3)


@pytest.mark.parametrize(
    ("strategy", "shape", "shapes"),
    [
        (ShardingStrategy.rowwise(2), (5, "n"), [[3, "n"], [2, "n"]]),
        (ShardingStrategy.columnwise(2), ("n", 5), [["n", 3], ["n", 2]]),
        (ShardingStrategy.axiswise(-1, 2), ("n", 3), [["n", 2], ["n", 1]]),
        (ShardingStrategy.stacked_qkv(2, 2, 2), (12, "n"), [[6, "n"], [6, "n"]]),
        (ShardingStrategy.gate_up(2, 0), (8, "n"), [[4, "n"], [4, "n"]]),
        (ShardingStrategy.replicate(2), ("n",), [["n"], ["n"]]),
        (ShardingStrategy(2, lambda w, i, n: w[:, i:]), ("n", 2), [["n", 2], ["n", 1]]),
    ],
)
def test_sizes_of_other_axes_may_be_symbolic(strategy, shape, shapes):
    w = weight(strategy, None, shape)
    assert [s.shape for s in w.shard([CPU] * 2)] == shapes


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        (lambda w, i, n: w[i : i + w.rank].permute([1, 0]), VALUE[1:3].T),
        (lambda w, i, n: w.transpose(0, 1)[i:], VALUE.T[1:]),
        (lambda w, i, n: w[i].cast(DType.float16).unsqueeze(0), VALUE[1:2]),
        (lambda w, i, n: ops.chunk(w, 5)[i] if w.dtype.is_float() else w, VALUE[1:2]),
        (lambda w, i, n: jnp.concatenate([w[i:], w[:i]]), np.roll(VALUE, -1, 0)),
    ],
)
def test_a_rule_that_is_a_function_has_the_methods_of_max(rule, part):
    w = weight(ShardingStrategy(2, rule), None)
    shard = w.shard([CPU] * 2)[1]
    assert shard.shape == part.shape
    with Graph("parts") as graph:
        graph.output(shard + 0)
    assert graph.output_types[0].shape == part.shape
    w.value = jnp.asarray(VALUE)
    np.testing.assert_array_equal(shard.value, part)


def test_displays_do_not_read_the_weight(tmp_path):
    np.savez(tmp_path / "m.npz", w=VALUE)
    w = load_weights(tmp_path / "m.npz").w.allocate()
    w.sharding_strategy = ShardingStrategy.rowwise(2)
    part = w.shard([CPU] * 2)[1]
    assert repr(part) == "Weight(w[1], DType.float32, [Dim(2), Dim(2)], cpu:0)"
    assert "not read yet" in part._repr_html_() and w.value is None
    np.testing.assert_array_equal(part, VALUE[3:])
    assert repr(part).endswith(", loaded)")


def test_setting_a_strategy_or_none_declares_the_cpu():
    for strategy in (ShardingStrategy.rowwise(2), None):
        w = Weight("w", "float32", (2,), DeviceRef.GPU(1))
        w.sharding_strategy = strategy
        assert w.device == CPU and w.sharding_strategy is strategy
    for other in (5, Module, np.ones(2)):
        with pytest.raises(TypeError, match=r"is a ShardingStrategy, such as .*, not "):
            w.sharding_strategy = other
    with pytest.raises(TypeError, match="not 'rowwise'"):
        Weight("w", "float32", (2,), CPU, sharding_strategy="rowwise")
