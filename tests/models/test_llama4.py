"""What of Llama 4 no other family has; its logits are in ``families``."""

import jax
import jax.numpy as jnp
import numpy as np

from maxjax import init
from maxjax.dtype import DType
from maxjax.models.llama4 import Llama4Attention, Llama4Config
from maxjax.models.parts import no_cache

SMALL = {
    "vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def attended(factor, **settings):
    """The result of attention in the first layer, where RoPE multiplies by YaRN's ``factor``."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "attention_factor": factor,
            "original_max_position_embeddings": 64}  # fmt: skip
    config = Llama4Config.from_dict({**SMALL, "rope_parameters": rope, **settings})
    layer = init(Llama4Attention(config, 0, DType.float32), jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 16)), jnp.float32)
    cache = no_cache(5)
    return np.asarray(
        layer(x, cache, config.rope_parameters.angles(cache, config.head_dim), None)[0]
    )


def test_the_norm_takes_the_factor_of_yarn_away():
    np.testing.assert_allclose(
        attended(1.3, rms_norm_eps=1e-12), attended(1.0, rms_norm_eps=1e-12), atol=1e-6
    )
    without = [attended(factor, use_qk_norm=False) for factor in (1.0, 1.3)]
    assert np.abs(without[0] - without[1]).max() > 1e-3
