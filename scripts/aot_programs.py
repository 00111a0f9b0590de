"""The programs that `scripts/aot.py` compiles: shapes of well-known models, and the fixed sets of its table."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = ("decode", "read", "read_tokens", "call")
# So few that the output head does not hide the layers, in models of two or three layers.
PACKED_VOCABULARY = 4096

# Shapes of models, as in their config.json.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama8": _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                        "num_attention_heads": 32},
    # Heads of width 64, whose caches TPUs lay out with the slots last.
    "llama1": _LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                        "num_attention_heads": 32, "tie_word_embeddings": True},
    "llama70": _LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                         "num_attention_heads": 64},
    "mixtral22": {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 32768, "hidden_size": 6144,
        "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48,
        "num_key_value_heads": 8, "max_position_embeddings": 65536, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen235": {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144,
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "sliding_window": 1024, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "gptoss": {
        "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32,
        "num_experts_per_tok": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0, "tie_word_embeddings": False,
    },
    # With one dense layer instead of three.
    "deepseek3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "deepseek2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "qwen3next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936,
        "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "full_attention_interval": 4, "partial_rotary_factor": 0.25, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 262144, "rope_theta": 10000000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 32768,
        "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
        "n_groups": 8, "state_size": 128, "conv_kernel": 4, "expand": 2, "use_bias": False,
        "use_conv_bias": True, "hidden_act": "silu", "layer_norm_epsilon": 1e-5,
        "rms_norm": True, "tie_word_embeddings": False,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257,
        "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
}  # fmt: skip


class Case(NamedTuple):
    """A program to compile: a model, the mesh it is on, and the sizes of the call.

    Attributes:
        program: one of ``PROGRAMS``.
        model: a key of ``MODELS``, or the path of a config.json or of its directory.
        layers: number of layers; None for that of the configuration.
        mesh: sizes of the mesh's axes.
        batch, capacity: number of sequences, and number of slots of the cache.
        tokens: number of tokens of each sequence, in a ``read`` or a call; of all in a ``read_tokens``.
        dtype, cache_dtype: dtypes of the weights and of the cache; None for that of the weights.
        unstack: whether each layer has weights of its own, whatever ``load`` would choose.
        packed: format of the matrices of layers: a key of ``packed_checkpoints.FORMATS``, or the name of
            an encoding of ggml's; None for floats. A packed model has a vocabulary of ``PACKED_VOCABULARY``.
    """

    program: str
    model: str
    layers: int | None
    mesh: dict[str, int]
    batch: int
    capacity: int
    tokens: int = 512
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    unstack: bool = False
    packed: str | None = None

    def __str__(self) -> str:
        """The name of the case in a table.

        Example:
            >>> str(Case("read", "llama8", 2, {"data": 2, "model": 4}, 8, 1024))
            'read llama8x2 data=2,model=4 B=8 T=512 S=1024'
        """
        axes = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        depth = "" if self.layers is None else f"x{self.layers}"
        words = [self.program, f"{Path(self.model).stem}{depth}", axes, f"B={self.batch}"]
        words += [] if self.program == "decode" else [f"T={self.tokens}"]
        words += [] if self.program == "call" else [f"S={self.capacity}"]
        words += [] if self.dtype == "bfloat16" else [self.dtype]
        words += [] if self.cache_dtype is None else [f"cache={self.cache_dtype}"]
        words += [] if self.packed is None else [self.packed]
        return " ".join(words + ["unstacked"] * self.unstack)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    def config(self) -> dict[str, Any]:
        """The model's configuration, with the number of layers of this case."""
        if self.model in MODELS:
            found = dict(MODELS[self.model])
        else:
            path = Path(self.model)
            found = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        inner = found.get("text_config", found)
        if self.packed is not None:
            inner["vocab_size"] = PACKED_VOCABULARY
        if self.layers is not None:
            inner["n_layer" if "n_layer" in inner else "num_hidden_layers"] = self.layers
            if inner.get("layer_types"):
                inner["layer_types"] = inner["layer_types"][: self.layers]
        return found


MODELS["kimi2"] = MODELS["deepseek3"] | {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0, "max_position_embeddings": 262144,
}  # fmt: skip
MODELS["gptoss120"] = MODELS["gptoss"] | {
    "num_hidden_layers": 36, "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip

# Just enough layers to show what a layer costs; the whole table compiles in four minutes on two cores.
TABLE = (
    Case("decode", "llama8", 4, {"model": 1}, 1, 8192),
    Case("decode", "llama8", 4, {"model": 1}, 8, 8192),
    Case("decode", "llama8", 4, {"model": 8}, 1, 32768),
    Case("decode", "llama8", 4, {"model": 8}, 8, 8192),
    Case("decode", "llama8", 4, {"model": 8}, 8, 8192, cache_dtype="int8"),
    Case("decode", "llama8", 4, {"fsdp": 8}, 8, 8192),
    Case("decode", "llama1", 4, {"data": 2, "model": 4}, 8, 8192),
    Case("decode", "llama1", 4, {"model": 4}, 8, 8192, cache_dtype="int8"),
    Case("decode", "gemma3", 6, {"model": 4}, 8, 32768),
    Case("decode", "mixtral22", 2, {"model": 8}, 1, 8192),
    Case("decode", "mixtral22", 2, {"model": 8}, 8, 8192),
    Case("decode", "gpt2", 4, {"model": 4}, 8, 1024),
    Case("decode", "deepseek2", 2, {"model": 8}, 8, 8192),
    Case("decode", "qwen3next", 4, {"model": 8}, 8, 8192),
    Case("decode", "llama70", 2, {"model": 64}, 8, 8192),
    Case("decode", "qwen235", 2, {"expert": 8, "model": 8}, 64, 8192),
    Case("decode", "llama8", 4, {"model": 1}, 64, 4096),
    Case("decode", "llama8", 4, {"model": 8}, 64, 4096),
    Case("decode", "llama8", 4, {"model": 8}, 64, 4096, cache_dtype="int8"),
    Case("read", "llama8", 2, {"model": 1}, 1, 8192),
    Case("read", "llama8", 2, {"model": 8}, 8, 8192),
    Case("read", "llama8", 2, {"model": 8}, 1, 32768),
    Case("read", "llama1", 2, {"data": 2, "model": 4}, 8, 8192),
    Case("read", "gemma3", 6, {"model": 4}, 1, 32768),
    Case("read", "mixtral22", 2, {"model": 8}, 1, 8192),
    Case("read", "gpt2", 4, {"model": 4}, 8, 1024),
    Case("read", "llama70", 2, {"model": 64}, 8, 8192),
    Case("read_tokens", "llama8", 2, {"model": 1}, 32, 2048),
    Case("read_tokens", "llama8", 2, {"model": 8}, 32, 2048),
    Case("call", "llama8", 2, {"model": 8}, 1, 0, 32768),
)
# The topologies of the table, by the number of devices that a mesh needs.
TOPOLOGIES = {
    "v5e": {8: "v5e:2x4", 64: "v5e:8x8"},
    "h200": {8: "h200:8", 64: "h200:64"},
}


def _packed_dense(
    packed: str, topologies: tuple[str, ...] = ("h200:8", "v5e:2x4")
) -> list[tuple[str, Case]]:
    """Programs of Llama 70B in a format."""
    model = partial(
        Case, model="llama70", layers=2, mesh={"model": 8}, capacity=2048, packed=packed
    )
    cases = (
        model("decode", batch=1),
        model("decode", batch=64),
        model("read", batch=4),
    )
    return [(topology, case) for topology in topologies for case in cases]


def _packed_mixture(model: str, layers: int, packed: str, tpu: str) -> list[tuple[str, Case]]:
    """Programs of a mixture of experts in a format."""
    made = partial(Case, model=model, layers=layers, capacity=2048, packed=packed)
    cases = (
        made("decode", mesh={"model": 8}, batch=1),
        made("decode", mesh={"expert": 8}, batch=64),
        made("read", mesh={"expert": 8}, batch=8, tokens=256),
    )
    return [(topology, case) for topology in ("h200:8", tpu) for case in cases]


# Programs of packed models, each with its topology. The models have one layer with a dense MLP if theirs have any.
PACKED: tuple[tuple[str, Case], ...] = (
    *(pair for packed in ("FP8", "AWQ", "GPTQ", "INT8", "NF4", "Q4_K", "Q8_0", "IQ4_XS")
      for pair in _packed_dense(packed)),
    *(pair for packed in ("GPTQ_ORDER", "NF4_NESTED", "NVFP4")
      for pair in _packed_dense(packed, ("h200:8",))),
    *((topology, Case("decode", "gptoss120", 2, {"model": 1}, 1, 2048, packed="MXFP4"))
      for topology in ("h200:8", "v5e:2x4")),
    *_packed_mixture("gptoss120", 2, "MXFP4", "v5e:2x4"),
    *_packed_mixture("qwen235", 2, "FP8", "v5p:2x2x2"),
    *_packed_mixture("qwen235", 2, "GPTQ", "v5p:2x2x2"),
    *_packed_mixture("kimi2", 2, "INT4", "v5p:2x2x2"),
    *_packed_mixture("deepseek3", 3, "FP8", "v5p:2x2x2"),
)  # fmt: skip
