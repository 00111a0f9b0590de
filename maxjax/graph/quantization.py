"""``QuantizationEncoding``: the names of quantised weight formats, and their blocks.

``storage.blocks`` has the layouts of blocks, and ``kernels`` computes with them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ..storage.blocks.layout import KEPT, LAYOUTS


@dataclass(frozen=True)
class BlockParameters:
    """The size of one block of a quantised weight.

    Attributes:
        elements_per_block: number of weights in a block.
        block_size: number of bytes of a block.

    Example:
        >>> BlockParameters(elements_per_block=32, block_size=18)
        BlockParameters(elements_per_block=32, block_size=18)
    """

    elements_per_block: int
    block_size: int


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantisation options in a checkpoint's configuration (GPTQ and similar).

    Attributes:
        quant_method: name of the method, such as "gptq".
        bits: width of one quantised value in bits.
        group_size: number of values that share a scale.
        desc_act: whether columns were quantised in order of decreasing activation.
        sym: whether the range is symmetric about zero.

    Example:
        >>> QuantizationConfig("gptq", bits=4, group_size=128).sym
        False
    """

    quant_method: str
    bits: int
    group_size: int
    desc_act: bool = False
    sym: bool = False


class QuantizationEncoding(enum.Enum):
    """A format of quantised weights. Lookup is by the upper-case value; ``name`` is lower case.

    Example:
        >>> q = QuantizationEncoding("Q4_K")
        >>> q.name, q.elements_per_block, q.block_size, q.is_gguf
        ('q4_k', 256, 144, True)
    """

    Q4_0 = "Q4_0"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    GPTQ = "GPTQ"

    # Encodings that MAX 26.7 does not have.
    Q8_0 = "Q8_0"
    MXFP4 = "MXFP4"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    IQ4_NL = "IQ4_NL"
    IQ4_XS = "IQ4_XS"

    @property
    def name(self) -> str:
        """The value in lower case, as MAX spells it."""
        return self._value_.lower()

    @property
    def block_parameters(self) -> BlockParameters:
        """Elements and bytes of a block; KeyError for GPTQ, which has no fixed block."""
        return _BLOCKS[self]

    @property
    def elements_per_block(self) -> int:
        return self.block_parameters.elements_per_block

    @property
    def block_size(self) -> int:
        """Bytes of a block."""
        return self.block_parameters.block_size

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in bytes of quantised weights with the given shape; the last axis is split into blocks.

        Raises:
            ValueError: the last axis does not consist of complete blocks.
            KeyError: the encoding is GPTQ, which has no fixed block.

        Example:
            >>> QuantizationEncoding.Q4_0.packed_shape((4, 64))
            (4, 36)
        """
        *rows, columns = shape
        if columns % self.elements_per_block:
            raise ValueError(
                f"{self.value} packs {self.elements_per_block} weights into a block, which does not "
                f"divide rows of {columns}"
            )
        return (*rows, columns // self.elements_per_block * self.block_size)

    def logical_shape(self, packed: Sequence[int]) -> tuple[int, ...]:
        """The shape of the weights in packed bytes: the inverse of :meth:`packed_shape`.

        Raises:
            KeyError: the encoding is GPTQ, which has no fixed block.

        Example:
            >>> QuantizationEncoding.Q4_0.logical_shape((4, 36))
            (4, 64)
        """
        *rows, nbytes = packed
        return (*rows, nbytes // self.block_size * self.elements_per_block)

    @property
    def is_gguf(self) -> bool:
        """Whether GGUF files can have this encoding, which is true of all except GPTQ."""
        return self in _BLOCKS


_BLOCKS = {
    QuantizationEncoding(name): BlockParameters(LAYOUTS[name].elements, LAYOUTS[name].nbytes)
    for name in KEPT
}
