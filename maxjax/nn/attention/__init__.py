"""Attention, under the names and paths of ``max.nn.attention``."""

from ...absent import absent as _absent
from .attention_with_rope import AttentionWithRope as AttentionWithRope
from .mask_config import MHAMaskVariant as MHAMaskVariant
from .multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .tapped_attention import attention as attention

__getattr__ = _absent(
    __name__,
    {
        "MultiheadAttention RaggedAttention GGUFQAttentionWithRope GPTQAttentionWithRope LatentAttentionWithRope "
        "TensorParallelAttentionWithRope TensorParallelLatentAttentionWithRope DistributedAttentionImpl "
        "DataParallelAttentionWithRope MLAPrefillMetadata": (
            "use AttentionWithRope; on a mesh, Module.to shards it"
        ),
    },
)
