"""Reader of PyTorch files from before version 1.6: a sequence of pickles and storages.

A file consists of three small pickles (a magic number, the version, system information), the pickle
of the value, the pickle of the list of keys, and for each key an 8-byte count and the storage.
``torch.save`` still writes this with ``_use_new_zipfile_serialization=False``.
"""

from __future__ import annotations

import sys
from typing import Any

from ...dtype import DType
from ...errors import CheckpointError, CheckpointFormatError, CheckpointTruncatedError
from ..entry import TensorEntry
from ..files import DOWNLOAD_AGAIN, OpenFile
from ..limits import Limits
from .names import WIDTHS, Storage, Tensor, find, persistent
from .pickle_machine import Reader, described
from .pickles import read_pickle
from .tensors import Entries, Stored
from .tree import flatten

MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
# Bytes read from the file at first; most pickles of weights are shorter.
_FIRST_BYTES = 1 << 20


def read_legacy(
    file: OpenFile, number: int, limits: Limits
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads (entries, metadata) of an open file; ``number`` is its index in a set.

    Raises:
        CheckpointUnsafeError: a pickle asks for a name that weights do not need.
        CheckpointTruncatedError: the file ends inside a pickle or a storage.
        CheckpointFormatError: ``torch.save`` does not write such files.
        CheckpointLimitError: the file exceeds ``limits``.
    """
    limit, wanted = limits.pickle_bytes, _FIRST_BYTES
    while True:
        data = file.pread(0, min(file.size, limit, wanted))
        legacy = _Legacy(file, number, limits, data)
        try:
            legacy.read()
            return legacy.entries()
        except CheckpointTruncatedError:
            # Only the end of the bytes read so far may be reached: try again with more.
            if legacy.is_read or len(data) == file.size:
                raise
            if len(data) == limit:
                problem = "the pickles are longer than the limit"
                raise limits.error(
                    problem, "pickle_bytes", file.size, path=file.path, offset=limit
                ) from None
            wanted *= 8


class _Legacy:
    """One attempt to read a file from ``data``, its first bytes; ``at`` is the next byte."""

    def __init__(self, file: OpenFile, number: int, limits: Limits, data: bytes):
        self.file = file
        self.number = number
        self.limits = limits
        self.data = data
        self.at = 0
        self.storages: dict[str, Storage] = {}
        self.is_read = False

    def read(self) -> None:
        """Reads the pickles."""
        for what, expected in (("magic number", MAGIC), ("version of the format", _VERSION)):
            value, offset = self._plain()
            if type(value) is not int or value != expected:
                raise self._error(what, offset, expected, described(value))
        system, offset = self._plain()
        if type(system) is not dict:
            raise self._error("system information", offset, "a dict", described(system))
        offset = self.at
        value = self._pickle(find, self._persistent)
        where = {"path": self.file.path, "offset": offset, "nbytes": self.at - offset}
        self.found, self.metadata = flatten(value, limits=self.limits, **where)
        self.keys, self.keys_at = self._plain()
        if type(self.keys) is not list or not all(type(key) is str for key in self.keys):
            found = described(self.keys)
            raise self._error("keys of the storages", self.keys_at, "a list of texts", found)
        self.is_read = True

    def entries(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        """(entries, metadata), after the pickles were read."""
        layout = self._layout()
        # Storages are little-endian on every machine.
        swap = sys.byteorder != "little"
        entries = Entries(self.file.path, self.number, self.limits, layout.get, swap)
        return {name: entries.entry(name, tensor) for name, tensor in self.found}, self.metadata

    def _error(
        self, problem: str, offset: int, expected: Any, found: Any, tensor: str | None = None
    ) -> CheckpointError:
        where = {"path": self.file.path, "offset": offset, "tensor": tensor}
        return CheckpointFormatError(problem, expected=expected, found=found, **where)

    def _plain(self) -> tuple[Any, int]:
        """The value of a pickle without globals, and its offset."""
        offset = self.at
        return self._pickle(lambda module, name: None, None), offset

    def _pickle(self, tokens: Any, persistent: Any) -> Any:
        value, self.at = read_pickle(
            self.data,
            path=self.file.path,
            offset=0,
            limits=self.limits,
            tokens=tokens,
            persistent=persistent,
            start=self.at,
        )
        return value

    def _persistent(self, reader: Reader, identity: Any) -> Storage:
        storage = persistent(reader, identity)
        if type(storage.key) is str:
            self.storages.setdefault(storage.key, storage)
        return storage

    # --- the storages behind the pickles ---

    def _layout(self) -> dict[str, Stored]:
        """key → where its storage lies; checks that they end with the file."""
        users = {_key(tensor): name for name, tensor in reversed(self.found)}
        layout: dict[str, Stored] = {}
        at = self.at
        for key in self.keys:
            storage, tensor = self.storages.get(key), users.get(key)
            if storage is None or key in layout:
                problem = f"keys of the storages: '{key[:80]}'"
                again = "again" if storage else "a key that no tensor uses"
                raise self._error(problem, self.keys_at, "each key once", again, tensor)
            kind = storage.kind.value
            width = kind.np.itemsize if type(kind) is DType else WIDTHS.get(storage.kind.name)
            if width is None:
                problem = "dtype: unknown or not supported"
                expected, kind_name = "a type that JAX has arrays of", str(storage.kind)
                raise self._error(problem, storage.at, expected, kind_name, tensor)
            layout[key] = self._storage(at, width, tensor)
            at = layout[key].offset + layout[key].nbytes
        if at != self.file.size:
            problem = "bytes after the last storage belong to no tensor"
            expected, size = f"a file of {at} bytes", f"{self.file.size} bytes"
            raise self._error(problem, at, expected, size)
        return layout

    def _storage(self, at: int, width: int, tensor: str | None) -> Stored:
        """The storage whose count begins at byte ``at``."""
        start, size = at + 8, self.file.size
        count = int.from_bytes(self.file.pread(at, 8), "little") if start <= size else 0
        nbytes = count * width
        if nbytes > self.limits.storage_bytes:
            where = {"path": self.file.path, "offset": at, "tensor": tensor}
            problem = "storage: too many bytes"
            raise self.limits.error(problem, "storage_bytes", nbytes, **where)
        if start + nbytes > size:
            raise CheckpointTruncatedError(
                "the file ends inside a storage",
                path=self.file.path,
                tensor=tensor,
                offset=min(at, size),
                expected=f"{8 + nbytes} bytes",
                found=f"{max(size - at, 0)} bytes",
                hint=DOWNLOAD_AGAIN,
            )
        return Stored(start, nbytes)


def _key(tensor: Tensor) -> Any:
    first = tensor.arguments[0] if tensor.arguments else None
    return first.key if type(first) is Storage and type(first.key) is str else None
