"""``save_pretrained``: write a model as a directory that transformers opens."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..dtype import DType
from ..engine.generate.defaults import FILE, GenerationDefaults
from ..errors import UserInputError
from ..graph.weights import WeightData
from ..graph.weights.gathering import Gathering
from ..graph.weights.writing import outgoing_data, weight_data
from ..images import ImageProcessor
from ..lockstep import Lockstep
from ..models import PretrainedModel
from ..models.config import quantization_settings
from ..models.pooling import Pooling
from ..models.quantized import with_blocks
from ..models.sentence_files import pooling_files
from ..models.weights import main_dtype, model_facts, named_float, shardings_of
from ..models.written import config_of
from ..nn.layer import Module
from ..nn.layer.walk import check_module
from ..nn.low_rank import LowRank
from ..progress import last_part, task
from ..storage.directory import is_weights
from ..storage.safetensors.writer import SetFile, shards, size_in_bytes
from ..storage.save.durable import target_path
from ..storage.sidecars import sidecar_kind
from ..text.tokenizer.arguments import check_is_tokenizer
from ..text.tokenizer.tokenizer import Tokenizer
from .file_set import Progress, json_bytes, write_set

_LOG = logging.getLogger("maxjax")
# Metadata that transformers requires of a safetensors file.
METADATA = {"format": "pt"}


def save_pretrained(
    model: Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | ImageProcessor | None = None,
    dtype: Any = None,
    config: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> Path:
    """Writes a model as a Hugging Face checkpoint: config.json, safetensors files, checksums.

    Names, shapes and bytes are those of a Hugging Face checkpoint, whether the model's weights are
    stacked, sharded over a mesh or stored in device-major order. Weights are streamed to the
    file. Several processes that share the model's mesh make the call together, and the first one
    writes. A checkpoint that the directory holds already stays valid until the new one is complete
    and on the disk; then the old checkpoint's files are deleted, and no others.

    Args:
        model: any Module. A :class:`PretrainedModel` also provides ``config.json``: that of its file, or one
            made of its settings.
        directory: path of the directory, made if it does not exist.
        tokenizer: tokenizer to write as well, or the image processor of a model of images.
        dtype: dtype that float weights are converted to and quantised weights dequantised to. By
            default all weights are written as they are; quantised weights in safetensors can be
            opened by maxjax only, and a warning is logged if there are any.
        config: content of ``config.json`` to use instead of the model's own.
        max_shard_size: maximum size of one file, "5GB", "500MB" or a number of bytes; a larger
            checkpoint is split into several files.
        progress: called after each piece with the number of bytes written.

    Tensors of the model's checkpoint that it does not hold are copied from there: heads that maxjax does not
    have, vision and audio parts (``model.unloaded``; None leaves them out).

    Returns:
        The path of the directory.

    Raises:
        ValueError: a weight has no value.
        UserInputError: the model has LoRA weights that are not merged; it was made in code, and no
            ``config.json`` can say what it is; ``dtype``, ``max_shard_size`` or another argument is invalid.
        CheckpointSaveError: writing failed, for example because the disk is full; ``errno`` says
            why. A checkpoint that was there before is intact.
        CheckpointChangedError: the checkpoint with ``model.unloaded`` has changed, or is gone; nothing was written.
        CheckpointAccessError, CheckpointBusyError: permission is denied; another process is writing.
        PeerFailedError, PeerLostError: another process raised an error in this call (for example,
            because the first one cannot write), or has ended.

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
    check_module(model, "save_pretrained")
    check_is_tokenizer(tokenizer, "files")
    if config is not None and not isinstance(config, Mapping):
        raise UserInputError(
            f"config is the content of config.json, a dict, not {type(config).__name__}"
        )
    unloaded = model.unloaded if isinstance(model, PretrainedModel) else None
    with Lockstep("save_pretrained", shardings_of(model)) as together, ExitStack() as stack:
        directory = target_path(directory)
        if is_weights(os.path.basename(directory)) and not os.path.isdir(directory):
            raise UserInputError(
                f"expected a directory, got the name of a file, {directory!r}: maxjax.save_pretrained writes "
                "model.safetensors and config.json into a directory"
            )
        limit = size_in_bytes(max_shard_size)
        gathering = Gathering(together)
        data = model_data(model, gathering)
        if dtype is not None:
            refuse_quantised(config if config is not None else getattr(model, "hf_config", None))
            data = {name: cast(one, named_float("dtype", dtype)) for name, one in data.items()}
        main = main_dtype(data)
        if isinstance(model, PretrainedModel) and unloaded is not None:
            data = unloaded.write(data)
            if unloaded.names:
                rest = stack.enter_context(unloaded.open())
                data |= {name: rest[name].data() for name in unloaded.names if name not in data}
        elif isinstance(model, PretrainedModel):
            data = model.tensor_names.write(data)
        packed = next((name for name, one in data.items() if one.is_packed), None)
        if packed is not None and isinstance(model, PretrainedModel) and together.is_leader:
            _LOG.warning(
                "save_pretrained: weights such as '%s' are quantised, and only maxjax opens '%s': pass "
                "dtype='bfloat16' to write a checkpoint that transformers opens",
                packed,
                directory,
            )
        outgoing = [outgoing_data(one, name) for name, one in data.items()]
        if config is not None:  # that of a model is written in any case
            config = config if "torch_dtype" in config else {"dtype": None, **config}
        elif isinstance(model, PretrainedModel) and unloaded is not None and unloaded.holds_parts:
            tied = (model.hf_config or {}).get("tie_word_embeddings")
            config = unloaded.config_with(tied)
        others = model_files(model, config, main, data, tokenizer)
        if tokenizer is not None:
            others |= tokenizer_files(tokenizer)

        def files(taken: Sequence[str]) -> Sequence[SetFile]:
            return shards(outgoing, limit, taken=taken)

        if together.is_shared:
            together.agree(
                tensors=[[name, str(one.dtype), list(map(int, one.shape))] for name, one in data.items()],
                max_shard_size=limit, **others, **model_facts(model),
            )  # fmt: skip
        if together.is_leader:
            total = sum(one.nbytes for one in outgoing)
            with task(f"saving {last_part(directory)}", total) as shown:
                write_set(directory, files, others, METADATA, progress=shown.telling(progress))
            gathering.end()
        else:
            gathering.follow()
        together.finish()
    if unloaded is not None and unloaded.names and unloaded.is_in(directory):
        model.unloaded = unloaded.at(directory)  # type: ignore[attr-defined]
    return Path(directory)


def model_data(model: Module, gathering: Gathering | None = None) -> dict[str, WeightData]:
    """The weights of a model as tensors of a checkpoint, by their names there.

    Raises:
        ValueError: a weight has no value.
        UserInputError: the model has LoRA weights, which no other program would find in such a checkpoint.
        NotImplementedError: devices of another process hold a part of a weight, and there is no
            ``gathering``, or the weight is not on a mesh.
    """
    if any(isinstance(m, LowRank) and m.lora_A is not None for _, m in model.named_modules()):
        raise UserInputError(
            "the model has LoRA weights: maxjax.lora.save(path, model) saves the adapter alone, and "
            "save_pretrained(maxjax.lora.merge(model), path) the model with the adapter merged into it"
        )
    return {
        name: weight_data(name, weight, gathering)
        for name, weight in model.raw_state_dict().items()
    }


def model_files(
    model: Module,
    config: Mapping[str, Any] | None = None,
    dtype: DType | None = None,
    names: Iterable[str] | None = None,
    tokenizer: Tokenizer | ImageProcessor | None = None,
    required: bool = True,
) -> dict[str, bytes]:
    """The files of a model's directory besides weights and tokenizer: name → content.

    Args:
        model: the model.
        config: configuration to write in place of the model's own.
        dtype: dtype of most weights, which the configuration names.
        names: names of the tensors, which show whether experts are MXFP4 blocks; None for what the
            configuration says.
        tokenizer: tokenizer of a model that was made in code, whose special tokens the configuration names.
        required: whether it is an error if no configuration can be made; else it is left out.

    Raises:
        UserInputError: the model was made in code, and no ``config.json`` can say what it is.
    """
    if config is None and isinstance(model, PretrainedModel):
        try:
            config = config_of(
                model, token_ids(tokenizer) if isinstance(tokenizer, Tokenizer) else {}
            )
        except UserInputError:
            if required:
                raise
        if config is not None and names is not None:
            config = with_blocks(config, names)
    files = {} if config is None else {"config.json": json_bytes(with_dtype(config, dtype))}
    embedder: Any = model
    if isinstance(pooling := getattr(embedder, "pooling", None), Pooling):
        files |= sentence_files(pooling, embedder.config.hidden_size)
    generation = getattr(embedder, "generation", None)
    content = generation.to_file(config) if isinstance(generation, GenerationDefaults) else None
    if content is not None:  # an empty file replaces settings in config.json
        files[FILE] = json_bytes(content)
    return files


def sentence_files(pooling: Pooling, width: int) -> dict[str, bytes]:
    """The files of sentence-transformers for a pooling of hidden states ``[..., width]``: name → content."""
    found = pooling_files(pooling, width).items()
    return {n: one if isinstance(one, bytes) else json_bytes(one) for n, one in found}


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids of a tokenizer's special tokens by their keys in ``config.json``."""
    ends = list(tokenizer.eos_ids)
    found = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    return found | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})


def tokenizer_files(tokenizer: Tokenizer | ImageProcessor) -> dict[str, bytes]:
    """The files of a tokenizer with its image processor, or of an image processor: name → content."""
    images = getattr(tokenizer, "images", None)
    files = {**({} if images is None else images.files()), **tokenizer.files()}
    return {name: text.encode() for name, text in files.items()}


def flat_name(name: str) -> str:
    """The name, in a step of orbax, of a file from a subdirectory of a model.

    A step of orbax cannot contain such subdirectories.

    Example:
        >>> flat_name("1_Pooling/config.json"), flat_name("config.json")
        ('1_Pooling.json', 'config.json')
    """
    name = re.sub(r"(_Dense)/(?:model|pytorch_model)\.(safetensors|bin)\Z", r"\1.\2", name)
    return name.replace("/config.json", ".json")


def deep_name(name: str) -> str:
    """The inverse of :func:`flat_name`.

    Example:
        >>> deep_name("1_Pooling.json"), deep_name("2_Dense.bin"), deep_name("config.json")
        ('1_Pooling/config.json', '2_Dense/pytorch_model.bin', 'config.json')
    """
    names = {"json": "config.json", "safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
    stem, _, end = name.rpartition(".")
    is_flat = "/" not in name and name[:1].isdigit() and sidecar_kind(name) is not None
    return f"{stem}/{names[end]}" if is_flat else name


def cast(data: WeightData, dtype: DType) -> WeightData:
    """The tensor in another float dtype if it holds floats or quantised blocks, else unchanged."""
    return data.astype(dtype) if data.dtype.is_float() or data.is_packed else data


def refuse_quantised(config: Mapping[str, Any] | None) -> None:
    """Checks that a configuration is not that of a quantised repository, which has no other dtype.

    Raises:
        UserInputError: it has a ``quantization_config``.
    """
    if config is not None and quantization_settings(config) is not None:
        raise UserInputError(
            "the weights are quantised as 'quantization_config' says, in several tensors each, and cannot "
            "be written in another dtype: leave dtype out"
        )


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """The configuration with the dtype of most weights where it names one, unless these are quantised.

    Example:
        >>> with_dtype({"dtype": "float32", "text_config": {"dtype": "float32"}}, DType.bfloat16)
        {'dtype': 'bfloat16', 'text_config': {'dtype': 'bfloat16'}}
    """
    if quantization_settings(config) is not None or dtype is None:
        return {key: value for key, value in config.items() if key != "dtype" or value is not None}
    found = {**config, **{key: dtype.name for key in ("dtype", "torch_dtype") if key in config}}
    if isinstance(text := config.get("text_config"), Mapping):
        found["text_config"] = with_dtype(text, dtype)
    return found
