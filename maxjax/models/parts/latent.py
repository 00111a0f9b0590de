"""The two products by which attention works on compressed vectors, from which a linear layer computes keys and values.

For each head h, ``kv_b_proj`` computes keys ``W_k c`` and values ``W_v c`` from the vector c of a token. Since
``q · (W_k c) = (W_kᵀ q) · c``, and a weighted sum of values is W_v times the sum of the vectors, all heads can attend
to the vectors themselves: keys and values are never computed, and the cache holds one vector for each token.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType, promote
from ...graph.weight.weight import Weight
from ...kernels import explicit, matmul
from ...kernels.head_products import head_products
from ...nn.linear import Linear


def absorb_keys(q: jax.Array, kv_b_proj: Linear) -> jax.Array:
    """Return ``W_kᵀ q`` for each head: the query for the vectors that ``kv_b_proj`` computes keys from.

    Args:
        q: queries ``[..., H, N]``.
        kv_b_proj: linear layer ``[H · (N + V), C]``, whose first N rows for each head are W_k.

    Returns:
        ``[..., H, C]``, in the dtype of ``q``.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Linear(4, 2 * (3 + 5))
        >>> _ = layer.load_state_dict({"weight": jnp.ones((16, 4))})
        >>> absorb_keys(jnp.ones((1, 2, 3)), layer).tolist()
        [[[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]]
    """
    heads, size = q.shape[-2:]
    y = head_products(q, _operand(kv_b_proj.weight), heads, 0, size, True)
    if not _has_update(kv_b_proj):
        return y
    wide = q.astype(promote(q.dtype, DType.float32).np)
    h = head_products(wide, _operand(kv_b_proj.lora_B), heads, 0, size, True)
    h = kv_b_proj.scaled(h)
    a = jnp.asarray(kv_b_proj.lora_A)
    run = explicit.automatic(
        partial(jnp.einsum, "...r,rc->...c"), explicit.mesh_of(h), explicit.entries(h)
    )
    return (y + run(h, a.astype(h.dtype))).astype(q.dtype)


def expand_values(y: jax.Array, kv_b_proj: Linear, width: int) -> jax.Array:
    """Return ``W_v y`` for each head: the value of a weighted sum of the vectors.

    Args:
        y: weighted sums ``[..., H, C]``.
        kv_b_proj: linear layer ``[H · (N + V), C]``, whose last V rows for each head are W_v.
        width: V.

    Returns:
        ``[..., H, V]``, in the dtype of ``y``.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Linear(4, 2 * (3 + 1))
        >>> _ = layer.load_state_dict({"weight": jnp.ones((8, 4))})
        >>> expand_values(jnp.ones((1, 2, 4)), layer, 1).tolist()
        [[[4.0], [4.0]]]
    """
    heads = y.shape[-2]
    first = int(kv_b_proj.weight.shape[0]) // heads - width
    found = head_products(y, _operand(kv_b_proj.weight), heads, first, width, False)
    if not _has_update(kv_b_proj):
        return found
    h = matmul(y.astype(promote(y.dtype, DType.float32).np), kv_b_proj.lora_A)
    h = kv_b_proj.scaled(h)
    update = head_products(h, _operand(kv_b_proj.lora_B), heads, first, width, False)
    return (found + update).astype(y.dtype)


def _has_update(layer: Linear) -> bool:
    """Whether a linear layer has a low-rank update that is not in its weight.

    Raises:
        NotImplementedError: the update is one of DoRA.
    """
    if layer.lora is None or layer.lora.merged:
        return False
    if layer.lora.dora:
        layer.refuse_update("latent attention, and DoRA,")
    return True


def _operand(weight: Any) -> Any:
    """A weight as an operand of kernels."""
    return weight.operand() if isinstance(weight, Weight) else weight
