"""Conversion to GGUF, from a Hugging Face checkpoint or from another GGUF file."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...dtype import DType
from ...engine.generate.defaults import FILE, end_tokens
from ...errors import CheckpointMissingError, UnsupportedModelError, UserInputError, some
from ...graph.weights import GGUFWeights, WeightData
from ...graph.weights.writing import outgoing_data
from ...models import find_family
from ...models.bounds import check_bounds
from ...models.config import read_object
from ...models.gguf import (
    encodings,
    gguf_metadata,
    gguf_settings,
    gguf_tensors,
    gguf_tokenizer_metadata,
    is_wide,
)
from ...models.gguf.config.families import read_config
from ...models.gguf.sampling import sampling_metadata
from ...models.gguf.tensors.types import Traits, takes_blocks
from ...models.gguf.write_metadata import file_type
from ...models.names import unwrapped
from ...models.pooling import Pooling, gguf_mode
from ...models.quantized import with_blocks
from ...models.sentence_files import read_pooling
from ...storage.blocks import Decoded, encode, layout_of
from ...storage.entry import TensorEntry
from ...storage.files import is_there
from ...storage.gguf.header import typed_metadata
from ...storage.gguf.writer import plan_gguf
from ...storage.save.beside import Files
from ...storage.save.outgoing import Outgoing, file_range
from ...storage.table import TensorTable
from ...text.template.files import read_templates
from ...text.tokenizer.files import optional, read_tokenizer_files
from ..file_set import write_file
from .source import Opened
from .written import Converted, Watch, result_of, watched

_LOG = logging.getLogger("maxjax")


def to_gguf(
    found: Opened,
    target: Path,
    dtype: DType | None,
    choice: str | None,
    watch: Watch,
    importance: Mapping[str, np.ndarray] | None = None,
) -> Converted:
    """Write a GGUF file; ``choice`` is what to quantise to, a key of ``MIXTURES``."""
    kind = None if choice is None else choice.upper()
    if isinstance(found.weights, GGUFWeights):
        metadata, data = _same_gguf(found.weights, kind or dtype)
        stored = {} if dtype else _stored_blocks(found.weights)
    else:
        metadata, data = _new_gguf(found, dtype, kind)
        found.folder.check()
        stored = {}
    shapes = {name: tuple(map(int, one.logical_shape)) for name, one in data.items()}
    floats = {name: shapes[name] for name, one in data.items() if _is_float(one)}
    wanted: dict[str, str | None] = {}
    if choice is not None:
        wanted = encodings(floats, choice, Traits.of_metadata(metadata))
    if importance is not None and importance.keys().isdisjoint(wanted):
        raise UserInputError(
            f"the importance matrix has none of the tensors of this model: it has {some(list(importance), 3)}"
        )
    outgoing = []
    for name, one in data.items():
        if name in stored and (choice is None or stored[name].encoding == wanted.get(name)):
            outgoing.append(stored[name])
        elif choice is None or name not in floats or not takes_blocks(name, shapes[name]):
            outgoing.append(_as_floats(name, one, shapes[name], dtype))
        else:
            outgoing.append(_quantised(name, one, dtype, wanted[name], importance or {}))
    nbytes = plan_gguf(metadata, outgoing).nbytes

    def pieces(tensors: Sequence[Outgoing]) -> Iterator[memoryview]:
        return plan_gguf(metadata, tensors).pieces()

    write_file(target, watched(outgoing, watch), pieces, nbytes)
    return result_of(target, "gguf", outgoing)


def _is_float(data: WeightData) -> bool:
    return data.dtype.is_float() or data.is_packed


def _as_floats(name: str, data: WeightData, shape: Sequence[int], dtype: DType | None) -> Outgoing:
    """A tensor that is not quantised; what llama.cpp requires in float32 is not converted."""
    if dtype is None or not _is_float(data) or is_wide(name, shape):
        return outgoing_data(data, name)
    return outgoing_data(data.astype(dtype), name)


def _quantised(
    name: str,
    data: WeightData,
    dtype: DType | None,
    encoding: str | None,
    importance: Mapping[str, np.ndarray],
) -> Outgoing:
    """A weight in an encoding; with None its rows are not complete blocks, and it stays floats."""
    if encoding is None:
        return outgoing_data(data.astype(dtype or DType.float16), name)
    packed = data.quantization_encoding if data.is_packed else None
    if packed is not None and packed.value == encoding:
        return outgoing_data(data, name)
    weights = importance.get(name)
    if weights is None:
        return outgoing_data(data, name, (encoding, lambda kind, rows, _: encode(kind, rows)))
    *outer, size = map(int, data.logical_shape)
    experts = outer[0] if len(outer) > 1 else 1
    if weights.shape not in ((1, size), (experts, size)):
        raise UserInputError(
            f"the importance of tensor '{name}' is {list(weights.shape)}, and {experts} x {size} is "
            "needed: it is of another model"
        )
    # The rows of each expert have its importance; a piece may have rows of several.
    each = math.prod(outer) // len(weights)

    def encode_rows(kind: str, rows: np.ndarray, first: int) -> np.ndarray:
        flat = rows.reshape(-1, rows.shape[-1])
        ends = range((first // each + 1) * each - first, len(flat), each)
        parts = np.split(flat, ends)
        blocks = [
            encode(kind, part, importance=weights[first // each + number])
            for number, part in enumerate(parts)
        ]
        return np.concatenate(blocks) if len(blocks) > 1 else blocks[0]

    return outgoing_data(data, name, (encoding, encode_rows))


def _same_gguf(
    weights: GGUFWeights, kind: DType | str | None
) -> tuple[dict[str, Any], dict[str, WeightData]]:
    """The metadata and tensors of a GGUF file, for one new file with most weights of ``kind``."""
    table = weights._family.open_table()
    typed = typed_metadata(table.files[0])
    metadata = {k: v for k, v in typed.items() if not k.startswith("split.")}
    if kind is not None:
        for key in ("general.file_type", "general.quantization_version"):
            metadata.pop(key, None)
        metadata |= file_type(kind)
    return metadata, {name: weights[name].data() for name in table.entries}


def _stored_blocks(weights: GGUFWeights) -> dict[str, Outgoing]:
    """Tensors of encodings that maxjax dequantises on reading, as the blocks of the file."""
    table, found = weights._family.open_table(), {}
    for name, entry in table.entries.items():
        if isinstance(entry.coding, Decoded) and not entry.coding.swap:
            kind, layout = entry.coding.type_name, layout_of(entry.coding.type_name)
            shape = (*entry.shape[:-1], entry.shape[-1] // layout.elements * layout.nbytes)
            pieces = partial(_bytes_of, table, entry)
            found[name] = Outgoing(name, DType.uint8, shape, pieces, kind)
    return found


def _bytes_of(table: TensorTable, entry: TensorEntry) -> Iterator[memoryview]:
    table.check([entry])
    return file_range(table.files[entry.file], entry.offset, entry.offset + entry.nbytes)


def _not_in_gguf(pooling: Pooling, architecture: str) -> str:
    """The parts of an embedding model's pooling that GGUF cannot express, as clauses."""
    if pooling.unsupported is not None:
        return f"that embeddings need {pooling.unsupported}"
    said = {
        "that embeddings pass through Dense modules": pooling.dense
        and architecture != "gemma-embedding",
        f"that tokens are pooled by {', '.join(pooling.modes)}": gguf_mode(pooling) is None,
        "that embeddings are not scaled to length 1": not pooling.normalize,
        f"that embeddings have {pooling.truncate_dim} numbers": pooling.truncate_dim is not None,
        "that texts are lowercased": pooling.lower_case,
        f"that {pooling.before(None)!r} is put before each text": pooling.before(None),
        "that tokens of prompts are not pooled": pooling.prompts and not pooling.include_prompt,
    }
    return ", ".join(clause for clause, applies in said.items() if applies)


def _new_gguf(
    found: Opened, dtype: DType | None, encoding: str | None
) -> tuple[dict[str, Any], dict[str, WeightData]]:
    """The metadata and the tensors of a GGUF file for a Hugging Face checkpoint."""
    path, config = found.path, found.config
    if config is None:
        raise CheckpointMissingError(
            "there is no config.json, which says what model this is", path=path,
            hint="A GGUF file cannot be written without it.",
        )  # fmt: skip
    config = with_blocks(config, ())  # in a GGUF file a tensor says itself what it is
    model = read_config(config, path=path)
    gguf_settings(model, path)  # a setting says more than a tensor that has no place
    family = find_family(config, path=path)
    tensors = unwrapped(found.tensors)
    named = family.names.canonical(tensors)
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in named.items()}
    check_bounds(type(model.config), model.settings, shapes, path=path)
    made = gguf_tensors(config, tensors, path=path)
    if made.left_out:
        what = "%s: left out, as GGUF files do not contain such tensors: %s"
        _LOG.warning(what, path, some(made.left_out, 5))
    pooling, _ = read_pooling(found.folder)
    if pooling is not None and (lost := _not_in_gguf(pooling, model.architecture)):
        _LOG.warning("%s: a GGUF file cannot say %s", path, lost)
    dense = pooling.dense if pooling is not None and model.architecture == "gemma-embedding" else ()
    metadata = gguf_metadata(
        config, made.tensors, encoding=encoding, dtype=dtype,
        name=path.resolve().name if path.is_dir() else path.resolve().stem,
        pooling=None if pooling is None else gguf_mode(pooling), path=path,
    )  # fmt: skip
    for number, layer in enumerate(dense, 2):  # EmbeddingGemma's, which have no biases
        name = f"dense_{number}.weight"
        made.tensors[name] = WeightData.from_numpy(layer.matrix, name)
        metadata[f"gemma-embedding.dense_{number}_feat_in"] = layer.in_features
        metadata[f"gemma-embedding.dense_{number}_feat_out"] = layer.out_features
    tokenizer, settings = _tokenizer(found.folder)
    if templates := read_templates(found.folder, settings or {}):
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        settings = {**(settings or {}), "chat_template": listed}
    embedding = made.tensors.get("token_embd.weight")
    metadata |= gguf_tokenizer_metadata(
        tokenizer, settings, config, path=path, ends=end_tokens(found.folder, config),
        vocab_size=None if embedding is None else int(embedding.logical_shape[0]),
    )  # fmt: skip
    if is_there(file := found.folder / FILE):
        metadata |= sampling_metadata(read_object(file))
    return metadata | made.metadata, made.tensors


def _tokenizer(folder: Files) -> tuple[Any, dict[str, Any] | None]:
    """The content of ``tokenizer.json`` with its added tokens, and the tokenizer's settings."""
    try:
        found = read_tokenizer_files(folder)
    except UnsupportedModelError as error:
        _LOG.warning("%s The GGUF file has no tokenizer.", error)
        found = None
    if found is None:
        return None, optional(folder / "tokenizer_config.json")
    document = found.document or json.loads(found.backend.to_str())
    return document, {**found.settings, **found.named}
