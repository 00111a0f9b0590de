"""GGUF files of Granite 3 with experts."""

from __future__ import annotations

from dataclasses import replace

from ...granite import GRANITE_GGUF, with_rope
from ..names import expert_names

GRANITEMOE_GGUF = replace(
    GRANITE_GGUF,
    architecture="granitemoe",
    tensors={**GRANITE_GGUF.tensors, **expert_names("block_sparse_moe", "router.layer")},
    keys={
        **GRANITE_GGUF.keys, "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    read=with_rope, biases=("attn_q", "attn_k", "attn_v", "attn_output"), model_types=(),
)  # fmt: skip
