"""MAX's float8 matmuls as functions of arrays: one quantises the inputs, another multiplies them by the weights.

A scale is the factor that restores values from float8: one for a tensor, for a row, or for a block. For checkpoints
with float8 weights, ``maxjax.load`` makes layers of ``maxjax.nn.quantized`` instead.

Shapes: inputs are ``[M, K]`` and weights ``[N, K]``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.ops.lift import lift
from ..quant_config import InputScaleSpec, WeightScaleSpec

_FLOAT8 = (DType.float8_e4m3fn, DType.float8_e4m3fnuz)
_FLOATS = (DType.float16, DType.bfloat16, DType.float32)


@lift
def quantize_dynamic_scaled_float8(
    input: Any,
    input_scale_spec: InputScaleSpec,
    weight_scale_spec: WeightScaleSpec,
    scale_ub: float = 1200.0,
    group_size_or_per_token: int = -1,
    out_type: DType = DType.float8_e4m3fn,
    scales_type: DType = DType.bfloat16,
    amax_floor: float = 0.0,
    row_offsets: Any = None,
) -> tuple[Any, Any]:
    """Quantises each row of the inputs, or each group of a row, by its largest magnitude.

    Args:
        input: floats ``[M, K]``.
        input_scale_spec, weight_scale_spec: scale settings, which say whether and in which blocks scales are shared.
        scale_ub: upper bound of the magnitude that gives a scale; ignored for scales in float8_e8m0fnu.
        group_size_or_per_token: numbers in a group; -1 means a block's width, or a row if there are no blocks.
        out_type: float8_e4m3fn or float8_e4m3fnuz.
        scales_type: dtype of the scales; float8_e8m0fnu rounds them up to powers of two.
        amax_floor: lower bound of the magnitude that a scale in float8_e8m0fnu is computed from.
        row_offsets: offsets of sequences, as in MAX; all rows are quantised, also those after the last offset.

    Returns:
        The quantised inputs ``[M, K]``, and the scales ``[K / group, M]``. With blocks, the scales have
        columns of zeros up to a multiple of 16 bytes.

    Raises:
        ValueError: the dtypes, shapes or options do not fit together.

    Example:
        >>> from maxjax.nn.quant_config import ScaleGranularity, ScaleOrigin
        >>> by_row = InputScaleSpec(ScaleGranularity.COLWISE, ScaleOrigin.DYNAMIC, DType.float32)
        >>> weights = WeightScaleSpec(ScaleGranularity.ROWWISE, DType.float32)
        >>> x = jnp.array([[448.0, -224.0], [1.0, 2.0]])
        >>> y, scales = quantize_dynamic_scaled_float8(x, by_row, weights, scales_type=DType.float32)
        >>> y[0].tolist(), scales[0, 0].item()
        ([448.0, -224.0], 1.0)
    """
    kind, of_scales = DType.of(out_type), DType.of(scales_type)
    powers = of_scales == DType.float8_e8m0fnu
    if not 0 <= amax_floor < float("inf"):
        raise ValueError(f"amax_floor must be finite and non-negative, got {amax_floor}")
    if amax_floor and (not powers or row_offsets is not None):
        raise ValueError("amax_floor needs float8_e8m0fnu scales and no row_offsets")
    if kind not in _FLOAT8:
        raise ValueError("out_type must be float8_e4m3fn or float8_e4m3fnuz")
    if input.ndim != 2:
        raise ValueError("input must be rank 2 tensor")
    rows, width = input.shape
    blocks = _has_blocks(input_scale_spec, weight_scale_spec)
    group = group_size_or_per_token
    if group == -1:
        group = input_scale_spec.block_size[1] if blocks else width  # type: ignore[index]
    if group < 1 or width % group:
        raise ValueError(f"groups of {group} numbers do not divide rows of {width}")
    groups = input.astype(jnp.float32).reshape(rows, width // group, group)
    most = float(jnp.finfo(kind.np).max)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    if powers:
        scales = _power_above(jnp.maximum(largest, max(amax_floor, 1e-10 * most)) / most)
    else:
        scales = (jnp.minimum(largest, scale_ub) / most).astype(of_scales.np).astype(jnp.float32)
    quantised = groups / jnp.where(scales == 0, 1, scales)[..., None]
    quantised = jnp.clip(quantised, -most, most).reshape(rows, width).astype(kind.np)
    pad = -rows % (16 // of_scales.np.itemsize) if blocks else 0
    return quantised, jnp.pad(scales.T, ((0, 0), (0, pad))).astype(of_scales.np)


@lift
def quantize_static_scaled_float8(
    x: Any,
    scale: Any,
    scale_is_inverted: bool = True,
    out_type: DType = DType.float8_e4m3fn,
) -> Any:
    """Quantises inputs by a given scale.

    Args:
        x: floats ``[M, K]``.
        scale: one number.
        scale_is_inverted: whether inputs are divided by the scale; otherwise they are multiplied by it.
        out_type: a float8 dtype.

    Returns:
        ``[M, K]``; numbers outside the range of ``out_type`` are clipped.

    Raises:
        ValueError: the dtypes or shapes do not fit together.

    Example:
        >>> quantize_static_scaled_float8(jnp.array([[3.0, -1.0]]), jnp.float32(2.0)).tolist()
        [[1.5, -0.5]]
    """
    scale = _scalar("scale", scale)
    _check_matrix("input", x, _FLOATS, "float16, bfloat16, or float32")
    kind = DType.of(out_type)
    most = float(jnp.finfo(kind.np).max)
    y = x.astype(jnp.float32)
    y = y / scale if scale_is_inverted else y * scale
    return jnp.clip(y, -most, most).astype(kind.np)


@lift
def dynamic_scaled_matmul(
    a: Any,
    b: Any,
    a_scales: Any,
    b_scales: Any,
    input_scale_spec: InputScaleSpec,
    weight_scale_spec: WeightScaleSpec,
    out_type: DType = DType.bfloat16,
) -> Any:
    """``a @ b.T`` of float8 numbers with their scales, summed in float32.

    Args:
        a: inputs ``[M, K]``.
        b: weights ``[N, K]``.
        a_scales: ``[1, 1]`` or ``[1, M]``; with blocks ``[K / width, M or more]``.
        b_scales: ``[1, 1]`` or ``[N, 1]``; with blocks ``[N / height, K / width]``, rounded up.
        input_scale_spec, weight_scale_spec: granularities of the scales, and the sizes (height, width) of blocks.
        out_type: dtype of the result.

    Returns:
        ``[M, N]``.

    Raises:
        ValueError: the shapes do not fit together, or the granularities are not supported.
        TypeError: ``a`` and ``b``, or their scales, differ in dtype.

    Example:
        >>> from maxjax.nn.quant_config import ScaleGranularity, ScaleOrigin
        >>> by_row = InputScaleSpec(ScaleGranularity.COLWISE, ScaleOrigin.DYNAMIC, DType.float32)
        >>> weights = WeightScaleSpec(ScaleGranularity.ROWWISE, DType.float32)
        >>> a = jnp.ones((2, 4), "float8_e4m3fn")
        >>> y = dynamic_scaled_matmul(a, a, jnp.ones((1, 2)), 3 * jnp.ones((2, 1)), by_row, weights)
        >>> y.tolist()
        [[12.0, 12.0], [12.0, 12.0]]
    """
    if {a.ndim, b.ndim, a_scales.ndim, b_scales.ndim} != {2}:
        raise ValueError("All arguments must be rank 2 tensors")
    if a.shape[1] != b.shape[1]:
        raise ValueError("The second dimension of b must match the second dimension of a")
    if a.dtype != b.dtype or a_scales.dtype != b_scales.dtype:
        raise TypeError(
            f"a and b dtypes {a.dtype}, {b.dtype} must match, as do a and b scales dtypes "
            f"{a_scales.dtype}, {b_scales.dtype}"
        )
    x, w = a.astype(jnp.float32), b.astype(jnp.float32)
    of_rows, of_columns = a_scales.astype(jnp.float32), b_scales.astype(jnp.float32)
    if _has_blocks(input_scale_spec, weight_scale_spec):
        if a_scales.shape[0] != b_scales.shape[1]:
            raise ValueError(
                "both a_scales and b_scales must have the same shape on the K dimension. got "
                f"a_scales.shape={a_scales.shape} and b_scales.shape={b_scales.shape}"
            )
        height, width = weight_scale_spec.block_size or (1, 1)
        x = x * _spread(of_rows.T[: x.shape[0]], x.shape, (1, width))
        return _product(x, w * _spread(of_columns, w.shape, (height, width)), out_type)
    per_tensor = input_scale_spec.is_tensor and weight_scale_spec.is_tensor
    if not per_tensor and not (input_scale_spec.is_colwise and weight_scale_spec.is_rowwise):
        raise ValueError("unsupported FP8 scaling granularity")
    if a_scales.shape[0] != 1 or a_scales.shape[1] not in (1, a.shape[0]):
        raise ValueError("only per-token scaling is supported for a")
    if b_scales.shape[1] != 1 or b_scales.shape[0] not in (1, b.shape[0]):
        raise ValueError("only channel-wise scaling is supported for b")
    return (_product(x, w, DType.float32) * of_rows.T * of_columns.T).astype(DType.of(out_type).np)


@lift
def matmul_static_scaled_float8(
    input: Any, weight: Any, input_scale: Any, weight_scale: Any
) -> Any:
    """``input @ weight.T`` of float8 numbers with one scale for each operand, in bfloat16.

    Args:
        input: ``[M, K]``.
        weight: ``[N, K]``.
        input_scale, weight_scale: one number each.

    Returns:
        ``[M, N]``.

    Raises:
        ValueError: the dtypes or shapes do not fit together.

    Example:
        >>> a = jnp.ones((1, 4), "float8_e4m3fn")
        >>> matmul_static_scaled_float8(a, a, jnp.float32(2), jnp.float32(3)).tolist()
        [[24.0]]
    """
    scale = _scalar("input_scale", input_scale) * _scalar("weight_scale", weight_scale)
    for name, x in (("input", input), ("weight", weight)):
        _check_matrix(name, x, _FLOAT8, "float8_e4m3fn or float8_e4m3fnuz")
    if input.shape[1] != weight.shape[1]:
        raise ValueError("K dimension does not match for matmul")
    y = _product(input.astype(jnp.float32), weight.astype(jnp.float32), DType.float32)
    return (y * scale).astype(jnp.bfloat16)


def _power_above(x: jax.Array) -> jax.Array:
    """The least powers of two that are not below positive numbers in float32; log2 and exp2 are not exact."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    power = (bits + jnp.uint32(2**23 - 1)) & jnp.uint32(0x7F800000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(power, jnp.float32))


def _has_blocks(inputs: InputScaleSpec, weights: WeightScaleSpec) -> bool:
    if inputs.is_block != weights.is_block:
        raise ValueError("both input and weight must be blockwise scaled for blockwise scaling")
    return inputs.is_block


def _check_matrix(name: str, x: jax.Array, dtypes: tuple[DType, ...], known: str) -> None:
    if DType.of(x.dtype) not in dtypes:
        raise ValueError(f"expected {name} dtype to be {known}, but got {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"expected {name} rank to be 2, but got {x.ndim}")


def _scalar(name: str, scale: Any) -> jax.Array:
    scale = jnp.asarray(scale)
    if scale.shape not in ((), (1,)):
        raise ValueError(f"expected {name} to be a scalar, but got shape of {list(scale.shape)}")
    return scale.reshape(()).astype(jnp.float32)


def _spread(scales: jax.Array, shape: tuple[int, ...], block: tuple[int, int]) -> jax.Array:
    """Repeats the scales of blocks, so that there is one for each element of an array of that shape."""
    for axis, size in enumerate(block):
        scales = jnp.repeat(scales, size, axis=axis)
    if scales.shape[0] < shape[0] or scales.shape[1] < shape[1]:
        raise ValueError(f"there are too few scales for blocks of {block} in {shape}")
    return scales[: shape[0], : shape[1]]


def _product(x: jax.Array, w: jax.Array, dtype: DType) -> jax.Array:
    y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision="highest")
    return y.astype(DType.of(dtype).np)
