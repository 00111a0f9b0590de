"""Disentangled attention: scores are sums of content-content, content-distance and distance-content terms.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, R classes (buckets) of distances.

Source: DeBERTa, arXiv:2006.03654.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.attention.tapped_attention import tapped_attention
from ...nn.layer import Module
from ...nn.linear import linear_rules, linears
from .attention import Types

# The two terms with distances: content-distance and distance-content. Then for each term the name of the
# linear layer of distances: one of its own, or the one of contents.
KINDS = ("c2p", "p2c")
_OWN: dict[str, str] = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
_SHARED: dict[str, str] = {"c2p": "key_proj", "p2c": "query_proj"}


class Near(NamedTuple):
    """Mask and distances for the tokens of one call, which every layer gets.

    Attributes:
        mask: which tokens are real, as in ``TokenInputs``.
        distances: embeddings of the classes of distances, ``[R, E]``.
        classes: class of the distance between each query and key, ``[T, T]``.
    """

    mask: Any
    distances: jax.Array
    classes: jax.Array


def classes(length: int, span: int, farthest: int | None = None) -> np.ndarray:
    """The class of the distance between each query and key, ``[T, T]``.

    Args:
        length: T.
        span: R/2, the number of classes in one direction.
        farthest: largest distance, if distances above span/2 share classes by their logarithm;
            None: each distance has its own class.

    Example:
        >>> classes(3, 2).tolist()
        [[2, 1, 0], [3, 2, 1], [3, 3, 2]]
    """
    places = np.arange(length)
    found = places[:, None] - places
    if farthest is not None:
        middle = span // 2
        far = np.where(np.abs(found) < middle, middle - 1, np.abs(found))
        # In float32 as in transformers, since the result is rounded up.
        logs = np.log((far / middle).astype(np.float32))
        logs = logs / np.log(np.float32((farthest - 1) / middle)) * np.float32(middle - 1)
        large = (np.ceil(logs) + middle).astype(int) * np.sign(found)
        found = np.where(far <= middle, found, large)
    return np.clip(found + span, 0, 2 * span - 1).astype(np.int32)


class DisentangledAttention(Module):
    """Self-attention whose scores depend on contents and on distances.

    Args:
        size, heads: E and H.
        kinds: terms of ``KINDS`` that are added to the scores of contents.
        shares: whether distances use the linear layers of queries and keys.
        types: dtypes.
    """

    def __init__(self, size: int, heads: int, kinds: Sequence[str], shares: bool, types: Types):
        super().__init__()
        self.num_heads, self.kinds, self.softmax_dtype = heads, tuple(kinds), types.reduce
        self.of_distances = _SHARED if shares else _OWN
        own = [self.of_distances[kind] for kind in kinds]
        self.names = tuple(dict.fromkeys(["query_proj", "key_proj", "value_proj", *own]))
        for name in self.names:
            setattr(self, name, types.linear(size, size))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads."""
        query = getattr(self, self.names[0])
        width = int(query.weight.logical_shape[0]) // self.num_heads
        rows = ShardingStrategy.segmented(1, 0, [Segment.head_aware(self.num_heads, width)])
        rules: dict[str, Any] = {}
        for name in self.names:
            rules |= linear_rules(name, rows)
        return rules

    def __call__(self, x: jax.Array, near: Near) -> jax.Array:
        """``[B, T, E]`` → the same shape."""
        inputs = [getattr(self, name) for name in self.names[:3]]
        q, k, v = (self.apart(y, x) for y in linears(inputs, x))  # [B, T, H, D]
        scale, bias = (q.shape[-1] * (1 + len(self.kinds))) ** -0.5, None
        for kind in self.kinds:
            y = self.apart(getattr(self, self.of_distances[kind])(near.distances[None]), x)
            y = jnp.broadcast_to(y, (len(x), *y.shape[1:]))  # [B, R, H, D]
            content, at = (q, near.classes) if kind == "c2p" else (k, near.classes.T)
            scores = jnp.einsum("bthd,brhd->bhtr", content, y, preferred_element_type=jnp.float32)
            at = jnp.broadcast_to(at[None, None], (*scores.shape[:3], len(at)))
            scores = jnp.take_along_axis(scores, at, 3) * scale  # [B, H, T, T]
            scores = scores if kind == "c2p" else scores.swapaxes(2, 3)
            bias = scores if bias is None else bias + scores
        options: dict[str, Any] = {"scale": scale, "softmax_dtype": self.softmax_dtype}
        return tapped_attention(q, k, v, near.mask, bias=bias, **options).reshape(x.shape)

    def apart(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """``[..., E]`` → ``[..., H, D]`` in the dtype of ``x``."""
        return y.astype(x.dtype).reshape(*y.shape[:2], self.num_heads, -1)
