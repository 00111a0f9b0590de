"""MultiHeadAttention: attention with projections, whose weights have torch's names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...elsewhere import either
from ...graph.device import DeviceRef
from ...graph.kind import on_arrays
from ...graph.weight.weight import Weight
from ...kernels import matmul
from ...kernels.attention import mask_4d
from ..layer import Module
from ..linear import Linear
from ..product import add_bias
from .tapped_attention import tapped_attention


class MultiHeadAttention(Module):
    """``softmax(q kᵀ / √D) v`` for each head, between linear layers (A. Vaswani et al., arXiv:1706.03762).

    Args:
        embed_dim: number E of features of queries and results.
        num_heads: number H of heads of D = E / H features.
        dtype: dtype of the weights.
        device: device that the weights are declared on; None means the CPU.
        has_bias, bias: two names of one argument: whether the projections have biases. By default they have.
        kdim, vdim: numbers of features of keys and values; E by default.

    Attributes:
        in_proj_weight: Weight ``[3 E, E]`` of queries, keys and values. If ``kdim`` or ``vdim`` is not E, there are
            ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight`` instead.
        in_proj_bias: Weight ``[3 E]``, or None.
        out_proj: Linear.

    Raises:
        ValueError: E is not a multiple of H.

    The batch is the first axis. Masks are True where a query attends, as everywhere in maxjax; in torch, False.

    Example:
        >>> import maxjax
        >>> layer = maxjax.init(MultiHeadAttention(8, 2), jax.random.key(0))
        >>> layer(jnp.ones((1, 3, 8)), is_causal=True).shape
        (1, 3, 8)
        >>> list(layer.raw_state_dict())
        ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias']
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dtype: Any = DType.float32,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        has_bias = either(True, has_bias=has_bias, bias=bias)
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        device = device or DeviceRef.CPU()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        sizes = {"q": embed_dim, "k": kdim or embed_dim, "v": vdim or embed_dim}
        self.is_fused = set(sizes.values()) == {embed_dim}
        if self.is_fused:
            self.in_proj_weight = Weight(
                "in_proj_weight", dtype, (3 * embed_dim, embed_dim), device
            )
        else:
            for name, size in sizes.items():
                full = f"{name}_proj_weight"
                setattr(self, full, Weight(full, dtype, (embed_dim, size), device))
        self.in_proj_bias = (
            Weight("in_proj_bias", dtype, (3 * embed_dim,), device) if has_bias else None
        )
        self.out_proj = Linear(embed_dim, embed_dim, dtype, device, has_bias=has_bias)

    @on_arrays
    def __call__(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        mask: Any = None,
        *,
        is_causal: bool = False,
    ) -> Any:
        """Attention of ``query`` to ``key`` and ``value``.

        Args:
            query: queries before projection, ``[B, T, E]``.
            key, value: keys and values before projection, ``[B, S, ...]``; the defaults are ``query`` and ``key``.
            mask: booleans, True = attend: ``[B, S]`` (padding), ``[B, T, S]`` or ``[B, H or 1, T or 1, S]``.
            is_causal: whether query t attends only to keys up to t.

        Returns:
            ``[B, T, E]``.

        Raises:
            ValueError: the shapes do not fit.
            TypeError: the mask is not boolean.
        """
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = (
            a.reshape(*a.shape[:-1], self.num_heads, self.embed_dim // self.num_heads)
            for a in self._projected(query, key, value)
        )
        if is_causal:
            t, s = q.shape[1], k.shape[1]
            causal = jnp.tril(jnp.ones((1, 1, t, s), bool))
            scores = (q.shape[0], self.num_heads, t, s)
            mask = causal if mask is None else mask_4d(mask, scores) & causal
        y = tapped_attention(q, k, v, mask)
        return self.out_proj(y.reshape(*y.shape[:2], self.embed_dim))

    def _projected(self, *inputs: Any) -> list[jax.Array]:
        """Queries, keys and values ``[B, T or S, E]``."""
        arrays = [jnp.asarray(a) for a in inputs]
        size = self.embed_dim
        if self.is_fused and inputs[0] is inputs[1] and inputs[1] is inputs[2]:
            y = matmul(arrays[0], self.in_proj_weight)
            return jnp.split(add_bias(y, self.in_proj_bias), 3, axis=-1)
        if self.is_fused:
            weights = jnp.split(jnp.asarray(self.in_proj_weight), 3)
        else:
            weights = [getattr(self, f"{name}_proj_weight") for name in "qkv"]
        found = [matmul(a, w) for a, w in zip(arrays, weights, strict=True)]
        if self.in_proj_bias is None:
            return found
        bias = jnp.asarray(self.in_proj_bias)
        return [add_bias(y, bias[i * size : (i + 1) * size]) for i, y in enumerate(found)]
