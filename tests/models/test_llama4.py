"""What of Llama 4 no other family has; its logits are in ``families``."""

import jax.numpy as jnp
import numpy as np

from maxjax.dtype import DType
from maxjax.models.llama4 import Llama4Attention, Llama4Config

SMALL = {
    "vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def test_the_norm_takes_the_factor_of_yarn_away():
    """transformers norms after RoPE; here RoPE, which comes later, multiplies by the factor."""
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.standard_normal((1, 3, n * 8)), jnp.float32) for n in (2, 1, 1)]
    for factor in (1.0, 1.3):
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "attention_factor": factor,
                "original_max_position_embeddings": 64}  # fmt: skip
        config = Llama4Config.from_dict({**SMALL, "rope_parameters": rope})
        q, k, v = Llama4Attention(config, True, DType.float32).heads(*given)
        for found, x in ((q, given[0]), (k, given[1])):
            x = factor * np.asarray(x).reshape(1, 3, -1, 8)
            normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
            np.testing.assert_allclose(factor * found, normed, rtol=1e-5)
        np.testing.assert_array_equal(v, given[2].reshape(1, 3, 1, 8))
