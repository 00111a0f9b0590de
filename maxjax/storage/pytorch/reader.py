"""Reader of PyTorch files (.pt, .pth, .bin), which never executes a pickle.

Since PyTorch 1.6 a file is a zip archive: a pickle ``<root>/data.pkl`` that describes the tensors, and
a member ``<root>/data/<key>`` for each storage. Older files are pickles followed by storages.
Format: ``torch/serialization.py`` and ``caffe2/serialize``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
    some,
)
from ..entry import Coding, TensorEntry
from ..files import DOWNLOAD_AGAIN, OpenFile
from ..limits import Limits
from ..signatures import SNIFF_BYTES, foreign, safetensors_instead, sniff
from ..table import TensorTable, open_single
from ..zip.archive import STORED, Archive, Member, read_directory
from .legacy import read_legacy
from .names import find, persistent
from .pickles import read_pickle
from .tensors import Entries, Stored
from .tree import flatten

WHAT = "a PyTorch checkpoint"
_PICKLE = "data.pkl"
_MEMBERS = 16
# The first bytes of files from torch.save: a zip archive, or a pickled magic number.
_ZIP = (b"PK\3\4", b"PK\5\6")
_MAGIC = (b"\x80", b"L119547037146038801333356L\n")
_SAFE = "No code in the file was run. Use a safetensors version."


def open_pytorch(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> TensorTable:
    """Opens one file of ``torch.save``: reads its pickle without executing it, and no data.

    Names are the keys of nested dicts, joined by dots. If all tensors are in one top-level dict named
    ``state_dict``, ``model_state_dict``, ``model`` or ``module``, names begin inside it. Text, numbers
    and lists of these beside the tensors become ``metadata``, as text. A storage that several tensors
    share is read for each of them. A parameter is read as its tensor; strides, hooks and devices are
    not visible. Quantised, sparse, nested and meta tensors, and dtypes that JAX lacks, are listed, but reading
    them raises an error. A pickle that calls more than constructors of tensors and plain containers is refused.

    Raises:
        CheckpointTruncatedError: the file is shorter than it declares.
        CheckpointFormatError: the file has another format, or ``torch.save`` does not write such files.
        CheckpointUnsafeError: the pickle asks for code to run, or the file is a TorchScript archive.
        CheckpointCorruptError: the pickle does not match its checksum.
        CheckpointLimitError: the file exceeds ``limits``.
        CheckpointMissingError, CheckpointAccessError: as for ``open_regular``.

    Example:
        >>> import os, tempfile, zipfile
        >>> path = os.path.join(tempfile.mkdtemp(), "m.pt")
        >>> with zipfile.ZipFile(path, "w") as z:
        ...     z.writestr("m/data.pkl", b"\\x80\\x02}U\\x05epochK\\x03s.")
        >>> open_pytorch(path).metadata
        {'epoch': '3'}
    """
    return open_single("pytorch", path, limits, read_pytorch)


def read_pytorch(
    file: OpenFile, number: int, limits: Limits
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads (entries, metadata) of an open file; ``number`` is its index in a set."""
    start = file.pread(0, min(file.size, SNIFF_BYTES))
    if not start:
        raise CheckpointTruncatedError(
            "the file is empty",
            path=file.path,
            offset=0,
            expected="at least 1 byte",
            found="0 bytes",
            hint=DOWNLOAD_AGAIN,
        )
    if start.startswith(_ZIP) or _ZIP[0].startswith(start):
        return _read_zip(file, number, limits)
    _check_kind(file, start)
    try:
        return read_legacy(file, number, limits)
    except (CheckpointFormatError, CheckpointTruncatedError) as error:
        if start.startswith(_MAGIC):
            raise
        raise CheckpointFormatError(
            f"the file is not {WHAT}",
            path=file.path,
            offset=0,
            expected="a zip archive or a pickle of torch.save",
            found=repr(start[:8]),
            hint="Download the file again.",
        ) from error


def _check_kind(file: OpenFile, start: bytes) -> None:
    """Refuses a file of neither format, with an error that names its kind."""
    if error := safetensors_instead(file.path, start, file.size, WHAT):
        raise error
    kind = sniff(start)
    if kind == "tar archive":
        raise CheckpointUnsafeError(
            "the file is a tar archive of pickles, as PyTorch wrote before version 0.2",
            path=file.path,
            offset=0,
            expected=WHAT,
            found=kind,
            hint=_SAFE,
        )
    if kind not in (None, "pickle") and (error := foreign(file.path, start, WHAT)):
        raise error


# --- the zip archive ---------------------------------------------------------------------------


def _read_zip(
    file: OpenFile, number: int, limits: Limits
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    archive = _directory(file, limits)
    pickle = _pickle(archive)
    root = pickle.name.removesuffix(_PICKLE)
    data = archive.read(pickle, limits.pickle_bytes, "pickle_bytes")
    _check_pickle(file, pickle, data)
    value, end = read_pickle(
        data,
        path=file.path,
        offset=pickle.offset,
        limits=limits,
        tokens=find,
        persistent=persistent,
        is_compressed=pickle.method != STORED,
    )
    if end != len(data):
        raise CheckpointFormatError(
            f"member '{pickle.name}': bytes after the end of the pickle",
            path=file.path,
            offset=pickle.offset,
            expected=f"{end} bytes",
            found=f"{len(data)} bytes",
        )
    place = {"path": file.path, "offset": pickle.offset, "nbytes": len(data)}
    found, plain = flatten(value, limits=limits, **place)

    def storage(key: str) -> Stored | None:
        member = archive.members.get(f"{root}data/{key}")
        return None if member is None else _stored(archive, member)

    entries = Entries(file.path, number, limits, storage, _is_swapped(archive, root))
    return {name: entries.entry(name, tensor) for name, tensor in found}, plain


def _directory(file: OpenFile, limits: Limits) -> Archive:
    """The members of the archive; errors name the member if no tensor is known."""
    try:
        # A few members are not storages: the pickle, the version, the byte order.
        raised = replace(limits, tensors=min(limits.tensors + _MEMBERS, 2**63 - 1))
        return read_directory(file, raised, what=WHAT, tensor_of=lambda name: name)
    except CheckpointFormatError as error:
        # Readers differ in which one they use, so one may be hidden from a scanner.
        if error.tensor and error.tensor.endswith(f"/{_PICKLE}") and "twice" in error.problem:
            raise _two_pickles(file, error.tensor, error.offset or 0) from error
        raise


def _two_pickles(file: OpenFile, name: str, offset: int) -> CheckpointError:
    return CheckpointUnsafeError(
        "the archive holds two pickles, so it is ambiguous",
        path=file.path,
        offset=offset,
        expected=f"one {_PICKLE}",
        found=name,
        hint=_SAFE,
    )


def _pickle(archive: Archive) -> Member:
    """The member with the pickle that describes the tensors."""
    file, members = archive.file, archive.members
    found = [name for name in members if name.endswith(f"/{_PICKLE}")]
    if len(found) > 1:
        raise _two_pickles(file, found[1], members[found[1]].offset)
    if not found or found[0].count("/") != 1:
        raise CheckpointFormatError(
            f"the zip archive is not {WHAT}: it has no {_PICKLE}",
            path=file.path,
            offset=0,
            expected=f"a member '<name>/{_PICKLE}'",
            found=some(list(members), 5) or "no members",
            hint="Is it a .npz or another archive?",
        )
    constants = found[0].removesuffix(_PICKLE) + "constants.pkl"
    if constants in members:
        raise CheckpointUnsafeError(
            "the file is a TorchScript archive, which holds a program",
            path=file.path,
            offset=members[constants].offset,
            expected=WHAT,
            found=f"member '{constants}'",
            hint="Save the state_dict of the model.",
        )
    return members[found[0]]


def _check_pickle(file: OpenFile, member: Member, data: bytes) -> None:
    if data.startswith(b"\x93NUMPY"):
        raise CheckpointUnsafeError(
            f"member '{member.name}' is a NumPy array, which may hold pickled objects",
            path=file.path,
            offset=member.offset,
            expected="a pickle of torch.save",
            found="NumPy array (.npy)",
            hint=_SAFE,
        )


def _is_swapped(archive: Archive, root: str) -> bool:
    """Whether the bytes of values must be swapped for this machine."""
    member = archive.members.get(f"{root}byteorder")
    if member is None:
        return sys.byteorder != "little"
    order = archive.read(member, 64)
    if order not in (b"little", b"big"):
        raise CheckpointFormatError(
            f"member '{member.name}': not a byte order",
            path=archive.file.path,
            offset=member.offset,
            expected="'little' or 'big'",
            found=repr(order),
        )
    return order.decode() != sys.byteorder


def _stored(archive: Archive, member: Member) -> Stored:
    """Where the bytes of a storage's member lie."""
    if member.method == STORED:
        return Stored(member.offset, member.size, archive.checksum(member))

    def packed(skip: int, order: tuple[int, ...], swap: bool) -> Coding:
        return replace(archive.deflated(member), skip=skip, order=order, swap=swap)

    return Stored(member.offset, member.size, None, packed, member.compressed)
