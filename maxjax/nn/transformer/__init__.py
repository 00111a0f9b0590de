"""Blocks, under the names and paths of ``max.nn.transformer``."""

from ...absent import absent as _absent
from .transformer import TransformerBlock as TransformerBlock

__getattr__ = _absent(
    __name__,
    {
        "Transformer DistributedTransformer DistributedTransformerBlock ReturnLogits ReturnHiddenStates "
        "forward_sequential_layers": (
            "a whole decoder is a Module of its own (maxjax.models), which gives logits, and on a mesh "
            "XLA puts the communication in"
        ),
    },
)
