"""Weights: a cursor over the names of a checkpoint.

Attribute and index access only build a name; tensors are read when ``data().data`` is accessed
or a Module loads them. All cursors of one checkpoint share its open files.
"""

from __future__ import annotations

import bisect
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...dtype import DType
from ...errors import CheckpointError, closest, differs
from ...rendering.rendered import Rendered
from ...rendering.row import Row
from ...storage import TensorTable, open_checkpoint
from ...storage.boxes import whole
from ...storage.files import aligned_empty
from ...storage.limits import in_force
from ...storage.parts import Part, read_parts
from ...storage.save.beside import Beside
from ...storage.save.outgoing import nibbles
from ..device import DeviceRef
from ..quantization import QuantizationEncoding
from ..shape import Shape, StaticDim
from ..weight.weight import Weight
from .rows import table_row
from .weight_data import PartSource, WeightData, as_leaf

# Names of methods: a tensor of such a name is reached by index, weights["data"].
RESERVED_NAMES = (
    "allocate",
    "allocate_as_bytes",
    "allocated_weights",
    "close",
    "data",
    "exists",
    "items",
    "keys",
    "name",
)
"""Names of tensors that are methods of Weights too: ``weights["name"]`` reaches these tensors."""


# A stacked array with more layers than this is not a LayerStack's.
MOST_LAYERS = 1 << 20


class _FullName(str):
    """A name from iteration. Used as an index, it is absolute, whatever the position of the cursor."""

    __slots__ = ()


class CheckpointSource:
    """The state that all cursors of one checkpoint share, and the DataSource of its WeightData."""

    def __init__(self, table: TensorTable, path: str, allocated: dict[str, Any] | None = None):
        self.table: TensorTable | None = table
        self.entries = table.entries  # kept when the files are closed, as in MAX
        self.path = path
        self.allocated = {} if allocated is None else allocated
        # The limits at opening also apply to files that are read with the checkpoint.
        self.limits = in_force()
        # Arrays in use, so that data().data is one object while it lives.
        self.seen: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()
        # Cached comparisons: names of two tensors → whether their values are the same.
        self.same: dict[tuple[str, str], bool] = {}
        # The file of the vision part of a model whose text half this is.
        self.mmproj: FileWeights | None = None

    def open_table(self) -> TensorTable:
        if self.table is None:
            raise CheckpointError("the weights are closed", path=self.path, hint="Open them again.")
        return self.table

    @cached_property
    def names(self) -> list[str]:
        return sorted(self.entries)

    def read(self, name: str) -> np.ndarray:
        array = self.seen.get(name)
        if array is None:
            array = self.seen[name] = self.open_table().read(name)
        return array

    def read_many(self, names: list[str]) -> dict[str, np.ndarray]:
        return self.open_table().read_many(names)

    def read_parts(self, parts: Sequence[Part]) -> int:
        return read_parts(self.open_table(), parts)

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        entry = self.open_table().entries[name]
        return entry.dtype.np, entry.shape

    def nbytes(self, name: str) -> int:
        return self.open_table().entries[name].nbytes

    def is_divisible(self, name: str) -> bool:
        """Whether parts of a tensor can be read alone."""
        coding = self.open_table().entries[name].coding
        return coding is None or coding.is_divisible


class FileWeights(Rendered):
    """A cursor: a position in the tree of names of a checkpoint.

    ``weights.model.layers[0].q_proj.weight`` and ``weights["model.layers.0.q_proj.weight"]``
    are the same position. Neither fails if there is no tensor; :meth:`exists` tests that. Use an
    index for names that start with an underscore or are names of methods, such as ``keys`` and
    ``items``: as an attribute you get the method.

    As a mapping, a cursor contains the tensors at or below it: ``len``, ``in``, iteration,
    ``keys()`` and ``items()`` use full names. jnp and NumPy accept the cursor of a tensor as an
    array, and then read it.

    Example:
        >>> import jax.numpy as jnp, numpy as np, tempfile, os, safetensors.numpy
        >>> from maxjax.graph.weights import load_weights
        >>> path = os.path.join(tempfile.mkdtemp(), "m.safetensors")
        >>> safetensors.numpy.save_file({"layers.0.w": np.ones((2, 3), np.float16)}, path)
        >>> weights = load_weights(path)
        >>> weights.layers[0].w.exists(), weights.layers.exists()
        (True, False)
        >>> weights.layers[0].w.data()
        WeightData(DType.float16, [Dim(2), Dim(3)])
        >>> list(weights.layers), len(weights), "layers.0.w" in weights
        (['layers.0.w'], 1, True)
        >>> jnp.asarray(weights.layers[0].w).shape
        (2, 3)
    """

    _family: CheckpointSource
    _prefix: str
    # Alignment of the file's tensors in bytes, for allocated Weights.
    _alignment: int | None = None

    def _open(
        self,
        table: TensorTable,
        path: str,
        prefix: str = "",
        allocated: dict[str, Any] | None = None,
    ) -> None:
        self.__dict__.update(_family=CheckpointSource(table, path, allocated), _prefix=prefix)

    @classmethod
    def _of(cls, table: TensorTable, path: str) -> Any:
        """The root of an open checkpoint."""
        self = object.__new__(cls)
        self._open(table, path)
        return self

    def _at(self, prefix: str) -> FileWeights:
        other = object.__new__(type(self))
        other.__dict__.update(_family=self._family, _prefix=prefix)
        return other

    def __getattr__(self, attr: str) -> FileWeights:
        if attr.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {attr!r}; "
                f"a tensor of that name is reached by index: weights[{attr!r}]"
            )
        return self[attr]

    def __getitem__(self, index: str | int) -> FileWeights:
        if type(index) is _FullName:
            return self._at(str(index))
        return self._at(f"{self._prefix}.{index}" if self._prefix else str(index))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._below())

    def __contains__(self, name: object) -> bool:
        prefix = self._prefix
        inside = not prefix or name == prefix or str(name).startswith(f"{prefix}.")
        return inside and name in self._family.entries

    def keys(self) -> list[str]:
        """Full names of the tensors at or below this position, sorted.

        These names find their tensors from any position; other strings used as an index are
        relative to the position.
        """
        return [_FullName(name) for name in self._below()]

    @property
    def name(self) -> str:
        """The full name of this position; "" at the root."""
        return self._prefix

    @property
    def _path(self) -> str:
        return self._family.path

    @property
    def _beside(self) -> Beside:
        """The files that describe the weights, such as config.json."""
        folder = self._path if os.path.isdir(self._path) else os.path.dirname(self._path)
        return self._family.open_table().beside or Beside(folder or ".")

    def exists(self) -> bool:
        """Whether a tensor has exactly this name."""
        return self._prefix in self._family.entries

    def items(self) -> Iterator[tuple[str, FileWeights]]:
        """Full name and cursor of each tensor at or below this position, in the order of keys()."""
        for name in map(str, self.keys()):
            yield name, self._at(name)

    def _below(self) -> list[str]:
        names, prefix = self._family.names, self._prefix
        if not prefix:
            return list(names)
        start = bisect.bisect_left(names, f"{prefix}.")
        stop = bisect.bisect_left(names, f"{prefix}/")  # the character after the dot
        return [prefix] * self.exists() + names[start:stop]

    def _relative(self) -> dict[str, str]:
        """Names below this position without its own → whole names; "" for a tensor at it."""
        skip = len(self._prefix) + 1 if self._prefix else 0
        return {name[skip:]: name for name in self._below()}

    def _named_data(self) -> Iterator[tuple[str, WeightData]]:
        """Every tensor at or below this position by its relative name, for a Module to load.

        A stacked array ``layers.*.w``, as orbax writes the leaf of a LayerStack, is the tensors of its layers.
        """
        layers = _Layers(self._family)
        for relative, name in self._relative().items():
            data = self._at(name)._lazy_data()
            yield from layers.named(relative, data).items() or ((relative, data),)

    def data(self) -> WeightData:
        """The tensor of this name, which is read when its ``data`` is accessed.

        Raises:
            KeyError: there is no such tensor; the message names a similar one.
            CheckpointFormatError: no array can hold its type. The error is also a ValueError, as in MAX.
        """
        data = self._lazy_data()
        DType.of(data.dtype)  # raises the error for an unsupported type
        return data

    def _lazy_data(self) -> WeightData:
        """As ``data``, but an unsupported type raises an error only when it is read."""
        entry = self._family.open_table().entries.get(self._prefix)
        if entry is None:
            raise KeyError(self._unknown_name())
        encoding = QuantizationEncoding(entry.encoding) if entry.encoding else None
        return WeightData.lazy(self._family, entry.name, entry.dtype, entry.shape, encoding)

    def __jax_array__(self) -> jax.Array:
        return self.data().__jax_array__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.data().__array__(dtype, copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.data().__dlpack_device__()

    def _unknown_name(self) -> str:
        like = closest(self._prefix, self._family.names)
        return f"{self._path}: no tensor is named '{self._prefix}'" + (
            f". Did you mean '{like}'?" if like else ""
        )

    def allocate(
        self,
        dtype: Any = None,
        shape: Any = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef | None = None,
    ) -> Weight:
        """A new Weight of this full name, whose value is read at its first use.

        Args:
            dtype: float type of another width to convert to; None keeps the file's.
            shape: expected shape, checked against the file's. A name matches any size, and stays the size of the
                Weight.
            quantization_encoding: None, except for a GGUF file.
            device: device that it is declared on; the CPU by default.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the shape differs, the dtype is not a float, or an encoding is given,
                which the format does not have.
        """
        data = self.data()
        if quantization_encoding is not None:
            self._check_encoding(data, quantization_encoding)
        stored_shape = data.logical_shape
        shape = Shape(stored_shape if shape is None else shape)
        pairs = zip(shape, stored_shape, strict=False)
        if len(shape) != len(stored_shape) or any(
            isinstance(size, StaticDim) and size != stored for size, stored in pairs
        ):
            sizes = f"(expected={_sizes(shape)}, actual={_sizes(stored_shape)})"
            raise ValueError(differs(self.name, f"shape {sizes}"))
        if dtype is not None:
            wanted = DType.of(dtype)
            floats = data.dtype.is_float() or data.is_packed
            if wanted is not data.dtype and not (wanted.is_float() and floats):
                types = f"(expected={wanted}, actual={data.dtype}): only floats are cast"
                raise ValueError(differs(self.name, f"dtype {types}"))
            data = data.astype(wanted)
        weight = Weight(
            self.name, data.dtype, data.shape if data.is_packed else shape, device or DeviceRef.CPU(),
            data.quantization_encoding, align=self._alignment,
        )  # fmt: skip
        weight.source = data
        self._family.allocated[self.name] = data
        return weight

    def _check_encoding(self, data: WeightData, encoding: QuantizationEncoding) -> None:
        """Raises an error: the format has no quantization encodings."""
        raise ValueError(
            f"'{self.name}': quantization_encoding is not supported for a {self._format()} file"
        )

    def _format(self) -> str:
        return self._family.open_table().format

    @property
    def allocated_weights(self) -> dict[str, Any]:
        """The data of all Weights allocated from this checkpoint, by full name; shared by all cursors."""
        return self._family.allocated

    def close(self) -> None:
        """Closes the files, for all cursors of this checkpoint."""
        if self._family.table is not None:
            self._family.table.close()
            self._family.table = None
        if self._family.mmproj is not None:
            self._family.mmproj.close()

    def __enter__(self) -> FileWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __dir__(self) -> list[str]:
        """Methods and the next components of names, for completion in a notebook."""
        parts = {name.split(".", 1)[0] for name in self._relative()}
        return sorted({*RESERVED_NAMES, *(p for p in parts if p.isidentifier())})

    def _ipython_key_completions_(self) -> list[str | int]:
        """The keys for brackets: the next components of names, and whole names below this position."""
        names = list(filter(None, self._relative()))
        parts = dict.fromkeys(name.split(".", 1)[0] for name in names)
        numbers = [int(part) for part in parts if part.isdecimal()]
        return [*sorted(numbers), *(part for part in parts if not part.isdecimal()), *names]

    def _mx_row(self) -> Row:
        if self._family.table is None:
            return Row(notes=("closed",))
        entries, prefix = self._family.table.entries, self._prefix
        return table_row([entries[name] for name in self._below()], prefix)

    def _mx_title(self, row: Row) -> str:
        if self._family.table is None:
            return f"{type(self).__name__}({self._path!r}, closed)"
        facts = ", ".join(filter(None, [*row.notes, row.type_text]))
        return f"{type(self).__name__}({self._path!r}, name={self._prefix!r}, {facts})"


as_leaf(FileWeights)


class _Layers(PartSource):
    """The DataSource of single layers' tensors of stacked arrays: ``layers.1.w`` is ``layers.*.w[1]``."""

    def __init__(self, source: CheckpointSource):
        self._source = source
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}

    def named(self, name: str, stack: WeightData) -> dict[str, WeightData]:
        """The tensors of a stack by name; {} if the array is not one, or has elements of no layer."""
        parts = name.split(".")
        axes = [i for i, part in enumerate(parts) if part == "*"]
        shape = [int(size) for size in stack.shape]
        lead, inner = shape[: len(axes)], shape[len(axes) :]
        if not axes or len(lead) < len(axes) or not 0 < math.prod(lead) <= MOST_LAYERS:
            return {}
        found = {}
        for index in np.ndindex(*lead):
            for axis, number in zip(axes, index, strict=True):
                parts[axis] = str(number)
            one = ".".join(parts)
            self._places[one] = stack.name, index
            found[one] = WeightData.lazy(self, one, stack.dtype, inner)
        return found

    def dtype_and_shape(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape."""
        stack, index = self._places[name]
        dtype, shape = self._source.dtype_and_shape(stack)
        return dtype, shape[len(index) :]

    def read_parts(self, parts: Sequence[Part]) -> int:
        """Reads rectangular parts, each into its memory."""
        wanted = []
        for part in parts:
            stack, index = self._places[part.name]
            wanted.append(part._replace(
                name=stack, region=(*((i, i + 1) for i in index), *part.region)
            ))  # fmt: skip
        return self._source.read_parts(wanted)

    def read_many(self, names: list[str]) -> dict[str, np.ndarray]:
        """Reads several tensors; those of one stack together, since its chunks may be compressed."""
        arrays, parts = {}, []
        for name in names:
            dtype, shape = self.dtype_and_shape(name)
            memory = aligned_empty(math.prod(shape) * dtype.itemsize)
            parts.append(Part(name, whole(shape), memory))
            arrays[name] = memory.view(dtype).reshape(shape)
        self.read_parts(parts)
        return arrays


class SafetensorWeights(FileWeights):
    """Weights of safetensors files.

    Args:
        filepaths: files; for a name in several files, the last file's tensor is used.
        prefix: name of the position to start at.
        allocated: dict that the data of allocated Weights is added to.
    """

    _alignment = 1

    def __init__(
        self,
        filepaths: Sequence[Any],
        *,
        tensors: Any = None,
        tensors_to_file_idx: Any = None,
        prefix: str = "",
        allocated: dict[str, Any] | None = None,
    ):
        del tensors, tensors_to_file_idx  # MAX's own bookkeeping; the files have it
        paths = [os.fsdecode(path) for path in filepaths]
        self._open(open_checkpoint(paths), paths[0], prefix, allocated)

    def allocate_as_bytes(self, dtype: Any = None) -> Weight:
        """A new uint8 Weight of the tensor's bytes: the last axis counts bytes, () becomes (n,).

        Args:
            dtype: ignored, as in MAX: bytes are uint8.

        Raises:
            ValueError: it is float4 with an odd last axis, whose rows are not whole bytes.
        """
        del dtype
        data = _Bytes(self.data())
        weight = Weight(self.name, DType.uint8, data.shape, DeviceRef.CPU())
        weight.source = self._family.allocated[self.name] = data
        return weight


def _sizes(shape: Any) -> str:
    return str(tuple(d.dim if isinstance(d, StaticDim) else d for d in Shape(shape)))


class _Bytes(WeightData):
    """The bytes of another WeightData, read on access."""

    def __init__(self, data: WeightData):
        *rows, last = [int(d) for d in data.shape] or [1]
        last, rest = divmod(last * data.dtype.size_in_bits, 8)
        if rest:
            raise ValueError(
                f"'{data.name}': rows of {list(data.shape)!r} {data.dtype!r} values are not whole bytes"
            )
        super().__init__(None, data.name, DType.uint8, [*rows, last])
        self._of = data

    @property
    def data(self) -> Any:
        array = np.asarray(self._of.typed())
        if self._of.dtype is DType.float4_e2m1fn:  # one byte per value in memory
            packed = np.frombuffer(b"".join(nibbles([array])), np.uint8)
            return packed.reshape([int(d) for d in self.shape])
        return np.atleast_1d(np.ascontiguousarray(array)).view(np.uint8)

    @property
    def is_loaded(self) -> bool:
        return True  # for code that would read it from a table


as_leaf(SafetensorWeights)


class _NoTable:
    """A table of tensors with allocated Weights only, and no data."""

    format = "no"

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def close(self) -> None:
        """There are no files."""


class UnreadWeights(FileWeights):
    """``Graph.weights()``: allocates Weights by name that a weights registry fills later.

    Example:
        >>> from maxjax.graph import Graph
        >>> weights = Graph("my_model").weights()
        >>> weights.layers[0].attention.weight.allocate("float32", (4, 4)).name
        'layers.0.attention.weight'
        >>> weights.layers[0].attention.weight.exists(), weights.layers[0].mlp.exists()
        (True, False)
    """

    def __init__(self) -> None:
        self._open(_NoTable(), "Graph.weights()")  # type: ignore[arg-type]

    def allocate(
        self,
        dtype: Any = None,
        shape: Any = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef | None = None,
    ) -> Weight:
        """A new Weight of this name.

        Raises:
            ValueError: dtype or shape is missing: there is no file to take them from.
        """
        if dtype is None or shape is None:
            raise ValueError(
                f"'{self.name}': without a checkpoint, allocate() needs a dtype and a shape"
            )
        weight = Weight(
            self.name, DType.of(dtype), shape, device or DeviceRef.CPU(), quantization_encoding
        )
        self._family.open_table().entries[self.name] = weight  # type: ignore[assignment]
        self._family.__dict__.pop("names", None)
        return weight

    def data(self) -> Any:
        """Raises KeyError: there is no data."""
        raise KeyError(
            f"'{self.name}': these weights have no data; open a checkpoint with load_weights"
        )
