"""Written for files of Modular MAX: ``AttentionWithRope``: projections, rotary embedding and masked attention.

maxjax itself does not import it: its models use the functions of ``models/parts``. The layer can also be
called with hidden states alone, without a cache of MAX.

Shapes: batch B, T queries, S keys, H query heads, K KV heads, head dimension D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp

from ...absent import absent as _absent
from ...absent import hides, refuse_arguments
from ...dtype import DType
from ...graph import ops
from ...graph.device import DeviceRef
from ...graph.placement.arrays import replicate_last_axis
from ...graph.placement.specs import parts
from ...graph.placement.split import REPLICATED, Segment, Split
from ...graph.placement.split import even_range as _compute_shard_range  # noqa: F401  # MAX's name
from ...graph.placement.strategy import ShardingStrategy
from ...graph.value import TensorValue, unwrap, wraps
from ...kernels.attention import mask_4d
from ..kernels.paged_attention import flash_attention_ragged, rope_split_store_ragged
from ..kv_cache.kinds import KeysValues
from ..kv_cache.paged import PagedCacheValues, over_pages
from ..layer import Module
from ..layer.sharded import sharded, split_layers, strategy_by
from ..linear import Linear
from ..norm import RMSNorm
from ..rotary_embedding import RotaryEmbedding, rotate
from ..stacked_linear import StackedLinear, stacked_rules
from .mask_config import MHAMaskVariant
from .tapped_attention import tapped_attention


def heads_rules(qkv: Any, heads: int, kv_heads: int, width: int, at: str = "") -> dict[str, Any]:
    """The sharding rules of attention, which splits by heads over the ``model`` axis.

    Args:
        qkv: StackedLinear of queries, keys and values; ``at`` is the prefix of its attribute path.
        heads, kv_heads, width: sizes H, K and D.
    """
    segments = [Segment.head_aware(n, width) for n in (heads, kv_heads, kv_heads)]
    rules = {"o_proj": Split(1, (Segment.head_aware(heads, width),))}
    if qkv.stacked:
        return rules | stacked_rules(at.removesuffix("."), qkv, segments)
    each = zip(qkv.names, segments, strict=True)
    return rules | {f"{at}{name}": Split(0, (segment,)) for name, segment in each}


# --- the layer -------------------------------------------------------------------------------


# The supported variants, and whether each masks the keys after a query's position.
_IS_CAUSAL = {
    MHAMaskVariant.CAUSAL_MASK: True,
    MHAMaskVariant.NULL_MASK: False,
    MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK: True,
}


class AttentionWithRope(Module):
    """Self-attention with rotary position embedding. Takes MAX's keyword arguments.

    Called with hidden states alone, it attends within them. Called as in MAX, with a layer index, hidden states of a
    ragged batch and a paged cache, it stores keys and values in the cache and attends to all tokens of a sequence.

    Args:
        rope: rotary embedding of queries and keys.
        sharding_strategy: initial value of the attribute of this name.
        num_attention_heads, num_key_value_heads: numbers H and K of heads; H is a multiple of K.
        hidden_size: length E of the last axis of the input and of the result.
        kv_params: settings of the paged cache, or an object with ``head_dim``; None uses the rope's
            ``head_dim``, and allows no cache.
        devices: devices; the weights are declared on the first.
        dtype: dtype of the weights.
        linear_cls: constructor of the projections.
        stacked_qkv: whether there is one weight ``qkv_proj.weight`` instead of three.
        scale: factor of the scores, 1/√D by default; for a scaled rope, pass ``rope.compute_scale()``.
        has_bias: whether the projections of queries, keys and values have a bias.
        clip_qkv: bound of the weights of these projections, which are clipped to ``±clip_qkv``; None means no bound.
        use_qk_norm, rms_norm_eps: whether each head of queries and keys is normalised before the
            rope, and the epsilon of that RMSNorm.
        mask_variant: mask of the keys, applied in addition to the mask of a call.
        sliding_window: number of latest tokens that a query attends to, itself included; None means all.

    Attributes:
        qkv_proj, o_proj: projections; their names in a state dict are q_proj, k_proj, v_proj.

    Example:
        >>> rope = RotaryEmbedding(dim=8, n_heads=2, theta=10000.0, max_seq_len=16)
        >>> layer = AttentionWithRope(
        ...     rope=rope, num_attention_heads=2, num_key_value_heads=1, hidden_size=8)
        >>> list(layer.raw_state_dict())
        ['o_proj.weight', 'q_proj.weight', 'k_proj.weight', 'v_proj.weight']
    """

    @hides("quant_config")
    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
        sharding_strategy: ShardingStrategy | None = None,
        num_attention_heads: int,
        num_key_value_heads: int,
        hidden_size: int,
        kv_params: Any = None,
        devices: Sequence[DeviceRef] | None = None,
        dtype: Any = DType.float32,
        linear_cls: Callable[..., Any] = Linear,
        stacked_qkv: bool = False,
        scale: float | None = None,
        has_bias: bool = False,
        quant_config: Any = None,
        clip_qkv: float | None = None,
        use_qk_norm: bool = False,
        rms_norm_eps: float = 1e-6,
        mask_variant: MHAMaskVariant = MHAMaskVariant.CAUSAL_MASK,
        sliding_window: int | None = None,
    ):
        super().__init__()
        if num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {num_attention_heads} is not a multiple of "
                f"num_key_value_heads {num_key_value_heads}"
            )
        refuse_arguments(self, quant_config=quant_config)
        if mask_variant not in _IS_CAUSAL:
            raise NotImplementedError(
                f"AttentionWithRope with mask_variant={mask_variant!r} is not supported"
            )
        if mask_variant == MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK and sliding_window is None:
            raise ValueError("SLIDING_WINDOW_CAUSAL_MASK needs a sliding_window")
        self.rope, self.kv_params = rope, kv_params
        self.n_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.hidden_size = hidden_size
        self.head_dim = rope.head_dim if kv_params is None else kv_params.head_dim
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.mask_variant = MHAMaskVariant(mask_variant)
        self.sliding_window = sliding_window
        self.stacked_qkv, self.has_bias, self.clip_qkv = stacked_qkv, has_bias, clip_qkv
        self.use_qk_norm, self.rms_norm_eps = use_qk_norm, rms_norm_eps
        if use_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, dtype, rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, dtype, rms_norm_eps)
        self.devices = list(devices or ())
        device = devices[0] if devices else DeviceRef.CPU()
        q_dim, kv_dim = (n * self.head_dim for n in (num_attention_heads, num_key_value_heads))
        self.qkv_proj = StackedLinear(
            hidden_size, [q_dim, kv_dim, kv_dim], ["q_proj", "k_proj", "v_proj"], dtype, device,
            stacked_qkv, has_bias, linear_cls, clip_weight=clip_qkv,
        )  # fmt: skip
        self.o_proj = linear_cls(in_dim=q_dim, out_dim=hidden_size, dtype=dtype, device=device)
        if sharding_strategy is not None:
            self.sharding_strategy = sharding_strategy

    @property
    def q_weight_dim(self) -> int:
        """The number of rows of ``wqkv`` for queries."""
        return self.n_heads * self.head_dim

    @property
    def wqkv(self) -> TensorValue:
        """The weights of the projections of queries, keys and values, one after the other."""
        return self.qkv_proj.stacked_weight

    @property
    def wqkv_bias(self) -> TensorValue | None:
        """The biases of these projections, one after the other, or None."""
        return self.qkv_proj.stacked_bias

    @property
    def cached(self) -> KeysValues:
        """The keys and values of a token that a cache keeps for this layer, which ``maxjax.plan`` counts."""
        return KeysValues(self.num_key_value_heads, self.head_dim, query_heads=self.n_heads)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits queries, keys and values by heads, and the columns of ``o_proj`` likewise."""
        return heads_rules(
            self.qkv_proj, self.n_heads, self.num_key_value_heads, self.head_dim, "qkv_proj."
        )

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy of the layer, tensor_parallel or replicate; None if it was not set.

        Raises:
            ValueError: another strategy is assigned, or the KV heads do not divide evenly over its devices.
        """
        return strategy_by(self.o_proj)

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        n = strategy.num_devices
        if strategy.is_tensor_parallel and self.num_key_value_heads % n:
            raise ValueError(f"{self.num_key_value_heads} KV heads do not divide over {n} devices")
        norms = ("q_norm", "k_norm") if self.use_qk_norm else ()
        rules = AttentionWithRope.sharding_rules(self)
        split_layers(self, strategy, rules | dict.fromkeys(norms, REPLICATED))

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one layer for each device, with its heads; the results must be summed.

        Raises:
            ValueError: ``sharding_strategy`` is not set.

        Example:
            >>> rope = RotaryEmbedding(dim=16, n_heads=4, theta=10000.0, max_seq_len=16)
            >>> layer = AttentionWithRope(
            ...     rope=rope, num_attention_heads=4, num_key_value_heads=2, hidden_size=16)
            >>> layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
            >>> [(part.n_heads, part.num_key_value_heads) for part in layer.shard([DeviceRef.CPU()] * 2)]
            [(2, 1), (2, 1)]
        """
        devices = list(devices)
        found, strategy = sharded(self, devices), self.sharding_strategy
        assert strategy is not None  # sharded refuses a weight without one
        for part, device in zip(found, devices, strict=True):
            part.devices = [device]
            if strategy.is_tensor_parallel:
                n = strategy.num_devices
                part.n_heads = self.n_heads // n
                part.num_key_value_heads = self.num_key_value_heads // n
                part.qkv_proj.out_dims = tuple(size // n for size in self.qkv_proj.out_dims)
        return found

    @overload
    def __call__(
        self, x: Any, mask: Any = None, positions: Any = None, freqs_cis: Any = None
    ) -> Any: ...

    @overload
    def __call__(
        self,
        layer_idx: Any,
        x: Any,
        kv_collection: PagedCacheValues,
        freqs_cis: Any,
        input_row_offsets: Any,
    ) -> TensorValue: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``[B, T, E]``, or ``[T, E]`` for one sequence, or ``[N, E]`` for a ragged batch → the same shape.

        Args:
            mask: booleans, True = attend, as for :func:`attention`; applied in addition to
                ``mask_variant``.
            positions: positions of the tokens for the rope, integers ``[T]`` or ``[B, T]``; 0, 1, …
                by default. The causal mask follows the order of the tokens, not ``positions``.
            freqs_cis: table such as ``rope.freqs_cis``, used instead of the rope.
            layer_idx: index of the layer in the cache.
            kv_collection: paged cache with the settings ``kv_params`` of the constructor.
            input_row_offsets: offsets of the sequences of a ragged batch, ``[B + 1]``.

        Raises:
            ValueError: ``x`` has the wrong number of axes, or the shapes do not match.
            NotImplementedError: a window without a causal mask, over a paged cache.
        """
        return self._result(*args, **kwargs)

    def _result(self, *args: Any, **kwargs: Any) -> Any:
        if over_pages(args, kwargs):
            return self._over_pages(*args, **kwargs)
        return self._within(*args, **kwargs)

    def _over_pages(
        self,
        layer_idx: Any,
        x: Any,
        kv_collection: PagedCacheValues,
        freqs_cis: Any,
        input_row_offsets: Any,
    ) -> TensorValue:
        variant, window = self.mask_variant, self.sliding_window
        if window is not None and not _IS_CAUSAL[variant]:
            raise NotImplementedError(
                f"a sliding_window with {variant.name} is not supported over a paged cache"
            )
        if variant is MHAMaskVariant.CAUSAL_MASK and window is not None:
            variant = MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK
        qkv = TensorValue(self.qkv_proj(x))
        norms: dict[str, Any] = {}
        if self.use_qk_norm:
            norms = {"q_norm_weight": self.q_norm.weight, "k_norm_weight": self.k_norm.weight,
                     "rms_norm_eps": self.q_norm.eps}  # fmt: skip
        queries = rope_split_store_ragged(
            self.kv_params, qkv, input_row_offsets, TensorValue(freqs_cis).cast(qkv.dtype),
            kv_collection, layer_idx, self.n_heads, self.rope.interleaved, **norms,
        )  # fmt: skip
        found = flash_attention_ragged(
            self.kv_params, queries.reshape((-1, self.n_heads, self.head_dim)), input_row_offsets,
            kv_collection, layer_idx, variant, self.scale, -1 if window is None else window,
        )  # fmt: skip
        return self.o_proj(found.reshape((-1, self.n_heads * self.head_dim)))

    def _within(
        self, x: Any, mask: Any = None, positions: Any = None, freqs_cis: Any = None
    ) -> Any:
        array = unwrap(x)
        if array.ndim not in (2, 3):
            raise ValueError(f"AttentionWithRope takes [B, T, E] or [T, E], not {array.shape}")
        tokens = array if array.ndim == 3 else array[None]  # [B, T, E]
        q, k, v = self._projected(TensorValue(tokens) if wraps(x) else tokens)
        cos, sin = self._cos_sin(positions, tokens.shape[1], freqs_cis)
        q, k = (rotate(a, cos, sin, interleaved=self.rope.interleaved) for a in (q, k))
        if self.num_key_value_heads % parts(self.o_proj.weight, 1):
            # The KV heads cannot be split evenly: each device has all of them, and uses those of its query heads.
            k, v = (jnp.repeat(a, self.n_heads // self.num_key_value_heads, axis=2) for a in (k, v))
        mask = self._combined_mask(mask, q, k)
        y = tapped_attention(q, k, v, mask, scale=self.scale)  # [B, T, H, D]
        y = y.reshape(*tokens.shape[:-1], self.n_heads * self.head_dim)
        y = y if array.ndim == 3 else y[0]
        return self.o_proj(TensorValue(y) if wraps(x) else y)

    def _projected(self, x: Any) -> list[jax.Array]:
        """Queries ``[B, T, H, D]``, keys and values ``[B, T, K, D]``."""
        q, k, v = (
            part.reshape(*part.shape[:-1], part.shape[-1] // self.head_dim, self.head_dim)
            for part in self._split_qkv(x)
        )
        return [self.q_norm(q), self.k_norm(k), v] if self.use_qk_norm else [q, k, v]

    def _split_qkv(self, x: Any) -> list[jax.Array]:
        if not self.qkv_proj.stacked or self.qkv_proj.weight.spec.layout is not None:
            return self.qkv_proj.split_projections(x)
        # The stacked weight is replicated, but heads may be split: keep XLA from splitting its result too.
        return [
            replicate_last_axis(part, self.o_proj.weight)
            for part in self.qkv_proj.split_projections(x)
        ]

    def _cos_sin(self, positions: Any, length: int, table: Any) -> tuple[jax.Array, jax.Array]:
        positions = jnp.arange(length) if positions is None else jnp.asarray(unwrap(positions))
        if table is None:
            return self.rope.cos_sin(positions)
        rows = jnp.take(unwrap(table), positions, axis=0, mode="fill")  # [..., T, D]
        pairs = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 2, 2)
        return pairs[..., 0], pairs[..., 1]

    def _combined_mask(self, mask: Any, q: jax.Array, k: jax.Array) -> jax.Array | None:
        """The masks of the variant, the window and the caller, combined: ``[B or 1, H or 1, T or 1, S]``."""
        scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        given = None if mask is None else mask_4d(unwrap(mask), scores)
        if not _IS_CAUSAL[self.mask_variant] and self.sliding_window is None:
            return given
        distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]  # [T, S]
        visible = distance >= 0 if _IS_CAUSAL[self.mask_variant] else jnp.ones(distance.shape, bool)
        if self.sliding_window is not None:
            visible = visible & (distance < self.sliding_window)
        return visible[None, None] if given is None else visible[None, None] & given


class TensorParallelAttentionWithRope(AttentionWithRope):
    """An AttentionWithRope over a paged cache, with its heads split over devices. It takes the same arguments.

    Called as in MAX, every argument except the index of the layer is a list with one entry for each device. Called
    with a single array, it computes what AttentionWithRope computes.

    Attributes:
        list_of_attentions: layers, one for each device, each with some of the heads.

    Raises:
        ValueError: there is no device, or the KV heads do not divide evenly over the devices.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        if not self.devices:
            raise ValueError("TensorParallelAttentionWithRope needs devices")
        self.sharding_strategy = ShardingStrategy.tensor_parallel(len(self.devices))
        self.list_of_attentions = self.shard(self.devices)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``(layer_idx, xs, signal_buffers, kv_collections, freqs_cis, input_row_offsets)`` → a list of results.

        Raises:
            ValueError: a list does not have one entry for each device.
        """
        x = args[1] if len(args) > 1 else kwargs.get("x")
        if isinstance(x, list | tuple):
            return self._on_each(*args, **kwargs)
        return self._result(
            *args, **kwargs
        )  # the base class's __call__ would run the hooks a second time

    def _on_each(
        self,
        layer_idx: Any,
        x: Sequence[Any],
        signal_buffers: Sequence[Any],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[Any],
        input_row_offsets: Sequence[Any],
    ) -> list[TensorValue]:
        lists = (x, kv_collections, freqs_cis, input_row_offsets)
        if wrong := [len(one) for one in lists if len(one) != len(self.devices)]:
            raise ValueError(f"{wrong[0]} entries for the {len(self.devices)} devices of a layer")
        found = [
            part(layer_idx, *one)
            for part, *one in zip(self.list_of_attentions, *lists, strict=True)
        ]
        return ops.allreduce.sum(found, signal_buffers)


__getattr__ = _absent(__name__)
