"""Writer of safetensors files: one file, or a set with its index, from streamed tensors.

The output is byte for byte that of safetensors 0.8 for the same tensors: data ordered by dtype width
and name, the header compact and padded with spaces.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...dtype import DType
from ...errors import CheckpointMismatchError, UserInputError, shown
from ..save.outgoing import Outgoing
from .reader import ENCODINGS

# The order of the data, as in safetensors: widest first, so that all of it is aligned.
_ORDER = """U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3
F8_E5M2 I8 U8 F4 BOOL""".split()
_RANK = {name: rank for rank, name in enumerate(_ORDER)}
_METADATA = "__metadata__"
_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**k for k, p in enumerate("KMGTP", 1)},
          **{f"{p}IB": 1024**k for k, p in enumerate("KMGTP", 1)}}  # fmt: skip


def in_order(tensors: Iterable[Outgoing]) -> list[Outgoing]:
    """Tensors in the order in which safetensors writes them: by dtype, widest first, then by name."""
    return sorted(tensors, key=lambda one: (_RANK[_type(one)], one.name))


def header(tensors: Sequence[Outgoing], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with these tensors in their order: its length, and its JSON.

    Raises:
        CheckpointMismatchError: a name is duplicate or reserved, or safetensors lacks the dtype.

    Example:
        >>> import numpy as np
        >>> from ..save.outgoing import outgoing
        >>> header([outgoing("w", np.zeros(2, np.int8))])[8:]
        b'{"w":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}   '
    """
    document: dict[str, object] = {}
    given = dict(metadata or {})
    if encodings := {one.name: one.encoding for one in tensors if one.encoding}:
        given[ENCODINGS] = json.dumps(encodings, separators=(",", ":"), ensure_ascii=False)
    if given:
        document[_METADATA] = given
    end = 0
    for one in tensors:
        if one.name in document or one.name == _METADATA:
            raise CheckpointMismatchError("two tensors would have this name", tensor=one.name)
        begin, end = end, end + one.nbytes
        document[one.name] = {
            "dtype": _type(one),
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _type(one: Outgoing) -> str:
    name = one.dtype.safetensors
    if name not in _RANK:
        raise CheckpointMismatchError(
            "safetensors has no such dtype", tensor=one.name, found=one.dtype.name
        )
    if one.dtype is DType.float4_e2m1fn and one.nbytes * 2 != math.prod(one.shape):
        raise CheckpointMismatchError(
            "safetensors holds an even number of float4 values",
            tensor=one.name,
            found=math.prod(one.shape),
        )
    return name


def file_pieces(
    tensors: Sequence[Outgoing], metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    """The bytes of a file, in order."""
    yield memoryview(header(tensors, metadata))
    for one in tensors:
        yield from one.pieces()


# --- sets of files ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetFile:
    """One file of a set: its name, and its tensors in the order of the file."""

    name: str
    tensors: tuple[Outgoing, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of its tensors."""
        return sum(one.nbytes for one in self.tensors)


def shards(
    tensors: Iterable[Outgoing],
    max_shard_size: int,
    *,
    taken: Iterable[str] = (),
    as_given: bool = False,
) -> list[SetFile]:
    """Assigns tensors to files: as many as fit, in order; a larger tensor gets its own file.

    Args:
        taken: file names that must not be used, those of the set to be replaced.
        as_given: whether to keep the order of the tensors within a file; otherwise it is safetensors'.

    Example:
        >>> import numpy as np
        >>> from ..save.outgoing import outgoing
        >>> tensors = [outgoing(name, np.zeros(3, np.int8)) for name in "abc"]
        >>> [(shard.name, len(shard.tensors)) for shard in shards(tensors, 6)]
        [('model-00001-of-00002.safetensors', 2), ('model-00002-of-00002.safetensors', 1)]
    """
    groups: list[list[Outgoing]] = []
    group, size = [], 0
    for one in tensors:
        if one.nbytes > max_shard_size:
            groups.append([one])  # the current group continues without it, as in huggingface_hub
            continue
        if size + one.nbytes > max_shard_size:
            groups.append(group)
            group, size = [], 0
        group.append(one)
        size += one.nbytes
    if group or not groups:
        groups.append(group)
    if not as_given:
        groups = list(map(in_order, groups))
    if len(groups) == 1:
        return [SetFile("model.safetensors", tuple(groups[0]))]
    used, series = set(taken), 0
    while True:
        letter = "" if not series else f"-{series}"
        names = [f"model{letter}-{i:05}-of-{len(groups):05}.safetensors"
                 for i in range(1, len(groups) + 1)]  # fmt: skip
        if used.isdisjoint(names):
            pairs = zip(names, groups, strict=True)
            return [SetFile(name, tuple(group)) for name, group in pairs]
        series += 1


def index(files: Sequence[SetFile]) -> bytes:
    """The JSON text of a set's index, as transformers writes it."""
    weight_map = {one.name: shard.name for shard in files for one in shard.tensors}
    metadata = {
        "total_parameters": sum(math.prod(one.shape) for shard in files for one in shard.tensors),
        "total_size": sum(shard.nbytes for shard in files),
    }
    document = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


def size_in_bytes(size: int | str, option: str = "") -> int:
    """A size as a number of bytes: "5GB" is 5 * 10 ** 9, "5GiB" is 5 * 2 ** 30. Messages name ``option``.

    Raises:
        UserInputError: ``size`` is not a size above 0.

    Example:
        >>> size_in_bytes("5GB"), size_in_bytes("1.5 MiB")
        (5000000000, 1572864)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?I?B?)\s*", str(size), re.IGNORECASE)
    unit = _UNITS.get(found[2].upper()) if found else None
    nbytes = float(found[1]) * unit if found and unit else 0
    if type(size) not in (int, str) or not 1 <= nbytes < math.inf:
        given = f"{option}=" * bool(option) + shown(size)
        raise UserInputError(f"{given} is not a size: write a number of bytes, or '5GB', '16GiB'")
    return int(nbytes)
