"""``maxjax_digests.json``: checksums of the tensors in the files beside it.

safetensors, GGUF and orbax have no checksums of their own, so maxjax writes them into an additional
file, which other programs ignore. It never makes an intact file unreadable: a record applies only to a
file of the recorded size, and is ignored otherwise.

    {"version": 1, "algorithm": "crc32",
     "files": {"model.safetensors": [{"size": 123, "header": [72, "00c0ffee"],
                                      "tensors": {"w": "89abcdef"}}]}}

"header", if present, is the number of bytes before the tensors (their names and types, the metadata)
and their checksum, which is compared when the file is opened. While a file is being replaced it has a
second record, because either the old or the new one may be found. The record of the file that commits
a checkpoint (the index of a set) lists in "beside" the files that describe the weights, and in "gone"
those of the previous checkpoint that are no longer among them. If a file of another program is being
replaced, its record lists only what distinguishes it from the new one. An orbax checkpoint has one
record, of file "." and size 0, with checksums of the arrays' values.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..errors import (
    CheckpointAccessError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMissingError,
    shown,
)
from .checksums import stale_hint
from .crc32 import crc32, crc32_of
from .entry import Checksum, TensorEntry
from .files import OpenFile, file_range, is_there
from .limits import Limits, in_force
from .save.beside import Description, sum_of
from .sidecars import sidecar_kind
from .strict_json import invalid, load_json, require
from .table import TensorTable

_LOG = logging.getLogger("maxjax")
NAME = "maxjax_digests.json"
# The key for a directory that is a checkpoint as a whole (orbax).
DIRECTORY = "."
VERSION, ALGORITHM = 1, "crc32"
# Maximum records of a file: the present file, and the new one of each interrupted replacement.
MAX_RECORDS = 8
# Maximum files that describe the weights; published models have some twenty.
MAX_SIDECARS = 256
# In place of a byte of a name that is not UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")
_CRC = re.compile("[0-9a-f]{8}")
# Matches a name that is not a plain relative path below the directory.
_OUTSIDE = re.compile(r"^/|^$|\\|\0|(^|/)\.")
_HINT = "The weights may be intact: delete this file, or read them with verify=False."


@dataclass(frozen=True, slots=True)
class Record:
    """The checksums of a file of ``size`` bytes.

    Attributes:
        tensors: name → CRC-32 of the tensor's bytes in the file.
        header: number of bytes before all tensors, and their CRC-32.
        beside: the files that describe the weights, if known.
    """

    size: int
    tensors: dict[str, int]
    header: tuple[int, int] | None = None
    beside: Description | None = None


@dataclass(frozen=True, slots=True)
class Digests:
    """The content of a ``maxjax_digests.json``: name of a file → its records.

    Example:
        >>> digests = Digests({"m.safetensors": (Record(9, {"w": 255}), Record(8, {"w": 1}))})
        >>> digests.of("m.safetensors", 9)
        {'w': (255,)}
        >>> parse(to_bytes(digests.files)) == digests
        True
    """

    files: dict[str, tuple[Record, ...]] = field(default_factory=dict)

    def of(self, file: str, size: int) -> dict[str, tuple[int, ...]]:
        """tensor → its accepted checksums, from the records of ``file`` that have this size."""
        return _acceptable([one for one in self.files.get(file, ()) if one.size == size])


def to_bytes(files: Mapping[str, Sequence[Record]]) -> bytes:
    """The content of a ``maxjax_digests.json``: the same bytes for the same records.

    Files whose names are not UTF-8, which JSON cannot hold, are left out.

    Example:
        >>> to_bytes({"m.gguf": [Record(9, {"w": 255})]})
        b'{"algorithm":"crc32","files":{"m.gguf":[{"size":9,"tensors":{"w":"000000ff"}}]},"version":1}'
    """
    listed = {n: list(map(_as_json, records)) for n, records in files.items() if _is_utf8(n)}
    document = {"version": VERSION, "algorithm": ALGORITHM, "files": listed}
    return json.dumps(document, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _as_json(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"size": record.size, "tensors": _hexadecimal(record.tensors)}
    if record.header is not None:
        found["header"] = [record.header[0], f"{record.header[1]:08x}"]
    if record.beside is not None:
        found["beside"] = _hexadecimal(record.beside.files)
        if record.beside.gone:
            found["gone"] = _hexadecimal(record.beside.gone)
    return found


def _hexadecimal(sums: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{crc:08x}" for name, crc in sums.items() if _is_utf8(name)}


def _is_utf8(name: str) -> bool:
    return name.isascii() or not _SURROGATE.search(name)


def parse(
    source: bytes | str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> Digests | None:
    """Parses the digests in a file or in bytes; returns None for an unknown version or algorithm.

    Raises:
        CheckpointFormatError: the content is not what maxjax writes.
        CheckpointError: as for ``load_json``.
    """
    path = NAME if isinstance(source, bytes) else os.fspath(source)
    try:
        # Four values for each tensor are more than any record has.
        limits = in_force(limits)
        values = min(limits.json_values, 4 * limits.tensors + 1000)
        document = load_json(source, limits=replace(limits, json_values=values))
    except (CheckpointMissingError, CheckpointAccessError):
        raise
    except CheckpointError as error:
        where = {"offset": error.offset, "expected": error.expected, "found": error.found}
        raise type(error)(error.problem, path=path, **where, hint=_HINT) from None
    require(isinstance(document, dict), path, "the document", "an object", document, hint=_HINT)
    version, algorithm = document.get("version"), document.get("algorithm")
    if version != VERSION or algorithm != ALGORITHM or isinstance(version, bool):
        what = f"version {version!r} with {algorithm!r}"
        _LOG.info("%s: %s is not supported, so no checksums are compared", path, what[:200])
        return None
    files = document.get("files")
    require(isinstance(files, dict), path, "files", "an object", files, hint=_HINT)
    return Digests({file: tuple(_records(path, file, of)) for file, of in files.items()})


def read_digests(
    directory: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> Digests | None:
    """The digests of the files in a directory; None if there are none that can be read.

    Raises:
        CheckpointFormatError, CheckpointLimitError: as for ``parse``.
    """
    path = os.path.join(directory, NAME)
    if not is_there(path):  # most checkpoints have none: no error is made to be caught
        return None
    try:
        return parse(path, limits=limits)
    except CheckpointMissingError:
        return None
    except CheckpointAccessError as error:
        _LOG.warning("%s; no checksums are compared", error)
        return None


def attach(
    table: TensorTable,
    *,
    limits: Limits | None = None,
    compare: bool = True,
) -> list[Record]:
    """Attaches the checksums beside a table's files to its tensors.

    Tensors that already have a checksum keep it, and records of another file size are ignored.
    Returns the records that say which files describe the weights: those of ``table.root``, or if it
    is None, those in which all files agree. With ``compare=False`` it does nothing else.

    Raises:
        CheckpointCorruptError: the header of a file does not match its checksum.
        CheckpointFormatError, CheckpointLimitError: as for ``parse``.
    """
    found: dict[str, Digests | None] = {}
    described: list[Record] = []
    # For each file: tensor → its accepted checksums.
    sums: list[dict[str, tuple[int, ...]]] = []
    for number, file in enumerate(table.files):
        folder, name = os.path.split(file.path)
        if folder not in found:
            found[folder] = read_digests(folder, limits=limits)
        digests = found[folder]
        records = [] if digests is None else digests.files.get(name, ())
        fitting = [record for record in records if record.size == file.size]
        if records and not fitting:
            _LOG.info("%s: %s records another size: no checksums are compared", file.path, NAME)
        fitting = _with_header(file, fitting, os.path.join(folder, NAME))
        fitting = matching_records(file, table.entries.values(), number, fitting)
        sums.append(_acceptable(fitting))
        described = [one for one in described if one.beside in [other.beside for other in fitting]]
        described = described if number else fitting
    if table.indexes and table.root is not None:
        folder = os.path.dirname(table.root.path)
        digests = found.get(folder) or read_digests(folder, limits=limits)
        described = fitting_index(table.root, digests)
    if not compare or not any(sums):
        return described
    paths = [os.path.join(os.path.dirname(file.path), NAME) for file in table.files]
    for name, entry in table.entries.items():
        crcs = sums[entry.file].get(name) if entry.checksum is None else None
        if crcs:
            path = paths[entry.file]
            checksum = Checksum(name, entry.offset, entry.nbytes, crcs[0], crcs[1:], path)
            table.entries[name] = entry._replace(checksum=checksum)
    return described


def warn_without_checksums(table: TensorTable) -> None:
    """Warns, once per file, about tensors without a checksum; for ``verify=True``."""
    missing: dict[str, int] = {}
    for entry in table.entries.values():
        # A compressed archive member is compared with its checksum whenever it is read.
        is_compressed = entry.coding is not None and not entry.coding.is_divisible
        if entry.checksum is None and entry.nbytes and not is_compressed:
            path = table.files[entry.file].path
            missing[path] = missing.get(path, 0) + 1
    for path, count in missing.items():
        _warn_once(path, count, len(table.entries))


@lru_cache(1024)
def _warn_once(path: str, count: int, of: int) -> None:
    _LOG.warning(
        "%s: verify=True, but there are no checksums of %s, so corruption cannot be detected. "
        "`maxjax convert` writes a copy with checksums",
        path,
        "its tensors" if count == of else f"{count} of the {of} tensors",
    )


def _acceptable(records: Sequence[Record]) -> dict[str, tuple[int, ...]]:
    """tensor → its accepted checksums; a tensor that some record lacks is left out (any is accepted)."""
    found: dict[str, tuple[int, ...]] = {}
    for name in records[0].tensors if records else ():
        if all(name in record.tensors for record in records):
            found[name] = tuple(dict.fromkeys(record.tensors[name] for record in records))
    return found


def matching_records(
    file: OpenFile, entries: Iterable[TensorEntry], number: int, records: Sequence[Record]
) -> list[Record]:
    """The records of a file that agree with its bytes.

    There are several records during a save or after an interrupted one; then the smallest tensor in
    which they differ is read.

    Args:
        entries: entries of tensors; only those in file ``number`` are considered.
    """
    records = list(records)
    while len(records) > 1:
        sizes = {
            entry.name: entry
            for entry in entries
            if entry.file == number
            and len({r.tensors[entry.name] for r in records if entry.name in r.tensors}) > 1
        }
        if not sizes:
            break
        entry = min(sizes.values(), key=lambda entry: entry.nbytes)
        crc = crc32_of(file_range(file, entry.offset, entry.offset + entry.nbytes))
        kept = [record for record in records if record.tensors.get(entry.name, crc) == crc]
        if not kept:  # corrupt: reported when the tensor is read
            break
        records = kept
    return records


def fitting_index(index: OpenFile, digests: Digests | None) -> list[Record]:
    """The records of a set's index that match its content."""
    records = () if digests is None else digests.files.get(os.path.basename(index.path), ())
    crc = sum_of(index) if records else 0
    return [one for one in records if one.header == (index.size, crc)]


def _with_header(file: OpenFile, records: Sequence[Record], path: str) -> list[Record]:
    """The records whose header checksum matches the file, and those without a header checksum."""
    found, others = [], []
    for record in records:
        nbytes, wanted = record.header or (0, 0)
        if nbytes > file.size:
            raise invalid(path, "a header", f"at most {file.size} bytes", nbytes, hint=_HINT)
        crc = crc32(file.pread(0, nbytes)) if nbytes else 0
        if crc == wanted:
            found.append(record)
        else:
            others.append((f"{wanted:08x}", f"{crc:08x}"))
    if records and not found:
        raise CheckpointCorruptError(
            "the header does not match its checksum",
            path=file.path,
            expected=f"CRC-32 {' or '.join(wanted for wanted, _ in others)}",
            found=others[0][1],
            hint=stale_hint(path),
        )
    return found


def _records(path: str, file: str, records: Any) -> Iterable[Record]:
    where = f"files[{file!r}]"
    is_list = isinstance(records, list) and 0 < len(records) <= MAX_RECORDS
    require(is_list, path, where, f"a list of 1 to {MAX_RECORDS} records", records, hint=_HINT)
    for record in records:
        require(isinstance(record, dict), path, where, "a list of objects", record, hint=_HINT)
        size, tensors = record.get("size"), record.get("tensors")
        is_size = type(size) is int and size >= 0
        require(is_size, path, f"{where}: size", "a number of bytes", size, hint=_HINT)
        require(
            isinstance(tensors, dict), path, f"{where}: tensors", "an object", tensors, hint=_HINT
        )
        header = _header(path, f"{where}: header", record.get("header"))
        yield Record(size, _sums(path, tensors), header, _beside(path, where, record))


def _sums(path: str, found: Mapping[str, Any]) -> dict[str, int]:
    return {name: _crc(path, name, crc) for name, crc in found.items()}


def _beside(path: str, where: str, record: Mapping[str, Any]) -> Description | None:
    found, gone = record.get("beside"), record.get("gone", {})
    if found is None:
        return None
    for key, value in ("beside", found), ("gone", gone):
        require(isinstance(value, dict), path, f"{where}: {key}", "an object", value, hint=_HINT)
        if len(value) > MAX_SIDECARS:
            raise CheckpointLimitError(
                f"{where}: {key}: too many files", path=path, expected=f"at most {MAX_SIDECARS}",
                found=len(value), hint=_HINT,
            )  # fmt: skip
        for name in value:
            is_below = not _OUTSIDE.search(name)
            require(is_below, path, f"{where}: {key}", "names in the directory", name, hint=_HINT)
    # Earlier versions recorded further files, which do not describe the weights.
    kept = ({n: crc for n, crc in value.items() if sidecar_kind(n)} for value in (found, gone))
    return Description(*(_sums(path, value) for value in kept))


def _header(path: str, where: str, found: Any) -> tuple[int, int] | None:
    if found is None:
        return None
    is_pair = isinstance(found, list) and len(found) == 2 and isinstance(found[1], str)
    if is_pair and type(found[0]) is int and found[0] >= 0 and _CRC.fullmatch(found[1]):
        return found[0], int(found[1], 16)
    raise invalid(path, where, "a number of bytes and eight hexadecimal digits", found, hint=_HINT)


def _crc(path: str, name: str, crc: Any) -> int:
    if isinstance(crc, str) and _CRC.fullmatch(crc):
        return int(crc, 16)
    raise CheckpointFormatError(
        "not a checksum",
        path=path,
        tensor=name,
        expected="eight hexadecimal digits",
        found=shown(crc),
        hint=_HINT,
    )
