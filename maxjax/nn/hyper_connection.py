"""Written for files of Modular MAX: hyper-connections: several residual streams around a layer.

maxjax itself does not import it. Source: Xie et al., arXiv:2512.24880.

Shapes: N tokens, n streams, E features of a stream.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.ops.lift import lift
from ..graph.value import TensorValue, unwrap, wraps
from ..graph.weight.weight import Weight
from .layer import Module


@lift
def hyper_connection_gates(
    hc_proj: Any,
    pre_post_comb_b: Any,
    pre_post_comb_scale: Any,
    hc_mult: int,
    hc_eps: float,
    hc_sinkhorn_iters: int,
) -> tuple[Any, Any, Any]:
    """The input gates, output gates and mixing matrix of the streams, from a projection of the streams.

    Args:
        hc_proj: projection ``[N, 2 n + n²]``: n input gates, n output gates, and the n² entries of the mixing matrix.
        pre_post_comb_b: bias ``[2 n + n²]``, added after the scale.
        pre_post_comb_scale: factors ``[3]`` of the three parts of ``hc_proj``.
        hc_mult: number n of streams, a power of 2.
        hc_eps: number added to the input gates, to the mixing matrix, and to the sums that divide it.
        hc_sinkhorn_iters: number of Sinkhorn iterations that normalise rows and columns of the matrix, at least 1.

    Returns:
        The input gates ``[N, n]``, the output gates ``[N, n]`` between 0 and 2, and the mixing matrix ``[N, n²]`` in
        row-major order; its columns sum to 1 up to ``hc_eps``, its rows approximately. All are float32.

    Raises:
        ValueError: the sizes do not fit.

    Example:
        >>> gates = hyper_connection_gates(jnp.zeros((1, 8)), jnp.zeros(8), jnp.ones(3), 2, 0.0, 3)
        >>> [x.tolist() for x in gates]
        [[[0.5, 0.5]], [[1.0, 1.0]], [[0.5, 0.5, 0.5, 0.5]]]
    """
    n, width = hc_mult, 2 * hc_mult + hc_mult**2
    if n < 1 or n & (n - 1) or hc_sinkhorn_iters < 1:
        raise ValueError(
            f"hc_mult is a power of 2 and hc_sinkhorn_iters at least 1, not {n} and {hc_sinkhorn_iters}"
        )
    if (hc_proj.ndim, *hc_proj.shape[1:]) != (2, width) or pre_post_comb_b.shape != (width,):
        raise ValueError(
            f"{n} streams have gates [N, {width}] and [{width}], not {list(hc_proj.shape)} and "
            f"{list(pre_post_comb_b.shape)}"
        )
    if pre_post_comb_scale.shape != (3,):
        raise ValueError(f"gates have 3 scales, not {list(pre_post_comb_scale.shape)}")
    take, give, mix = (
        (part * scale + bias[None]).astype(jnp.float32)
        for part, scale, bias in zip(
            jnp.split(hc_proj, [n, 2 * n], axis=-1),
            pre_post_comb_scale,
            jnp.split(pre_post_comb_b, [n, 2 * n]),
            strict=True,
        )
    )
    mixture = jax.nn.softmax(mix.reshape(-1, n, n), axis=-1) + hc_eps
    mixture = mixture / (mixture.sum(axis=-2, keepdims=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):
        mixture = mixture / (mixture.sum(axis=-1, keepdims=True) + hc_eps)
        mixture = mixture / (mixture.sum(axis=-2, keepdims=True) + hc_eps)
    return jax.nn.sigmoid(take) + hc_eps, 2 * jax.nn.sigmoid(give), mixture.reshape(-1, n * n)


class HyperConnection(Module):
    """Combines several residual streams into a layer's input, and gives the gates that write its result back.

    Args (in MAX's order):
        hidden_size: number E of features of a stream.
        hc_mult: number n of streams, a power of 2.
        device: device that the weights are declared on.
        dtype: dtype of the weights; the gates are computed in float32.
        hc_sinkhorn_iters, hc_eps: settings of :func:`hyper_connection_gates`.
        rms_norm_eps: number added to the mean of squares in the RMS norm of the streams.

    Attributes:
        hc_fn: Weight ``[2 n + n², n E]``.
        hc_base: Weight ``[2 n + n²]``.
        hc_scale: Weight ``[3]``.

    The caller computes ``streams = combᵀ streams + post · layer(collapsed)``: stream k becomes the sum of
    ``comb[:, j, k] * streams[:, j]`` over j, plus ``post[:, k]`` times the layer's result.

    Example:
        >>> import maxjax
        >>> layer = maxjax.init(HyperConnection(3, 2, DeviceRef.CPU()), jax.random.key(0))
        >>> [x.shape for x in layer(jnp.ones((5, 2, 3)))]
        [(5, 2), (5, 2, 2), (5, 3)]
    """

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int,
        device: DeviceRef,
        dtype: Any = DType.float32,
        *,
        hc_sinkhorn_iters: int = 20,
        hc_eps: float = 1e-6,
        rms_norm_eps: float = 1e-6,
    ):
        super().__init__()
        self.hidden_size, self.hc_mult, self.device = hidden_size, hc_mult, device
        self.hc_sinkhorn_iters, self.hc_eps, self.rms_norm_eps = (
            hc_sinkhorn_iters, hc_eps, rms_norm_eps,
        )  # fmt: skip
        width = 2 * hc_mult + hc_mult**2
        self.hc_fn = Weight("hc_fn", dtype, (width, hc_mult * hidden_size), device)
        self.hc_base = Weight("hc_base", dtype, (width,), device)
        self.hc_scale = Weight("hc_scale", dtype, (3,), device)

    def __call__(self, hidden_streams: Any) -> tuple[Any, Any, Any]:
        """Streams ``[N, n, E]`` → ``post [N, n]``, ``comb [N, n, n]`` and ``collapsed [N, E]``.

        ``post`` and ``comb`` are float32; ``collapsed``, the layer's input, has the dtype of the streams.

        Raises:
            ValueError: the streams have another shape.
        """
        x = jnp.asarray(unwrap(hidden_streams))
        if x.ndim != 3 or x.shape[1:] != (self.hc_mult, self.hidden_size):
            raise ValueError(
                f"HyperConnection takes [N, {self.hc_mult}, {self.hidden_size}], not {list(x.shape)}"
            )
        fn, base, scale = (
            jnp.asarray(w).astype(jnp.float32) for w in (self.hc_fn, self.hc_base, self.hc_scale)
        )
        wide = x.astype(jnp.float32)
        flat = wide.reshape(x.shape[0], -1)
        size = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + self.rms_norm_eps)
        pre, post, comb = hyper_connection_gates(
            (flat @ fn.T) * size, base, scale, self.hc_mult, self.hc_eps, self.hc_sinkhorn_iters
        )
        collapsed = jnp.sum(pre[..., None] * wide, axis=1).astype(x.dtype)
        found = post, comb.reshape(-1, self.hc_mult, self.hc_mult), collapsed
        return tuple(TensorValue(y) for y in found) if wraps(hidden_streams) else found  # type: ignore[return-value]
