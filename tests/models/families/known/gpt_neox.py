"""GPT-NeoX and Pythia."""

from tests.models.families.cases import Case

LAST = ("gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias")


def neox(**settings):
    return (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"num_key_value_heads": 4, **settings},
    )


# Of GELU, llama.cpp computes the approximation by tanh, from a table of 16-bit floats.
CASES = [
    Case(*neox(rotary_pct=0.5, rotary_emb_base=25000, hidden_size=64), name="20b", last=LAST),
    Case(*neox(use_parallel_residual=False, rotary_pct=1.0), name="sequential", last=LAST),
    Case(*neox(attention_bias=False, tie_word_embeddings=True, hidden_act="gelu_fast"), name="plain",
         last=LAST, gguf=False),
]  # fmt: skip
