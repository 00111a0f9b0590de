"""MPT: ALiBi, no biases, clipped queries, keys and values."""

from tests.models.families.cases import Case


def mpt(name, gguf=True, **settings):
    sizes = {"vocab_size": 96, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64,
             "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    return Case("mpt", "MptForCausalLM", "MptConfig", sizes | settings, name,
                last=("transformer.norm_f.weight",), is_whole=True, gguf=gguf)  # fmt: skip


CASES = [
    mpt("30b", n_heads=6, d_model=48, attn_config={"clip_qkv": 0.7}, tie_word_embeddings=False),
    mpt("7b", n_heads=16, layer_norm_epsilon=1e-3),
    mpt("scaled", False, attn_config={"softmax_scale": 0.3, "clip_qkv": 2.0}, n_heads=2),
]
