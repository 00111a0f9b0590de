"""Multi-head latent attention (MLA), whose cache has one short vector for each token.

The vector holds a compressed latent c, from which ``kv_b_proj`` computes the keys and values of all
heads, and a key part with RoPE that all heads share. ``kv_b_proj`` is absorbed: queries are mapped to
the space of the latents, all heads attend to the vectors as to one KV head, and the result is mapped
to values. So keys and values are never expanded, neither in prefill nor in a decode step.

Shapes: B sequences, T tokens, H heads, hidden size E, latent size C; a head's query and key have R
features with RoPE and N without, and its value has V features.

Source: DeepSeek-V2, arXiv:2405.04434.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...graph.weight.weight import Weight
from ...kernels import explicit
from ...kernels.head_products import head_products
from ...nn.kv_cache.kinds import LatentVectors
from ...nn.linear import Linear, linear_rules
from ...nn.norm import RMSNorm
from ...nn.rope_scaling import yarn_mscale
from ..config import setting
from ..parts.rotary import rope_settings
from .attention import DecoderAttention
from .config import DecoderConfig, own

# The epsilon of the norms of latents; the configuration's epsilon is for the other norms.
_EPSILON = 1e-6


@dataclass(frozen=True)
class LatentConfig(DecoderConfig):
    """The settings of a decoder with latent attention.

    Attributes:
        kv_lora_rank: C.
        q_lora_rank: size of the compressed vector that queries are computed from; None: queries are
            computed from the hidden state.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R and V; ``head_dim`` is R.
    """

    head_dim: int | None = own(None)
    kv_lora_rank: int = setting(default=512, minimum=1, held="axis")
    q_lora_rank: int | None = setting(default=None, minimum=1, held="axis")
    qk_nope_head_dim: int = setting(default=128, minimum=1, held="axis")
    qk_rope_head_dim: int = setting(default=64, minimum=2, held="axis")
    v_head_dim: int = setting(default=128, minimum=1, held="axis")

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.query_scale is None:
            width = self.qk_nope_head_dim + self.qk_rope_head_dim
            object.__setattr__(self, "query_scale", width**-0.5)
        super().__post_init__()

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """``mscale_all_dim``, from which :func:`yarn_scale` computes the factor of the scores."""
        scaling, width = self.rope.scaling, self.qk_nope_head_dim + self.qk_rope_head_dim
        factor = getattr(scaling, "factor", 0.0)
        if self.query_scale == width**-0.5 or factor <= 1:
            return raw
        all_dim = ((self.query_scale or 1.0) ** 0.5 * width**0.25 - 1) / (0.1 * math.log(factor))
        rope = {**raw["rope_scaling"], "mscale_all_dim": round(all_dim, 6)}
        return {**raw, "rope_scaling": rope}

    def states(self, number: int) -> Mapping[str, LatentVectors]:
        """One vector ``[R + C]`` for each token."""
        width = self.qk_rope_head_dim + self.kv_lora_rank
        return {"full": LatentVectors(1, width, None, self.num_attention_heads)}


def yarn_scale(raw: Mapping[str, Any]) -> dict[str, float]:
    """``query_scale`` for a file whose RoPE has YaRN's ``mscale_all_dim``; an empty dict for other files.

    Raises:
        ValueError: ``factor`` or ``mscale_all_dim`` is not a positive number.

    Example:
        >>> yarn_scale({"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}})
        {'query_scale': 0.1352337788608801}
    """
    nope, rope = (raw.get(f"qk_{kind}_head_dim", n) for kind, n in (("nope", 128), ("rope", 64)))
    _, given = rope_settings(raw)
    factor, all_dim = given.get("factor"), given.get("mscale_all_dim")
    scaled = given.get("rope_type", given.get("type", "default")) != "default"
    if not (scaled and all_dim and all(type(n) is int and n > 0 for n in (nope, rope))):
        return {}
    good = isinstance(all_dim, (int, float)) and 0 < all_dim < 1e30
    if not (good and isinstance(factor, (int, float)) and 0 < factor < 1e30):
        raise ValueError("'factor' and 'mscale_all_dim' of the RoPE must be positive numbers")
    return {"query_scale": (nope + rope) ** -0.5 * yarn_mscale(factor, all_dim) ** 2}


class LatentAttention(DecoderAttention):
    """Multi-head latent attention, configured by a LatentConfig.

    Attributes:
        q_proj: linear layer of queries; or ``q_a_proj``, ``q_a_layernorm`` and ``q_b_proj``.
        kv_a_proj_with_mqa, kv_a_layernorm: linear layer of the latent and of the key part with RoPE, and
            the latent's norm.
        kv_b_proj: linear layer from a latent to keys and values of all heads.
    """

    def make_projections(self, config: Any, dtype: DType) -> None:
        """Makes the layers that :meth:`project` uses, and ``o_proj``."""
        size, heads, bias = config.hidden_size, self.num_heads, config.attention_bias
        self.nope, self.rotated, self.latent, self.value = (
            config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank, config.v_head_dim
        )  # fmt: skip
        self.num_kv_heads, self.head_dim = 1, self.rotated + self.latent
        width, rank = self.nope + self.rotated, config.q_lora_rank

        def linear(in_dim: int, out_dim: int, has_bias: bool = False) -> Linear:
            return Linear(in_dim, out_dim, dtype, DeviceRef.CPU(), has_bias=has_bias)

        self.q_rank = rank
        if rank is None:
            self.q_proj = linear(size, heads * width)
        else:
            self.q_a_proj = linear(size, rank, bias)
            self.q_a_layernorm = RMSNorm(rank, dtype, _EPSILON)
            self.q_b_proj = linear(rank, heads * width)
        self.kv_a_proj_with_mqa = linear(size, self.latent + self.rotated, bias)
        self.kv_a_layernorm = RMSNorm(self.latent, dtype, _EPSILON)
        self.kv_b_proj: Any = linear(self.latent, heads * (self.nope + self.value))
        self.o_proj = linear(heads * self.value, size, bias)

    def project(self, x: jax.Array) -> list[jax.Array]:
        """``[..., E]`` → queries ``[..., H, R + C]``, and vectors ``[..., 1, R + C]`` as both keys and values."""
        if self.q_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x).astype(x.dtype)))
        q = q.astype(x.dtype).reshape(*x.shape[:-1], self.num_heads, self.nope + self.rotated)
        kv = self.kv_a_proj_with_mqa(x).astype(x.dtype)  # [..., C + R]
        mixed = self._mapped(q[..., : self.nope], 0, self.nope, True)  # [..., H, C]
        q = explicit.concatenate([q[..., self.nope :], mixed], -1)
        latent = self.kv_a_layernorm(kv[..., : self.latent])
        k = explicit.concatenate([kv[..., self.latent :], latent], -1)[..., None, :]
        return [q, k, k]

    def merged(self, y: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """The heads' results ``[..., H, R + C]``, mapped from latents to values: ``[..., H · V]``."""
        return super().merged(
            self._mapped(y[..., self.rotated :], self.nope, self.value, False), gate
        )

    def _mapped(self, x: jax.Array, first: int, rows: int, transposed: bool) -> jax.Array:
        """Multiplies each head by ``rows`` of its N + V rows of the weight of ``kv_b_proj``, from ``first`` on."""
        weight = self.kv_b_proj.weight
        if isinstance(weight, Weight):
            weight = weight.stored.operand()
        weight = self.kv_b_proj.updated_weight(weight, "latent attention")
        return head_products(x, weight, self.num_heads, first, rows, transposed)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits queries, keys, values and the columns of ``o_proj`` between heads; latents are replicated."""
        heads = self.num_heads
        rules = linear_rules("o_proj", ShardingStrategy.head_aware_columnwise(1, heads, self.value))
        widths = {"kv_b_proj": self.nope + self.value}
        widths["q_proj" if self.q_rank is None else "q_b_proj"] = self.nope + self.rotated
        for name, width in widths.items():
            segment = Segment.head_aware(heads, width)
            rules |= linear_rules(name, ShardingStrategy.segmented(1, 0, [segment]))
        for name in ("kv_a_proj_with_mqa",) + (() if self.q_rank is None else ("q_a_proj",)):
            rules |= linear_rules(name, ShardingStrategy.replicate(1))
        return rules
