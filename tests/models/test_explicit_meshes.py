"""Language models on meshes with Explicit axes: logits with and without a cache are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import maxjax
from maxjax.models import Gemma3n, Gemma4, Llama, Mixtral

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
KINDS = {
    "llama": (Llama, {}),
    "mixtral": (Mixtral, {"num_local_experts": 4}),
    "gemma3n": (Gemma3n, {
        "num_kv_shared_layers": 1, "layer_types": ("full_attention",) * 2, "laurel_rank": 4,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64,
    }),
    "gemma4": (Gemma4, {
        "layer_types": ("sliding_attention", "full_attention"), "global_head_dim": 8, "sliding_window": 6,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 0,
    }),
}  # fmt: skip


@jax.jit
def answers(model, ids):
    prefill, cache = model(ids[:, :-1], model.cache(4, 16))
    return model(ids), prefill, model(ids[:, -1:], cache)[0]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=pytest.mark.extra if one == "gemma3n" else ()) for one in KINDS],
)
def test_logits_are_those_of_one_device(kind):
    made, settings = KINDS[kind]
    model = maxjax.init(
        made(made.family.config(64, 32, 48, **SIZES, **settings)), jax.random.key(0)
    )
    ids = jnp.arange(28, dtype=jnp.int32).reshape(4, 7)
    expected = answers(model, ids)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    model.to(mesh)
    with jax.set_mesh(mesh):
        found = answers(model, jax.device_put(ids, NamedSharding(mesh, PartitionSpec("data"))))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=2e-5)
