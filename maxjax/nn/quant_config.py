"""Written for files of Modular MAX: the description of a quantised checkpoint: format, scales, quantised layers.

maxjax itself does not import it: the layers that compute with quantised weights are in ``maxjax.nn.quantized``, and
``maxjax.load`` makes them. Adapters and configurations of MAX use these classes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from ..dtype import DType
from ..graph.shape import Dim, DimLike

# The number of elements that share a scale.
NVFP4_BLOCK_SIZE = 16
MXFP4_BLOCK_SIZE = 32


class ScaleGranularity(enum.Enum):
    """Which elements share a scale: a tensor's, a row's, a column's or a block's."""

    TENSOR = "tensor"
    ROWWISE = "rowwise"
    COLWISE = "colwise"
    BLOCK = "block"

    def __str__(self) -> str:
        return self.value


class ScaleOrigin(enum.Enum):
    """Whether scales are in the checkpoint or computed from the inputs."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @property
    def is_static(self) -> bool:
        return self is ScaleOrigin.STATIC

    @property
    def is_dynamic(self) -> bool:
        return self is ScaleOrigin.DYNAMIC


class QuantFormat(enum.Enum):
    """The names of quantised formats."""

    COMPRESSED_TENSORS_FP8 = "compressed-tensors-fp8"
    FBGEMM_FP8 = "fbgemm-fp8"
    BLOCKSCALED_FP8 = "blockscaled-fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP6 = "mxfp6"
    INT8_W8A8 = "int8-w8a8"


class _Scale:
    granularity: ScaleGranularity
    block_size: tuple[int, int] | None

    def __post_init__(self) -> None:
        if self.granularity is ScaleGranularity.BLOCK and len(self.block_size or ()) != 2:
            raise ValueError(
                f"block_size must be two integers where blocks share a scale, not {self.block_size!r}"
            )

    def shared(self, each_row: bool) -> tuple[int, int]:
        """The numbers of rows and columns that share a scale; -1 means all.

        Args:
            each_row: whether each row has a scale of its own, if there are no blocks.
        """
        if self.is_block and self.block_size is not None:
            return self.block_size
        return (1 if each_row else -1), -1

    @property
    def is_tensor(self) -> bool:
        return self.granularity is ScaleGranularity.TENSOR

    @property
    def is_rowwise(self) -> bool:
        return self.granularity is ScaleGranularity.ROWWISE

    @property
    def is_colwise(self) -> bool:
        return self.granularity is ScaleGranularity.COLWISE

    @property
    def is_block(self) -> bool:
        return self.granularity is ScaleGranularity.BLOCK


@dataclass
class WeightScaleSpec(_Scale):
    """The scales of weights.

    Raises:
        ValueError: blocks share a scale, and ``block_size`` is not two integers.
    """

    granularity: ScaleGranularity
    dtype: DType
    block_size: tuple[int, int] | None = None


@dataclass
class InputScaleSpec(_Scale):
    """The scales of a layer's inputs.

    Raises:
        ValueError: blocks share a scale, and ``block_size`` is not two integers.
    """

    granularity: ScaleGranularity
    origin: ScaleOrigin
    dtype: DType
    activation_scale_ub: float | None = None
    block_size: tuple[int, int] | None = None


@dataclass
class QuantConfig:
    """How a model is quantised. The fields and constructors are MAX's.

    Attributes:
        input_scale, weight_scale: scales of the inputs and of the weights.
        mlp_quantized_layers, attn_quantized_layers: indices of the layers whose MLP or attention is quantised.
        format: quantised format.
        embedding_output_dtype, bias_dtype: dtypes of the embeddings' results and of biases, which are not quantised.
        shared_experts_weight_dtype: dtype of shared experts, if it differs from that of the other experts.

    Example:
        >>> config = QuantConfig.mxfp4(mlp_quantized_layers=range(2))
        >>> config.is_fp4, config.weight_scale.block_size, fp4_packed_k(64, config)
        (True, (1, 32), 32)
    """

    input_scale: InputScaleSpec
    weight_scale: WeightScaleSpec
    mlp_quantized_layers: set[int]
    attn_quantized_layers: set[int]
    format: QuantFormat
    embedding_output_dtype: DType | None = None
    shared_experts_weight_dtype: DType | None = None
    bias_dtype: DType | None = None
    can_use_fused_mlp: bool = False
    can_use_fused_swiglu: bool = False
    scales_pre_interleaved: bool = False
    _mxfp6_element_format: str = "e2m3"

    @classmethod
    def _of_blocks(
        cls,
        format: QuantFormat,
        origin: ScaleOrigin,
        dtypes: tuple[DType, DType],
        block: tuple[int, int],
        mlp_quantized_layers: Iterable[int],
        attn_quantized_layers: Iterable[int],
        **more: Any,
    ) -> Self:
        grain = ScaleGranularity.BLOCK
        return cls(
            InputScaleSpec(grain, origin, dtypes[0], block_size=(1, block[1])),
            WeightScaleSpec(grain, dtypes[1], block_size=block),
            set(mlp_quantized_layers), set(attn_quantized_layers), format, **more,
        )  # fmt: skip

    @classmethod
    def blockscaled_fp8(
        cls,
        *,
        mlp_quantized_layers: Iterable[int],
        attn_quantized_layers: Iterable[int],
        block_size: int = 128,
        scale_dtype: DType = DType.float32,
        **more: Any,
    ) -> Self:
        """float8 weights with a scale for each square block, and inputs that are scaled dynamically."""
        return cls._of_blocks(
            QuantFormat.BLOCKSCALED_FP8, ScaleOrigin.DYNAMIC, (scale_dtype, scale_dtype),
            (block_size, block_size), mlp_quantized_layers, attn_quantized_layers, **more,
        )  # fmt: skip

    @classmethod
    def mxfp4(
        cls,
        *,
        mlp_quantized_layers: Iterable[int],
        attn_quantized_layers: Iterable[int] = (),
        **more: Any,
    ) -> Self:
        """MXFP4: blocks of 32 with a power of two as scale."""
        return cls._of_blocks(
            QuantFormat.MXFP4, ScaleOrigin.DYNAMIC, (DType.float32, DType.float8_e8m0fnu),
            (1, MXFP4_BLOCK_SIZE), mlp_quantized_layers, attn_quantized_layers, **more,
        )  # fmt: skip

    @classmethod
    def nvfp4(
        cls,
        *,
        mlp_quantized_layers: Iterable[int],
        attn_quantized_layers: Iterable[int],
        **more: Any,
    ) -> Self:
        """NVFP4: blocks of 16 with a float8 as scale."""
        return cls._of_blocks(
            QuantFormat.NVFP4, ScaleOrigin.STATIC, (DType.float32, DType.float8_e4m3fn),
            (1, NVFP4_BLOCK_SIZE), mlp_quantized_layers, attn_quantized_layers, **more,
        )  # fmt: skip

    @property
    def scales_granularity_mnk(self) -> tuple[int, int, int]:
        """Numbers of elements that share a scale along input rows, weight rows and the contracted axis; -1 means all.

        Raises:
            ValueError: the scales of inputs and weights do not fit each other.
        """
        given, weight = self.input_scale, self.weight_scale
        if given.is_rowwise or weight.is_colwise:
            side = "input" if given.is_rowwise else "weight"
            raise ValueError(f"unsupported {side} scale granularity")
        m, k = given.shared(given.is_colwise)
        n, other = weight.shared(weight.is_rowwise)
        if k != other:
            raise ValueError(f"inputs share a scale along {k} elements, and weights along {other}")
        return m, n, k

    @property
    def is_static(self) -> bool:
        return self.input_scale.origin.is_static

    @property
    def is_dynamic(self) -> bool:
        return self.input_scale.origin.is_dynamic

    @property
    def is_nvfp4(self) -> bool:
        return self.format is QuantFormat.NVFP4

    @property
    def is_mxfp4(self) -> bool:
        return self.format is QuantFormat.MXFP4

    @property
    def is_mxfp6(self) -> bool:
        return self.format is QuantFormat.MXFP6

    @property
    def is_mxfp8(self) -> bool:
        return self.format is QuantFormat.MXFP8

    @property
    def is_fp4(self) -> bool:
        return self.is_nvfp4 or self.is_mxfp4

    @property
    def is_mx(self) -> bool:
        return self.is_mxfp4 or self.is_mxfp6 or self.is_mxfp8

    @property
    def mx_element_dtype(self) -> DType:
        """The dtype of an element of an MX format.

        Raises:
            ValueError: the format is not an MX format.
        """
        if self.is_mxfp6:
            e3m2 = self._mxfp6_element_format == "e3m2"
            return DType.float6_e3m2fn if e3m2 else DType.float6_e2m3fn
        if not self.is_mx:
            raise ValueError(f"{self.format.value} is not an MX format")
        return DType.float4_e2m1fn if self.is_mxfp4 else DType.float8_e4m3fn

    @property
    def is_int8_w8a8(self) -> bool:
        return self.format is QuantFormat.INT8_W8A8

    def shared_experts_dtype(self, routed_weight_dtype: DType) -> DType:
        """The dtype of shared experts, given that of the routed experts."""
        return self.shared_experts_weight_dtype or routed_weight_dtype

    def shared_experts_use_quant(self, routed_weight_dtype: DType) -> bool:
        """Whether shared experts are quantised like the routed experts."""
        return self.shared_experts_dtype(routed_weight_dtype) == routed_weight_dtype


def fp4_packed_k(in_dim: int, quant_config: QuantConfig | None) -> int:
    """The number of bytes (of a packed format) or elements that hold ``in_dim`` inputs of one row of a weight."""
    if quant_config is not None and quant_config.is_fp4:
        return in_dim // 2
    if quant_config is not None and quant_config.is_mxfp6:
        return in_dim * 3 // 4
    return in_dim


def ceildiv(n: DimLike, d: DimLike) -> Dim:
    """``n / d`` rounded up.

    Example:
        >>> ceildiv(5, 2), ceildiv("n", 2)
        (Dim(3), (Dim('n') + Dim(1)) // Dim(2))
    """
    return (Dim(n) + Dim(d) - 1) // Dim(d)
