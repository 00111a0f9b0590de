"""Blocks, under the names and paths of ``max.nn.transformer``."""

from ...absent import absent as _absent
from .transformer import TransformerBlock as TransformerBlock

__getattr__ = _absent(
    __name__,
    {
        "Transformer DistributedTransformer DistributedTransformerBlock ReturnLogits ReturnHiddenStates "
        "forward_sequential_layers": (
            "use a decoder of maxjax.models, which returns logits; on a mesh, XLA inserts the communication"
        ),
    },
)
