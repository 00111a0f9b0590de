"""The file format of exported programs, and its reader, which accepts only undamaged files.

A file consists of a prefix (magic, length and SHA-256 of the header), a JSON header, and the bytes
of a ``jax.export.Exported``, whose SHA-256 is in the header. The header holds what JAX does not
store: the checkpoint names of the program's weights, the containers of its other arrays, and the
integers that were declared wider than they are in the program.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

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
from .signature import ArrayKind, ModelWeights, Signature, field, names_in

MAGIC = b"\x89MAXJAX\n"  # a transfer as text changes its first or its last byte
PREFIX = struct.Struct("<8sQ32s")
VERSION = 3
_READ = (2, 3)  # the older one has no models among arguments and results
WHAT = "a file of maxjax.export"
_FETCH = "Fetch it again, or export the model again."
_AGAIN = "Export the model again."


class ProgramHeader(NamedTuple):
    """The header of a file: what maxjax stores about the program in addition to JAX.

    Attributes:
        name: class name of the model.
        maxjax, jax: versions that wrote the file.
        vjp_order: number of times the program can be differentiated.
        weights: the model's weights, and the arrays that the program takes for them.
        inputs, outputs: signatures of the other arguments, and of the results.
        nbytes, sha256: size and SHA-256 of the program.
    """

    name: str
    maxjax: str
    jax: str
    vjp_order: int
    weights: ModelWeights
    inputs: Signature
    outputs: Signature
    nbytes: int
    sha256: str

    def json(self) -> dict[str, Any]:
        trees = {"inputs": self.inputs.json(), "outputs": self.outputs.json()}
        return {"format": VERSION, **self._asdict(), **self.weights.json(), **trees}

    @classmethod
    def read(cls, data: Any) -> ProgramHeader:
        """Reads parsed JSON; ValueError names the field that is wrong."""
        found = cls(
            **{name: field(data, name, str) for name in ("name", "maxjax", "jax", "sha256")},
            **{name: field(data, name, int) for name in ("vjp_order", "nbytes")},
            weights=ModelWeights.read(data),
            inputs=Signature.read(field(data, "inputs", dict)),
            outputs=Signature.read(field(data, "outputs", dict)),
        )
        if not isinstance(found.inputs.restore(found.inputs.dtypes), tuple):
            raise ValueError("'inputs' is not a tuple")
        return found


# --- reading --------------------------------------------------------------------------------


def open_program(path: str, limits: Limits) -> tuple[ProgramHeader, Any]:
    """The header of a file and its ``jax.export.Exported``.

    Raises:
        CheckpointError: as for :func:`read`.
        CheckpointMismatchError: this version of JAX cannot read the program.
    """
    from jax import export as jax_export  # takes a while to import

    header, program = read(path, limits)
    try:
        exported = jax_export.deserialize(program)
        problem = next(_disagreements(header, exported), None)
    except ImportError:
        raise
    except Exception as error:  # of any class: flatbuffers and JAX check little
        raise unreadable(header, path) from error
    least = jax_export.minimum_supported_calling_convention_version
    most = jax_export.maximum_supported_calling_convention_version
    if not least <= exported.calling_convention_version <= most:
        raise unreadable(header, path)
    if problem:
        problem = f"the header does not match the program: {problem}"
        raise CheckpointFormatError(problem, path=path, hint=_AGAIN)
    return header, exported


def unreadable(header: ProgramHeader, path: str) -> CheckpointMismatchError:
    """The error for a program that JAX cannot read, at loading or at compilation."""
    return CheckpointMismatchError(
        "this version of JAX cannot read the program", path=path,
        expected=f"one that JAX {jax.__version__} reads", found=f"one of JAX {header.jax}",
        hint="Export the model again, or use the JAX it was exported with.",
    )  # fmt: skip


def _disagreements(header: ProgramHeader, exported: Any) -> Iterator[str]:
    """The differences between the header and the program."""
    inputs, outputs = header.inputs.dtypes, header.outputs.dtypes
    count = len(header.weights.leaves)
    sizes = count + len(inputs), len(outputs)
    if sizes != (len(exported.in_avals), len(exported.out_avals)):
        yield "numbers of arrays"
        return
    trees = jax.tree.structure((([0] * count, [0] * len(inputs)), {})), [0] * len(outputs)
    if (exported.in_tree, exported.out_tree) != (trees[0], jax.tree.structure(trees[1])):
        yield "numbers of arrays"
        return
    if exported.nr_devices != 1:  # a program of maxjax.export runs on one device
        yield f"it was exported for {exported.nr_devices} devices"
    kept = exported.module_kept_var_idx
    if list(kept) != sorted({i for i in kept if 0 <= i < len(exported.in_avals)}):
        yield "arguments that are not there"
    if any(type(size) is not int for aval in exported.in_avals[:count] for size in aval.shape):
        yield "a weight without a size"
    models = [(header.weights, exported.in_avals[:count])]
    models += header.inputs.models(exported.in_avals[count:])
    models += header.outputs.models(exported.out_avals)
    for weights, avals in models:
        for leaf, aval in zip(weights.leaves, avals, strict=True):
            if not isinstance(leaf, str) and aval.shape[:1] != (len(leaf),):
                yield f"{ArrayKind.of(aval)} is listed as {len(leaf)} layers"
            for name in names_in(leaf):
                yield from _other_type(weights.weights[name].dtype, aval)
    for dtype, aval in zip(inputs, exported.in_avals[count:], strict=True):
        yield from _other_type(dtype, aval)
    for dtype, aval in zip(outputs, exported.out_avals, strict=True):
        yield from _other_type(dtype, aval)


def _other_type(dtype: str, aval: Any) -> Iterator[str]:
    """The problem, if any, with an array that the header declares with this dtype."""
    narrow = {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)
    if str(aval.dtype) not in (dtype, narrow):
        yield f"{ArrayKind.of(aval)} is listed as {dtype}"


def read(path: str, limits: Limits) -> tuple[ProgramHeader, bytearray]:
    """The header of a file and the bytes of its program, both checked by their SHA-256.

    Raises:
        CheckpointFormatError: the file is not an exported program, or has another format version.
        CheckpointTruncatedError: the file ends too early.
        CheckpointCorruptError: a SHA-256 does not match.
        CheckpointLimitError: the header is over a limit.
        CheckpointMissingError, CheckpointAccessError: as for ``open_regular``.
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
    """The length and the SHA-256 of the header."""
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


def _header(file: OpenFile, text: bytes, limits: Limits) -> ProgramHeader:
    data = load_json(text, limits=limits, name=file.path)
    try:
        if (version := field(data, "format", int)) not in _READ:
            is_later = version > VERSION
            age, hint = ("a later", "Update maxjax.") if is_later else ("an earlier", _AGAIN)
            raise CheckpointFormatError(
                f"the file is of {age} version (written by maxjax {data.get('maxjax')})",
                path=file.path, expected=f"format {VERSION}", found=f"format {version}", hint=hint,
            )  # fmt: skip
        return ProgramHeader.read(data)
    except CheckpointError:
        raise
    except ValueError as error:
        problem = f"the header is not valid: {error}"
        raise CheckpointFormatError(problem, path=file.path, hint=_AGAIN) from error


def _require_size(file: OpenFile, offset: int, nbytes: int, what: str) -> None:
    if file.size - offset < nbytes:
        raise CheckpointTruncatedError(
            f"the file ends inside the {what}", path=file.path, offset=offset,
            expected=f"{nbytes} bytes", found=f"{max(file.size - offset, 0)} bytes", hint=_FETCH,
        )  # fmt: skip


def _corrupt(file: OpenFile, what: str, expected: str, found: str) -> CheckpointCorruptError:
    problem = f"the {what} is damaged: its SHA-256 differs"
    return CheckpointCorruptError(
        problem, path=file.path, expected=expected, found=found, hint=_FETCH
    )
