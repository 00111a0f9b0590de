"""Written for files of Modular MAX: its kernels as functions of JAX arrays, at the path of ``max.nn.kernels``.

maxjax itself does not import it: its layers use ``maxjax.kernels``. There are kernels for attention, RoPE and experts
of ragged batches, with and without a paged cache, and for norms of rows. A ragged batch concatenates the tokens of
all its sequences, ``[tokens, …]``; offsets ``[B + 1]`` say where each begins. A kernel of MAX that is not supported
raises NotImplementedError with advice when it is called (``maxjax.absent``).
"""

from ...absent import absent as _absent
from ..attention.mask_config import MHAMaskVariant as MHAMaskVariant
from ..hyper_connection import hyper_connection_gates as hyper_connection_gates
from ..moe.assignments import grouped_matmul_ragged as grouped_matmul_ragged
from ..moe.assignments import moe_create_indices as moe_create_indices
from ..moe.assignments import moe_finalize as moe_finalize
from ..moe.sigmoid_router import moe_router_group_limited as moe_router_group_limited
from .attention import flash_attention_gpu as flash_attention_gpu
from .attention import flash_attention_ragged_gpu as flash_attention_ragged_gpu
from .attention import masked_flash_attention_gpu as masked_flash_attention_gpu
from .attention import rope_ragged as rope_ragged
from .attention import rope_ragged_with_position_ids as rope_ragged_with_position_ids
from .float8_matmul import dynamic_scaled_matmul as dynamic_scaled_matmul
from .float8_matmul import matmul_static_scaled_float8 as matmul_static_scaled_float8
from .float8_matmul import quantize_dynamic_scaled_float8 as quantize_dynamic_scaled_float8
from .float8_matmul import quantize_static_scaled_float8 as quantize_static_scaled_float8
from .grids import learnable_2d_interp_pos_emb as learnable_2d_interp_pos_emb
from .grids import spatial_merge as spatial_merge
from .grids import tpool_patch_merger as tpool_patch_merger
from .paged_attention import flash_attention_ragged as flash_attention_ragged
from .paged_attention import fused_qk_ragged_rope as fused_qk_ragged_rope
from .paged_attention import fused_qkv_ragged_matmul as fused_qkv_ragged_matmul
from .paged_attention import matmul_kv_cache_ragged as matmul_kv_cache_ragged
from .paged_attention import rms_norm_key_cache as rms_norm_key_cache
from .paged_attention import rope_split_store_ragged as rope_split_store_ragged
from .paged_attention import store_k_cache_ragged as store_k_cache_ragged
from .paged_attention import store_v_cache_ragged as store_v_cache_ragged
from .rows import apply_qk_rms_norm as apply_qk_rms_norm
from .rows import argmax_with_bias as argmax_with_bias
from .rows import gated_group_rmsnorm as gated_group_rmsnorm
from .rows import merge_ragged_tensors as merge_ragged_tensors
from .rows import mtp_eh_norm as mtp_eh_norm
from .rows import row_mean_of_squares_qk as row_mean_of_squares_qk
from .rows import scatter_nd_skip_oob_indices as scatter_nd_skip_oob_indices
from .rows import top_k_per_row as top_k_per_row

__getattr__ = _absent(__name__)
