"""GPT-J and CodeGen."""

from tests.models.families.cases import Case

LAST = ("transformer.ln_f.weight", "transformer.ln_f.bias")
SIZES = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 256,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def gptj(name, **settings):
    is_new = settings.get("activation_function", "gelu_new") == "gelu_new"  # GGUF has no other
    return Case("gptj", "GPTJForCausalLM", "GPTJConfig", SIZES | settings, name, last=LAST,
                is_whole=True, gguf=is_new, like_llama_cpp=False)  # fmt: skip


def codegen(name, **settings):
    return Case("codegen", "CodeGenForCausalLM", "CodeGenConfig", SIZES | settings, name, last=LAST,
                is_whole=True, gguf=False)  # fmt: skip


CASES = [
    gptj("6b", n_inner=40, n_head=2),
    gptj("whole", rotary_dim=8, tie_word_embeddings=True, layer_norm_epsilon=1e-3),
    gptj("relu", rotary_dim=2, activation_function="relu", n_embd=24, n_head=3),
    codegen("350m", n_head=8, n_inner=40, rotary_dim=2),
    codegen("whole", rotary_dim=8, layer_norm_epsilon=1e-3),
    codegen("relu", activation_function="relu", tie_word_embeddings=True),
]
