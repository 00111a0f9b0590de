"""ColumnParallelLinear and VocabParallelEmbedding: whole arrays, split over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef

CPU = DeviceRef.CPU()


class Head(nn.Module):
    def __init__(self, vocab, tied):
        super().__init__()
        self.embed_tokens = nn.VocabParallelEmbedding(vocab, 16, "float32", [CPU])
        tied = self.embed_tokens.weight if tied else None
        self.lm_head = nn.ColumnParallelLinear(16, vocab, "float32", [CPU], tied)

    def __call__(self, ids):
        return self.lm_head(self.embed_tokens(ids))


@pytest.mark.slow
@pytest.mark.default(
    "AxisType.Manual-63-spec1-False",
    "AxisType.Auto-64-spec0-True",
    "AxisType.Explicit-63-spec1-True",
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab", "spec"), [(64, ("model", None)), (63, (None, "model"))])
@pytest.mark.parametrize("kind", jax.sharding.AxisType.__members__.values())
def test_equal_to_one_device(vocab, spec, tied, kind):
    if kind is jax.sharding.AxisType.Manual:
        return
    model = maxjax.init(Head(vocab, tied), jax.random.key(0))
    assert list(model.raw_state_dict()) == ["embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    ids = np.array([[1, 62, -1, 0]])
    want = model(ids)
    model.to(maxjax.make_mesh(data=2, model=4, axis_types=kind))
    assert tuple(model.lm_head.weight.sharding.spec) == spec
    for call in (lambda m, x: m(x), jax.jit(lambda m, x: m(x))):
        np.testing.assert_allclose(call(model, ids), want, atol=1e-5)
    best = jax.jit(lambda m, x: (jnp.argmax(m(x), -1), jax.nn.softmax(m(x), -1).sum(-1)))
    np.testing.assert_array_equal(best(model, ids)[0], jnp.argmax(want, -1))
    np.testing.assert_allclose(best(model, ids)[1], 1, rtol=1e-5)


def test_without_devices():
    assert nn.ColumnParallelLinear(2, 3, "float32", [], has_bias=True).bias.device == CPU
    assert nn.VocabParallelEmbedding(2, 3, "float32", []).weight.device == CPU
