"""``FusedExperts``: a row of a table of names that splits tensors with all experts of a layer, and fuses them again.

A model has a weight for each projection of each expert. Files of some families hold the weights of all
experts of a layer as one tensor: gate and up together, perhaps transposed, with rows of gate and up
alternating, or quantised (MXFP4). Reading takes parts of such tensors, and writing joins the weights.
Both are lazy, and neither holds a second copy.

Shapes: X experts; a projection is ``[out, in]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ..dtype import DType
from ..errors import CheckpointFormatError
from ..graph.quantization import QuantizationEncoding
from ..graph.weights import WeightData
from ..storage.boxes import Box
from .gguf.layouts import Expert as ExpertLayout
from .gguf.names import Source
from .gguf.sources import ArraySource, Relaid, read_box
from .names import NameRow

# Numbers in a block of MXFP4, and bytes that hold them; a GGUF block has its scale in front of these.
_NUMBERS, _BYTES = 32, 16
_MXFP4 = QuantizationEncoding.MXFP4
# MLX's names of a layer's experts: one tensor for each projection.
_MLX = ("gate_proj", "up_proj", "down_proj")
_STACKED = re.compile(rf"(.*\.)switch_mlp\.({'|'.join(_MLX)})\.(weight|scales|biases|bias)")
_SUFFIXES = ("_blocks", "_scales", "_bias", ".weight", "")
# A tensor of all experts of a layer: name of the layer, whether it is gate and up, "weight" or "bias".
_Stack = tuple[str, bool, str]


@dataclass(frozen=True)
class FusedExperts(NameRow):
    """The tensors that hold all experts of a layer, and the weights of single experts that a model has.

    Attributes:
        expert: name of an expert's weight in the layer, with ``#`` for the expert's index and ``*`` for
            its linear layer.
        projections: the model's names of an expert's gate, up and down projections, or of up and down for
            experts without a gate, whose up projections are then the tensor ``gate_up``.
        gate_up, down: names of the tensors after the layer's name; files are written with the first, all are read.
        suffix: suffix of the name of a written tensor.
        transposed: whether float tensors are written as ``[X, in, out]``, not ``[X, out, in]``. When
            they are read, their shapes decide.
        interleaved: whether rows of gate and up alternate, instead of gate first and then up.
        written: whether files are written in this form. If not, files have single experts, and only
            transformers' models in memory have this form.
    """

    expert: str = "mlp.experts.#.*.weight"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gate_up: tuple[str, ...] = tuple(
        f"{mlp}.experts.gate_up_proj" for mlp in ("mlp", "block_sparse_moe")
    )
    down: tuple[str, ...] = tuple(f"{mlp}.experts.down_proj" for mlp in ("mlp", "block_sparse_moe"))
    suffix: str = ""
    transposed: bool = False
    interleaved: bool = False
    written: bool = False

    def split(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors of a file, with one for each projection of each expert; nothing is read.

        Raises:
            CheckpointFormatError: a tensor of stacked experts has another shape, or two tensors hold one weight.
        """
        split: dict[str, Any] = {}
        for name, value in tensors.items():
            found, stacked = self._found(name), _STACKED.fullmatch(name)
            parts: Any
            if stacked is not None:
                parts = self._stacked(stacked, name, value)
            elif found is None:
                parts = [(name, value)]
            elif found[2] == "_scales":
                if name.removesuffix("_scales") + "_blocks" not in tensors:
                    raise CheckpointFormatError("scales without their blocks", tensor=name)
                continue
            elif found[2] == "_blocks":
                scales = tensors.get(name.removesuffix("_blocks") + "_scales")
                parts = self._packed(found, name, value, scales)
            else:
                parts = self._floats(found, name, value, self._is_transposed(found, tensors))
            for part, data in parts:
                if part in split:
                    raise CheckpointFormatError(
                        f"'{name}' and another tensor are both the weight '{part}'"
                    )
                split[part] = data
        return split

    def _stacked(self, found: re.Match[str], name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The tensors of single experts of a projection that MLX holds as one, each with its own quantisation."""
        front, kind, suffix = found.groups()
        place = _MLX.index(kind) - len(_MLX) + len(self.projections)
        shape = tuple(int(n) for n in value.shape)
        if len(shape) not in (2, 3) or not shape[0] or place < 0:
            raise CheckpointFormatError(
                "not a stack of experts", tensor=name, expected="[experts, out, …]", found=shape
            )
        rest = self.expert.partition("experts.#.")[2].removesuffix("weight") + suffix
        for number in range(shape[0]):
            new = f"{front}experts.{number}.{rest}".replace("*", self.projections[place])
            yield new, _part(name, value, ExpertLayout(number, shape[0], 0, 1))

    def _found(self, name: str) -> tuple[str, bool, str] | None:
        """(Name of the layer, whether the tensor is gate and up, suffix) of a tensor; None for any other tensor."""
        for suffix in _SUFFIXES:
            stem = name.removesuffix(suffix)
            if stem == name and suffix:
                continue
            for is_gate_up, names in ((True, self.gate_up), (False, self.down)):
                for one in names:
                    if stem == one or stem.endswith(f".{one}"):
                        return stem.removesuffix(one), is_gate_up, suffix
        return None

    def _names(self, found: tuple[str, bool, str], experts: int) -> Iterator[tuple[int, int, str]]:
        """(Index of the expert, index of the part, name) of each weight in a tensor of all experts."""
        front, is_gate_up, suffix = found
        pattern = self.expert
        if suffix == "_bias":
            pattern = pattern.removesuffix(".weight") + ".bias"
        for number in range(experts):
            for k, kind in enumerate(self._kinds(is_gate_up)):
                yield number, k, front + pattern.replace("#", str(number)).replace("*", kind)

    def _kinds(self, is_gate_up: bool) -> tuple[str, ...]:
        """The names of the projections that one tensor holds."""
        return self.projections[:-1] if is_gate_up else self.projections[-1:]

    def _is_transposed(self, found: tuple[str, bool, str], checkpoint: Mapping[str, Any]) -> bool:
        """Whether a layer's float tensors are ``[X, in, out]``, as in files of Qwen3-VL, by their shapes.

        With gate and up of ``[X, a, b]`` and down of ``[X, c, d]`` either ``a = 2d`` and ``b = c``,
        or ``b = 2c`` and ``a = d``; both cannot hold.
        """
        front, _, suffix = found
        pair = [
            next(
                (checkpoint[n] for n in (front + one + suffix for one in names) if n in checkpoint),
                None,
            )
            for names in (self.gate_up, self.down)
        ]
        shapes = [tuple(map(int, one.shape)) for one in pair if one is not None]
        if [len(shape) for shape in shapes] != [3, 3]:
            return self.transposed and suffix != "_bias"
        (_, a, b), (_, c, d) = shapes
        if (a, b) == (2 * d, c) or (a, b) == (d, 2 * c):
            return (a, b) == (d, 2 * c)
        return self.transposed

    def _floats(
        self, found: Any, name: str, value: Any, transposed: bool
    ) -> Iterator[tuple[str, Any]]:
        shape, is_bias = tuple(int(n) for n in value.shape), found[2] == "_bias"
        parts = len(self._kinds(found[1]))
        rank = 2 if is_bias else 3
        if len(shape) != rank or not shape[0] or shape[2 if transposed else 1] % parts:
            expected = "[experts, in, out]" if transposed else "[experts, out, in]"
            raise CheckpointFormatError(
                "not a stack of experts", tensor=name,
                expected="[experts, out]" if is_bias else expected, found=shape,
            )  # fmt: skip
        interleaved = self.interleaved and parts > 1
        for number, k, new in self._names(found, shape[0]):
            layout = ExpertLayout(number, shape[0], k, parts)
            if not transposed and not interleaved:
                yield new, _part(name, value, layout)
            else:
                cut = _Cut(number, k, parts, transposed, interleaved)
                yield new, cut.of(name, value)

    def _packed(
        self, found: Any, name: str, blocks: Any, scales: Any
    ) -> Iterator[tuple[str, WeightData]]:
        shape = tuple(int(n) for n in blocks.shape)
        rows = None if scales is None else tuple(int(n) for n in scales.shape)
        parts = len(self._kinds(found[1]))
        if len(shape) != 4 or not shape[0] or shape[3] != _BYTES or shape[1] % parts:
            raise CheckpointFormatError(
                "not a stack of experts in MXFP4", tensor=name,
                expected=f"[experts, out, in / {_NUMBERS}, {_BYTES}]", found=shape,
            )  # fmt: skip
        if rows != shape[:3]:
            raise CheckpointFormatError(
                "blocks without a scale for each", tensor=name, expected=shape[:3], found=rows
            )
        pair = _data(name, blocks), _data(name.removesuffix("_blocks") + "_scales", scales)
        interleaved = self.interleaved and parts > 1
        for number, k, new in self._names(found, shape[0]):
            source = _Blocks(*pair, _Cut(number, k, parts, False, interleaved))
            dtype, sizes = source.dtype_and_shape(name)
            yield new, WeightData.lazy(source, name, DType.of(dtype), sizes, _MXFP4)

    def fuse(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inverse of :meth:`split`: joins the experts of each layer, if files are written in this form.

        Experts that are quantised in an encoding other than MXFP4 stay separate.
        """
        if not self.written:
            return tensors
        groups: dict[_Stack, dict[tuple[int, int], str]] = {}
        where: dict[str, _Stack] = {}
        for name in tensors:
            if (place := self._place(name)) is not None:
                where[name], number, part = place
                groups.setdefault(where[name], {})[number, part] = name
        made = {key: self._joined(key, names, tensors) for key, names in groups.items()}
        found: dict[str, WeightData] = {}
        for name, data in tensors.items():
            new = made.get(where[name]) if name in where else None
            found |= {name: data} if new is None else new
        return found

    def fused_names(self, name: str) -> list[str]:
        """See :class:`NameRow`."""
        place = self._place(name) if self.written else None
        return [name] if place is None else [self._stack_name(place[0])]

    def of_modules(self) -> FusedExperts:
        """See :class:`NameRow`. The modules have all experts of a layer as one tensor, whatever the files have."""
        gate_up, down = (
            next((one for one in names if "experts." in one), names[0])
            for names in (self.gate_up, self.down)
        )
        return replace(self, gate_up=(gate_up,), down=(down,), suffix="", written=True)

    def _place(self, name: str) -> tuple[_Stack, int, int] | None:
        """(Stack, index of the expert, index of the part) of an expert's weight or bias; None for any other tensor."""
        match = _expert(self.expert, self.projections).fullmatch(name)
        if match is None:
            return None
        front, number, kind, what = match.groups()
        is_gate_up = kind != self.projections[-1]
        return (front, is_gate_up, what), int(number), self._kinds(is_gate_up).index(kind)

    def _stack_name(self, stack: _Stack) -> str:
        """The name of the tensor of floats that holds the experts of a layer."""
        front, is_gate_up, what = stack
        name = front + (self.gate_up if is_gate_up else self.down)[0]
        return name + ("_bias" if what == "bias" else self.suffix)

    def as_in(self, tensors: Mapping[str, Any]) -> FusedExperts:
        """This row with the form in which a file with these tensors holds the experts."""
        where = {name: found for name in tensors if (found := self._found(name)) is not None}
        if not where:
            return replace(self, written=False)
        gate_up, down = (
            next(
                (
                    one
                    for name in where
                    for one in names
                    if re.search(rf"(\A|\.){re.escape(one)}\b", name)
                ),
                names[0],
            )
            for names in (self.gate_up, self.down)
        )
        found = next(iter(where.values()))
        return replace(
            self, gate_up=(gate_up,), down=(down,), written=True,
            suffix=found[2] if found[2] in ("", ".weight") else self.suffix,
            transposed=self._is_transposed(found, tensors),
        )  # fmt: skip

    def _joined(
        self, key: _Stack, names: Mapping[tuple[int, int], str], tensors: Any
    ) -> dict[str, WeightData] | None:
        """The tensor of all experts of a layer, or two tensors in MXFP4; None if experts differ or are missing."""
        (_, _, what), parts = key, len(self._kinds(key[1]))
        experts = len(names) // parts
        order = [(x, k) for x in range(experts) for k in range(parts)]
        if any(place not in names for place in order) or len(order) != len(names):
            return None
        each = [tensors[names[place]] for place in order]
        first = each[0]
        facts = {(d.dtype, d.quantization_encoding, tuple(map(int, d.shape))) for d in each}
        if len(facts) > 1 or (first.is_packed and first.quantization_encoding is not _MXFP4):
            return None
        name = self._stack_name(key)
        interleaved = self.interleaved and parts > 1
        transposed = self.transposed and what == "weight"
        if first.is_packed:
            packed: Any = _Unpacked(each, parts, interleaved)
            name = name.removesuffix(self.suffix)
            kinds = [f"{name}_blocks", f"{name}_scales"]
        else:
            packed = _Joined(each, parts, transposed, interleaved)
            kinds = [name]
        made = {}
        for kind in kinds:
            dtype, shape = packed.dtype_and_shape(kind)
            made[kind] = WeightData.lazy(packed, kind, DType.of(dtype), shape)
        return made


@cache
def _expert(expert: str, projections: tuple[str, ...]) -> re.Pattern[str]:
    """What matches names of experts' weights and biases: (layer's name, expert's index, projection, kind)."""
    pattern = re.escape(expert.removesuffix("weight")).replace(r"\#", "([0-9]+)")
    names = "|".join(map(re.escape, projections))
    return re.compile(rf"(.*?){pattern.replace(re.escape('*'), f'({names})')}(weight|bias)")


def _part(name: str, value: Any, layout: ExpertLayout) -> Any:
    """One expert's slice of a stack; it stays lazy if the stack is lazy."""
    if not isinstance(value, WeightData):
        return layout.apply(value)
    source = Relaid({name: value}, {name: Source(name, layout)})
    dtype, shape = source.dtype_and_shape(name)
    return WeightData.lazy(source, name, DType.of(dtype), shape, value.quantization_encoding)


def _data(name: str, value: Any) -> WeightData:
    return (
        value
        if isinstance(value, WeightData)
        else WeightData.from_numpy(np.asarray(value).view(np.uint8), name)
    )


# --- one expert of several ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """Where one projection of one expert is in a tensor of all experts.

    Attributes:
        expert: index of the expert.
        part, parts: index of the part of the expert's rows, and number of parts.
        transposed, interleaved: as in :class:`FusedExperts`.
    """

    expert: int
    part: int
    parts: int
    transposed: bool
    interleaved: bool

    def rows(self, span: tuple[int, int], size: int) -> tuple[tuple[int, int], slice]:
        """The range of the expert's rows that holds the rows ``span`` of a part of ``size`` rows, and its step."""
        first, last = span
        if self.interleaved:
            return (
                (self.part + self.parts * first, self.part + self.parts * (last - 1) + 1),
                slice(None, None, self.parts),
            )
        return (self.part * size + first, self.part * size + last), slice(None)

    def of(self, name: str, value: Any) -> Any:
        """The projection; it stays lazy if the tensor is lazy."""
        if isinstance(value, WeightData):
            source = _Expert(value, self)
            dtype, shape = source.dtype_and_shape(name)
            return WeightData.lazy(source, name, DType.of(dtype), shape)
        found = value[self.expert]
        found = found.T if self.transposed else found
        (first, last), step = self.rows((0, len(found) // self.parts), len(found) // self.parts)
        return found[first:last][step]


class _Expert(ArraySource):
    """Source of one projection of one expert, from a float tensor that holds all experts of a layer."""

    def __init__(self, data: WeightData, cut: _Cut):
        self._data, self._cut = data, cut

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the projection."""
        _, *sizes = (int(n) for n in self._data.shape)
        sizes = sizes[::-1] if self._cut.transposed else sizes
        return self._data.dtype.np, (sizes[0] // self._cut.parts, *sizes[1:])

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`~maxjax.models.gguf.sources.ArraySource`."""
        cut, (rows, *rest) = self._cut, region
        span, step = cut.rows(rows, self.dtype_and_shape(name)[1][0])
        box = (*rest, span) if cut.transposed else (span, *rest)
        values, total = read_box(self._data, ((cut.expert, cut.expert + 1), *box))
        values = values[0].T if cut.transposed else values[0]
        array[...] = values[step]
        return total


class _Blocks(ArraySource):
    """Source of one projection of one expert in MXFP4, with blocks as in GGUF files.

    Each of a block's 16 bytes holds two neighbouring numbers in files of gpt-oss, and the numbers i and
    i + 16 in GGUF files.
    """

    def __init__(self, blocks: WeightData, scales: WeightData, cut: _Cut):
        self._blocks, self._scales, self._cut = blocks, scales, cut

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the blocks."""
        _, rows, blocks = (int(n) for n in self._scales.shape)
        return np.dtype(np.uint8), (rows // self._cut.parts, blocks * (_BYTES + 1))

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`~maxjax.models.gguf.sources.ArraySource`."""
        rows, (first, last) = region
        cut, (height, _) = self._cut, self.dtype_and_shape(name)[1]
        span, step = cut.rows(rows, height)
        start, stop = first // (_BYTES + 1), -(-last // (_BYTES + 1))
        box = ((cut.expert, cut.expert + 1), span, (start, stop))
        packed, total = read_box(self._blocks, (*box, (0, _BYTES)))
        scales, more = read_box(self._scales, box)
        found = np.empty((rows[1] - rows[0], stop - start, _BYTES + 1), np.uint8)
        found[..., 0] = scales[0][step]
        packed = packed[0][step]
        numbers = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], _NUMBERS)
        found[..., 1:] = numbers[..., :_BYTES] | numbers[..., _BYTES:] << 4
        flat = found.reshape(len(found), -1)
        offset = start * (_BYTES + 1)
        array[...] = flat[:, first - offset : last - offset]
        return total + more


# --- all experts from single ones ---------------------------------------------------------------


class _All(ArraySource):
    """Source of a tensor of all experts of a layer, from ``each``: the parts of expert 0, those of expert 1, …"""

    def __init__(self, each: Sequence[WeightData], parts: int, interleaved: bool):
        self._each, self._parts, self._interleaved = each, parts, interleaved

    def _fill_expert(
        self, expert: int, rows: tuple[int, int], into: np.ndarray,
        read: Callable[[WeightData, tuple[int, int]], tuple[np.ndarray, int]],
    ) -> int:  # fmt: skip
        """Fills ``into`` with ``rows`` of one expert's matrix; ``read`` reads the rows of one part."""
        first, parts, total = rows[0], self._parts, 0
        size = int(self._each[0].shape[0])
        for k in range(parts):
            if self._interleaved:
                low, high = (max(0, -(-(edge - k) // parts)) for edge in rows)
                place = slice(low * parts + k - first, None, parts)
            else:
                low, high = (min(max(edge - k * size, 0), size) for edge in rows)
                place = slice(low + k * size - first, high + k * size - first)
            if low < high:
                values, nbytes = read(self._each[expert * parts + k], (low, high))
                into[place][: high - low] = values
                total += nbytes
        return total


class _Joined(_All):
    """Source of a float tensor of all experts."""

    def __init__(self, each: Sequence[WeightData], parts: int, transposed: bool, interleaved: bool):
        super().__init__(each, parts, interleaved)
        self._transposed = transposed

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the tensor."""
        out, *inner = (int(n) for n in self._each[0].shape)
        shape = (out * self._parts, *inner)
        shape = shape[::-1] if self._transposed else shape
        return self._each[0].dtype.np, (len(self._each) // self._parts, *shape)

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`~maxjax.models.gguf.sources.ArraySource`."""
        (first, last), *box = region
        rows, *rest = box[::-1] if self._transposed else box

        def read(data: WeightData, span: tuple[int, int]) -> tuple[np.ndarray, int]:
            return read_box(data, (span, *rest))

        return sum(
            self._fill_expert(
                i, rows, array[i - first].T if self._transposed else array[i - first], read
            )
            for i in range(first, last)
        )


class _Unpacked(_All):
    """Source of the blocks and of the scales of all experts in MXFP4, as in files of gpt-oss."""

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of the blocks or of the scales."""
        rows, width = (int(n) for n in self._each[0].shape)
        shape = (len(self._each) // self._parts, rows * self._parts, width // (_BYTES + 1))
        return np.dtype(np.uint8), (*shape, _BYTES) if name.endswith("_blocks") else shape

    def fill(self, array: np.ndarray, name: str, region: Box) -> int:
        """See :class:`~maxjax.models.gguf.sources.ArraySource`."""
        (first, last), rows, (start, stop), *inside = region

        def read(data: WeightData, span: tuple[int, int]) -> tuple[np.ndarray, int]:
            box: Box = (span, (start * (_BYTES + 1), stop * (_BYTES + 1)))
            values, nbytes = read_box(data, box)
            blocks = values.reshape(len(values), stop - start, _BYTES + 1)
            if not inside:
                return blocks[..., 0], nbytes
            packed = blocks[..., 1:]
            numbers = np.concatenate([packed & 15, packed >> 4], -1)
            found = numbers[..., ::2] | numbers[..., 1::2] << 4
            return found[..., slice(*inside[0])], nbytes

        return sum(self._fill_expert(i, rows, array[i - first], read) for i in range(first, last))
