"""OPT and Galactica."""

from tests.models.families.cases import Case

LAST = "model.decoder.final_layer_norm"


def opt(name, last=(f"{LAST}.weight", f"{LAST}.bias"), **settings):
    sizes = {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3,
             "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": None,
             "eos_token_id": None}  # fmt: skip
    return Case("opt", "OPTForCausalLM", "OPTConfig", sizes | settings, name, last=last,
                is_whole=True, gguf=False)  # fmt: skip


CASES = [
    opt("350m", do_layer_norm_before=False, word_embed_proj_dim=16,
        last=("model.decoder.project_out.weight",)),
    opt("125m", num_attention_heads=2, ffn_dim=33),
    opt("galactica", enable_bias=False, activation_function="gelu", tie_word_embeddings=False),
    opt("fine-tuned", _remove_final_layer_norm=True, word_embed_proj_dim=48,
        last=("model.decoder.project_out.weight",)),
]  # fmt: skip
