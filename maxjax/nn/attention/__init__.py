"""Attention, under the names and paths of ``max.nn.attention``."""

from ...absent import absent as _absent
from .attention_with_rope import AttentionWithRope as AttentionWithRope
from .mask_config import MHAMaskVariant as MHAMaskVariant
from .multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .multihead_attention import num_heads_for_device as num_heads_for_device
from .tapped_attention import attention as attention

__getattr__ = _absent(__name__)
