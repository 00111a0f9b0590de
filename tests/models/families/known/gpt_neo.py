"""GPT-Neo: layers with a sliding window, scores that are not scaled."""

from tests.models.families.cases import Case

LAST = ("transformer.ln_f.weight", "transformer.ln_f.bias")


def neo(name, **settings):
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "bos_token_id": None,
             "eos_token_id": None, "max_position_embeddings": 64,
             "attention_types": [[["global", "local"], 1], [["local"], 1]]}  # fmt: skip
    return Case("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", sizes | settings, name, last=LAST,
                is_whole=True, gguf=False)  # fmt: skip


CASES = [
    neo("125m", window_size=7, num_heads=2, intermediate_size=40),
    neo("tinystories", window_size=256, num_layers=2, attention_types=[[["global", "local"], 1]]),
    neo("plain", attention_types=[[["global"], 3]], activation_function="relu",
        tie_word_embeddings=False, layer_norm_epsilon=1e-3),
]  # fmt: skip
