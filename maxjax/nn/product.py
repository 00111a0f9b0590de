"""The arithmetic of linear layers: the matmul with a transposed weight, which may be quantised, and the bias."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..absent import hides, refuse_arguments
from ..dtype import DType, promote
from ..graph.kind import as_array, on_float_arrays
from ..graph.quantization import QuantizationEncoding
from ..kernels import QuantArray, matmul


@hides("quant_config", "input_scale", "weight_scale", "weight_scale_2")
@on_float_arrays
def linear(
    x: Any,
    weight: Any,
    quantization_encoding: QuantizationEncoding | None = None,
    quant_config: Any = None,
    input_scale: Any = None,
    weight_scale: Any = None,
    weight_scale_2: Any = None,
    bias: Any = None,
) -> Any:
    """``x @ weight.T``.

    Args:
        x: ``[…, in]``.
        weight: ``[out, in]``, or quantised blocks ``[out, bytes]``.
        quantization_encoding: block format of a quantised weight, or None.
        bias: ignored, as in MAX; the caller adds it.

    Raises:
        NotImplementedError: MAX's setting of weights in 8 or 4 bits is given.
        ValueError: ``x`` is a TensorValue of integers.

    Example:
        >>> linear(jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 1.0], [0.0, 3.0]])).tolist()
        [[3.0, 6.0]]
    """
    if quantization_encoding is not None:
        weight = QuantArray(jnp.asarray(weight), quantization_encoding.value)
    refuse_arguments("linear", quant_config=quant_config)
    return matmul(jnp.asarray(x), weight)


def add_bias(y: jax.Array, bias: Any) -> jax.Array:
    """``y + bias`` along the last axis, in the dtype of ``y``; ``y`` if there is no bias."""
    if bias is None:
        return y
    bias = jnp.asarray(as_array(bias))
    bias = bias.reshape((1,) * (y.ndim - 1) + bias.shape)
    if bias.dtype == y.dtype:
        return y + bias
    wide = promote(y.dtype, promote(bias.dtype, DType.float32)).np
    return (y.astype(wide) + bias.astype(wide)).astype(y.dtype)
