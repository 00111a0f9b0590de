"""Floor 1. NumPy's .npy format: magic, version, the length of a header, the header, the data.

The header is validated in Python integers before anything is allocated, and nothing of the
data is read. Format: numpy/lib/format.py, versions 1.0, 2.0 and 3.0. Below: files, sniff,
npy_text, table. Above: npz.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import CheckpointError, CheckpointFormatError, CheckpointTruncatedError
from .entry import TensorEntry, UnknownType
from .files import OpenFile, open_regular
from .limits import Limits, in_force
from .npy_text import Header as Header
from .npy_text import HeaderText
from .npy_text import Place as Place
from .sniff import foreign
from .table import TensorTable

WHAT = "a NumPy .npy array"
MAGIC = b"\x93NUMPY"
# The first read: magic, version, length, and nearly always all of the header.
_START_BYTES = 256
_REFETCH = "Incomplete download? Delete the file and fetch it again."


def open_npy(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> TensorTable:
    """Opens one .npy file: a table of one tensor, with the name of the file without ``.npy``.

    Raises:
        CheckpointTruncatedError: The file is shorter than it declares.
        CheckpointFormatError: Another kind of file, a broken header, or values that are no numbers.
        CheckpointUnsafeError: Python objects, code in the header, or a pickle.
        CheckpointLimitError: More than ``limits`` allow.
        CheckpointMissingError, CheckpointAccessError: As for ``open_regular``.

    Example:
        >>> import os, tempfile, numpy as np
        >>> path = os.path.join(tempfile.mkdtemp(), "w.npy")
        >>> np.save(path, np.arange(3))
        >>> with open_npy(path) as table:
        ...     print(table.read("w"))
        [0 1 2]
    """
    limits = in_force(limits)
    file = open_regular(path)
    try:
        name = os.path.basename(file.path).removesuffix(".npy")
        entry = _entry(file, name, limits)
    except BaseException:
        file.close()
        raise
    return TensorTable("npy", [file], {name: entry})


def _entry(file: OpenFile, name: str, limits: Limits) -> TensorEntry:
    place = Place(file.path, name)

    def head(nbytes: int) -> bytes:
        return file.pread(0, min(nbytes, file.size))

    header = read_header(head, file.size, place, limits)
    if isinstance(header.dtype, UnknownType):
        there = file.size - header.skip
        return TensorEntry(name, header.dtype, header.shape, 0, header.skip, there)
    check_size(header, file.size, place)
    return TensorEntry(
        name, header.dtype, header.shape, 0, header.skip, header.nbytes, header.coding
    )


def check_size(header: Header, size: int, place: Place) -> None:
    """Refuses an array whose data is not what is left of the ``size`` bytes behind its header."""
    there = size - header.skip
    if header.nbytes > there:
        raise CheckpointTruncatedError(
            f"shape: the data of {list(header.shape)} ends after the last byte that is there",
            expected=f"{header.nbytes} bytes",
            found=f"{there} bytes",
            hint=_REFETCH,
            **place.at(header.skip),
        )
    if header.nbytes < there:
        raise CheckpointFormatError(
            f"shape: bytes after the data of {list(header.shape)} belong to nothing",
            expected=f"{header.nbytes} bytes of data",
            found=f"{there} bytes",
            **place.at(header.skip + header.nbytes),
        )


def read_header(head: Callable[[int], bytes], size: int, place: Place, limits: Limits) -> Header:
    """The header of an array of ``size`` bytes, header included; ``head(n)`` gives the first n.

    Raises:
        CheckpointTruncatedError, CheckpointFormatError, CheckpointUnsafeError,
        CheckpointLimitError: As for ``open_npy``.
    """
    start = head(_START_BYTES)
    if not start.startswith(MAGIC) and not (len(start) < 6 and MAGIC.startswith(start)):
        raise _other(start, place)
    if len(start) < 10:
        raise _short(place, "magic, version and length", len(start), 10, len(start))
    version = (start[6], start[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        found = f"{version[0]}.{version[1]}"
        raise CheckpointFormatError(
            "version: not one NumPy has written", expected="1.0, 2.0 or 3.0", found=found, **place.at(6)
        )  # fmt: skip
    fixed = 10 if version == (1, 0) else 12
    if len(start) < fixed:
        raise _short(place, "length of the header", len(start), fixed, len(start))
    length = int.from_bytes(start[8:fixed], "little")
    if length > limits.npy_header_bytes:
        problem = "header length is over the limit"
        raise limits.error(problem, "npy_header_bytes", length, **place.at(8))
    if fixed + length > size:
        raise _short(place, "header", fixed, length, size - fixed)
    data = (start if fixed + length <= len(start) else head(fixed + length))[fixed:][:length]
    encoding = "utf-8" if version == (3, 0) else "latin-1"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        found = repr(data[error.start : error.start + 8])
        raise CheckpointFormatError(
            "header: not UTF-8", expected="UTF-8", found=found, **place.at(fixed + error.start)
        ) from None
    return HeaderText(text, encoding, fixed, place, limits).header(fixed + length)


def _short(place: Place, what: str, at: int, wanted: int, there: int) -> CheckpointError:
    return CheckpointTruncatedError(
        f"the array ends inside the {what}",
        expected=f"{wanted} bytes",
        found=f"{there} bytes",
        hint=_REFETCH,
        **place.at(at),
    )


def _other(start: bytes, place: Place) -> CheckpointError:
    """The error for what is no array, by what it is."""
    known = foreign(place.path, start, WHAT)
    if known is not None:
        problem, found = known.problem.replace("the file is", "not an array but"), known.found
        where = place.at(known.offset or 0)
        return type(known)(problem, expected=WHAT, found=found, hint=known.hint, **where)
    problem, found = f"not {WHAT}", repr(start[:8])
    return CheckpointFormatError(problem, expected=repr(MAGIC), found=found, **place.at(0))
