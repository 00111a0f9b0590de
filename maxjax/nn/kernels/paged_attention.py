"""MAX's kernels for attention over a paged KV cache with ragged batches: projections, RoPE, norms and stores.

Shapes: N tokens of B sequences, H query heads, K KV heads, head dimension D. The new tokens of a sequence follow those
that are in the cache already (``cache_lengths``). A store replaces the value of the buffer of pages
(``BufferValue.store``), which a traced program then returns as a result.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...dtype import DType
from ...graph.ops import rms_norm
from ...graph.shape import Dim
from ...graph.symbolic import to_size
from ...graph.value import TensorValue
from ...kernels import matmul
from ...kernels.attention import attention
from ..attention.mask_config import MHAMaskVariant
from ..kv_cache.paged import KVCacheParams, PagedCacheValues
from .ragged import axes_in_turn, frequencies, rotated, seen, sequences

KEYS, VALUES = 0, 1


def _array(x: Any) -> Any:
    return TensorValue(x).value


class _Places:
    """The sequence, position, page and slot of each new token of a ragged batch."""

    def __init__(self, cache: PagedCacheValues, input_row_offsets: Any, count: int):
        self.rows, places = sequences(_array(input_row_offsets), count)
        self.positions = places + _array(cache.cache_lengths).astype(jnp.int32)[self.rows]
        self.page_size = cache.kv_blocks.value.shape[3]
        table = _array(cache.lookup_table).astype(jnp.int32)
        page = self.positions // self.page_size
        # Padding behind the last sequence, and tokens without a page, are stored nowhere.
        inside = (self.rows < table.shape[0]) & (page < table.shape[1])
        self.pages = jnp.where(inside, table[self.rows, page], cache.kv_blocks.value.shape[0])
        self.slots = self.positions % self.page_size

    def index(self, layer: Any, kind: int) -> tuple[Any, ...]:
        """The index of the tokens' keys or values in the pages."""
        return self.pages, kind, jnp.asarray(_array(layer), jnp.int32).reshape(()), self.slots


def _store(cache: PagedCacheValues, places: _Places, layer: Any, kind: int, x: Any) -> None:
    pages = cache.kv_blocks
    x = x.reshape(x.shape[0], *pages.value.shape[4:]).astype(pages.value.dtype)
    pages.store(x, places.index(layer, kind))


def store_k_cache_ragged(
    kv_collection: PagedCacheValues, x_k: Any, input_row_offsets: Any, layer_idx: Any
) -> None:
    """Stores the keys of the new tokens ``[N, K, D]`` in a layer's pages."""
    x = _array(x_k)
    _store(kv_collection, _Places(kv_collection, input_row_offsets, x.shape[0]), layer_idx, KEYS, x)


def store_v_cache_ragged(
    kv_collection: PagedCacheValues, x_v: Any, input_row_offsets: Any, layer_idx: Any
) -> None:
    """Stores the values of the new tokens ``[N, K, D]`` in a layer's pages."""
    x = _array(x_v)
    _store(
        kv_collection, _Places(kv_collection, input_row_offsets, x.shape[0]), layer_idx, VALUES, x
    )


def _product(x: Any, weight: Any, bias: Any) -> Any:
    y = matmul(_array(x), _array(weight))
    return y if bias is None else y + jnp.broadcast_to(_array(bias), y.shape)


def fused_qkv_ragged_matmul(
    kv_params: KVCacheParams,
    input: Any,
    input_row_offsets: Any,
    wqkv: Any,
    kv_collection: PagedCacheValues,
    layer_idx: Any,
    n_heads: int,
    bias: Any = None,
    _output_dim: int | None = None,
) -> TensorValue:
    """Computes queries, keys and values of the new tokens; returns the queries and stores the rest in the cache.

    Args:
        kv_params: settings of the cache.
        input: hidden states ``[N, E]``.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        wqkv: projections of queries, keys and values, ``[(H + 2 K) D, E]``.
        kv_collection: cache.
        layer_idx: index of the layer, an integer scalar.
        n_heads: number H of query heads.
        bias: bias ``[(H + 2 K) D]``, or None.
        _output_dim: width of the queries, where it is not ``H D``.

    Returns:
        The queries ``[N, H D]``.
    """
    y = _product(input, wqkv, bias)
    width = n_heads * kv_params.head_dim if _output_dim is None else _output_dim
    _store_both(kv_collection, input_row_offsets, layer_idx, y[:, width:])
    return TensorValue(y[:, :width])


def _store_both(cache: PagedCacheValues, offsets: Any, layer: Any, y: Any) -> None:
    places, half = _Places(cache, offsets, y.shape[0]), y.shape[1] // 2
    _store(cache, places, layer, KEYS, y[:, :half])
    _store(cache, places, layer, VALUES, y[:, half:])


def matmul_kv_cache_ragged(
    kv_params: KVCacheParams,
    hidden_states: Any,
    input_row_offsets: Any,
    weight: Any,
    kv_collection: PagedCacheValues,
    layer_idx: Any,
) -> None:
    """Stores the keys and values of the new tokens, ``hidden_states [N, E] @ weight [2 K D, E].T``, in the cache."""
    _store_both(kv_collection, input_row_offsets, layer_idx, _product(hidden_states, weight, None))


def _frequencies(freqs_cis: Any, places: _Places, position_ids: Any, mrope_section: Any) -> Any:
    table = _array(freqs_cis)
    positions = places.positions if position_ids is None else _array(position_ids)
    axes = None
    if mrope_section is not None:
        axes = axes_in_turn(mrope_section, positions, table.shape[-1] // 2)
    return frequencies(table, positions, axes)


def fused_qk_ragged_rope(
    kv_params: KVCacheParams,
    input: Any,
    input_row_offsets: Any,
    kv_collection: PagedCacheValues,
    freqs_cis: Any,
    layer_idx: Any,
    interleaved: bool = True,
    position_ids: Any = None,
    mrope_section: Any = None,
) -> TensorValue:
    """Applies RoPE to the queries of the new tokens, and to their keys in the cache.

    Args:
        kv_params: settings of the cache.
        input: queries ``[N, H, D]``.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        kv_collection: cache, with the keys of the new tokens.
        freqs_cis: table ``[positions, W]`` of a RotaryEmbedding.
        layer_idx: index of the layer.
        interleaved: whether pairs are neighbouring elements; otherwise element i is paired with i + W/2.
        position_ids: positions ``[N]`` or ``[1, N]``, or with ``mrope_section`` ``[S, N]`` along S axes; by default
            those that follow the cached tokens.
        mrope_section: number of pairs of features that use the positions along each axis, in order (M-RoPE).

    Returns:
        The rotated queries ``[N, H, D]``.

    Raises:
        ValueError: ``mrope_section`` does not fit the positions or the table.
    """
    queries = _array(input)
    places = _Places(kv_collection, input_row_offsets, queries.shape[0])
    table = _frequencies(freqs_cis, places, position_ids, mrope_section)
    keys = kv_collection.kv_blocks.value[places.index(layer_idx, KEYS)]
    _store(kv_collection, places, layer_idx, KEYS, rotated(keys, table, interleaved, False))
    return TensorValue(rotated(queries, table, interleaved, False))


def rope_split_store_ragged(
    kv_params: KVCacheParams,
    qkv: Any,
    input_row_offsets: Any,
    freqs_cis: Any,
    kv_collection: PagedCacheValues,
    layer_idx: Any,
    n_heads: int,
    interleaved: bool = True,
    position_ids: Any = None,
    mrope_section: Any = None,
    fuse: bool = True,
    q_out_dtype: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    rms_norm_eps: float | None = None,
    k_eq_v: bool = False,
) -> TensorValue:
    """Applies RoPE to queries and keys; returns the queries and stores keys and values in the cache.

    Args:
        kv_params: settings of the cache.
        qkv: queries, keys and values ``[N, (H + 2 K) D]``.
        input_row_offsets, freqs_cis, kv_collection, layer_idx, interleaved, position_ids, mrope_section: as for
            :func:`fused_qk_ragged_rope`.
        n_heads: number H of query heads.
        fuse: ignored.
        q_out_dtype: dtype of the queries; that of ``qkv`` by default.
        q_norm_weight, k_norm_weight, rms_norm_eps: RMS norm of each head before RoPE, if the weights are given.
        k_eq_v: whether keys are the values too; not supported.

    Returns:
        The rotated queries ``[N, H D]``.

    Raises:
        NotImplementedError: ``k_eq_v`` is set.
        ValueError: one of the two norm weights is given alone, or ``mrope_section`` does not fit.
    """
    if k_eq_v:
        raise NotImplementedError("rope_split_store_ragged(k_eq_v=True) is not supported")
    x, heads, width = _array(qkv), kv_params.n_kv_heads_per_device, kv_params.head_dim
    count = x.shape[0]
    x = x.reshape(count, n_heads + 2 * heads, width)
    q, k, v = x[:, :n_heads], x[:, n_heads : n_heads + heads], x[:, n_heads + heads :]
    if (q_norm_weight is None) is not (k_norm_weight is None):
        raise ValueError(
            "rope_split_store_ragged needs both of q_norm_weight and k_norm_weight, or neither"
        )
    if q_norm_weight is not None:
        eps = 1e-6 if rms_norm_eps is None else rms_norm_eps
        q, k = (_array(rms_norm(TensorValue(one), TensorValue(weight), eps))
                for one, weight in ((q, q_norm_weight), (k, k_norm_weight)))  # fmt: skip
    places = _Places(kv_collection, input_row_offsets, count)
    table = _frequencies(freqs_cis, places, position_ids, mrope_section)
    _store(kv_collection, places, layer_idx, KEYS, rotated(k, table, interleaved, False))
    _store(kv_collection, places, layer_idx, VALUES, v)
    q = rotated(q, table, interleaved, False).reshape(count, n_heads * width)
    return TensorValue(q if q_out_dtype is None else q.astype(DType.of(q_out_dtype).np))


def rms_norm_key_cache(
    kv_params: KVCacheParams,
    kv_collection: PagedCacheValues,
    gamma: Any,
    epsilon: float,
    layer_idx: Any,
    total_seq_len: Any,
    input_row_offsets: Any,
    weight_offset: float,
    rms_norm_cols: int | None = None,
    multiply_before_cast: bool = True,
    per_head_norm: bool = True,
) -> None:
    """Applies an RMS norm to the keys of the new tokens in the cache.

    Args:
        kv_params: settings of the cache.
        kv_collection: cache, with the keys of the new tokens.
        gamma: weight ``[D]``, or ``[K D]`` for a norm of all heads together.
        epsilon, weight_offset, multiply_before_cast: as for ``ops.rms_norm``.
        layer_idx: index of the layer.
        total_seq_len: number N of new tokens.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        rms_norm_cols: ignored; the length of ``gamma`` says how many elements are normalised.
        per_head_norm: whether each head is normalised separately.

    Raises:
        NotImplementedError: ``gamma`` is shorter than a key: only some of its elements would be normalised.
    """
    pages, weight = kv_collection.kv_blocks, TensorValue(gamma)
    places = _Places(kv_collection, input_row_offsets, to_size(Dim(total_seq_len)))
    keys = pages.value[places.index(layer_idx, KEYS)]
    x = keys if per_head_norm else keys.reshape(keys.shape[0], -1)
    if weight.value.shape[0] != x.shape[-1]:
        raise NotImplementedError(f"a norm of {weight.value.shape[0]} of the {x.shape[-1]} elements of a key is not "
                                  "supported")  # fmt: skip
    normed = rms_norm(
        TensorValue(x), weight.cast(x.dtype), epsilon, weight_offset, multiply_before_cast
    )
    _store(kv_collection, places, layer_idx, KEYS, normed.value)


def flash_attention_ragged(
    kv_params: KVCacheParams,
    input: Any,
    input_row_offsets: Any,
    kv_collection: PagedCacheValues,
    layer_idx: Any,
    mask_variant: MHAMaskVariant,
    scale: float,
    local_window_size: int = -1,
    sink_weights: Any = None,
    rel_logits: Any = None,
    output_dtype: Any = None,
) -> TensorValue:
    """Attention of the new tokens to all keys of their sequences in the cache, the new ones included.

    Args:
        kv_params: settings of the cache.
        input: queries ``[N, H, D]``.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        kv_collection: cache, with the keys and values of the new tokens.
        layer_idx: index of the layer.
        mask_variant: mask of the keys within a sequence.
        scale: factor of the scores.
        local_window_size: number of positions in a window or chunk.
        sink_weights: attention sinks ``[H]``, or None.
        rel_logits: bias by relative position; not supported.
        output_dtype: dtype of the result; that of the queries by default.

    Returns:
        ``[N, H, D]``. Every query is scored against all pages of the table; those of other sequences are masked.

    Raises:
        ValueError: the mask needs a window.
        NotImplementedError: ``rel_logits`` is given.
    """
    if rel_logits is not None:
        raise NotImplementedError("flash_attention_ragged(rel_logits=...) is not supported; "
                                  "maxjax.kernels.attention.attention takes a bias")  # fmt: skip
    queries = _array(input)
    places = _Places(kv_collection, input_row_offsets, queries.shape[0])
    (key, value), mask = _read(
        kv_collection, places, input_row_offsets, layer_idx, (KEYS, VALUES), queries.dtype,
        mask_variant, local_window_size,
    )  # fmt: skip
    sinks = None if sink_weights is None else _array(sink_weights)
    dtype = queries.dtype if output_dtype is None else DType.of(output_dtype).np
    found = attention(queries[None], key, value, mask, scale=scale, sinks=sinks)
    return TensorValue(found[0].astype(dtype))


def _read(
    cache: PagedCacheValues,
    places: _Places,
    input_row_offsets: Any,
    layer_idx: Any,
    kinds: tuple[int, ...],
    dtype: Any,
    mask_variant: MHAMaskVariant,
    window: int,
) -> tuple[list[Any], Any]:
    """What a layer has stored of all sequences, one after the other, ``[1, S, K, D]`` for each kind, and the mask.

    The mask ``[1, N, S]`` says which of them the token at each place attends to.
    """
    pages, table = cache.kv_blocks.value, _array(cache.lookup_table).astype(jnp.int32)
    layer = jnp.asarray(_array(layer_idx), jnp.int32).reshape(())
    there = pages[table, :, layer]  # [B, P, kinds, page_size, K, D]
    length = table.shape[1] * places.page_size
    # The keys of all sequences are concatenated; slots after a sequence's last token may hold anything.
    grid = (table.shape[0], length)
    of_row = jnp.broadcast_to(jnp.arange(grid[0])[:, None], grid).reshape(-1)
    at = jnp.broadcast_to(jnp.arange(length)[None], grid).reshape(-1)
    # Not offsets[1:] - offsets[:-1]: B + 1 and B may be unrelated symbolic sizes.
    offsets, row = _array(input_row_offsets).astype(jnp.int32), jnp.arange(table.shape[0])
    ends = _array(cache.cache_lengths).astype(jnp.int32) + offsets[row + 1] - offsets[row]
    stored = at < ends[of_row]
    # Slots that were never stored become zeros: they may hold NaN, and 0 * NaN is NaN.
    found = [
        jnp.where(stored[:, None, None], x, 0).astype(dtype)[None]
        for x in (there[:, :, kind].reshape(-1, *pages.shape[4:]) for kind in kinds)
    ]
    mask = (places.rows[:, None] == of_row[None]) & stored[None]
    shown = seen(mask_variant, places.positions, at, window)
    return found, (mask if shown is None else mask & shown)[None]


def latent_attention_ragged(
    q: Any,
    kv: Any,
    input_row_offsets: Any,
    freqs_cis: Any,
    kv_norm_gamma: Any,
    w_uk: Any,
    w_uv: Any,
    kv_collection: PagedCacheValues,
    layer_idx: Any,
    mask_variant: MHAMaskVariant,
    scale: float,
    epsilon: float,
) -> TensorValue:
    """Multi-head latent attention of the new tokens to all tokens of their sequences (DeepSeek-AI, arXiv:2405.04434).

    The cache keeps for each token a latent vector of R features and a key of W features that all heads share. Queries
    are projected into the latent space, so that the latent vectors are both keys and values.

    Args:
        q: queries ``[N, H, D + W]``; RoPE is applied to the last W features of each head.
        kv: latent vectors and shared keys ``[N, R + W]``, before their RMS norm and RoPE.
        input_row_offsets: offsets of the sequences ``[B + 1]``.
        freqs_cis: table ``[positions, W]`` of a RotaryEmbedding, for pairs of neighbouring features.
        kv_norm_gamma, epsilon: weight ``[R]`` and epsilon of the norm of the latent vectors.
        w_uk: projections of latent vectors to keys, ``[H, R, D]``.
        w_uv: projections of latent vectors to values, ``[H, V, R]``.
        kv_collection: cache of an :class:`~maxjax.nn.kv_cache.MLAKVCacheParams`.
        layer_idx, mask_variant, scale: as for :func:`flash_attention_ragged`.

    Returns:
        ``[N, H, V]`` in the dtype of ``q``.
    """
    queries, latents, keys, values = (_array(x) for x in (q, kv, w_uk, w_uv))
    rank, width = keys.shape[1], keys.shape[2]
    places = _Places(kv_collection, input_row_offsets, queries.shape[0])
    table = _frequencies(freqs_cis, places, None, None)
    normed = rms_norm(TensorValue(latents[:, :rank]), TensorValue(kv_norm_gamma), epsilon)
    rope = rotated(latents[:, None, rank:], table, True, False)[:, 0]
    stored = jnp.concatenate([normed.value.astype(latents.dtype), rope], axis=-1)
    _store(kv_collection, places, layer_idx, KEYS, stored)
    (cached,), mask = _read(
        kv_collection, places, input_row_offsets, layer_idx, (KEYS,), queries.dtype, mask_variant, -1
    )  # fmt: skip
    inside = jnp.einsum("nhd,hrd->nhr", queries[..., :width], keys.astype(queries.dtype))
    wide = jnp.concatenate([inside, rotated(queries[..., width:], table, True, False)], axis=-1)
    found = attention(wide[None], cached, cached, mask, scale=scale)[0, ..., :rank]
    return TensorValue(jnp.einsum("nhr,hvr->nhv", found, values.astype(queries.dtype)))
