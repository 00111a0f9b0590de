"""Floor 0. ``QuantizationEncoding``: the names of packed weight formats, and their blocks.

Data only: how many elements and bytes a block has. The layouts inside a block belong to
storage, arithmetic on packed values to kernels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockParameters:
    """The size of one block of a packed weight.

    Attributes:
        elements_per_block: How many weights a block holds.
        block_size: How many bytes it takes.

    Example:
        >>> BlockParameters(elements_per_block=32, block_size=18)
        BlockParameters(elements_per_block=32, block_size=18)
    """

    elements_per_block: int
    block_size: int


@dataclass(frozen=True)
class QuantizationConfig:
    """What a checkpoint's configuration says of its quantisation (GPTQ and its like).

    Attributes:
        quant_method: The method's name, "gptq" say.
        bits: Width of one quantised value.
        group_size: How many values share a scale.
        desc_act: Whether columns were quantised in order of decreasing activation.
        sym: Whether the range is symmetric about zero.

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
    """A format of packed weights. Lookup is by the upper-case value; ``name`` is lower case.

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

    @property
    def is_gguf(self) -> bool:
        """Whether GGUF files hold this encoding: all but GPTQ."""
        return self in _BLOCKS


_BLOCKS = {
    QuantizationEncoding.Q4_0: BlockParameters(elements_per_block=32, block_size=18),
    QuantizationEncoding.Q4_K: BlockParameters(elements_per_block=256, block_size=144),
    QuantizationEncoding.Q5_K: BlockParameters(elements_per_block=256, block_size=176),
    QuantizationEncoding.Q6_K: BlockParameters(elements_per_block=256, block_size=210),
}
