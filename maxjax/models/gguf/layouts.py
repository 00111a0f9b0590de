"""What llama.cpp's converter does to a tensor's values, undone: by rows where it can be.

Each class is one change, as data. ``rows`` says which rows of the GGUF tensor the rows of the
Hugging Face one are: it holds for values and for packed blocks alike, since a block never spans
two rows, and a part of a tensor needs only its own. Rows are counted over all axes but the last,
of a vector over its elements.

Source: ``convert_hf_to_gguf.py`` of llama.cpp and the modules in its ``conversion``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import CheckpointFormatError, UserInputError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """One change, of which this class is none at all; shapes are as NumPy has them, ``[out, in]``.

    That is GGUF's own order of axes reversed. Of packed blocks the last axis may count bytes.

    Attributes:
        by_rows: Whether the tensor's rows are rows of the GGUF tensor, as :meth:`rows` says.
        keeps_values: Whether :meth:`change` does nothing, so that blocks may stay packed.

    Example:
        >>> stored, layout = np.float32([[0, 0], [1, 1], [2, 2], [3, 3]]), Permuted(heads=1)
        >>> layout.apply(stored)[1:3].tolist()
        [[2.0, 2.0], [1.0, 1.0]]
        >>> layout.change(stored[layout.rows(4)[1:3]]).tolist()  # the same, reading no other row
        [[2.0, 2.0], [1.0, 1.0]]
    """

    by_rows = True
    keeps_values = True

    def shape(self, stored: Sequence[int]) -> Shape:
        """The tensor's shape, from that in the GGUF file.

        Raises:
            CheckpointFormatError: A tensor of that shape cannot have been changed so.
        """
        return tuple(stored)

    def rows(self, count: int) -> np.ndarray:
        """For each of a tensor's ``count`` rows, the row of the GGUF tensor that it is: int64 [count]."""
        return np.arange(count)

    def change(self, values: np.ndarray) -> np.ndarray:
        """Values of the GGUF tensor, whichever, as they are in Hugging Face's."""
        return values

    def apply(self, stored: np.ndarray) -> np.ndarray:
        """The whole tensor, from the whole GGUF tensor; a view where that can be."""
        self.shape(stored.shape)
        return self.change(stored)

    def back(self) -> Layout:
        """The change from Hugging Face's tensor to GGUF's; of a stack of experts there is none."""
        return Same()


@dataclass(frozen=True)
class Same(Layout):
    """No change."""


@dataclass(frozen=True)
class Permuted(Layout):
    """The rows of queries or keys, in pairs for llama.cpp's rope (``LlamaModel.permute``).

    Rope turns pairs of features. In Hugging Face's Llama row i of a head goes with row
    ``i + D / 2``, D being the head's width; in GGUF rows 2 i and 2 i + 1 go together.

    Attributes:
        heads: How many heads the rows are of.

    Example:
        >>> Permuted(heads=1).rows(6)
        array([0, 2, 4, 1, 3, 5])
    """

    heads: int

    def shape(self, stored: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        self._check(stored[0] if stored else 1)
        return tuple(stored)

    def rows(self, count: int) -> np.ndarray:
        """See :class:`Layout`."""
        self._check(count)
        pairs = np.arange(count).reshape(self.heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def apply(self, stored: np.ndarray) -> np.ndarray:
        """See :class:`Layout`."""
        self.shape(stored.shape)
        return stored[self.rows(len(stored))]

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Paired(self.heads)

    def _check(self, count: int) -> None:
        if count % (2 * self.heads):
            raise CheckpointFormatError(
                "the rows of queries or keys are not pairs in each of its heads",
                expected=f"a multiple of 2 × {self.heads} heads",
                found=f"{count} rows",
            )


@dataclass(frozen=True)
class Paired(Permuted):
    """The rows of queries or keys from Hugging Face's order to llama.cpp's: undoes ``Permuted``.

    Example:
        >>> Paired(heads=1).rows(6)
        array([0, 3, 1, 4, 2, 5])
    """

    def rows(self, count: int) -> np.ndarray:
        """See :class:`Layout`."""
        self._check(count)
        halves = np.arange(count).reshape(self.heads, 2, -1)
        return halves.swapaxes(1, 2).reshape(-1)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Permuted(self.heads)


@dataclass(frozen=True)
class Plus(Layout):
    """A number added to every value, as the norms of Gemma have it (``GemmaModel.modify_tensors``).

    Gemma multiplies by 1 + weight; GGUF holds that sum, so ``Plus(-1.0)`` undoes it. Computed in
    float32 or wider and rounded to the tensor's own type once; bits that the sum lost stay lost.

    Attributes:
        value: What is added.

    Example:
        >>> Plus(-1.0).apply(np.float32([1.5, 0.75]))
        array([ 0.5 , -0.25], dtype=float32)
    """

    value: float
    keeps_values = False

    def change(self, values: np.ndarray) -> np.ndarray:
        """See :class:`Layout`.

        Raises:
            UserInputError: These are packed blocks or integers.
        """
        if values.dtype.kind in "iub":
            raise UserInputError(
                f"{self} needs values, not {values.dtype}: unpack the tensor's blocks first"
            )
        wide = np.float64 if values.dtype == np.float64 else np.float32
        return (values.astype(wide) + wide(self.value)).astype(values.dtype)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Plus(-self.value)


@dataclass(frozen=True)
class Transposed(Layout):
    """A matrix turned over, as all maps of GPT-2 are (``GPT2Model.modify_tensors``).

    Hugging Face's GPT-2 keeps ``[in, out]``, GGUF ``[out, in]``. Rows become columns, so there is
    no map of rows, and packed blocks must be unpacked first.

    Example:
        >>> Transposed().apply(np.float32([[1, 2, 3]])).shape
        (3, 1)
    """

    by_rows = False

    def shape(self, stored: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        if len(stored) != 2:
            raise CheckpointFormatError(
                "not a matrix", expected="2 axes", found=f"shape {list(stored)}"
            )
        return tuple(stored)[::-1]

    def rows(self, count: int) -> np.ndarray:
        """There is no such map.

        Raises:
            UserInputError: Always.
        """
        raise UserInputError(f"{self} is no map of rows: apply it to the whole tensor")

    def apply(self, stored: np.ndarray) -> np.ndarray:
        """See :class:`Layout`.

        Raises:
            UserInputError: These are packed blocks.
        """
        self.shape(stored.shape)
        if stored.dtype == np.uint8:
            raise UserInputError(f"{self} needs values: unpack the tensor's blocks first")
        return stored.T

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return self


@dataclass(frozen=True)
class Expert(Layout):
    """One of the experts that GGUF holds as one tensor ``[experts, out, in]``.

    The converter stacks them (``Qwen2MoeModel``, ``LlamaModel.modify_tensors``). It can also fuse
    gate and up of each, ``[experts, 2 · out, in]`` with the gate first: these are parts 0 and 1.

    Attributes:
        index: Which expert.
        count: How many there are.
        part, parts: Which part of an expert's rows, of how many equal ones.

    Example:
        >>> Expert(1, 4).shape((4, 2, 3)), Expert(1, 4).rows(2)
        ((2, 3), array([2, 3]))
        >>> Expert(1, 4, part=1, parts=2).rows(2)
        array([6, 7])
    """

    index: int
    count: int
    part: int = 0
    parts: int = 1

    def shape(self, stored: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        stored = tuple(stored)
        if len(stored) < 2 or stored[0] != self.count or stored[1] % self.parts:
            parts = f", each in {self.parts} parts" if self.parts > 1 else ""
            raise CheckpointFormatError(
                "not a stack of experts",
                expected=f"{self.count} experts on the first axis{parts}",
                found=f"shape {list(stored)}",
            )
        return (stored[1] // self.parts, *stored[2:])

    def rows(self, count: int) -> np.ndarray:
        """See :class:`Layout`."""
        return np.arange(count) + (self.index * self.parts + self.part) * count

    def apply(self, stored: np.ndarray) -> np.ndarray:
        """See :class:`Layout`. A view."""
        size = self.shape(stored.shape)[0]
        return stored[self.index, self.part * size : (self.part + 1) * size]


@dataclass(frozen=True)
class Matrix(Layout):
    """A vector that is a matrix of one row, ``[1, in]``; files hold it either way.

    The gate of Qwen2-MoE's shared expert: the converter once dropped axes of size 1.

    Example:
        >>> Matrix().shape((5,)), Matrix().shape((1, 5))
        ((1, 5), (1, 5))
    """

    def shape(self, stored: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        stored = tuple(stored)
        if len(stored) > 2 or (len(stored) == 2 and stored[0] != 1) or not stored:
            raise CheckpointFormatError(
                "not a single row", expected="shape [n] or [1, n]", found=f"shape {list(stored)}"
            )
        return stored if len(stored) == 2 else (1, *stored)

    def apply(self, stored: np.ndarray) -> np.ndarray:
        """See :class:`Layout`. A view."""
        return stored.reshape(self.shape(stored.shape))
