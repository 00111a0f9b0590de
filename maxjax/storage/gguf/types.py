"""The tensor types of ggml with their numbers in GGUF files, and the values and bytes of one block.

Source: ``enum ggml_type`` in ggml.h; the blocks of quantised types are those of ``blocks.layout``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...dtype import DType
from ..blocks.layout import LAYOUTS


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One tensor type: its ``number`` in the file, its ``name`` ("Q4_K"), and the size of a block.

    A block holds ``elements`` values of one row in ``nbytes`` bytes. ``dtype`` is set for plain
    types, whose blocks are single values, and None for quantised ones.
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

_PACKED = [
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),  # the gguf package says 40 bytes, the size before March 2024
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (42, "Q2_0"),
]

GGML_TYPES: dict[int, GgmlType] = {
    type.number: type
    for type in sorted(
        [GgmlType(number, name, 1, dtype.np.itemsize, dtype) for number, name, dtype in _PLAIN]
        + [
            GgmlType(number, name, LAYOUTS[name].elements, LAYOUTS[name].nbytes)
            for number, name in _PACKED
        ],
        key=lambda type: type.number,
    )
}
"""Every current type of ggml, by number."""

GGML_TYPES_BY_NAME: dict[str, GgmlType] = {type.name: type for type in GGML_TYPES.values()}
"""Every current type of ggml, by name."""

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
"""Numbers of types that ggml no longer reads."""
