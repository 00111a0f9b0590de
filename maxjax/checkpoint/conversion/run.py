"""``convert``: write a checkpoint of any format in another one.

Values are streamed: only the pieces that are being written are in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...dtype import DType
from ...engine.quantize.importance import Importance, load_importance
from ...errors import UserInputError, some
from ...graph.weights import GGUFWeights, WeightData
from ...graph.weights.writing import outgoing_data
from ...models.gguf.tensors.types import MIXTURES
from ...models.weights import main_dtype, named_float
from ...progress import last_part, task
from ...storage.files import OpenFile
from ...storage.formats import SUFFIXES, UNREADABLE
from ...storage.hub import checkpoint_path
from ...storage.limits import Limits, allowing
from ...storage.orbax.paths import is_orbax
from ...storage.safetensors.writer import file_pieces, header, in_order, shards, size_in_bytes
from ...storage.save.beside import settled
from ...storage.save.durable import target_path
from ..file_set import INDEX, SINGLE, content_of, json_bytes, write_file, write_set
from ..orbax.steps import COMMITTED
from ..orbax.streaming import stream
from ..pretrained import cast, flat_name, refuse_quantised, with_dtype
from .source import Opened, as_hugging_face, opened
from .to_gguf import to_gguf
from .written import Converted, Watch, counting, result_of, watched

_LOG = logging.getLogger("maxjax")
FORMATS = ("safetensors", "gguf", "orbax")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    dtype: Any = None,
    quantize: str | None = None,
    importance: Any = None,
    max_shard_size: int | str = "5GB",
    limits: Limits | None = None,
    watch: Watch | None = None,
    overwrite: bool = False,
) -> Converted:
    """Writes a checkpoint in another format, dtype or number of files.

    Args:
        source: path of a checkpoint that ``load_weights`` opens.
        destination: path of a file that ends in ``.safetensors`` or ``.gguf``, or of a directory.
        to: format, "safetensors", "gguf" or "orbax"; by default that of the destination's suffix,
            and safetensors for a directory.
        dtype: dtype that float tensors are converted to and quantised tensors dequantised to.
        quantize: type of the linear layers and embedding tables of a GGUF file: one type, such as
            "q8_0", "q4_0" or "q4_k", or one of llama.cpp's mixtures, such as "q4_k_m"
            (``docs/quantization.md`` lists them).
        importance: importance matrix that weights the quantisation errors: path of a GGUF file
            from ``llama-imatrix``, or the result of ``maxjax.calibrate``. Weights that it lacks are
            quantised without.
        max_shard_size: maximum size of each safetensors file of a directory.
        limits: limits of what is read, as in ``maxjax.load``.
        watch: progress callback: it is called with the number of bytes to write, and returns a
            function that is called with the size of each piece when that is written.
        overwrite: whether to replace a checkpoint at the destination. An orbax step never replaces
            another: it is added to the existing steps.

    Names, shapes and values of the new checkpoint are those of Hugging Face, in a GGUF file those
    of llama.cpp; configuration, tokenizer and similar files are converted too. A checkpoint at the
    destination stays intact until the new one is complete and on the disk. The destination may be
    the source itself only if no value is lost: a file written again, other shards, wider floats.

    If the configuration ties the output head to the embedding table but the two have different
    values, both are kept, and the new configuration says that they are not tied.

    Raises:
        UserInputError: the arguments contradict each other; the destination exists, and
            ``overwrite`` is not set; the destination is the source, and values would be lost.
        UnsupportedModelError: maxjax cannot write this architecture or tokenizer as GGUF.
        CheckpointError: the source cannot be read, or the destination cannot be written.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.savez(folder / "w.npz", w=np.ones((2, 3), np.float32))
        >>> found = convert(folder / "w.npz", folder / "w.safetensors", dtype="bfloat16")
        >>> found.format, found.tensors, found.nbytes
        ('safetensors', 1, 12)
    """
    source, destination = checkpoint_path(source), target_path(destination)
    target = Path(destination)
    kind = _format(target, to)
    target_dtype = None if dtype is None else named_float("dtype", dtype)
    limit = size_in_bytes(max_shard_size)
    encoding = _encoding(quantize, kind)
    if importance is not None and encoding is None:
        raise UserInputError("an importance matrix is for quantising: pass quantize= too")
    if importance is not None and not isinstance(importance, Importance):
        importance = load_importance(importance)
    is_single = kind == "safetensors" and _is_file(target)
    options = {"dtype": target_dtype, "encoding": encoding, "overwrite": overwrite}

    def once() -> Converted:
        with opened(source, is_single=is_single) as found:
            counted = counting(shown, watch)
            if kind != "gguf" and isinstance(found.weights, GGUFWeights):
                as_hugging_face(found)
            others = ["config.json", *found.beside, *found.made]
            _check_destination(found, target, kind, others, **options)
            if kind == "gguf":
                weights = None if importance is None else importance.of_gguf()
                return to_gguf(found, target, target_dtype, encoding, counted, weights)
            data = found.tensors
            if target_dtype is not None:
                refuse_quantised(found.config)
                data = {name: cast(one, target_dtype) for name, one in data.items()}
            if kind == "orbax":
                return _to_orbax(found, data, target, counted)
            return _to_safetensors(found, data, target, limit, counted)

    with allowing(limits), task(f"converting {last_part(source)}") as shown:
        return settled(once)


def _format(target: Path, to: str | None) -> str:
    suffix, is_directory = target.suffix.lower(), os.path.isdir(target)
    end = {".safetensors": "safetensors", ".gguf": "gguf"}.get(suffix)
    if to is not None and to not in FORMATS:
        raise UserInputError(f"to={to!r}: it must be one of {', '.join(FORMATS)}")
    if to is not None and end is not None and end != to:
        raise UserInputError(f"{target} is the name of a {end} file, and {to} was asked for")
    if end is None and suffix in {*SUFFIXES, *UNREADABLE} and not is_directory:
        raise UserInputError(
            f"{target}: {target.suffix} files are not written: name a .safetensors or .gguf file, or "
            "a directory"
        )
    if end is None and os.path.exists(target) and not is_directory:
        raise UserInputError(
            f"{target} is a file: name a directory, or a .safetensors or .gguf file"
        )
    kind = to or end or "safetensors"
    if kind == "gguf" and (end is None or is_directory):
        raise UserInputError(f"{target}: name a file for GGUF, for example {target / 'model.gguf'}")
    return kind


def _is_file(target: Path) -> bool:
    """Whether a destination of safetensors is a single file."""
    return target.suffix.lower() == ".safetensors" and not os.path.isdir(target)


def _encoding(quantize: str | None, kind: str) -> str | None:
    if quantize is None:
        return None
    if not isinstance(quantize, str) or quantize.lower() not in MIXTURES:
        raise UserInputError(f"quantize={quantize!r}: it must be one of {', '.join(MIXTURES)}")
    if kind != "gguf":
        raise UserInputError(f"quantize={quantize!r} is for GGUF files: {kind} has no such blocks")
    return quantize.lower()


# --- the destination --------------------------------------------------------------------------


def _check_destination(
    found: Opened,
    target: Path,
    kind: str,
    others: Iterable[str],
    *,
    dtype: DType | None,
    encoding: str | None,
    overwrite: bool,
) -> None:
    """Refuse a destination that exists, and one that is the source if that would lose values.

    A step of orbax replaces nothing: it is added to the steps that are there.

    Args:
        found: the source.
        target: the destination.
        kind: format of the destination, "safetensors", "gguf" or "orbax".
        others: names of the files that will be written beside the weights.
        dtype, encoding: dtype or encoding that weights are converted to.
        overwrite: whether an existing checkpoint may be replaced.

    Raises:
        UserInputError: the destination is refused; the message says how to proceed.
    """
    source = [file.path for file in found.weights._family.open_table().files]
    part = _is_source(source, found.path, target)
    lost = _lost(found, target, source, dtype, encoding) if part else None
    if lost is not None:
        raise UserInputError(
            f"{target} is the checkpoint that is converted ({found.path}), and {lost}: "
            "name another destination"
        )
    replaced = _replaced_files(target, kind, others)
    if replaced and not overwrite:
        raise UserInputError(
            f"{target}: there is {some(replaced, 3)} already: name another destination, or pass "
            "overwrite=True to replace it"
        )


def _replaced_files(target: Path, kind: str, others: Iterable[str]) -> list[str]:
    """The files at the destination that would be replaced, or no longer be what is opened there."""
    if kind == "orbax" or not os.path.lexists(target):
        return []
    if not os.path.isdir(target):
        return [f"'{target.name}'"]
    names = sorted(entry.name for entry in target.iterdir() if not entry.name.startswith("."))
    weights = [n for n in names if Path(n).suffix.lower() in SUFFIXES or n.endswith(".index.json")]
    replaced = [name for name in others if os.path.lexists(target / name)]
    found = [f"'{name}'" for name in dict.fromkeys([*weights, *replaced])]
    # Safetensors files would be opened instead of it.
    return ["an orbax checkpoint", *found] if is_orbax(target) else found


def _is_source(source: list[str], path: Path, target: Path) -> bool:
    """Whether the destination is the source, one of its files, or the directory that holds it."""
    if not os.path.exists(target):
        return False
    if not os.path.isdir(target):
        return any(os.path.samefile(file, target) for file in source if os.path.exists(file))
    place = os.path.realpath(target)
    places = [os.path.realpath(name) for name in (path, *source)]
    # Only the directory itself counts: what lies deeper in it is not replaced.
    return any(place in (one, os.path.dirname(one)) for one in places)


def _lost(
    found: Opened, target: Path, source: list[str], dtype: DType | None, encoding: str | None
) -> str | None:
    """What would be lost of the source if it were replaced, as a clause; None for nothing."""
    if not os.path.isdir(target) and len(source) > 1:
        return "is made of several files, of which this is one"
    if encoding is not None:
        return f"quantize={encoding!r} would lose bits of its values"
    if dtype is not None and not all(_holds(dtype, data) for data in _data(found).values()):
        return f"dtype={dtype.name!r} would lose bits of its values"
    return None


def _data(found: Opened) -> Mapping[str, WeightData]:
    return found.tensors or {name: place.data() for name, place in found.weights.items()}


def _holds(dtype: DType, data: WeightData) -> bool:
    """Whether a dtype can hold every value of a tensor; only floats are converted."""
    if data.is_packed:
        return False
    if not data.dtype.is_float() or data.dtype is dtype:
        return True
    return np.promote_types(data.dtype.np, dtype.np) == dtype.np


# --- safetensors ------------------------------------------------------------------------------


def _to_safetensors(
    found: Opened, data: Mapping[str, WeightData], target: Path, limit: int, watch: Watch
) -> Converted:
    outgoing = [outgoing_data(one, name) for name, one in data.items()]
    result = result_of(target, "safetensors", outgoing)
    outgoing = watched(outgoing, watch)
    if _is_file(target):
        ordered = outgoing if found.as_given else in_order(outgoing)
        nbytes = result.nbytes + len(header(ordered, found.metadata))
        pieces = partial(file_pieces, metadata=found.metadata)
        write_file(target, ordered, pieces, nbytes)
        return result

    def files(taken: Iterable[str]) -> Any:
        return shards(outgoing, limit, taken=taken, as_given=found.as_given)

    write_set(target, files, _others(found, data), found.metadata)
    return result


def _others(found: Opened, data: Mapping[str, WeightData]) -> dict[str, bytes | OpenFile]:
    """The other files of a directory: name → content."""
    others = {**found.beside, **found.made}
    if found.config is not None:
        others["config.json"] = json_bytes(with_dtype(found.config, main_dtype(data)))
    return others


def _to_orbax(
    found: Opened, data: Mapping[str, WeightData], target: Path, watch: Watch
) -> Converted:
    """Write the tensors as the next step of a directory of orbax checkpoints."""
    if os.path.exists(target / COMMITTED):
        raise UserInputError(
            f"{target} is a step: name the directory of the steps, {target.parent}"
        )
    if os.path.exists(target / SINGLE) or os.path.exists(target / INDEX):
        raise UserInputError(
            f"{target} holds a safetensors checkpoint, which would be opened instead of any orbax "
            "step there: name another directory"
        )
    outgoing = [outgoing_data(one, name) for name, one in data.items()]
    result = result_of(target, "orbax", outgoing)
    progress = watch(result.nbytes)
    files = _others(found, data)
    beside = {flat_name(name): content_of(given) for name, given in files.items()}
    for name in [name for name in beside if "/" in name]:
        _LOG.warning("%s: left out, as an orbax step cannot contain it: %s", found.path, name)
        del beside[name]
    return replace(result, path=stream(target, data, beside, progress))
