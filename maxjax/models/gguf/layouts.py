"""The changes that llama.cpp's converter makes to tensors, and their inverses: by rows where possible.

Each class is one change, as data. ``rows`` maps the rows of the Hugging Face tensor to rows of the
GGUF tensor. It works for quantised blocks as for values, since a block never spans two rows, and to
read a part of a tensor only the rows of that part are needed. Rows are counted over all axes but the
last; the rows of a vector are its elements.

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
    """Base class of the changes; it changes nothing itself. Shapes are NumPy's, ``[out, in]``.

    This is the reverse of GGUF's order of axes. For quantised blocks the last axis may count bytes.

    Attributes:
        by_rows: whether the tensor's rows are rows of the GGUF tensor, given by :meth:`rows`.
        keeps_values: whether :meth:`change` keeps all values, so that they may stay quantised.

    Example:
        >>> in_file, layout = np.float32([[0, 0], [1, 1], [2, 2], [3, 3]]), Permuted(heads=1)
        >>> layout.apply(in_file)[1:3].tolist()
        [[2.0, 2.0], [1.0, 1.0]]
        >>> layout.change(in_file[layout.rows(4)[1:3]]).tolist()  # the same, reading no other row
        [[2.0, 2.0], [1.0, 1.0]]
    """

    by_rows = True
    keeps_values = True

    def shape(self, in_file: Sequence[int]) -> Shape:
        """The tensor's shape, computed from its shape in the GGUF file.

        Raises:
            CheckpointFormatError: this change cannot result in a tensor of that shape.
        """
        return tuple(in_file)

    def rows(self, count: int) -> np.ndarray:
        """The row of the GGUF tensor for each of the tensor's ``count`` rows: int64 ``[count]``."""
        return np.arange(count)

    def change(self, values: np.ndarray) -> np.ndarray:
        """Some rows of the GGUF tensor → the values of these rows in Hugging Face's tensor."""
        return values

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """The complete GGUF tensor → the complete tensor; a view where possible."""
        self.shape(in_file.shape)
        return self.change(in_file)

    def back(self) -> Layout:
        """The inverse change, from Hugging Face's tensor to GGUF's. For ``Expert``, which has none, ``Same``."""
        return Same()


@dataclass(frozen=True)
class Same(Layout):
    """No change."""


@dataclass(frozen=True)
class Reordered(Layout):
    """Base class of the changes of the order of rows, which subclasses define by :meth:`rows`."""

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        self._check(in_file[0] if in_file else 1)
        return tuple(in_file)

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """See :class:`Layout`."""
        self.shape(in_file.shape)
        return in_file[self.rows(len(in_file))]

    def _check(self, count: int) -> None:
        """Checks that a tensor can have ``count`` rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class Permuted(Reordered):
    """Reorders rows of queries or keys, which GGUF interleaves for llama.cpp's RoPE (``LlamaModel.permute``).

    RoPE rotates pairs of features. In Hugging Face's Llama, row i of a head is paired with row
    ``i + D / 2``, where D is the head's width; in GGUF, row 2 i is paired with row 2 i + 1.

    Attributes:
        heads: number of heads that the rows belong to.

    Example:
        >>> Permuted(heads=1).rows(6)
        array([0, 2, 4, 1, 3, 5])
    """

    heads: int

    def rows(self, count: int) -> np.ndarray:
        """See :class:`Layout`."""
        self._check(count)
        pairs = np.arange(count).reshape(self.heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Paired(self.heads)

    def _check(self, count: int) -> None:
        if count % (2 * self.heads):
            raise CheckpointFormatError(
                "the rows of queries or keys do not form pairs in each head",
                expected=f"a multiple of 2 × {self.heads} heads",
                found=f"{count} rows",
            )


@dataclass(frozen=True)
class Paired(Permuted):
    """Reorders rows of queries or keys from Hugging Face's order to llama.cpp's: the inverse of ``Permuted``.

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
class Grouped(Reordered):
    """Reorders the rows of a linear layer of queries, keys and values, which Hugging Face has in groups.

    A group has the queries of one KV head, its key and its value; GGUF has all queries, then all keys,
    then all values (``FalconModel`` and ``GPTNeoXModel``).

    Attributes:
        heads, kv_heads: numbers of query heads and of KV heads.

    Example:
        >>> Grouped(4, 2).rows(8)
        array([0, 1, 4, 6, 2, 3, 5, 7])
    """

    heads: int
    kv_heads: int

    def rows(self, count: int) -> np.ndarray:
        """See :class:`Layout`."""
        self._check(count)
        parts = np.split(np.arange(count), count // self._total * np.cumsum(self._counts)[:-1])
        groups = [part.reshape(self.kv_heads, -1) for part in parts]
        return np.concatenate(groups, 1).reshape(-1)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Ungrouped(self.heads, self.kv_heads)

    @property
    def _counts(self) -> tuple[int, int, int]:
        return self.heads, self.kv_heads, self.kv_heads

    @property
    def _total(self) -> int:
        return sum(self._counts)

    def _check(self, count: int) -> None:
        if count % self._total or self.heads % self.kv_heads:
            raise CheckpointFormatError(
                "the rows of queries, keys and values do not form heads",
                expected=f"a multiple of {self.heads} + 2 × {self.kv_heads} heads",
                found=f"{count} rows",
            )


@dataclass(frozen=True)
class Ungrouped(Grouped):
    """Reorders rows of queries, keys and values from groups to GGUF's order: the inverse of ``Grouped``.

    Example:
        >>> Ungrouped(4, 2).rows(8)
        array([0, 1, 4, 5, 2, 6, 3, 7])
    """

    def rows(self, count: int) -> np.ndarray:
        """See :class:`Layout`."""
        return np.argsort(super().rows(count))

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Grouped(self.heads, self.kv_heads)


@dataclass(frozen=True)
class Plus(Layout):
    """Adds a number to every value, as for the norms of Gemma (``GemmaModel.modify_tensors``).

    Gemma multiplies by 1 + weight; GGUF holds that sum, and ``Plus(-1.0)`` restores the weight. The sum
    is computed in float32 or wider and rounded to the tensor's dtype once; bits that are lost in this
    way cannot be restored.

    Attributes:
        value: the number that is added.

    Example:
        >>> Plus(-1.0).apply(np.float32([1.5, 0.75]))
        array([ 0.5 , -0.25], dtype=float32)
    """

    value: float
    keeps_values = False

    def change(self, values: np.ndarray) -> np.ndarray:
        """See :class:`Layout`.

        Raises:
            UserInputError: the values are quantised blocks or integers.
        """
        if values.dtype.kind in "iub":
            raise UserInputError(
                f"{self} needs float values, not {values.dtype}: dequantise the tensor first"
            )
        wide = np.float64 if values.dtype == np.float64 else np.float32
        return (values.astype(wide) + wide(self.value)).astype(values.dtype)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Plus(-self.value)


@dataclass(frozen=True)
class Transposed(Layout):
    """Transposes a matrix, as for all linear layers of GPT-2 (``GPT2Model.modify_tensors``).

    Hugging Face's GPT-2 stores ``[in, out]``, GGUF ``[out, in]``. Rows become columns, so rows
    cannot be mapped, and quantised blocks must be dequantised first.

    Example:
        >>> Transposed().apply(np.float32([[1, 2, 3]])).shape
        (3, 1)
    """

    by_rows = False

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        if len(in_file) != 2:
            raise CheckpointFormatError(
                "not a matrix", expected="2 axes", found=f"shape {list(in_file)}"
            )
        return tuple(in_file)[::-1]

    def rows(self, count: int) -> np.ndarray:
        """Raises, because this change does not map rows to rows.

        Raises:
            UserInputError: always.
        """
        raise UserInputError(f"{self} does not map rows to rows: apply it to the complete tensor")

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """See :class:`Layout`.

        Raises:
            UserInputError: the values are quantised blocks.
        """
        self.shape(in_file.shape)
        if in_file.dtype == np.uint8:
            raise UserInputError(f"{self} needs float values: dequantise the tensor first")
        return in_file.T

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return self


@dataclass(frozen=True)
class Expert(Layout):
    """Takes one expert from the tensor ``[experts, out, in]`` in which GGUF holds all experts of a layer.

    The converter stacks experts (``Qwen2MoeModel``, ``LlamaModel.modify_tensors``). It can also fuse
    gate and up of each, ``[experts, 2 · out, in]``: the gate is part 0 and up is part 1.

    Attributes:
        index: index of the expert.
        count: number of experts.
        part, parts: index of a part of the expert's rows, and number of equal parts.

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

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        in_file = tuple(in_file)
        if len(in_file) < 2 or in_file[0] != self.count or in_file[1] % self.parts:
            parts = f", each in {self.parts} parts" if self.parts > 1 else ""
            raise CheckpointFormatError(
                "not a stack of experts",
                expected=f"{self.count} experts on the first axis{parts}",
                found=f"shape {list(in_file)}",
            )
        return (in_file[1] // self.parts, *in_file[2:])

    def rows(self, count: int) -> np.ndarray:
        """See :class:`Layout`."""
        return np.arange(count) + (self.index * self.parts + self.part) * count

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """See :class:`Layout`. A view."""
        size = self.shape(in_file.shape)[0]
        return in_file[self.index, self.part * size : (self.part + 1) * size]


@dataclass(frozen=True)
class Matrix(Layout):
    """Makes a matrix of one row, ``[1, in]``, of a matrix or vector in the file.

    It is for the gate of Qwen2-MoE's shared expert: old converters dropped axes of size 1.

    Example:
        >>> Matrix().shape((5,)), Matrix().shape((1, 5))
        ((1, 5), (1, 5))
    """

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        in_file = tuple(in_file)
        if len(in_file) > 2 or (len(in_file) == 2 and in_file[0] != 1) or not in_file:
            raise CheckpointFormatError(
                "not a single row", expected="shape [n] or [1, n]", found=f"shape {list(in_file)}"
            )
        return in_file if len(in_file) == 2 else (1, *in_file)

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """See :class:`Layout`. A view."""
        return in_file.reshape(self.shape(in_file.shape))
