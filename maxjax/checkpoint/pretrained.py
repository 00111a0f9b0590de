"""Save_pretrained: a model as a directory that transformers opens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..dtype import DType
from ..errors import UserInputError
from ..graph.weights import WeightData
from ..graph.weights.writing import outgoing_data, weight_data
from ..models import PretrainedModel
from ..models.family import main_dtype
from ..models.pooling import pooling_files
from ..nn.layer import Module
from ..storage.safetensors.writer import shards, size_in_bytes
from ..text.tokenizer.tokenizer import Tokenizer
from .file_set import Progress, json_bytes, write_set

# What transformers asks of a safetensors file.
METADATA = {"format": "pt"}


def save_pretrained(
    model: Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    dtype: Any = None,
    config: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Path:
    """Writes a model as Hugging Face's files: config.json, safetensors, and a record of checksums.

    Names, shapes and bytes are those of a Hugging Face checkpoint, whatever the model's weights
    are inside: stacked, split over a mesh, in the order of the devices. A weight goes to the
    file piece by piece. A checkpoint that is in the directory already counts until the new
    one is whole and on the disk; then its files are deleted, and no others.

    Args:
        model: Any Module; of a :class:`PretrainedModel` the configuration is known.
        directory: Made if it is not there.
        tokenizer: Written as well.
        dtype: Float weights are converted to this type, packed blocks decoded. By default
            everything stays as it is, blocks too, which only maxjax can open in safetensors.
        config: The content of ``config.json`` in the place of the model's own.
        max_shard_size: Several files are written from this size on: "5GB", "500MB", or bytes.
        progress: Called with the number of bytes that were written, after each piece.

    Returns:
        The directory.

    Raises:
        ValueError: A weight has no value.
        CheckpointSaveError: It cannot be written (a full disk); ``errno`` says why. What was
            there before is intact.
        CheckpointAccessError, CheckpointBusyError: It may not be written; another process is writing.
        NotImplementedError: Several processes hold the weights: use ``maxjax.checkpoint.save``.

    Example:
        >>> import tempfile
        >>> import jax, maxjax
        >>> from maxjax import nn
        >>> from maxjax.graph import DeviceRef
        >>> model = maxjax.init(nn.Linear(4, 2, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> directory = maxjax.save_pretrained(model, tempfile.mkdtemp())
        >>> sorted(file.name for file in directory.iterdir())
        ['maxjax_digests.json', 'model.safetensors']
    """
    directory = os.fsdecode(directory)
    limit = size_in_bytes(max_shard_size)
    data = model_data(model)
    if dtype is not None:
        data = {name: cast(one, float_type(dtype)) for name, one in data.items()}
    outgoing = [outgoing_data(one, name) for name, one in data.items()]
    others = model_files(model, config, main_dtype(data))
    if tokenizer is not None:
        others |= tokenizer_files(tokenizer)
    pieces = {name: [content] for name, content in others.items()}
    write_set(directory, partial(_files, outgoing, limit), pieces, METADATA, progress=progress)
    return Path(directory)


def _files(outgoing: Any, limit: int, taken: Any) -> Any:
    return shards(outgoing, limit, taken=taken)


def model_data(model: Module) -> dict[str, WeightData]:
    """The weights of a model as tensors of a checkpoint, by the names they have there.

    Raises:
        ValueError: A weight has no value.
        NotImplementedError: Devices of another process hold a part of one.
    """
    return {name: weight_data(name, weight) for name, weight in model.raw_state_dict().items()}


def model_files(
    model: Module, config: Mapping[str, Any] | None = None, dtype: DType | None = None
) -> dict[str, bytes]:
    """What a model's directory holds besides weights and tokenizer: name → content.

    Args:
        config: In the place of the configuration that a model of a family has.
        dtype: What most of the values are.
    """
    if config is None and isinstance(model, PretrainedModel):
        config = model.hf_config
    files = {} if config is None else {"config.json": json_bytes(with_dtype(config, dtype))}
    if (pooling := getattr(model, "pooling", None)) is not None:
        files.update((name, json_bytes(found)) for name, found in pooling_files(pooling).items())
    return files


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What a tokenizer is on the disk: name → content."""
    return {name: text.encode() for name, text in tokenizer.files().items()}


def flat_name(name: str) -> str:
    """What a file of a module's directory is called in a step of orbax, where no directory may be.

    Example:
        >>> flat_name("1_Pooling/config.json"), flat_name("config.json")
        ('1_Pooling.json', 'config.json')
    """
    return name.replace("/config.json", ".json")


def cast(data: WeightData, dtype: DType) -> WeightData:
    """Floats and packed blocks in another float type, all else as it is."""
    return data.astype(dtype) if data.dtype.is_float() or data._is_packed else data


def float_type(dtype: Any) -> DType:
    """The float type that a user named.

    Raises:
        UserInputError: It is none.
    """
    try:
        found = DType.of(dtype)
    except (TypeError, ValueError, KeyError) as error:
        raise UserInputError(f"dtype={dtype!r} is not a dtype: {error}") from None
    if not found.is_float():
        raise UserInputError(f"dtype must be a float type, not {found.name}")
    return found


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """A configuration that names the float type that most of the values have."""
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return dict(config) if dtype is None else {**config, key: dtype.name}
