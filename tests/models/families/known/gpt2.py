"""GPT-2: learned positions, LayerNorm, maps whose weights are transposed."""

from tests.models import decoders
from tests.models.families.cases import Case


def _case(name, gguf=True, **settings):
    return Case(
        "gpt2", "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": None,
         "eos_token_id": None, **settings},
        name, draw=decoders.drawn_of_gpt2, last=("transformer.ln_f.weight", "transformer.ln_f.bias"),
        is_whole=True, gguf=gguf,
    )  # fmt: skip


CASES = [
    _case("wide", n_inner=48, n_head=2),
    _case("124m"),
    _case(
        "scaled",
        activation_function="gelu",
        scale_attn_by_inverse_layer_idx=True,
        n_layer=2,
        gguf=False,
    ),
]
