"""Mamba 2: groups, biases, other sizes than twice the hidden size."""

from tests.models import decoders
from tests.models.families.cases import Case

_SMALL = {
    "vocab_size": decoders.VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8,
    "head_dim": 8, "state_size": 10, "n_groups": 2, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def mamba(name, length=24, exact=True, gguf=True, **settings):
    kind = "mamba2", "Mamba2ForCausalLM", "Mamba2Config"
    settings = {**_SMALL, **settings}
    last = ("backbone.norm_f.weight",)
    return Case(
        *kind, settings, name, last=last, length=length, is_whole=True, gguf=gguf, exact=exact
    )


CASES = [
    mamba("codestral", length=90, conv_kernel=3, layer_norm_epsilon=1e-3),
    # With biases, transformers' convolution sees the padding on the left of shorter texts.
    mamba("biases", exact=False, gguf=False, use_bias=True, use_conv_bias=False, expand=3, num_heads=12, n_groups=4,
          tie_word_embeddings=True),
    mamba("one-group", length=70, n_groups=1, num_heads=16, head_dim=4, state_size=16, expand=2),
]  # fmt: skip
