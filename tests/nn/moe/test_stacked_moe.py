"""StackedMoE: against each expert by itself, in NumPy; and its parts, whose results are summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import DeviceRef, ShardingStrategy, TensorValue
from maxjax.nn.moe import GateUpFormat, MoEGate, StackedMoE, make_stacked_gated_activation_fn
from maxjax.nn.quant_config import QuantConfig

CPU = DeviceRef.CPU()
X, E, F, TOP = 4, 6, 8, 2
FORMATS = {"concatenated": GateUpFormat.CONCATENATED, "interleaved": GateUpFormat.INTERLEAVED}


def made(**options):
    layer = StackedMoE([CPU], E, X, TOP, F, MoEGate, "float32", router_dtype="float32", **options)
    rng = np.random.default_rng(0)
    w = {
        name: rng.normal(0, 0.5, [int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in layer.raw_state_dict().items()
    }
    layer.load_state_dict(w)
    return layer, w


def plain(w, x, form, activation, first):
    """Each token through each of its experts."""
    y = np.zeros_like(x)
    for row, out in zip(x, y, strict=True):
        scores = w["gate.gate_score.weight"] @ row
        for expert in np.argsort(-scores)[:TOP]:
            inner = scores[expert] * row if first else row
            h = inner @ w["experts.gate_up_proj"][expert]
            h = h + w.get("experts.gate_up_proj_bias", np.zeros((X, 2 * F)))[expert]
            gate, up = (h[0::2], h[1::2]) if form == "interleaved" else np.split(h, 2)
            found = np.asarray(activation(gate, up)) @ w["experts.down_proj"][expert]
            found = found + w.get("experts.down_proj_bias", np.zeros((X, E)))[expert]
            out += found if first else scores[expert] * found
    return y


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("form", "bias", "first"), [("concatenated", False, True), ("interleaved", True, False)]
)
def test_stacked_experts_are_those_by_themselves(form, bias, first):
    own = None if form == "concatenated" else make_stacked_gated_activation_fn(jnp.tanh)
    layer, w = made(gate_up_format=FORMATS[form], has_bias=bias, gated_activation_fn=own,
                    apply_router_weight_first=first)  # fmt: skip
    x = np.random.default_rng(1).normal(0, 1, (7, E)).astype(np.float32)
    act = jax.nn.silu if own is None else jnp.tanh
    wanted = plain(w, x, form, lambda gate, up: act(gate) * up, first)
    np.testing.assert_allclose(layer(x), wanted, rtol=1e-4, atol=1e-4)
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    parts = layer.shard([CPU, CPU])
    assert [part.moe_dim for part in parts] == [F // 2] * 2
    found = sum(part(TensorValue(jnp.asarray(x))).value for part in parts)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    # Sizes that do not divide.
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(3)
    run = jax.jit(lambda parts, x: sum(part(x) for part in parts))
    found = run(layer.shard([CPU] * 3), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    # Fewer devices get the first parts.
    np.testing.assert_array_equal(layer.shard([CPU])[0](x), parts[0](x))


def test_shared_experts_are_added_and_quantised_ones_refused():
    layer, w = made(has_shared_experts=True, shared_experts_dim=3)
    x = np.ones((2, E), np.float32)
    without, _ = made()
    without.load_state_dict({n: v for n, v in w.items() if not n.startswith("shared")})
    np.testing.assert_allclose(layer(x), without(x) + layer.shared_experts(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="quant_config"):
        StackedMoE([CPU], E, X, TOP, F, MoEGate, quant_config=object.__new__(QuantConfig))
    with pytest.raises(ValueError, match="tensor_parallel"):
        layer.sharding_strategy = ShardingStrategy.replicate(2)
