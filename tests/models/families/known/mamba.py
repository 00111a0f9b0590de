"""Mamba 1 and FalconMamba: biases, ranks of time steps, other sizes than twice the hidden size."""

from tests.models import decoders
from tests.models.families.cases import Case

_SMALL = {
    "vocab_size": decoders.VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 10,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _case(kinds, name, length=24, exact=True, gguf=True, **settings):
    settings, last = {**_SMALL, **settings}, ("backbone.norm_f.weight",)
    # Small mean squares of time steps enlarge float32's error, transformers' as much as ours.
    return Case(
        *kinds, settings, name, last=last, length=length, is_whole=True, gguf=gguf, exact=exact,
        in_float64=kinds[0] == "falcon_mamba",
    )  # fmt: skip


def mamba(name, **settings):
    return _case(("mamba", "MambaForCausalLM", "MambaConfig"), name, **settings)


def falcon(name, **settings):
    kinds = "falcon_mamba", "FalconMambaForCausalLM", "FalconMambaConfig"
    return _case(kinds, name, **settings)


CASES = [
    mamba("130m", length=90, conv_kernel=3, layer_norm_epsilon=1e-3, tie_word_embeddings=False),
    # With biases, transformers' convolution sees the padding on the left of shorter texts.
    mamba("biases", exact=False, gguf=False, use_bias=True, use_conv_bias=False, expand=3, time_step_rank=5,
          residual_in_fp32=False),
    mamba("rank", length=40, exact=False, time_step_rank=7, state_size=16),
    falcon("7b", length=70, conv_kernel=3, layer_norm_epsilon=1e-3, time_step_rank=12),
    falcon("biases", exact=False, gguf=False, use_bias=True, mixer_rms_eps=1e-2, expand=1),
    falcon("untied", exact=False, tie_word_embeddings=False, time_step_rank=3),
]  # fmt: skip
