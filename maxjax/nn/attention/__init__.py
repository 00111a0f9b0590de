"""Attention layers, under the names and paths of ``max.nn.attention``. Names are imported on first use."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ...absent import absent as _absent
from ...lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .attention_with_rope import AttentionWithRope as AttentionWithRope
    from .attention_with_rope import (
        TensorParallelAttentionWithRope as TensorParallelAttentionWithRope,
    )
    from .mask_config import AttentionMaskVariant as AttentionMaskVariant
    from .mask_config import MHAMaskVariant as MHAMaskVariant
    from .multi_head_attention import MultiHeadAttention as MultiHeadAttention
    from .multi_latent_attention import LatentAttentionWithRope as LatentAttentionWithRope
    from .multi_latent_attention import MLAPrefillMetadata as MLAPrefillMetadata
    from .multi_latent_attention import (
        TensorParallelLatentAttentionWithRope as TensorParallelLatentAttentionWithRope,
    )
    from .multihead_attention import MultiheadAttention as MultiheadAttention
    from .multihead_attention import num_heads_for_device as num_heads_for_device
    from .tapped_attention import attention as attention

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "attention_with_rope": "AttentionWithRope TensorParallelAttentionWithRope",
        "mask_config": "AttentionMaskVariant MHAMaskVariant",
        "multi_head_attention": "MultiHeadAttention",
        "multi_latent_attention": "LatentAttentionWithRope MLAPrefillMetadata "
        "TensorParallelLatentAttentionWithRope",
        "multihead_attention": "MultiheadAttention num_heads_for_device",
        "tapped_attention": "attention",
    },
    _absent(__name__),
)
