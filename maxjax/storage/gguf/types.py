"""The tensor types of ggml, as a GGUF file numbers them: values and bytes of one block.

Source: ``enum ggml_type`` in ggml.h and the block structures of ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...dtype import DType


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One type: ``number`` in the file, ``name`` ("Q4_K"), and what a block of it takes.

    A block holds ``elements`` values, all of one row, in ``nbytes`` bytes. ``dtype`` is set for
    plain types, whose blocks are single values, and None for the packed ones.
    """

    number: int
    name: str
    elements: int
    nbytes: int
    dtype: DType | None = None


_PLAIN = [
    (0, "F32", DType.float32),
    (1, "F16", DType.float16),
    (24, "I8", DType.int8),
    (25, "I16", DType.int16),
    (26, "I32", DType.int32),
    (27, "I64", DType.int64),
    (28, "F64", DType.float64),
    (30, "BF16", DType.bfloat16),
]

# Number, name, values of a block, bytes of a block.
_PACKED = [
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    # Two float16 beside 32 bytes; the gguf package counts 40, which was so before March 2024.
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
]

GGML_TYPES: dict[int, GgmlType] = {
    type.number: type
    for type in sorted(
        [GgmlType(number, name, 1, dtype.np.itemsize, dtype) for number, name, dtype in _PLAIN]
        + [GgmlType(*row) for row in _PACKED],
        key=lambda type: type.number,
    )
}
"""Every type that ggml has now, by its number."""

GGML_TYPES_BY_NAME: dict[str, GgmlType] = {type.name: type for type in GGML_TYPES.values()}
"""The same by name."""

REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Numbers that ggml gave out once and does not read any more."""
