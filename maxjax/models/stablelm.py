"""StableLM 2: LayerNorm, RoPE of a quarter of each head, and in some sizes attention and MLP in parallel.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = q_proj(h), k_proj(h), v_proj(h)
        q, k = rope(q_layernorm(q)), rope(k_layernorm(k))    the norms in the 12B alone
        x = x + o_proj(softmax(q kᵀ / √D) v)
        h = post_attention_layernorm(x)                      the same h as above, where they are in parallel
        x = x + down_proj(silu(gate_proj(h)) · up_proj(h))
    logits = lm_head(norm(x))

Source: arXiv:2402.17834; transformers' ``modeling_stablelm``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..errors import CheckpointFormatError
from ..graph.device import DeviceRef
from ..graph.weights import WeightData
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import ConstantLayerNorm, LayerNorm
from .family import Family
from .gguf.metadata import Settings
from .gguf.pieces import computed
from .gguf.table import GGUFTable
from .names import DECODER, Names
from .parts import (
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class StableLMConfig(LanguageModelConfig):
    """The settings of a StableLM 2: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        use_qkv_bias: whether the projections of queries, keys and values have biases.
        use_parallel_residual: whether attention and MLP are added to the same hidden states.
        qk_layernorm: whether each head of queries and keys is normalised, with a weight of its own.
    """

    model_type = "stablelm"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(4096, minimum=1)
    layer_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0, part=0.25)
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, by default with 32 KV heads."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 32}), **values)


class StableLMHeadNorms(Module):
    """LayerNorm of each head, with a weight of its own and no bias."""

    def __init__(self, heads: int, head_dim: int, dtype: DType, eps: float):
        super().__init__()
        self.normalise = ConstantLayerNorm(head_dim, eps=eps)
        self.norms = LayerList(
            LayerNorm(head_dim, dtype=dtype, eps=eps, use_bias=False) for _ in range(heads)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        # All heads at once, whose axis a mesh may split.
        weight = jnp.stack([jnp.asarray(norm.weight) for norm in self.norms])  # [H, D]
        weight = weight.reshape((1,) * (x.ndim - 2) + weight.shape).astype(jnp.float32)
        return (self.normalise(x.astype(jnp.float32)) * weight).astype(x.dtype)  # [B, T, H, D]


class StableLMAttention(Module):
    """Attention with rotary positions of a part of each head, and norms of queries and keys in the 12B."""

    def __init__(self, config: StableLMConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.use_qkv_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype)
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            self.q_layernorm, self.k_layernorm = (
                StableLMHeadNorms(n, D, dtype, config.layer_norm_eps) for n in (H, K)
            )

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class StableLMMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: StableLMConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype)
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class StableLMBlock(Module):
    """One layer: attention, then the MLP; or both in parallel, after one norm."""

    def __init__(self, config: StableLMConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.is_parallel = config.use_parallel_residual
        self.input_layernorm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)
        self.self_attn = StableLMAttention(config, dtype)
        self.mlp = StableLMMLP(config, dtype)
        if not self.is_parallel:
            self.post_attention_layernorm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, cache, angles)
        x = x + y
        return x + self.mlp(h if self.is_parallel else self.post_attention_layernorm(x)), cache


class StableLMModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: StableLMConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            StableLMBlock(config, dtype) for _ in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.layer_norm_eps
        self.norm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class StableLM(LanguageModel):
    """A StableLM 2 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> sizes = dict(num_hidden_layers=1, num_attention_heads=2)
        >>> config = StableLMConfig(100, 32, 16, use_parallel_residual=True, **sizes)
        >>> [n for n in StableLM(config).raw_state_dict() if "0.post" in n]
        []
    """

    def __init__(self, config: StableLMConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = StableLMModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------

_EACH = re.compile(r"(.*\.self_attn\.[qk]_layernorm)\.norms\.(\d+)\.weight")


def _join(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Cut the weights ``[H, D]`` of the norms of all heads into one for each."""
    found: dict[str, WeightData] = {}
    for name, data in tensors.items():
        if not name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            found[name] = data
            continue
        shape = tuple(map(int, data.logical_shape))
        if len(shape) != 2:
            raise CheckpointFormatError(
                "not the norms of all heads", path=given.path, tensor=name, expected="[H, D]", found=shape
            )  # fmt: skip
        for head in range(shape[0]):
            new = f"{name.removesuffix('weight')}norms.{head}.weight"
            found[new] = computed(new, [data], lambda all, head=head: all[head], shape[1:])
    return found


def _split(config: StableLMConfig, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Stack the weights of the norms of a layer's heads: the inverse of :func:`_join`."""
    found: dict[str, WeightData] = {}
    heads: dict[str, dict[int, WeightData]] = {}
    for name, data in tensors.items():
        if match := _EACH.fullmatch(name):
            heads.setdefault(f"{match[1]}.weight", {})[int(match[2])] = data
        else:
            found[name] = data
    for name, each in heads.items():
        count = config.num_attention_heads if "q_lay" in name else config.num_key_value_heads
        if set(each) != set(range(count)):
            raise CheckpointFormatError(
                "not the norms of all heads", tensor=name, expected=count, found=sorted(each)
            )
        shape = (count, config.head_dim)
        found[name] = computed(
            name, [each[i] for i in range(count)], lambda *all: np.stack(all), shape
        )
    return found


STABLELM_GGUF = GGUFTable(
    "stablelm",
    {".attn_q_norm": "self_attn.q_layernorm", ".attn_k_norm": "self_attn.k_layernorm"},
    keys={"use_parallel_residual": "use_parallel_residual"},
    constants={"hidden_act": "silu"},
    read=lambda given, tensors, config: {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    },
    join=_join,
    split=_split,
    biases=("attn_q", "attn_k", "attn_v", "attn_norm", "ffn_norm", "output_norm"),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    is_partial=True,
    has_head=True,
)

STABLELM = StableLM.family = Family.of(
    StableLM,
    StableLMConfig,
    "StableLmForCausalLM",
    "StableLmModel",
    names=Names(*DECODER),
    gguf=STABLELM_GGUF,
)
