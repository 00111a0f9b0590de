"""Sets of files with an index: model.safetensors.index.json, pytorch_model.bin.index.json.

The index maps each tensor to the file that holds it. Its file names are untrusted: they must stay
below the index's own directory. The files there may be symbolic links, as in the Hugging Face cache.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from ..errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
    some,
)
from .directory import fetch_hint, is_index
from .entry import TensorEntry
from .files import OpenFile, closed_on_error, open_regular, os_error
from .formats import FORMATS, PYTORCH, SAFETENSORS
from .limits import Limits, in_force
from .strict_json import KeyPath, Text, read_json_bytes
from .table import TensorTable

_LOG = logging.getLogger("maxjax")
_PICKLES = (*PYTORCH.suffixes, ".pkl", ".pickle")
# Matches a path that leads out of the directory on any operating system.
_OUTSIDE = re.compile(r"^[/~]|\\|\0|^[A-Za-z][A-Za-z0-9+.-]*:|(^|/)\.\.(/|$)")
_NAME_BYTES, _PATH_BYTES = 255, 4095


def open_index(
    path: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> TensorTable:
    """Opens every file that an index names, relative to the index's directory.

    An index whose name ends in ``.bin.index.json`` lists PyTorch files, any other lists safetensors
    files; it must not name files of the other format. Each tensor must be in the file that the index
    names and in no other file of the set. Tensors that the index does not list are left out, and a
    wrong ``total_size`` is only logged.

    Raises:
        CheckpointMissingError: a file is missing; the message says how many tensors it holds.
        CheckpointUnsafeError: a file name leads out of the directory, or an index of safetensors
            files names a pickle.
        CheckpointFormatError: the index or a file is malformed, or they contradict each other.
        CheckpointTruncatedError, CheckpointLimitError, CheckpointAccessError: as for one file.
    """
    limits = in_force(limits)
    # Stays open until the shards are open: meanwhile another set's index may replace it.
    opened = open_regular(path)
    files: list[OpenFile] = []
    with closed_on_error([opened]), closed_on_error(files):
        index = _Index(opened, limits)
        entries, metadata = index.open_all(files)
    table = TensorTable(index.format.name, files, entries, metadata)
    table.indexes = [opened]
    return table


def _tensor_of(keys: KeyPath) -> str | None:
    return str(keys[1]) if len(keys) > 1 and keys[0] == "weight_map" else None


class _Index:
    """A parsed index: ``shard_of`` maps tensor → file name, ``shards`` file name → tensors."""

    def __init__(self, file: OpenFile, limits: Limits):
        self.path = file.path
        self.limits = limits
        sets = (one for one in FORMATS if one.stem and is_index(self.path, one.suffixes[0]))
        self.format = next(sets, SAFETENSORS)
        self.end = self.format.suffixes[0]
        data = read_json_bytes(file, limits)
        self.text = Text(data, self.path, limits, tensor_of=_tensor_of)
        value = self.text.parse()
        self.shard_of = self._weight_map(value)
        self.metadata = value.get("metadata")
        self.shards: dict[str, int] = {}
        for tensor, shard in self.shard_of.items():
            if shard not in self.shards:
                self._check_name(tensor, shard)
            self.shards[shard] = self.shards.get(shard, 0) + 1

    def _error(
        self,
        problem: str,
        tensor: str | None = None,
        cls: type[CheckpointError] = CheckpointFormatError,
        **more: Any,
    ) -> CheckpointError:
        keys = ("weight_map",) if tensor is None else ("weight_map", tensor)
        return self.text.error(f"weight_map: {problem}", keys, cls=cls, **more)

    def _weight_map(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise self.text.error(
                "the index must be a JSON object", expected="an object", found=type(value).__name__
            )
        if "weight_map" not in value:
            if not is_index(self.path, self.end):
                raise self.text.error(
                    f"this is {os.path.basename(self.path)}, which holds no weights",
                    expected="weights, their index, or their folder",
                    hint="Pass its folder.",
                )
            raise self._error(
                "is missing",
                expected="an object: tensor name to file name",
                found=some(list(value), 5) or "an empty object",
                hint="Name an index of weights, or their directory.",
            )
        shard_of = value["weight_map"]
        if not isinstance(shard_of, dict):
            raise self._error(
                "must be an object",
                expected="an object: tensor name to file name",
                found=type(shard_of).__name__,
            )
        if not shard_of:
            raise self._error(
                "lists no tensor",
                cls=CheckpointTruncatedError,
                expected="at least 1 tensor",
                found="0 tensors",
            )
        for tensor, shard in shard_of.items():
            if type(shard) is not str:
                raise self._error(
                    "a file name must be a string",
                    tensor,
                    expected="a string",
                    found=f"{type(shard).__name__} {str(shard)[:80]}",
                )
        return shard_of

    def _check_name(self, tensor: str, shard: str) -> None:
        shown, wanted = f"'{shard}'", f"a {self.end} file"
        if not shard:
            cls, problem = CheckpointTruncatedError, "the file name is empty"
            raise self._error(problem, tensor, cls, expected="at least 1 byte", found="0 bytes")
        if _OUTSIDE.search(shard):
            cls, problem = CheckpointUnsafeError, "a file name may not lead out of the directory"
            wanted = "a plain name beside the index"
            raise self._error(problem, tensor, cls, expected=wanted, found=shown)
        if shard.lower().endswith(_PICKLES) and self.format is SAFETENSORS:
            cls, problem = CheckpointUnsafeError, "an index of safetensors files names a pickle"
            raise self._error(problem, tensor, cls, expected=wanted, found=shown)
        parts = shard.split("/")
        longest = max(len(part.encode()) for part in parts)
        if longest > _NAME_BYTES or len(shard.encode()) > _PATH_BYTES:
            wanted, shown = f"{_NAME_BYTES} bytes", f"{longest} bytes"
            raise self._error("the file name is too long", tensor, expected=wanted, found=shown)
        plain = all(part not in ("", ".") for part in parts) and shard.isprintable()
        if not plain or not shard.endswith(self.end):
            problem = f"not the name of a {self.end[1:]} file"
            raise self._error(problem, tensor, expected=wanted, found=shown)

    # --- the files ---

    def open_all(self, files: list[OpenFile]) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
        """Opens the shards into ``files``; returns the entries that the index lists, and all metadata."""
        directory = os.path.dirname(self.path)
        try:
            handle = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise os_error(error, directory, "opening failed") from error
        entries: dict[str, TensorEntry] = {}
        elsewhere: dict[str, str] = {}
        metadata: dict[str, Any] = {}
        try:
            for shard in self.shards:
                files.append(self._open(handle, directory, shard))
                found, more = self.format.read(files[-1], len(files) - 1, self.limits)
                self._sort(found, shard, entries, elsewhere)
                metadata.update(more)
        finally:
            os.close(handle)
        self._check_complete(entries, elsewhere)
        self._check_total(entries)
        return entries, metadata

    def _open(self, handle: int, directory: str, shard: str) -> OpenFile:
        shown = os.path.join(directory, shard)
        try:
            # Links are followed, because the Hugging Face cache consists of them.
            return open_regular(shard, dir_fd=handle, shown=shown)
        except CheckpointMissingError as error:
            name = os.path.basename(self.path)
            raise CheckpointMissingError(
                f"{error.problem}, but {name} says it holds {self.shards[shard]} of the "
                f"{len(self.shard_of)} tensors",
                path=shown,
                hint=fetch_hint(shown),
            ) from error

    def _sort(
        self,
        found: dict[str, TensorEntry],
        shard: str,
        entries: dict[str, TensorEntry],
        elsewhere: dict[str, str],
    ) -> None:
        """Adds a shard's tensors to ``entries``, or to ``elsewhere`` if the index lists another file."""
        unlisted = []
        for tensor, entry in found.items():
            listed = self.shard_of.get(tensor)
            if listed == shard:
                entries[tensor] = entry
            elif listed is None:
                unlisted.append(tensor)
            else:
                elsewhere[tensor] = shard
        if unlisted:
            _LOG.info(
                "%s: %s holds tensors that the index does not list; left out: %s",
                self.path,
                shard,
                some(unlisted, 5),
            )

    def _check_complete(self, entries: dict[str, TensorEntry], elsewhere: dict[str, str]) -> None:
        hint = "The index and the files do not belong together: download both again."
        if len(entries) < len(self.shard_of):
            tensor = next(tensor for tensor in self.shard_of if tensor not in entries)
            other = elsewhere.get(tensor)
            raise self._error(
                "the tensor is not in the file that the index names",
                tensor,
                expected=f"in '{self.shard_of[tensor]}'",
                hint=hint,
                found=f"in '{other}'" if other else "in no file of the set",
            )
        for tensor, shard in elsewhere.items():
            raise self._error(
                "another file holds a tensor of the same name",
                tensor,
                expected=f"only in '{self.shard_of[tensor]}'",
                hint=hint,
                found=f"in '{shard}' too",
            )

    def _check_total(self, entries: dict[str, TensorEntry]) -> None:
        listed = self.metadata.get("total_size") if isinstance(self.metadata, dict) else None
        total = sum(entry.nbytes for entry in entries.values())
        # PyTorch files store tied tensors once, and they are counted once.
        places = {(entry.file, entry.offset, entry.nbytes) for entry in entries.values()}
        if listed is not None and listed not in (total, sum(other[2] for other in places)):
            _LOG.warning(
                "%s: total_size is %s but the tensors have %d bytes; ignored",
                self.path,
                str(listed)[:40],
                total,
            )
