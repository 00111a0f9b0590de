"""Experts of several devices against the same mixture on one device."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Graph, ShardingStrategy, TensorType, TensorValue, ops
from maxjax.graph.buffer import BufferValue
from maxjax.nn.activation import GatedActivation
from maxjax.nn.comm.ep import EPBatchManager, EPConfig
from maxjax.nn.moe import MoE, SigmoidTopKRouter, forward_moe_sharded_layers
from tests.nn.layers import call, filled, random

E, F, X, K = 6, 4, 8, 2
GATE = functools.partial(SigmoidTopKRouter, routed_scaling_factor=2.5)
SIZES = (3, 0, 5, 1, 2, 4, 1, 6)  # tokens of each device


def config_of(count, **settings):
    return EPConfig(
        DType.float32, DType.float32, E, K, X, 16, n_gpus_per_node=count, n_nodes=1, **settings
    )


def mixture(devices, kind=MoE, **options):
    return kind(devices, E, X, K, F, gate_cls=GATE, dtype="float32", **options)


class Block(nn.Module):
    """A mixture whose experts are dealt to devices, as MAX's model files build it."""

    def __init__(self, count, settings=None, **options):
        super().__init__()
        devices = [DeviceRef.CPU(i) for i in range(count)]
        manager = EPBatchManager(config_of(count, **settings or {}))
        self.mlp = mixture(devices, ep_size=count, ep_batch_manager=manager, **options)
        self.mlp.sharding_strategy = ShardingStrategy.expert_parallel(count)
        self.parts = self.mlp.shard(devices)

    def __call__(self, *xs):
        return forward_moe_sharded_layers(self.parts, list(xs))


def both(count, settings=None, **options):
    """The mixture on one device and on several, with equal weights."""
    one, _ = filled(mixture([DeviceRef.CPU()], **options))
    block = Block(count, settings, **options)
    block.mlp.load_state_dict(one.state_dict())
    return one, block, [random(n, E, seed=i) for i, n in enumerate(SIZES[:count])]


def compare(one, block, xs):
    found, want = call(block, *xs), call(one, np.concatenate(xs))
    np.testing.assert_allclose(np.concatenate(found), want, rtol=1e-5, atol=1e-5)
    assert [y.shape for y in found] == [x.shape for x in xs]
    assert not block.mlp.ep_batch_manager._rounds  # nothing is left in the manager


@pytest.mark.sampled
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_several_devices_compute_what_one_does(count, shared):
    one, block, xs = both(count, has_shared_experts=shared, shared_experts_dim=F * shared)
    compare(one, block, xs)
    for chosen in ([2, 3], [0, 7]):  # every token to the same experts: other devices get none
        bias = {"gate.e_score_correction_bias": np.isin(np.arange(X), chosen) * np.float32(100)}
        for model in (one, block.mlp):
            model.load_state_dict(bias, strict=False)
        compare(one, block, xs)
    if count == 2:
        compare(one, block, [np.zeros((0, E), np.float32)] * count)


def test_one_device_has_all_experts():
    compare(*both(1))


def test_eagerly_each_result_is_on_its_device():
    one, block, xs = both(2)
    xs = [TensorValue(jax.device_put(x, at)) for x, at in zip(xs, jax.devices(), strict=False)]
    found = block(*xs)
    assert [(type(y), y.dtype) for y in found] == [(TensorValue, DType.float32)] * 2
    assert [y.value.devices() for y in found] == [{at} for at in jax.devices()[:2]]
    np.testing.assert_allclose(np.asarray(found[0]), call(one, xs[0].value), rtol=1e-5, atol=1e-5)


def test_in_a_graph_with_named_sizes():
    one, block, xs = both(2)
    kinds = [TensorType(DType.float32, (f"n{i}", E), DeviceRef.CPU(i)) for i in range(2)]
    graph = Graph("experts", block, input_types=kinds)
    assert [kind.shape[0] for kind in graph.output_types] == ["n0", "n1"]


def test_derivatives_are_those_of_one_device():
    one, block, xs = both(2, has_shared_experts=True, shared_experts_dim=F)
    loss = lambda m, *xs: jnp.sum(jnp.sin(jnp.concatenate([jnp.ravel(y) for y in m(*xs)])))
    run = jax.jit(jax.grad(loss, (0, 1)))
    (ours, of_x), (theirs, of_all) = run(block, *xs), run(one, np.concatenate(xs))
    np.testing.assert_allclose(of_x, of_all[: len(xs[0])], rtol=1e-4, atol=1e-5)
    ours, theirs = ours.mlp.raw_state_dict(), theirs.raw_state_dict()
    for name in theirs:
        found = np.asarray(ours[name])
        np.testing.assert_allclose(found, np.asarray(theirs[name]), rtol=1e-4, atol=1e-5)


def test_devices_that_all_have_all_tokens():
    one, block, xs = both(2, {"use_allreduce": True}, has_shared_experts=True, shared_experts_dim=F)
    found = call(block, xs[0], xs[0])
    np.testing.assert_allclose(sum(found), call(one, xs[0]), rtol=1e-5, atol=1e-5)


class InTurn(MoE):
    """Gates and up projections in turn."""

    @property
    def gate_up_proj(self):
        both = super().gate_up_proj
        return ops.permute(both.reshape([-1, 2, F, E]), [0, 2, 1, 3]).reshape([-1, 2 * F, E])


SWIGLU = GatedActivation("swigluoai", alpha=1.7, limit=1.0)
WHOLE = GatedActivation(gated_activation_fn=lambda y, n: ops.tanh(y[:, :n]) + y[:, n:])


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"fused_shared_expert": True}, {"has_shared_experts": True, "shared_experts_dim": F}),
        ({}, {"kind": InTurn, "interleaved_gate_up": True, "activation": SWIGLU}),
        ({}, {"activation": WHOLE, "pre_expert_norm_cls": lambda: nn.RMSNorm(E, "float32")}),
    ],
)
def test_what_experts_compute(settings, options):
    one, block, xs = both(2, settings, **options)
    compare(one, block, xs)
    if "activation" not in options:
        return
    # One token by itself, with the plain weights and NumPy.
    (x,) = random(1, E)
    (ids,), (shares,) = one.gate(jnp.asarray(x[None]))
    h = x if one.pre_expert_norm is None else np.asarray(one.pre_expert_norm(jnp.asarray(x)))
    want = 0
    for expert, share in zip(np.asarray(ids), np.asarray(shares), strict=True):
        gate, up, down = (np.asarray(getattr(one.experts[expert], f"{n}_proj").weight)
                          for n in ("gate", "up", "down"))  # fmt: skip
        gate, up = gate @ h, up @ h
        if options["activation"] is WHOLE:
            middle = np.tanh(gate) + up
        else:
            gate = np.minimum(gate, 1)
            middle = gate / (1 + np.exp(-1.7 * gate)) * (np.clip(up, -1, 1) + 1)
        want = want + share * (down @ middle)
    np.testing.assert_allclose(call(one, x[None])[0], want, rtol=1e-4, atol=1e-5)


def test_parts_of_every_expert_are_summed():
    one, _ = filled(
        mixture([DeviceRef.CPU()], has_shared_experts=True, shared_experts_dim=F, activation=SWIGLU)
    )
    one.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    parts = one.shard([DeviceRef.CPU(0), DeviceRef.CPU(1)])
    assert [part.moe_dim for part in parts] == [2, 2]
    assert parts[1].devices == parts[1].gate.devices == [DeviceRef.CPU(1)]
    x = random(3, E)
    found = jax.jit(forward_moe_sharded_layers)(parts, [x, x])
    np.testing.assert_allclose(sum(found), call(one, x), rtol=1e-5, atol=1e-5)


def test_objects_with_the_attributes_of_a_part_and_counts_of_choices():
    manager = EPBatchManager(config_of(2))

    def part(i):
        return SimpleNamespace(
            _ep_batch_manager=manager, ep_batch_manager=manager, devices=[DeviceRef.GPU(i)],
            gate=lambda x: (jnp.array([[i, 7]] * len(x)), jnp.ones((len(x), K))),
            num_experts=X, has_shared_experts=False, num_experts_per_token=K, _ep_dispatch_input_scales=lambda: None,
            _local_ep_compute=lambda rows, x, total: rows[0] * (i + 1),
        )  # fmt: skip

    xs = [jnp.ones((1, E)), jnp.full((2, E), 3.0)]
    counters = [BufferValue(jnp.zeros(X, jnp.int32)) for _ in range(2)]
    found = forward_moe_sharded_layers([part(0), part(1)], xs, counters)
    assert [y[:, 0].tolist() for y in found] == [
        [3.0],
        [9.0, 9.0],
    ]  # by experts 0 and 1, and twice by 7
    assert [ops.buffer_load(one).to_numpy().tolist() for one in counters] == [
        [1, 0, 0, 0, 0, 0, 0, 1], [0, 2, 0, 0, 0, 0, 0, 2]]  # fmt: skip


def test_what_is_refused():
    _, block, xs = both(2)
    with pytest.raises(
        ValueError, match="MoE has an ep_batch_manager: .*forward_moe_sharded_layers"
    ):
        block.mlp(xs[0])
    with pytest.raises(ValueError, match="dealt to 2 devices .*not to 3"):
        block.mlp.shard([DeviceRef.CPU()] * 3)
    with pytest.raises(ValueError, match="2 layers and 1 tensors"):
        forward_moe_sharded_layers(block.parts, xs[:1])
    with pytest.raises(ValueError, match="without a sharding_strategy"):
        mixture([DeviceRef.CPU()]).shard([DeviceRef.CPU()])
    one = mixture([DeviceRef.CPU()])
    one.sharding_strategy = ShardingStrategy.expert_parallel(2)  # for a mesh
    with pytest.raises(ValueError, match="MoE has no ep_batch_manager"):
        one.shard([DeviceRef.CPU()] * 2)
