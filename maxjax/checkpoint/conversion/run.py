"""Convert: a checkpoint of any format as one of another, piece by piece.

Nothing is in memory but the pieces that are on their way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import UserInputError
from ...graph.weights import GGUFWeights, WeightData
from ...graph.weights.writing import outgoing_data
from ...models.family import main_dtype
from ...storage.formats import SUFFIXES, UNREADABLE
from ...storage.limits import Limits, allowing
from ...storage.safetensors.writer import file_pieces, header, in_order, shards, size_in_bytes
from ..file_set import INDEX, SINGLE, json_bytes, write_file, write_set
from ..orbax.steps import COMMITTED
from ..orbax.streaming import stream
from ..pretrained import cast, flat_name, float_type, with_dtype
from .destination import check_destination
from .progress import Converted, Watch, result_of, watched
from .source import Opened, as_hugging_face, content, opened
from .to_gguf import to_gguf

_LOG = logging.getLogger("maxjax")
FORMATS = ("safetensors", "gguf", "orbax")
QUANTIZED = ("q8_0", "q4_0", "q4_k", "q6_k")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    max_shard_size: int | str = "5GB",
    limits: Limits | None = None,
    watch: Watch | None = None,
    overwrite: bool = False,
) -> Converted:
    """Writes a checkpoint in another format, type or number of files.

    Args:
        source: The path of anything that ``load_weights`` opens.
        destination: A file that ends in ``.safetensors`` or ``.gguf``, or a directory.
        to: "safetensors", "gguf" or "orbax"; by default what the destination's name says,
            for a directory safetensors.
        dtype: Float tensors become this type, and quantised blocks are decoded to it.
        quantize: "q8_0", "q4_0", "q4_k" or "q6_k": the large weights of a GGUF file become
            blocks of this kind.
        max_shard_size: Of the safetensors files of a directory.
        limits: As of ``maxjax.load``.
        watch: Called with the number of bytes of all tensors as they will be written; what it
            gives is called with the number of bytes of each piece when that is written.
        overwrite: Replace a checkpoint that is at the destination. A step of orbax is put beside
            those that are there, and replaces none.

    Names, shapes and values are those of a Hugging Face checkpoint, in a GGUF file llama.cpp's;
    configuration, tokenizer and the like go along. What was at the destination stays until the
    new checkpoint is whole and on the disk. The source itself may be the destination only where every
    value stays: a file written once more, other shards, wider floats.

    A head of other values than the table that the configuration ties it to is kept, and the new
    configuration says that the two are not tied.

    Raises:
        UserInputError: The arguments do not go together; the destination is there, and ``overwrite``
            is not set; it is the source, of which something would be lost.
        UnsupportedModelError: GGUF of an architecture or tokenizer that maxjax has no names for.
        CheckpointError: The source cannot be read, or the destination cannot be written.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.savez(folder / "w.npz", w=np.ones((2, 3), np.float32))
        >>> found = convert(folder / "w.npz", folder / "w.safetensors", dtype="bfloat16")
        >>> found.format, found.tensors, found.nbytes
        ('safetensors', 1, 12)
    """
    source, destination = os.fsdecode(source), os.fsdecode(destination)
    if not source or not destination:
        raise UserInputError("an empty name is neither a checkpoint nor a place for one")
    target = Path(destination)
    kind = _format(target, to)
    wanted = None if dtype is None else float_type(dtype)
    limit = size_in_bytes(max_shard_size)
    encoding = _encoding(quantize, kind)
    with allowing(limits), opened(source) as found:
        if kind != "gguf" and isinstance(found.weights, GGUFWeights):
            as_hugging_face(found)
        check_destination(
            found, target, kind, ["config.json", *found.beside, *found.made],
            dtype=wanted, encoding=encoding, overwrite=overwrite,
        )  # fmt: skip
        if kind == "gguf":
            return to_gguf(found, target, wanted, encoding, watch)
        data = found.tensors
        if wanted is not None:
            data = {name: cast(one, wanted) for name, one in data.items()}
        if kind == "orbax":
            return _to_orbax(found, data, target, watch)
        return _to_safetensors(found, data, target, limit, watch)


def _format(target: Path, to: str | None) -> str:
    end = {".safetensors": "safetensors", ".gguf": "gguf"}.get(target.suffix.lower())
    if to is not None and to not in FORMATS:
        raise UserInputError(f"to={to!r} is none of {', '.join(FORMATS)}")
    if to is not None and end is not None and end != to:
        raise UserInputError(f"{target} is the name of a {end} file, and {to} was asked for")
    if target.suffix.lower() in {*SUFFIXES, *UNREADABLE} and end is None and not target.is_dir():
        raise UserInputError(
            f"{target}: {target.suffix} files are not written: name a .safetensors or .gguf file, or "
            "a directory"
        )
    kind = to or end or "safetensors"
    if kind == "gguf" and (end is None or target.is_dir()):
        raise UserInputError(f"{target}: name a file for GGUF, for example {target / 'model.gguf'}")
    return kind


def _encoding(quantize: str | None, kind: str) -> str | None:
    if quantize is None:
        return None
    if quantize.lower() not in QUANTIZED:
        raise UserInputError(f"quantize={quantize!r} is none of {', '.join(QUANTIZED)}")
    if kind != "gguf":
        raise UserInputError(f"quantize={quantize!r} is for GGUF files: {kind} has no such blocks")
    return quantize.upper()


# --- safetensors ------------------------------------------------------------------------------


def _to_safetensors(
    found: Opened, data: Mapping[str, WeightData], target: Path, limit: int, watch: Watch | None
) -> Converted:
    outgoing = [outgoing_data(one, name) for name, one in data.items()]
    result = result_of(target, "safetensors", outgoing)
    outgoing = watched(outgoing, watch)
    if target.suffix.lower() == ".safetensors" and not target.is_dir():
        ordered = outgoing if found.as_given else in_order(outgoing)
        nbytes = result.nbytes + len(header(ordered, found.metadata))
        pieces = partial(file_pieces, metadata=found.metadata)
        write_file(target, ordered, pieces, nbytes)
        return result

    def files(taken: Iterable[str]) -> Any:
        return shards(outgoing, limit, taken=taken, as_given=found.as_given)

    write_set(target, files, _others(found, data), found.metadata)
    return result


def _others(found: Opened, data: Mapping[str, WeightData]) -> dict[str, Iterable[Any]]:
    """The other files of a directory: name → pieces."""
    others: dict[str, Iterable[Any]] = {name: content(path) for name, path in found.beside.items()}
    others |= {name: [content] for name, content in found.made.items()}
    if found.config is not None:
        others["config.json"] = [json_bytes(with_dtype(found.config, main_dtype(data)))]
    return others


def _to_orbax(
    found: Opened, data: Mapping[str, WeightData], target: Path, watch: Watch | None
) -> Converted:
    """As the next step of a directory of orbax."""
    if (target / COMMITTED).exists():
        raise UserInputError(
            f"{target} is a step: name the directory of the steps, {target.parent}"
        )
    if (target / SINGLE).exists() or (target / INDEX).exists():
        raise UserInputError(
            f"{target} holds a safetensors checkpoint, which would be opened in the place of any "
            "step of orbax there: name another directory"
        )
    outgoing = [outgoing_data(one, name) for name, one in data.items()]
    result = result_of(target, "orbax", outgoing)
    progress = watch(result.nbytes) if watch is not None else None
    files = _others(found, data)
    beside = {flat_name(name): b"".join(pieces) for name, pieces in files.items()}
    for name in [name for name in beside if "/" in name]:
        _LOG.warning("%s: a step of orbax has no place for it, left out: %s", found.path, name)
        del beside[name]
    return replace(result, path=stream(target, data, beside, progress))
