"""Written for files of Modular MAX: multi-head latent attention over a paged cache.

maxjax itself does not import it: its DeepSeek decoders keep latent vectors in a ``maxjax.nn.KVCache``. The
cache here has pages, and keeps one latent vector for each token instead of keys and values for each head.
Source: DeepSeek-AI, arXiv:2405.04434.

Shapes: N tokens of B sequences, hidden size E, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...absent import absent as _absent
from ...absent import hides, refuse_arguments
from ...graph import ops
from ...graph.device import DeviceRef
from ...graph.placement.split import COLUMNS, REPLICATED, ROWS
from ...graph.placement.strategy import ShardingStrategy
from ...graph.value import TensorValue
from ...graph.weight.weight import Weight
from ..kernels.paged_attention import latent_attention_ragged
from ..kv_cache.paged import PagedCacheValues
from ..layer import Module
from ..layer.sharded import sharded, split_layers, strategy_by
from ..linear import Linear
from ..norm import RMSNorm
from ..rotary_embedding import RotaryEmbedding
from .mask_config import MHAMaskVariant

_EPS = 1e-6  # of the norms of latent vectors, as in MAX


@dataclass
class MLAPrefillMetadata:
    """The parts of a cache that MAX's latent attention reads into a buffer at a time.

    Attributes:
        buffer_row_offsets: offsets of the sequences in a buffer.
        cache_offsets: index of the first token that is read from the cache.
        buffer_lengths: number of tokens in each buffer.
    """

    buffer_row_offsets: Any
    cache_offsets: Any
    buffer_lengths: Any


class LatentAttentionWithRope(Module):
    """Causal latent attention with rotary position embedding over a paged cache. Takes MAX's keyword arguments.

    Args:
        rope: rotary embedding of ``qk_rope_head_dim`` features.
        num_attention_heads: number H of heads.
        num_key_value_heads: ignored.
        hidden_size: length E of the last axis of the input and of the result.
        kv_params: settings of the paged cache.
        dtype: dtype of the weights.
        devices: devices; the weights are declared on the first.
        linear_cls: constructor of ``o_proj``.
        o_proj_dtype: dtype of the weight of ``o_proj``; ``dtype`` by default.
        scale: factor of the scores before that of the rope; 1/√(qk_nope_head_dim + qk_rope_head_dim) by default.
        q_lora_rank: size of the latent vectors of queries; None means that queries have one projection.
        kv_lora_rank: size of the latent vectors of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: features of a query without and with RoPE.
        v_head_dim: features of a value.
        buffer_size, graph_mode: settings of MAX's kernels; ignored.
        norm_dtype: dtype of the weights of the norms; ``dtype`` by default.

    Raises:
        NotImplementedError: ``o_proj_quant_config`` is given.

    Example:
        >>> rope = RotaryEmbedding(dim=8, n_heads=2, theta=10000.0, max_seq_len=16, head_dim=4)
        >>> layer = LatentAttentionWithRope(
        ...     rope=rope, num_attention_heads=2, num_key_value_heads=2, hidden_size=8, kv_params=None,
        ...     dtype="float32", kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
        >>> [(name, *map(int, w.shape)) for name, w in layer.raw_state_dict().items()][:3]
        [('q_proj.weight', 16, 8), ('kv_a_layernorm.weight', 6), ('kv_a_proj_with_mqa.weight', 10, 8)]
    """

    @hides("o_proj_quant_config")
    def __init__(
        self,
        *,
        rope: RotaryEmbedding,
        num_attention_heads: int,
        num_key_value_heads: int,
        hidden_size: int,
        kv_params: Any,
        dtype: Any,
        devices: Sequence[DeviceRef] | None = None,
        linear_cls: Callable[..., Any] = Linear,
        o_proj_dtype: Any = None,
        o_proj_quant_config: Any = None,
        scale: float | None = None,
        q_lora_rank: int | None = None,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        buffer_size: int = 16384,
        graph_mode: str | None = None,
        norm_dtype: Any = None,
    ):
        super().__init__()
        refuse_arguments(self, o_proj_quant_config=o_proj_quant_config)
        self.rope, self.kv_params, self.hidden_size = rope, kv_params, hidden_size
        self.n_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = qk_nope_head_dim + qk_rope_head_dim, v_head_dim
        self.cache_head_dim = kv_lora_rank + qk_rope_head_dim
        self.graph_mode, self.BUFFER_TOK_SIZE = graph_mode or "auto", buffer_size
        self.scale = rope.compute_scale(math.sqrt(1 / self.qk_head_dim) if scale is None else scale)
        self.devices = list(devices or [DeviceRef.CPU()])
        device, norms = self.devices[0], dtype if norm_dtype is None else norm_dtype

        def weight(name: str, *shape: int, dtype: Any = dtype) -> Weight:
            return Weight(f"{name}.weight", dtype, shape, device)

        queries = num_attention_heads * self.qk_head_dim
        if q_lora_rank is None:
            self.q_proj = weight("q_proj", queries, hidden_size)
        else:
            self.q_a_proj = weight("q_a_proj", q_lora_rank, hidden_size)
            self.q_a_layernorm = RMSNorm(q_lora_rank, norms, _EPS, multiply_before_cast=False)
            self.q_b_proj = weight("q_b_proj", queries, q_lora_rank)
        self.kv_a_proj_layernorm = weight("kv_a_layernorm", kv_lora_rank, dtype=norms)
        self.kv_a_proj_with_mqa = weight("kv_a_proj_with_mqa", self.cache_head_dim, hidden_size)
        rows = num_attention_heads * (qk_nope_head_dim + v_head_dim)
        self.kv_b_proj = weight("kv_b_proj", rows, kv_lora_rank)
        self.o_proj = linear_cls(
            in_dim=num_attention_heads * v_head_dim, out_dim=hidden_size, device=device,
            dtype=dtype if o_proj_dtype is None else o_proj_dtype,
        )  # fmt: skip

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy of the layer, tensor_parallel or replicate; None if it was not set.

        Raises:
            ValueError: another strategy is assigned, or the heads do not divide evenly over its devices.
        """
        return strategy_by(self.o_proj)

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        n = strategy.num_devices
        if strategy.is_tensor_parallel and self.n_heads % n:
            raise ValueError(f"{self.n_heads} heads do not divide over {n} devices")
        queries = {"q_a_proj": REPLICATED, "q_a_layernorm": REPLICATED, "q_b_proj": ROWS}
        rules = {"q_proj": ROWS} if self.q_lora_rank is None else queries
        rules |= {"kv_a_proj_layernorm": REPLICATED, "kv_a_proj_with_mqa": REPLICATED}
        split_layers(self, strategy, {**rules, "kv_b_proj": ROWS, "o_proj": COLUMNS})

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one layer for each device, with its heads; the results must be summed.

        Raises:
            ValueError: ``sharding_strategy`` is not set.
        """
        devices = list(devices)
        found, strategy = sharded(self, devices), self.sharding_strategy
        assert strategy is not None  # sharded refuses a weight without one
        for part, device in zip(found, devices, strict=True):
            part.devices = [device]
            if strategy.is_tensor_parallel:
                part.n_heads = self.n_heads // strategy.num_devices
        return found

    def create_mla_prefill_metadata(
        self, input_row_offsets: Any, kv_collection: PagedCacheValues
    ) -> MLAPrefillMetadata:
        """The plan of MAX's kernels for one buffer of all tokens, which the layer here does not need."""
        offsets = TensorValue(input_row_offsets).value.astype(jnp.int32)
        cached = TensorValue(kv_collection.cache_lengths).value.astype(jnp.int32)
        row = jnp.arange(cached.shape[0])
        ends = jnp.cumsum(cached + offsets[row + 1] - offsets[row])
        starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
        values = (starts[None], jnp.zeros_like(cached)[None], ends[-1:])
        return MLAPrefillMetadata(*(TensorValue(x.astype(jnp.uint32)) for x in values))

    @property
    def wqkv(self) -> TensorValue:
        """The first projection of queries, and that of latent vectors and shared keys, one after the other."""
        queries = self.q_proj if self.q_lora_rank is None else self.q_a_proj
        return ops.concat([TensorValue(queries), TensorValue(self.kv_a_proj_with_mqa)])

    def _by_head(self) -> TensorValue:
        rows = (self.n_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        return TensorValue(self.kv_b_proj).reshape(rows)

    @property
    def w_uk(self) -> TensorValue:
        """The projections of latent vectors to keys, ``[H, kv_lora_rank, qk_nope_head_dim]``."""
        return self._by_head()[:, : self.qk_nope_head_dim].transpose(1, 2)

    @property
    def w_k(self) -> TensorValue:
        """The same projections, ``[H qk_nope_head_dim, kv_lora_rank]``."""
        return self._by_head()[:, : self.qk_nope_head_dim].reshape((-1, self.kv_lora_rank))

    @property
    def w_uv(self) -> TensorValue:
        """The projections of latent vectors to values, ``[H, v_head_dim, kv_lora_rank]``."""
        return self._by_head()[:, self.qk_nope_head_dim :]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``(layer_idx, x [N, E], kv_collection, freqs_cis, input_row_offsets)`` → ``[N, E]``.

        Args:
            layer_idx: index of the layer in the cache.
            x: hidden states of a ragged batch.
            kv_collection: paged cache with the settings ``kv_params`` of the constructor.
            freqs_cis: table ``rope.freqs_cis``.
            input_row_offsets: offsets of the sequences, ``[B + 1]``.
            mla_prefill_metadata: ignored.
        """
        return self._result(*args, **kwargs)

    def _result(
        self,
        layer_idx: Any,
        x: Any,
        kv_collection: PagedCacheValues,
        freqs_cis: Any,
        input_row_offsets: Any,
        mla_prefill_metadata: Any = None,
    ) -> Any:
        x = TensorValue(x)
        first = self.q_lora_rank or self.n_heads * self.qk_head_dim
        queries, latents = ops.split(x @ self.wqkv.T, [first, self.cache_head_dim], axis=1)
        if self.q_lora_rank is not None:
            queries = self.q_a_layernorm(queries) @ TensorValue(self.q_b_proj).T
        found = latent_attention_ragged(
            queries.reshape((-1, self.n_heads, self.qk_head_dim)), latents, input_row_offsets,
            TensorValue(freqs_cis).cast(queries.dtype), self.kv_a_proj_layernorm, self.w_uk, self.w_uv,
            kv_collection, layer_idx, MHAMaskVariant.CAUSAL_MASK, self.scale, _EPS,
        )  # fmt: skip
        return self.o_proj(found.reshape((-1, self.n_heads * self.v_head_dim)))


class _OnEach(LatentAttentionWithRope):
    """A LatentAttentionWithRope with one layer for each device.

    Called as in MAX, every argument except the index of the layer is a list with one entry for each device. Called
    with a single array, it computes what LatentAttentionWithRope computes.

    Attributes:
        list_of_attentions: layers, one for each device.
    """

    list_of_attentions: Any

    def create_mla_prefill_metadata(self, input_row_offsets: Any, kv_collection: Any) -> Any:
        """The plan of LatentAttentionWithRope, or a list of plans for lists of arguments."""
        plan = super().create_mla_prefill_metadata
        if not isinstance(kv_collection, list | tuple):
            return plan(input_row_offsets, kv_collection)
        return [plan(*each) for each in zip(input_row_offsets, kv_collection, strict=True)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``(layer_idx, xs, signal_buffers, kv_collections, freqs_cis, input_row_offsets)`` → a list of results.

        Raises:
            ValueError: a list does not have one entry for each device.
        """
        x = args[1] if len(args) > 1 else kwargs.get("xs", kwargs.get("x"))
        if isinstance(x, list | tuple):
            return self._on_each(*args, **kwargs)
        return self._result(
            *args, **kwargs
        )  # not the base class's __call__, which would run the hooks again

    def _on_each(
        self,
        layer_idx: Any,
        xs: Sequence[Any],
        signal_buffers: Sequence[Any],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[Any],
        input_row_offsets: Sequence[Any],
        mla_prefill_metadata: Any = None,
    ) -> list[TensorValue]:
        lists = (xs, kv_collections, freqs_cis, input_row_offsets)
        if wrong := [len(one) for one in lists if len(one) != len(self.devices)]:
            raise ValueError(f"{wrong[0]} entries for the {len(self.devices)} devices of a layer")
        return [
            part(layer_idx, *one)
            for part, *one in zip(self.list_of_attentions, *lists, strict=True)
        ]


class TensorParallelLatentAttentionWithRope(_OnEach):
    """A LatentAttentionWithRope with its heads split over devices, which have the same cache.

    Args:
        skip_allreduce: whether the results of the devices are returned without being summed.
        options: arguments of LatentAttentionWithRope.

    Attributes:
        list_of_attentions: layers, one for each device.
    """

    def __init__(self, *, skip_allreduce: bool = False, **options: Any):
        super().__init__(**options)
        self.skip_allreduce = skip_allreduce
        self.sharding_strategy = ShardingStrategy.tensor_parallel(len(self.devices))
        self.list_of_attentions = self.shard(self.devices)

    def _on_each(
        self, layer_idx: Any, xs: Any, signal_buffers: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = super()._on_each(layer_idx, xs, signal_buffers, *args, **kwargs)
        return found if self.skip_allreduce else ops.allreduce.sum(found, signal_buffers)


class DataParallelLatentAttentionWithRope(_OnEach):
    """A LatentAttentionWithRope that is replicated on devices, each of which has its own sequences.

    Args:
        options: arguments of LatentAttentionWithRope.

    Attributes:
        list_of_attentions: layers, one for each device.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.sharding_strategy = ShardingStrategy.replicate(len(self.devices))
        self.list_of_attentions = self.shard(self.devices)


__getattr__ = _absent(__name__)
