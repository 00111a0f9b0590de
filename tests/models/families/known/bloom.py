"""BLOOM: ALiBi, a norm of the embeddings."""

from tests.models.families.cases import Case

LAST = ("transformer.ln_f.weight", "transformer.ln_f.bias")


def bloom(name, gguf=True, **settings):
    sizes = {"vocab_size": 96, "hidden_size": 32, "n_layer": 3, "n_head": 4, "bos_token_id": None,
             "eos_token_id": None}  # fmt: skip
    return Case("bloom", "BloomForCausalLM", "BloomConfig", sizes | settings, name, last=LAST,
                is_whole=True, gguf=gguf)  # fmt: skip


CASES = [
    bloom("heads", n_head=6, hidden_size=48, tie_word_embeddings=False),
    bloom("560m", n_head=16, layer_norm_epsilon=1e-3),
    bloom("early", False, apply_residual_connection_post_layernorm=True, n_head=2),
]
