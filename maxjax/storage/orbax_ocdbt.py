"""Floor 1. OCDBT, the database that orbax keeps chunks in: all its keys, and where their values lie.

tensorstore decodes the nodes of the tree, which have checksums; the references in them are held
against the files here, so that a file that is missing or too short is named, and nothing leads
out of the directory. To tensorstore a value whose file is gone is merely empty. Format: tensorstore,
``kvstore/ocdbt/format``. Below: errors, files. Above: orbax_store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ..errors import (
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
)
from .limits import Limits

# "value:ocdbt.process_0/:d/0123:0:99": what it is, directory, file, offset, length.
_REFERENCE = re.compile(r"(\w+):([^:]*):([^:]*):(\d{1,19}):(\d{1,19})", re.ASCII)
_PROCESS = re.compile(r"ocdbt\.process_(\d+)")
_HINT = "Fetch the checkpoint again, or open an earlier step."


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the tree still to be looked at; its keys have ``prefix`` in front."""

    location: str
    prefix: bytes
    height: int


@dataclass
class Database:
    """The newest version of a database.

    Attributes:
        directory: Where it is.
        sizes: Size of every file below, by its path from there.
        dump: What tensorstore says of a node; of None, of the manifest.
    """

    directory: str
    sizes: Mapping[str, int]
    dump: Callable[[str | None], Any]
    limits: Limits

    def values(self) -> dict[str, bytes | None]:
        """Key → value, or None where it lies in a file, which was seen to hold it.

        Raises:
            CheckpointMissingError, CheckpointTruncatedError: A file does not hold what it should.
            CheckpointUnsafeError: A reference leads out of the directory.
            CheckpointFormatError: The tree is none.
            CheckpointLimitError: There are too many keys.
        """
        found: dict[str, bytes | None] = {}
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
                raise self._broken("a node is in two places of the tree of keys")
            seen.add(node.location)
            self._check(node.location, None)
            content = self.dump(node.location)
            if content["height"] != node.height:
                raise self._broken("a node is of another height than its place in the tree")
            for entry in content["entries"]:
                key = node.prefix + entry["key"]
                if node.height:
                    prefix = node.prefix + entry["subtree_common_prefix"]
                    nodes.append(_Node(entry["location"], prefix, node.height - 1))
                else:
                    self._add(found, key, entry)
        return found

    def _add(self, found: dict[str, bytes | None], key: bytes, entry: dict[str, Any]) -> None:
        try:
            name = key.decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"the key {key[:100]!r} is not UTF-8") from error
        if "indirect_value" in entry:
            self._check(entry["indirect_value"], name)
        if len(found) >= 50 * self.limits.tensors:
            problem = "the database has too many keys (50 for each tensor)"
            raise self.limits.error(problem, "tensors", "more", path=self.directory)
        value = entry.get("inline_value")
        found[name] = None if value is None else bytes(value)

    def _check(self, location: str, key: str | None) -> None:
        """Holds a reference against the files; ``key`` is whose value it is of."""
        match = _REFERENCE.fullmatch(location)
        if not match:
            raise self._broken(f"a reference cannot be read: {location}")
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

    def _broken(self, problem: str) -> CheckpointFormatError:
        return CheckpointFormatError(problem, path=self.directory, hint=_HINT)


def _owner(key: str | None) -> str | None:
    """The array whose chunk or description a key is of, as well as it can be told.

    Example:
        >>> _owner("layers.0.w/c/0/1"), _owner("layers.0.w/0.1")
        ('layers.0.w', 'layers.0.w')
    """
    if key is None:
        return None
    return re.sub(r"/?(zarr\.json|\.zarray|c(/\d+)*|[\d.]+)\Z", "", key)


def missing(*, path: str, tensor: str | None, hint: str = _HINT) -> CheckpointMissingError:
    """The error for a file that is not there; says which process wrote it, if one of several."""
    process = _PROCESS.search(path)
    who = f"the part that process {process[1]} wrote is not there: " if process else ""
    return CheckpointMissingError(f"{who}no such file", path=path, tensor=tensor, hint=hint)
