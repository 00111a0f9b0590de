"""Ops on quantised weights: dequantize and qmatmul of ``max.graph.ops``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...kernels import QuantArray, matmul
from ...kernels.blocks import decode
from ..quantization import QuantizationEncoding
from ..value import TensorValue, unwrap, wraps


def dequantize(encoding: QuantizationEncoding, quantized: Any) -> Any:
    """Dequantises the blocks of a quantised weight.

    Args:
        encoding: type of the blocks.
        quantized: uint8 ``[..., n * encoding.block_size]``.

    Returns:
        float32 ``[..., n * encoding.elements_per_block]``.

    Raises:
        ValueError: the last axis does not consist of complete blocks, or the dtype is not uint8.
        NotImplementedError: the encoding is GPTQ, which has no fixed blocks.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> from maxjax.graph.quantization import QuantizationEncoding
        >>> ops.dequantize(QuantizationEncoding.Q4_0, jnp.zeros((3, 36), jnp.uint8)).shape
        (3, 64)
    """
    y = decode(encoding.value, unwrap(quantized))
    return TensorValue(y) if wraps(quantized) else y


def qmatmul(encoding: QuantizationEncoding, config: Any, lhs: Any, *rhs: Any) -> Any:
    """``lhs @ w.T`` for a quantised weight.

    The weight is dequantised, and activations keep their precision (MAX rounds them to 8 bits, with an
    error of about one percent).

    Args:
        encoding: type of the blocks.
        config: None. GPTQ, which has a config, is not supported.
        lhs: activations ``[..., in]``.
        rhs: one weight, uint8 ``[out, in / encoding.elements_per_block * encoding.block_size]``.

    Returns:
        ``[..., out]`` in the dtype of ``lhs``.

    Raises:
        ValueError: the shapes do not fit.
        NotImplementedError: there is a config, or more than one array in ``rhs``, as for GPTQ.

    Example:
        >>> import jax.numpy as jnp
        >>> from maxjax.graph import ops
        >>> from maxjax.graph.quantization import QuantizationEncoding
        >>> w = jnp.zeros((5, 34), jnp.uint8)
        >>> ops.qmatmul(QuantizationEncoding.Q8_0, None, jnp.ones((2, 32)), w).shape
        (2, 5)
    """
    if config is not None or len(rhs) != 1:
        raise NotImplementedError("qmatmul takes one weight and no config: GPTQ is not supported")
    y = matmul(unwrap(lhs), QuantArray(jnp.asarray(unwrap(rhs[0])), encoding.value))
    return TensorValue(y) if wraps(lhs) else y
