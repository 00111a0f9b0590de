"""Zip archives: their members and the bytes of each.

Stored members are read in place, compressed ones are inflated while they are read. Nothing is ever
unpacked to the disk, and a member's name is never used as a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...errors import CheckpointFormatError, CheckpointLimitError
from ..crc32 import crc32
from ..entry import Checksum
from ..files import OpenFile
from ..limits import Limits, in_force, raising
from ..signatures import SNIFF_BYTES, foreign
from .deflate import Deflated, corrupt
from .directory import DEFLATED as DEFLATED
from .directory import STORED as STORED
from .directory import Directory
from .directory import Member as Member


class Archive:
    """The members of a zip archive by name, in the order of its directory; no data yet.

    Attributes: ``file`` and ``members``. Errors of its methods name ``tensor_of(name)`` as the
    tensor. ``has_all_crcs``: whether a CRC of 0 is an ordinary value; otherwise it means that none was
    computed, which is an option of PyTorch.
    """

    def __init__(
        self,
        file: OpenFile,
        members: dict[str, Member],
        tensor_of: Callable[[str], str | None],
        has_all_crcs: bool,
    ):
        self.file = file
        self.members = members
        self._tensor_of = tensor_of
        self._has_all_crcs = has_all_crcs

    def crc(self, member: Member) -> int | None:
        """The CRC-32 of a member, or None if none was computed; that of an empty member is 0."""
        return member.crc if member.crc or not member.size or self._has_all_crcs else None

    def checksum(self, member: Member) -> Checksum | None:
        """The checksum of a stored member, for TensorTable; compressed ones are checked on reading."""
        crc = self.crc(member)
        if crc is None or member.method != STORED:
            return None
        return Checksum(member.name, member.offset, member.size, crc)

    def deflated(self, member: Member) -> Deflated:
        """The coding of a compressed member, in C order."""
        return Deflated(member.name, member.size, self.crc(member))

    def head(self, member: Member, nbytes: int) -> bytes:
        """The first ``nbytes`` bytes of a member, or all if it has fewer; no checksum is compared.

        Raises:
            CheckpointCorruptError: the bytes cannot be inflated.
        """
        nbytes = min(nbytes, member.size)
        if member.method == STORED:
            return self.file.pread(member.offset, nbytes, tensor=self._tensor_of(member.name))
        pieces, found = self._inflated(member), b""
        while len(found) < nbytes:
            found += next(pieces, b"")  # raises an error if the member is shorter
        return found[:nbytes]

    def read(self, member: Member, limit: int, option: str | None = None) -> bytes:
        """All bytes of a small member; ``option`` is the field of Limits that ``limit`` comes from.

        Raises:
            CheckpointLimitError: the member has more than ``limit`` bytes; nothing was read.
            CheckpointCorruptError: the bytes do not match the checksum.
        """
        where = {"path": self.file.path, "tensor": self._tensor_of(member.name)}
        if member.size > limit:
            raise CheckpointLimitError(
                f"member '{member.name}' is too large",
                expected=f"at most {limit} bytes",
                found=f"{member.size} bytes",
                offset=member.offset,
                hint=raising(option) if option else None,
                **where,
            )
        if member.method == DEFLATED:
            return b"".join(self._inflated(member))
        data, crc = self.head(member, member.size), self.crc(member)
        if crc is not None and (found := crc32(data)) != crc:
            expected, found = f"CRC-32 {crc:08x}", f"{found:08x}"
            raise corrupt(member.name, expected, found, offset=member.offset, **where)
        return data

    def _inflated(self, member: Member) -> Iterator[bytes]:
        place, tensor = (member.offset, member.compressed), self._tensor_of(member.name)
        return self.deflated(member).pieces(self.file, *place, tensor=tensor)


def read_directory(
    file: OpenFile,
    limits: Limits | None = None,
    *,
    what: str = "a zip archive",
    tensor_of: Callable[[str], str | None] = lambda name: None,
    has_all_crcs: bool = False,
) -> Archive:
    """Reads the directory of an archive and the header of each member; no data.

    ``what`` says in messages what the file should be; see ``Archive`` for the other arguments.

    Raises:
        CheckpointTruncatedError: the file ends before its end record.
        CheckpointFormatError: another kind of file; members that overlap, are duplicate, encrypted,
            compressed with a method other than deflate, or described inconsistently; unexpected
            bytes before, between or after them.
        CheckpointUnsafeError: the file is a pickle.
        CheckpointLimitError: the archive exceeds ``limits``, or a member would inflate to more
            than ``member_ratio`` times its bytes and a MiB.

    Example:
        >>> import os, tempfile, zipfile
        >>> from maxjax.storage import open_regular
        >>> path = os.path.join(tempfile.mkdtemp(), "a.zip")
        >>> with zipfile.ZipFile(path, "w") as z:
        ...     z.writestr("w", b"abc")
        >>> archive = read_directory(open_regular(path))
        >>> archive.members["w"].size, archive.read(archive.members["w"], limit=10)
        (3, b'abc')
    """
    limits = in_force(limits)
    start = file.pread(0, min(file.size, SNIFF_BYTES))
    if not start.startswith((b"PK\3\4", b"PK\5\6")) and not b"PK\3\4".startswith(start):
        raise foreign(file.path, start, what) or CheckpointFormatError(
            f"the file is not {what}",
            path=file.path,
            offset=0,
            expected="'PK' and the bytes 3 and 4",
            found=repr(start[:4]),
        )
    members = Directory(file, limits, tensor_of).members()
    return Archive(file, members, tensor_of, has_all_crcs)
