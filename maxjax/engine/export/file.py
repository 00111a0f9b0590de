"""The file of an exported program: its header, and reading it whole or not at all.

The file is a prefix (magic, length and SHA-256 of the header), a JSON header, and the bytes
of a ``jax.export.Exported``, whose SHA-256 the header has. The header says which names the
program's weights have in a checkpoint, and what trees its other arrays are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from ...errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointTruncatedError,
)
from ...storage.files import OpenFile, open_regular
from ...storage.limits import Limits
from ...storage.signatures import SNIFF_BYTES, foreign
from ...storage.strict_json import load_json
from .signature import Kind, Signature, field, texts

MAGIC = b"\x89MAXJAX\n"  # sent as text, it loses its first byte or its last
PREFIX = struct.Struct("<8sQ32s")
VERSION = 1
WHAT = "a file of maxjax.export"
_FETCH = "Fetch it again, or export the model again."


class Entry(NamedTuple):
    """A weight: what it is, and its other names if it is tied."""

    kind: Kind
    aliases: tuple[str, ...]

    @classmethod
    def read(cls, data: Any) -> Entry:
        """Of what a header has; ValueError for anything else."""
        return cls(Kind.read(data), texts(data.get("aliases", [])))

    def json(self) -> dict[str, Any]:
        aliases = {"aliases": self.aliases} if self.aliases else {}
        return {**self.kind._asdict(), **aliases}


class Header(NamedTuple):
    """All that the file says of its program.

    Attributes:
        name: The model's class.
        maxjax, jax: The versions that wrote it.
        platforms, calling_convention, vjp_order: As ``jax.export`` has them.
        weights: By name, in the order of a state dict.
        leaves: For each array the program takes its name, or the names of what is stacked.
        inputs, outputs: The rest of what it takes, and what it gives.
        nbytes, sha256: Of the program.
    """

    name: str
    maxjax: str
    jax: str
    platforms: tuple[str, ...]
    calling_convention: int
    vjp_order: int
    weights: dict[str, Entry]
    leaves: tuple[str | tuple[str, ...], ...]
    inputs: Signature
    outputs: Signature
    nbytes: int
    sha256: str

    def json(self) -> dict[str, Any]:
        weights = {name: entry.json() for name, entry in self.weights.items()}
        trees = {"inputs": self.inputs.json(), "outputs": self.outputs.json()}
        return {"format": VERSION, **self._asdict(), "weights": weights, **trees}

    @classmethod
    def read(cls, data: Any) -> Header:
        """Of parsed JSON; ValueError names what is not as it should be."""
        entries = field(data, "weights", dict).items()
        leaves = field(data, "leaves", list)
        found = cls(
            **{name: field(data, name, str) for name in ("name", "maxjax", "jax", "sha256")},
            **{n: field(data, n, int) for n in ("calling_convention", "vjp_order", "nbytes")},
            platforms=texts(field(data, "platforms", list)),
            weights={name: Entry.read(entry) for name, entry in entries},
            leaves=tuple(leaf if isinstance(leaf, str) else texts(leaf) for leaf in leaves),
            inputs=Signature.read(data.get("inputs")),
            outputs=Signature.read(data.get("outputs")),
        )
        used = [name for leaf in found.leaves for name in names_in(leaf)]
        if sorted(used) != sorted(found.weights) or () in found.leaves:
            raise ValueError("'leaves' has other names than 'weights'")
        if not isinstance(found.inputs.tree, dict) or "tuple" not in found.inputs.tree:
            raise ValueError("'inputs' is no tuple")
        return found

    def leaf(self, leaf: str | tuple[str, ...]) -> Kind:
        """What the program takes for one of ``leaves``; ValueError where layers differ."""
        kinds = {self.weights[name].kind for name in names_in(leaf)}
        if len(kinds) > 1:
            raise ValueError(f"{leaf!r:.80} are not alike")
        kind = kinds.pop()
        return kind if isinstance(leaf, str) else Kind(kind.dtype, (len(leaf), *kind.shape))


def names_in(leaf: str | tuple[str, ...]) -> tuple[str, ...]:
    """The weights of one of ``Header.leaves``."""
    return (leaf,) if isinstance(leaf, str) else leaf


# --- reading --------------------------------------------------------------------------------


def open_program(path: str, limits: Limits) -> tuple[Header, Any]:
    """The header of a file and its ``jax.export.Exported``.

    Raises:
        CheckpointError: As for :func:`read`.
        CheckpointMismatchError: This version of JAX cannot read it.
    """
    from jax import export as jax_export  # takes a while to import

    header, program = read(path, limits)
    least = jax_export.minimum_supported_calling_convention_version
    most = jax_export.maximum_supported_calling_convention_version
    if not least <= header.calling_convention <= most:
        raise unreadable(header, path)
    try:
        exported = jax_export.deserialize(program)
        problem = _disagreement(header, exported)
    except ImportError:
        raise
    except Exception as error:  # of whatever class: flatbuffers and JAX check little
        raise unreadable(header, path) from error
    if problem:
        problem = f"the header does not go with the program: {problem}"
        raise CheckpointFormatError(problem, path=path, hint="Export it again.")
    return header, exported


def unreadable(header: Header, path: str) -> CheckpointMismatchError:
    """The error for a program that JAX fails to read, now or when it is compiled."""
    return CheckpointMismatchError(
        "this version of JAX cannot read the program", path=path,
        expected=f"one that JAX {jax.__version__} reads",
        found=f"one of JAX {header.jax}, calling convention {header.calling_convention}",
        hint="Export the model again, or use the JAX it was exported with.",
    )  # fmt: skip


def _disagreement(header: Header, exported: Any) -> str | None:
    """What of the header is not so in the program, or None."""
    try:
        kinds = [header.leaf(leaf) for leaf in header.leaves]
    except ValueError as error:
        return str(error)
    lists = ([0] * len(kinds), [0] * len(header.inputs.kinds))
    trees = jax.tree.structure((lists, {})), jax.tree.structure([0] * len(header.outputs.kinds))
    if (exported.in_tree, exported.out_tree) != trees:
        return "numbers of arrays"
    found = (*exported.in_avals, *exported.out_avals)
    for kind, aval in zip(
        (*kinds, *header.inputs.kinds, *header.outputs.kinds), found, strict=True
    ):
        real = Kind.of(aval)
        # Integers are listed as they were declared, and JAX may have made them narrower.
        narrow = kind.dtype.replace("64", "32") if kind.dtype in ("int64", "uint64") else kind.dtype
        if real.shape != kind.shape or real.dtype not in (kind.dtype, narrow):
            return f"{real} is listed as {kind}"
    if tuple(exported.platforms) != header.platforms:
        return f"it is for {exported.platforms}"
    return None


def platform_of(values: Sequence[Any]) -> str:
    """Where a program with these weights runs, in the words of jax.export."""
    from jax import export as jax_export

    default = jax_export.default_export_platform()
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    placed = [value for value in values if not isinstance(value, Tracer)]
    if placed:
        chosen = next(iter(placed[0].devices()))
    platform = default if chosen is None else getattr(chosen, "platform", chosen)
    return default if platform == "gpu" and default != "cpu" else platform


def read(path: str, limits: Limits) -> tuple[Header, bytearray]:
    """The header of a file and the bytes of its program, both as they were written.

    Raises:
        CheckpointFormatError: It is no such file, or of a later version.
        CheckpointTruncatedError: It ends too early.
        CheckpointCorruptError: A digest does not match.
        CheckpointLimitError: Its header is over a limit.
        CheckpointMissingError, CheckpointAccessError: As for ``open_regular``.
    """
    file = open_regular(path)
    try:
        length, digest = _prefix(file, limits)
        text = file.pread(PREFIX.size, length)
        if hashlib.sha256(text).digest() != digest:
            raise _corrupt(file, "header", digest.hex(), hashlib.sha256(text).hexdigest())
        header = _header(file, text, limits)
        start, end = PREFIX.size + length, PREFIX.size + length + header.nbytes
        if file.size > end:
            problem, found = "there are bytes after the program", f"{file.size} bytes"
            raise CheckpointFormatError(
                problem, path=file.path, offset=end, expected=f"{end} bytes", found=found
            )
        _require_size(file, start, header.nbytes, "program")
        program = bytearray(header.nbytes)
        file.pread_into(memoryview(program), start)
        found = hashlib.sha256(program).hexdigest()
        if found != header.sha256:
            raise _corrupt(file, "program", header.sha256, found)
        file.check_unchanged()
    finally:
        file.close()
    return header, program


def _prefix(file: OpenFile, limits: Limits) -> tuple[int, bytes]:
    """Length and digest of the header."""
    start = file.pread(0, min(file.size, SNIFF_BYTES))
    if not start.startswith(MAGIC[: len(start)]):
        raise foreign(file.path, start, WHAT) or CheckpointFormatError(
            f"not {WHAT}", path=file.path, offset=0, expected=MAGIC, found=start[: len(MAGIC)]
        )
    _require_size(file, 0, PREFIX.size, "prefix")
    _, length, digest = PREFIX.unpack_from(start)
    _require_size(file, PREFIX.size, length, "header")
    if length > limits.header_bytes:
        problem = "the header is over the limit"
        raise limits.error(problem, "header_bytes", length, path=file.path, offset=len(MAGIC))
    return length, digest


def _header(file: OpenFile, text: bytes, limits: Limits) -> Header:
    data = load_json(text, limits=limits, name=file.path)
    try:
        if (version := field(data, "format", int)) > VERSION:
            raise CheckpointFormatError(
                f"the file is of a later version (written by maxjax {data.get('maxjax')})",
                path=file.path, expected=f"format {VERSION}", found=f"format {version}",
                hint="Update maxjax.",
            )  # fmt: skip
        return Header.read(data)
    except CheckpointError:
        raise
    except ValueError as error:
        problem = f"the header is not as export writes it: {error}"
        raise CheckpointFormatError(problem, path=file.path, hint="Export it again.") from error


def _require_size(file: OpenFile, offset: int, wanted: int, what: str) -> None:
    if file.size - offset < wanted:
        raise CheckpointTruncatedError(
            f"the file ends inside the {what}", path=file.path, offset=offset,
            expected=f"{wanted} bytes", found=f"{max(file.size - offset, 0)} bytes", hint=_FETCH,
        )  # fmt: skip


def _corrupt(file: OpenFile, what: str, expected: str, found: str) -> CheckpointCorruptError:
    problem = f"the {what} is not what was written: its SHA-256 differs"
    return CheckpointCorruptError(
        problem, path=file.path, expected=expected, found=found, hint=_FETCH
    )
