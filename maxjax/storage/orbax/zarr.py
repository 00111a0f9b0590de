"""The description (metadata) of one array in zarr's two formats, as tensorstore reads them.

It is checked here before tensorstore reads it, because its sizes decide how much memory is
allocated. Formats: zarr 2 (``.zarray``) and zarr 3 (``zarr.json``), the subset that orbax writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtype import DType
from ...errors import (
    CheckpointCorruptError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMissingError,
)
from ..entry import UnknownType
from ..limits import Limits
from ..strict_json import invalid, load_json, require

# tensorstore's driver for a format → file name of the array's description.
DRIVERS = {"zarr3": "zarr.json", "zarr": ".zarray"}
# The most dimensions that both NumPy and tensorstore support.
_MAX_DIMS = 32
# Orbax writes two or three codecs, and one more for shards.
_MAX_CODECS = 16
_CODECS = ("bytes", "transpose", "zstd", "gzip", "blosc", "crc32c", "sharding_indexed")
_ZARR2 = re.compile(r"[<>|](?:[biuf]\d|c8|c16)")


@dataclass(frozen=True, slots=True)
class ArrayDescription:
    """The description of one array: dtype, shape, and division into chunks.

    Attributes:
        driver: tensorstore's name of the format.
        chunk: shape of what is stored under one key.
        read_chunk: shape that is decompressed at a time, which may be part of a chunk.
        prefix, separator: prefix and separator of the keys: "c/0/1" in zarr 3, "0.1" in zarr 2.
    """

    driver: str
    dtype: DType | Any
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    read_chunk: tuple[int, ...]
    prefix: str
    separator: str

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array."""
        itemsize = 0 if isinstance(self.dtype, UnknownType) else self.dtype.np.itemsize
        return math.prod(self.shape) * itemsize

    @property
    def most_bytes(self) -> int:
        """The most bytes that one chunk may take in its file: tensorstore reads it completely.

        Compression lengthens values a little at most, and a shard has 16 bytes for each chunk in it.
        """
        itemsize = 16 if isinstance(self.dtype, UnknownType) else self.dtype.np.itemsize
        inside = math.prod(self.chunk) // math.prod(self.read_chunk)
        return 2 * math.prod(self.chunk) * itemsize + 16 * inside + (1 << 20)

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    def key(self, index: Sequence[int]) -> str:
        """The key of a chunk, without the array's name.

        Example:
            >>> ArrayDescription("zarr3", DType.int8, (4, 4), (2, 2), (2, 2), "c", "/").key((0, 1))
            'c/0/1'
        """
        numbers = [self.prefix, *map(str, index)] if self.prefix else list(map(str, index))
        return self.separator.join(numbers) or "0"


def read_description(
    driver: str, path: str, name: str, source: bytes | str, limits: Limits
) -> ArrayDescription:
    """Reads the description of the array ``name`` from a file or bytes; ``path`` is for messages.

    Raises:
        CheckpointFormatError: the description is invalid, or tensorstore does not support it.
        CheckpointError: as for ``load_json``.
    """
    shown = path if isinstance(source, bytes) else None
    value = load_json(source, limits=limits, name=shown)
    require(isinstance(value, dict), path, "the document", "an object", value, name)
    found = (_zarr3 if driver == "zarr3" else _zarr2)(value, path, name)
    _check_sizes(found, path, name, limits)
    return found


def _zarr2(value: dict[str, Any], path: str, name: str) -> ArrayDescription:
    version, filters = value.get("zarr_format"), value.get("filters")
    require(version == 2, path, "zarr_format", "2", version, name)
    require(filters is None, path, "filters", "null", filters, name)
    shape, chunk = (_sizes(value.get(key), path, key, name) for key in ("shape", "chunks"))
    separator = value.get("dimension_separator", ".")
    require(separator in (".", "/"), path, "dimension_separator", "'.' or '/'", separator, name)
    dtype = _dtype(value.get("dtype"), path, "dtype", name)
    return ArrayDescription("zarr", dtype, shape, chunk, chunk, "", separator)


def _zarr3(value: dict[str, Any], path: str, name: str) -> ArrayDescription:
    version, kind = value.get("zarr_format"), value.get("node_type")
    require(version == 3, path, "zarr_format", "3", version, name)
    require(kind == "array", path, "node_type", "'array'", kind, name)
    grid, configuration = _extension(value.get("chunk_grid"), path, "chunk_grid", name)
    require(grid == "regular", path, "chunk_grid", "'regular'", grid, name)
    shape = _sizes(value.get("shape"), path, "shape", name)
    chunk = _sizes(configuration.get("chunk_shape"), path, "chunk_shape", name)
    keys = value.get("chunk_key_encoding")
    encoding, options = _extension(keys, path, "chunk_key_encoding", name)
    known = encoding in ("default", "v2")
    require(known, path, "chunk_key_encoding", "'default' or 'v2'", encoding, name)
    separator = options.get("separator", "/" if encoding == "default" else ".")
    require(separator in (".", "/"), path, "separator", "'.' or '/'", separator, name)
    dtype = _dtype(value.get("data_type"), path, "data_type", name)
    read_chunk = _inner(value.get("codecs"), len(shape), path, name) or chunk
    prefix = "c" if encoding == "default" else ""
    return ArrayDescription("zarr3", dtype, shape, chunk, read_chunk, prefix, separator)


def _inner(codecs: Any, axes: int, path: str, name: str) -> tuple[int, ...] | None:
    """The shape of the inner chunks of a shard, if chunks are shards; refuses unknown codecs."""
    require(isinstance(codecs, list), path, "codecs", "a list", codecs, name)
    if len(codecs) > _MAX_CODECS:
        raise CheckpointLimitError(
            "the array has too many codecs",
            path=path,
            tensor=name,
            expected=f"at most {_MAX_CODECS}",
            found=len(codecs),
        )
    found = None
    for one in codecs:
        codec, configuration = _extension(one, path, "codecs", name)
        require(codec in _CODECS, path, "codec", f"one of {', '.join(_CODECS)}", codec, name)
        if codec == "transpose":
            order: Any = configuration.get("order")
            is_order = isinstance(order, list) and len(order) == axes
            is_order = is_order and all(type(axis) is int for axis in order)
            is_order = is_order and sorted(order) == list(range(axes))
            require(
                is_order, path, "order of a transpose", f"the axes 0 to {axes - 1}", order, name
            )
        if codec == "sharding_indexed":
            found = _sizes(configuration.get("chunk_shape"), path, "chunk_shape", name)
            inside = _inner(configuration.get("codecs"), axes, path, name)
            require(inside is None, path, "codecs", "one level", "two", name)
            if "index_codecs" in configuration:
                inside = _inner(configuration["index_codecs"], axes + 1, path, name)
                require(inside is None, path, "index_codecs", "no shards", "shards", name)
    return found


def _extension(value: Any, path: str, what: str, name: str) -> tuple[str, dict[str, Any]]:
    """The name and the configuration of an extension."""
    if isinstance(value, str):
        return value, {}
    require(isinstance(value, dict), path, what, "an object", value, name)
    title, configuration = value.get("name"), value.get("configuration", {})
    require(isinstance(title, str), path, f"{what}: name", "text", title, name)
    is_object = isinstance(configuration, dict)
    require(is_object, path, f"{what}: configuration", "an object", configuration, name)
    return title, configuration


def _sizes(value: Any, path: str, what: str, name: str) -> tuple[int, ...]:
    holds = isinstance(value, list) and len(value) <= _MAX_DIMS
    holds = holds and all(type(size) is int and size >= 0 for size in value)
    require(holds, path, what, f"a list of up to {_MAX_DIMS} sizes", value, name)
    return tuple(value)


def _dtype(value: Any, path: str, what: str, name: str) -> Any:
    try:
        if isinstance(value, str) and _ZARR2.fullmatch(value):
            return DType.of(np.dtype(value))
        if isinstance(value, str) and value in DType.__members__:
            return DType[value]
    except (TypeError, ValueError):
        pass
    error = invalid(path, what, "a dtype that maxjax supports", value, name)
    if not isinstance(value, str):
        raise error
    return UnknownType(value[:80], error)


def _check_sizes(found: ArrayDescription, path: str, name: str, limits: Limits) -> None:
    shape, chunk, read_chunk = found.shape, found.chunk, found.read_chunk
    where: dict[str, Any] = {"path": path, "tensor": name}
    same = len(shape) == len(chunk) == len(read_chunk)
    require(same, path, "the number of axes of a chunk", str(len(shape)), str(len(chunk)), name)
    itemsize = 1 if isinstance(found.dtype, UnknownType) else found.dtype.np.itemsize
    nbytes = itemsize * math.prod(size for size in shape if size)
    if nbytes > limits.tensor_bytes:
        raise limits.error("the tensor is too large", "tensor_bytes", nbytes, **where)
    # A chunk is decoded completely, including the part outside the array.
    fits = all(0 < step <= max(size, 1) for size, step in zip(shape, chunk, strict=True))
    fits = fits and all(
        0 < step and size % step == 0 for size, step in zip(chunk, read_chunk, strict=True)
    )
    if not fits:
        raise CheckpointFormatError(
            "the chunks do not fit into the array",
            expected=f"chunks of at most {list(shape)}",
            found=f"{list(chunk)} in pieces of {list(read_chunk)}",
            **where,
        )


def check_write_shape(
    found: ArrayDescription, shape: tuple[int, ...], path: str, name: str
) -> None:
    """Checks an array against the shape of the pieces in which, by the tree, it was written.

    Raises:
        CheckpointFormatError: the array does not consist of whole pieces.
    """
    pairs = zip(found.shape, shape, strict=True) if len(shape) == len(found.shape) else [(1, 0)]
    if not all(piece and size % piece == 0 for size, piece in pairs):
        raise CheckpointFormatError(
            "the array's shape does not match the pieces in which it was written",
            path=path,
            tensor=name,
            expected=f"a multiple of {list(shape)}",
            found=list(found.shape),
            hint="One of the two files is corrupt.",
        )


def check_chunks(
    found: ArrayDescription, sizes: Mapping[str, int], path: str, name: str, is_dense: bool
) -> None:
    """Checks the existing chunks (bytes by key, without the array's name) against the shape.

    Raises:
        CheckpointMissingError: a chunk is missing.
        CheckpointCorruptError: a chunk lies outside the shape.
        CheckpointLimitError: a chunk has more bytes than its values could take.
    """
    present = {}
    for key, nbytes in sizes.items():
        if (index := _index(found, key)) is not None:
            present[index] = nbytes
    largest = max(present.values(), default=0)
    if largest > found.most_bytes:
        raise CheckpointLimitError(
            "a chunk has more bytes than its values could take",
            path=path,
            tensor=name,
            expected=f"at most {found.most_bytes} bytes",
            found=f"{largest} bytes",
        )
    grid = found.grid
    outside = [index for index in present if not all(map(int.__lt__, index, grid))]
    if outside:
        raise CheckpointCorruptError(
            "there are chunks outside the array's shape",
            path=path,
            tensor=name,
            expected=f"a grid of {list(grid)} chunks",
            found=found.key(min(outside)),
        )
    if is_dense and len(present) < math.prod(grid):
        # Among one more index than there are chunks, at least one is missing.
        indices = (_unravel(number, grid) for number in range(len(present) + 1))
        missing = next(index for index in indices if index not in present)
        raise CheckpointMissingError(
            f"{math.prod(grid) - len(present)} of the {math.prod(grid)} chunks are missing",
            path=path,
            tensor=name,
            expected=f"chunk {found.key(missing)}",
            hint="Download the checkpoint again, or open an earlier step.",
        )


def _unravel(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    """The grid index of a chunk, by its number."""
    index = []
    for size in reversed(grid):
        number, last = divmod(number, size)
        index.append(last)
    return tuple(reversed(index))


def _index(found: ArrayDescription, key: str) -> tuple[int, ...] | None:
    """The grid index of a chunk, by its key; None if the key is not that of a chunk."""
    if not found.shape:
        return () if key == found.key(()) else None
    numbers = key.split(found.separator)
    if found.prefix:
        if numbers[0] != found.prefix:
            return None
        numbers = numbers[1:]
    plain = all(number.isascii() and number.isdecimal() for number in numbers)
    if not plain or len(numbers) != len(found.shape) or any(len(one) > 18 for one in numbers):
        return None
    return tuple(map(int, numbers))
