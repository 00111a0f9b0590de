"""ColumnParallelLinear and VocabParallelEmbedding: whole arrays, split over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef, TensorValue
from maxjax.graph.weight.epoch import EPOCH
from maxjax.nn.attention import TensorParallelAttentionWithRope
from maxjax.nn.comm import Signals
from maxjax.nn.layer import layer_hook

CPU = DeviceRef.CPU()


class Head(nn.Module):
    def __init__(self, vocab, tied):
        super().__init__()
        self.embed_tokens = nn.VocabParallelEmbedding(vocab, 16, "float32", [CPU])
        tied = self.embed_tokens.weight if tied else None
        self.lm_head = nn.ColumnParallelLinear(16, vocab, "float32", [CPU], tied)

    def __call__(self, ids):
        return self.lm_head(self.embed_tokens(ids))


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab", "spec"), [(64, ("model", None)), (63, (None, "model"))])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_equal_to_one_device(vocab, spec, tied, kind):
    model = maxjax.init(Head(vocab, tied), jax.random.key(0))
    assert list(model.raw_state_dict()) == ["embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    ids = np.array([[1, 62, -1, 0]])
    want = model(ids)
    model.to(maxjax.make_mesh(data=2, model=4, axis_types=kind))
    assert tuple(model.lm_head.weight.sharding.spec) == spec
    np.testing.assert_allclose(model(ids), want, atol=1e-5)

    @jax.jit
    def run(model, ids):
        logits = model(ids)
        return logits, jnp.argmax(logits, -1), jax.nn.softmax(logits, -1).sum(-1)

    logits, best, total = run(model, ids)
    np.testing.assert_allclose(logits, want, atol=1e-5)
    np.testing.assert_array_equal(best, np.argmax(want, -1))
    np.testing.assert_allclose(total, 1, rtol=1e-5)


def test_without_devices():
    assert nn.ColumnParallelLinear(2, 3, "float32", [], has_bias=True).bias.device == CPU
    assert nn.VocabParallelEmbedding(2, 3, "float32", []).weight.device == CPU


class Lists(nn.VocabParallelEmbedding):
    """Is called with buffers alone, as some of MAX's model files define it: its parts are called without."""

    def __call__(self, indices, signal_buffers):
        return super().__call__(indices, signal_buffers)


def test_a_call_with_lists_changes_no_structure():
    """The parts are made once: a call that set a strategy would have every program traced anew."""
    devices = [DeviceRef.CPU(0), DeviceRef.CPU(1)]
    buffers = Signals(devices).buffers()
    model = Head(6, tied=True)
    model.embed_tokens = Lists(6, 4, "float32", devices)
    model.lm_head = nn.ColumnParallelLinear(4, 6, "float32", devices, model.embed_tokens.weight)
    maxjax.init(model, jax.random.key(0))
    assert list(model.raw_state_dict()) == ["embed_tokens.weight"]
    ids, before = TensorValue(jnp.arange(6)), EPOCH.structure
    table, found = model.embed_tokens.weight.value, model.embed_tokens(ids, buffers)
    for rows, logits in zip(found, model.lm_head(found, buffers), strict=True):
        np.testing.assert_array_equal(rows, table)
        np.testing.assert_allclose(logits, table @ table.T, rtol=1e-6)
    assert EPOCH.structure == before


def test_attention_over_devices_fires_a_hook_once():
    rope = nn.RotaryEmbedding(dim=8, n_heads=2, theta=10000.0, max_seq_len=8)
    layer = TensorParallelAttentionWithRope(
        rope=rope, num_attention_heads=2, num_key_value_heads=2, hidden_size=8, devices=[CPU, CPU]
    )
    maxjax.init(layer, jax.random.key(0))
    fired = []
    with layer_hook(lambda one, *_: fired.append(one)):
        layer(jnp.ones((3, 8)))
    assert fired.count(layer) == 1
