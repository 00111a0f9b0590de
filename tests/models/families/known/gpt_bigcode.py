"""StarCoder and SantaCoder."""

from tests.models.families.cases import Case

LAST = ("transformer.ln_f.weight", "transformer.ln_f.bias")


def code(name, gguf=True, **settings):
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
             "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    return Case("gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", sizes | settings, name,
                last=LAST, is_whole=True, gguf=gguf)  # fmt: skip


CASES = [
    code("santa", n_inner=40),
    code(
        "heads",
        False,
        multi_query=False,
        scale_attn_weights=False,
        n_embd=16,
        tie_word_embeddings=False,
    ),
    code("relu", False, activation_function="relu", layer_norm_epsilon=1e-3, n_head=2),
]
