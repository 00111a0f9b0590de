"""Access to the arrays of one orbax tree through tensorstore: keys, descriptions, boxes of values.

Orbax itself writes with tensorstore, which is imported when the first orbax directory is opened. It
receives only paths, never content of a file. Each file is checked first, because tensorstore would
wait forever for a FIFO and reports an unreadable file as missing. Its errors become exceptions of
``maxjax.errors``.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ...errors import (
    CheckpointAccessError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
    OutOfMemoryError,
)
from ..boxes import Box
from ..files import Identity, changed, content_identity, os_error
from ..limits import Limits
from .zarr import DRIVERS

# Bytes of the manifest and of a node of the tree of keys: tensorstore reads each completely. Orbax
# divides nodes of over 100 MB, and a manifest has some kilobytes.
_MAX_MANIFEST, _MAX_NODE = 16 << 20, 128 << 20
# "value:ocdbt.process_0/:d/0123:0:99": kind, directory, file, offset, length.
_REFERENCE = re.compile(r"(\w+):([^:]*):([^:]*):(\d{1,19}):(\d{1,19})", re.ASCII)
_PROCESS = re.compile(r"ocdbt\.process_(\d+)")
_HINT = "Download the checkpoint again, or open an earlier step."


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the tree that is still to be read; its keys have the prefix ``prefix``."""

    location: str
    prefix: bytes
    height: int


@dataclass
class Database:
    """The newest version of an OCDBT database.

    Attributes:
        directory: directory of the database.
        sizes: relative path → size in bytes, of every file in it.
        dump: function that returns tensorstore's dump of a node, or for None of the manifest.
    """

    directory: str
    sizes: Mapping[str, int]
    dump: Callable[[str | None], Any]
    limits: Limits

    def values(self) -> dict[str, bytes | int]:
        """Key → value, or its number of bytes if it lies in a file, which was checked to be large enough.

        Raises:
            CheckpointMissingError, CheckpointTruncatedError: a file is missing or too short.
            CheckpointUnsafeError: a reference leads out of the directory.
            CheckpointFormatError: the nodes do not form a tree.
            CheckpointLimitError: there are too many keys, or a node is too large.
        """
        found: dict[str, bytes | int] = {}
        versions = self.dump(None).get("versions")
        if not versions:
            raise self._broken("the database has no version")
        root = versions[-1]["root"]
        if "location" not in root:
            return found
        nodes, seen = [_Node(root["location"], b"", versions[-1]["root_height"])], set()
        while nodes:
            node = nodes.pop()
            if node.location in seen:
                raise self._broken("a node occurs twice in the tree of keys")
            seen.add(node.location)
            nbytes = self._check(node.location, None)
            problem = "a node of the tree of keys is too large"
            _at_most(nbytes, _MAX_NODE, problem, os.path.join(self.directory, MANIFEST))
            content = self.dump(node.location)
            if content["height"] != node.height:
                raise self._broken("the height of a node does not match its level in the tree")
            for entry in content["entries"]:
                key = node.prefix + entry["key"]
                if node.height:
                    prefix = node.prefix + entry["subtree_common_prefix"]
                    nodes.append(_Node(entry["location"], prefix, node.height - 1))
                else:
                    self._add(found, key, entry)
        return found

    def _add(self, found: dict[str, bytes | int], key: bytes, entry: dict[str, Any]) -> None:
        try:
            name = key.decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"the key {key[:100]!r} is not UTF-8") from error
        if len(found) >= 50 * self.limits.tensors:
            problem = "the database has too many keys (50 for each tensor)"
            raise self.limits.error(problem, "tensors", "more", path=self.directory)
        if "indirect_value" in entry:
            found[name] = self._check(entry["indirect_value"], name)
        else:
            found[name] = bytes(entry["inline_value"])

    def _check(self, location: str, key: str | None) -> int:
        """The bytes that a reference stands for, checked against the files; ``key`` is the key whose value it is."""
        match = _REFERENCE.fullmatch(location)
        if not match:
            raise self._broken(f"invalid reference: {location}")
        file = unquote(match[2]) + unquote(match[3])
        where: dict[str, Any] = {"path": os.path.join(self.directory, file), "tensor": _owner(key)}
        if file.startswith("/") or "\0" in file or ".." in file.split("/"):
            raise CheckpointUnsafeError(
                "a reference leads out of the checkpoint's directory",
                path=self.directory,
                tensor=where["tensor"],
                expected="a file in the directory",
                found=repr(file),
            )
        size = self.sizes.get(os.path.normpath(file))
        if size is None:
            raise missing(hint=_HINT, **where)
        offset, length = int(match[4]), int(match[5])
        if offset + length > size:
            raise CheckpointTruncatedError(
                "the file ends inside the data",
                offset=min(offset, size),
                expected=f"{offset + length} bytes",
                found=f"{size} bytes",
                hint=f"Incomplete copy? {_HINT}",
                **where,
            )
        return length

    def _broken(self, problem: str) -> CheckpointFormatError:
        return CheckpointFormatError(problem, path=self.directory, hint=_HINT)


def _at_most(nbytes: int, most: int, problem: str, path: str) -> None:
    if nbytes > most:
        raise CheckpointLimitError(
            problem, path=path, expected=f"at most {most} bytes", found=f"{nbytes} bytes"
        )


def prefix(name: str) -> str:
    """The prefix of the keys of an array, as tensorstore makes it from the array's name.

    Example:
        >>> prefix("a/b"), prefix("a/"), prefix(""), prefix("/")
        ('a/b/', 'a/', '', '')
    """
    if name == "/":
        return ""
    return name if not name or name.endswith("/") else f"{name}/"


def _owner(key: str | None) -> str | None:
    """The name of the array that a key of a chunk or description belongs to, as far as it is known.

    Example:
        >>> _owner("layers.0.w/c/0/1"), _owner("layers.0.w/0.1")
        ('layers.0.w', 'layers.0.w')
    """
    if key is None:
        return None
    return re.sub(r"/?(zarr\.json|\.zarray|c(/\d+)*|[\d.]+)\Z", "", key)


def missing(*, path: str, tensor: str | None, hint: str = _HINT) -> CheckpointMissingError:
    """The error for a missing file; it says which process wrote the file, if one of several did."""
    process = _PROCESS.search(path)
    part = f"the part that process {process[1]} wrote is missing: " if process else ""
    return CheckpointMissingError(f"{part}no such file", path=path, tensor=tensor, hint=hint)


MANIFEST = "manifest.ocdbt"
# Cache for the nodes of OCDBT's tree of keys, in bytes, as in orbax.
_NODES_BYTES = 100_000_000
# Nodes as tensorstore 0.1.86 dumps them. It never frees their values, so opening the same files again
# would take memory each time.
_DUMPS: dict[tuple[Any, ...], Any] = {}
_MOST_DUMPS = 64
_QUOTED = re.compile(r'"(/[^"]+)"')


class Store:
    """The arrays of one tree. Any number of threads may read at once.

    Attributes: ``directory``, ``is_ocdbt`` (one database; otherwise one file per chunk) and
    ``nbytes`` (of all files).

    Args:
        directory: directory of the tree.
        limits: limits on the files.
        is_own: whether this process wrote the files just now. Then references are not checked to stay
            in the directory, but the last byte of each value is read, and the sizes are not known.

    Raises:
        CheckpointError: the path of the directory is not UTF-8.
        CheckpointFormatError: a FIFO, socket or device is among the files.
        CheckpointAccessError: a file may not be read.
        CheckpointLimitError: there are too many files, or the manifest is too large.
    """

    def __init__(self, directory: str, limits: Limits, *, is_own: bool = False):
        self.directory = os.path.abspath(directory)
        require_unicode(self.directory)
        self.limits = limits
        self._identities = dict(_files(self.directory, limits))
        self.nbytes = sum(identity[0] for identity in self._identities.values())
        self.is_ocdbt = MANIFEST in self._identities
        if self.is_ocdbt:
            nbytes, path = self._identities[MANIFEST][0], os.path.join(self.directory, MANIFEST)
            _at_most(nbytes, _MAX_MANIFEST, "the manifest is too large", path)
        self._arrays: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()
        with self.wrapped(None):
            import tensorstore

            self._ts = tensorstore
            self._context = tensorstore.Context(
                {
                    # Values are not cached, since the caller keeps them.
                    "cache_pool": {"total_bytes_limit": 0},
                    "cache_pool#ocdbt": {"total_bytes_limit": _NODES_BYTES},
                }
            )
            store = tensorstore.KvStore.open(self._kvstore_spec(), context=self._context)
            self._kvs = store.result()
        read = self._read_ends if is_own else self._read_values
        self._values: Mapping[str, bytes | int] = read() if self.is_ocdbt else {}

    def __reduce__(self):
        raise TypeError("an open checkpoint cannot be copied or pickled; open the path again")

    def _kvstore_spec(self, name: str = "") -> dict[str, Any]:
        """tensorstore's specification of the key-value store below a name."""
        front = prefix(name)
        if not self.is_ocdbt:
            return {"driver": "file", "path": f"{self.directory}/{front}"}
        base = {"driver": "file", "path": f"{self.directory}/"}
        return {"driver": "ocdbt", "base": base, "path": front, "cache_pool": "cache_pool#ocdbt"}

    def sizes(self) -> dict[str, int]:
        """Key → bytes of its value: of the database, or of the files."""
        if not self.is_ocdbt:
            return {file: identity[0] for file, identity in self._identities.items()}
        return {k: v if isinstance(v, int) else len(v) for k, v in self._values.items()}

    def _read_values(self) -> dict[str, bytes | int]:
        """Key → value of the database, or its number of bytes if the value lies in a file."""
        base = {"driver": "file", "path": f"{self.directory}/"}
        sizes = {file: identity[0] for file, identity in self._identities.items()}
        with self.wrapped(None):
            files = self._ts.KvStore.open(base, context=self._context).result()

            def dump(node: str | None) -> Any:
                key = (self.directory, node, frozenset(self._identities.items()))
                if key not in _DUMPS:
                    while len(_DUMPS) >= _MOST_DUMPS:
                        _DUMPS.pop(next(iter(_DUMPS)), None)
                    _DUMPS[key] = self._ts.ocdbt.dump(files, node, context=self._context).result()
                return _DUMPS[key]

            return Database(self.directory, sizes, dump, self.limits).values()

    def _read_ends(self) -> dict[str, bytes | int]:
        """Key → description, or the number of bytes read at the end of a value. Unlike a dump, it keeps no memory."""
        with self.wrapped(None):
            names = [key.decode() for key in self._kvs.list().result()]
            described = tuple(DRIVERS.values())
            ends = [None if name.endswith(described) else slice(-1, None) for name in names]
            reads = [
                self._kvs.read(name, byte_range=end) for name, end in zip(names, ends, strict=True)
            ]
        found: dict[str, bytes | int] = {}
        for name, end, read in zip(names, ends, reads, strict=True):
            with self.wrapped(_owner(name)):
                value = bytes(read.result().value)
            if not value:  # tensorstore takes a file that is missing for an empty value
                raise missing(path=os.path.join(self.directory, name), tensor=_owner(name))
            found[name] = value if end is None else len(value)
        return found

    def descriptions(self, wanted: Sequence[tuple[str, str]]) -> Iterator[tuple[str, bytes | str]]:
        """For each (tensor, key), the path for messages, and the bytes or the path of a file."""
        if not self.is_ocdbt:
            for _, key in wanted:
                path = os.path.join(self.directory, key)
                yield path, path
            return
        with self.wrapped(None):
            # All are requested at once; short values are stored with the keys.
            stored = [key for _, key in wanted if isinstance(self._values[key], int)]
            futures = {key: self._kvs.read(key) for key in stored}
        for tensor, key in wanted:
            path, value = os.path.join(self.directory, key), self._values[key]
            if isinstance(value, int):
                with self.wrapped(tensor):
                    found = futures.pop(key).result()
                if found.state != "value":
                    raise missing(path=path, tensor=tensor)
                value = bytes(found.value)
            yield path, value

    def array(self, driver: str, name: str, is_dense: bool) -> Any:
        """The tensorstore array ``name``, opened once."""
        with self._lock:
            if (driver, name) in self._arrays:
                return self._arrays[driver, name]
        spec = {
            "driver": driver,
            "kvstore": self._kvstore_spec(name),
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            # Otherwise missing chunks would be read as zeros.
            "fill_missing_data_reads": not is_dense,
        }
        with self.wrapped(name, opening=True):
            array = self._ts.open(spec, open=True, read=True, context=self._context).result()
        with self._lock:
            return self._arrays.setdefault((driver, name), array)

    def start(self, array: Any, box: Box, into: Any, name: str) -> Callable[[], None]:
        """Starts reading a box into a NumPy array; returns a function that waits for the end."""
        with self.wrapped(name):
            index = tuple(slice(start, stop) for start, stop in box)
            future = self._ts.array(into).write(array[index] if index else array)

        def finish() -> None:
            with self.wrapped(name):
                future.result()

        return finish

    # --- errors ---

    def check_unchanged(self, name: str | None = None) -> None:
        """Checks that the files are unchanged: all of a database, or those of one array.

        Raises:
            CheckpointMissingError: a file is gone, because the step was deleted.
            CheckpointAccessError: a file may not be read any more.
            CheckpointChangedError: a file was modified.
        """
        below = "" if name is None or self.is_ocdbt else f"{name}/"
        for file, identity in self._identities.items():
            if not file.startswith(below) or (self.is_ocdbt and not _is_data(file)):
                continue
            path = os.path.join(self.directory, file)
            try:
                now = content_identity(os.stat(path))
            except OSError as error:
                raise os_error(error, path, "stat failed", tensor=name) from error
            if now != identity:
                raise changed(path, identity, now, name)

    @contextmanager
    def wrapped(self, tensor: str | None, *, opening: bool = False) -> Iterator[None]:
        """Context in which tensorstore's exceptions become exceptions of ``maxjax.errors``."""
        try:
            yield
        except CheckpointError:
            raise
        except MemoryError as error:
            raise OutOfMemoryError(self._text(tensor, "out of host memory")) from error
        except Exception as error:
            self.check_unchanged(tensor)
            raise self._error(str(error), tensor, opening) from error

    def _error(self, message: str, tensor: str | None, opening: bool) -> Exception:
        path = self._named(message) or self.directory
        where: dict[str, Any] = {"path": path, "tensor": tensor}
        if not os.path.lexists(path):
            return missing(path=path, tensor=tensor)
        short = re.sub(r"\s*\[[^\[]*='.*|\s*\[source locations=.*", "", message, flags=re.DOTALL)
        problem = f"tensorstore reports: {short[:300]}"
        if "PERMISSION_DENIED" in message:
            return CheckpointAccessError(problem, **where)
        if "Too many open files" in message:
            hint = "Too many files are open: raise `ulimit -n`."
            return CheckpointError(problem, hint=hint, **where)
        if message.startswith("RESOURCE_EXHAUSTED"):
            return OutOfMemoryError(self._text(tensor, problem))
        if message.startswith("NOT_FOUND") or "is missing" in message:
            return CheckpointMissingError(problem, **where)
        if "OUT_OF_RANGE" in message or "outside valid range" in message:
            hint = "Incomplete copy, or truncated while being read? Download the checkpoint again."
            return CheckpointTruncatedError(problem, hint=hint, **where)
        invalid = message.startswith(("INVALID_ARGUMENT", "UNIMPLEMENTED"))
        if invalid or (opening and message.startswith("FAILED_PRECONDITION")):
            return CheckpointFormatError(problem, **where)
        hint = "The file is corrupt: download it again, or open an earlier step."
        return CheckpointCorruptError(problem, hint=hint, **where)

    def _text(self, tensor: str | None, problem: str) -> str:
        named = f"tensor '{tensor}': " if tensor is not None else ""
        return f"{self.directory}: {named}{problem}"

    def _named(self, message: str) -> str | None:
        """The file in the directory that an error message names, if any."""
        for path in _QUOTED.findall(message):
            path = os.path.normpath(path)
            if path.startswith(self.directory + os.sep):
                return path
        return None


def require_unicode(directory: str) -> None:
    """Refuses a path that is not UTF-8, which tensorstore cannot open.

    Raises:
        CheckpointError: the path is not UTF-8.
    """
    try:
        directory.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            "orbax checkpoints cannot be in a directory whose path is not UTF-8", path=directory,
            hint="Rename the directory.",
        ) from None  # fmt: skip


def _is_data(file: str) -> bool:
    return file == MANIFEST or f"{os.sep}d{os.sep}" in f"{os.sep}{file}"


def _files(directory: str, limits: Limits) -> Iterable[tuple[str, Identity]]:
    """The relative path and identity of every file in a directory; each must be regular and readable."""
    folders, count = [""], 0
    seen: set[tuple[int, int]] = set()  # links may be circular
    while folders:
        folder = folders.pop()
        path = os.path.join(directory, folder)
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            names = sorted(os.listdir(path))
        except OSError as error:
            raise os_error(error, path, "listing the directory failed") from error
        count += len(names)
        if count > 50 * limits.tensors:
            problem = "the directory has too many files (50 for each tensor)"
            raise limits.error(problem, "tensors", count, path=directory)
        for name in names:
            file = os.path.join(folder, name)
            path = os.path.join(directory, file)
            try:
                status = os.stat(path)
            except OSError as error:
                raise os_error(error, path, "stat failed") from error
            if stat.S_ISDIR(status.st_mode):
                folders.append(file)
                continue
            _check_file(path, status)
            yield file, content_identity(status)


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointFormatError(
            "not a regular file",
            path=path,
            expected="a regular file",
            found="a FIFO, a socket or a device",
            hint="Remove it from the checkpoint.",
        )
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        raise os_error(PermissionError(13, "Permission denied"), path, "opening failed")
