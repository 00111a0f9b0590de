"""Reads and writes the files that sentence-transformers puts beside a model: ``modules.json`` and the files it names.

They say how the hidden states of a text's tokens become one embedding. Source: ``sentence_transformers/models`` of
sentence-transformers 5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import (
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointUnsafeError,
    shown,
    some,
)
from ..storage.files import is_there
from ..storage.open import open_checkpoint
from ..storage.safetensors.writer import file_pieces
from ..storage.save.beside import Files, files_of
from ..storage.save.outgoing import outgoing
from ..storage.sidecars import DENSE
from ..storage.strict_json import load_json
from .config import ModelConfig, config_field, read_object
from .pooling import POOLINGS, SIMILARITIES, Dense, Pooling

# The settings of the whole model.
_MODEL = "config_sentence_transformers.json"
# The names of a Dense module's weights.
# What embeddings of such a model need, and scores of a decoder with a head.
CHAT_TEMPLATE = "the chat template around each text ('modality_config' with 'message')"
# What the files of a reranker say instead of a pooling.
_SCORES = "the output 'logits' of the model ('modality_config')"
_SCORING = "sequence-classification"  # their 'transformer_task'
# The settings of a tokenizer that say how texts are padded and truncated, not what their tokens are.
_PADDING = (
    "max_length", "padding", "padding_side", "pad_to_multiple_of", "truncation", "return_tensors", "use_fast",
)  # fmt: skip
# Settings that say how files are found.
_FINDING = ("trust_remote_code", "local_files_only", "token", "cache_dir")
# A larger limit is Hugging Face's number for none, int(1e30).
_MAX_LENGTH = (1 << 31) - 1
# Published models have three or four modules; for each, a directory is read.
_MOST_MODULES = 100
_MOST_MODES = 16
# The keys of the modes in a Pooling module's configuration.
_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# torch's classes of activation functions, and maxjax's names for them.
_FUNCTIONS = {
    "Identity": "linear", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu",
    "Sigmoid": "sigmoid",
}  # fmt: skip
_CLASSES = {
    "linear": "torch.nn.modules.linear.Identity",
    **{
        name: f"torch.nn.modules.activation.{c}"
        for c, name in _FUNCTIONS.items()
        if c != "Identity"
    },
}
# Names of similarities in old files, and today's names.
_SIMILARITIES = {"cos_sim": "cosine", "dot_score": "dot"}


@dataclass(frozen=True)
class _Module(ModelConfig):
    """An entry of ``modules.json``; ``needs`` names the step that maxjax could not read and wrote this entry for."""

    path: str
    type: str
    needs: str | None = None

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class _SentenceConfig(ModelConfig):
    """``sentence_bert_config.json``."""

    max_seq_length: int | None = config_field(None, minimum=1)
    do_lower_case: bool = config_field(False)


@dataclass(frozen=True)
class _ModelConfig(ModelConfig):
    """``config_sentence_transformers.json``, except for its prompts."""

    similarity_fn_name: str | None = config_field(None)
    truncate_dim: int | None = config_field(None, minimum=1)
    activation_fn: str | None = config_field(None)


@dataclass(frozen=True)
class _DenseConfig(ModelConfig):
    """``2_Dense/config.json``."""

    in_features: int = config_field(minimum=1)
    out_features: int = config_field(minimum=1)
    bias: bool = config_field(True)
    activation_function: str = config_field("torch.nn.modules.activation.Tanh")


@dataclass(frozen=True)
class _PoolingConfig(ModelConfig):
    """The settings of ``1_Pooling/config.json`` that apply to all modes."""

    include_prompt: bool = config_field(True)


def read_pooling(directory: str | os.PathLike[str]) -> tuple[Pooling | None, Path]:
    """Reads ``modules.json`` and the files it names.

    Returns:
        The Pooling, and the directory of the transformer; None and ``directory`` if there is no
        ``modules.json``.

    Raises:
        CheckpointFormatError: the content of a file is invalid.
        CheckpointError: a file that is named does not exist or cannot be read, or tensors do not fit.
        CheckpointUnsafeError: a path in ``modules.json`` leads out of the directory.
    """
    files = files_of(directory)
    file = files / "modules.json"
    if not is_there(file):
        return None, Path(directory)
    transformer, pooling, normalize, unsupported, with_prompt = "", None, False, None, True
    dense: list[Dense] = []
    for module in _modules(file):
        place = _inside(module.path, file)
        if module.kind == "Transformer":
            transformer = place
        elif module.kind == "Pooling":
            config = _settings(files, place)
            pooling = _modes(config)
            with_prompt = _PoolingConfig.from_dict(read_object(config), path=config).include_prompt
        elif module.kind == "Normalize":
            normalize = True
        elif module.kind == "Dense" and pooling is not None and not normalize:
            found = _dense(files, place)
            unsupported = unsupported or (found if isinstance(found, str) else None)
            dense += [found] if isinstance(found, Dense) else []
        elif module.kind != "Dropout":  # dropout does nothing at inference
            unsupported = unsupported or module.needs or f"the module {module.kind}"
    settings, needs = _sentence_config(files, transformer)
    file = files / _MODEL
    model = _ModelConfig.from_dict(read_object(file) if is_there(file) else {}, path=file)
    unsupported = unsupported or needs
    if pooling is None:
        unsupported = unsupported or "a model without a Pooling module"
    elif isinstance(pooling, str):
        unsupported, pooling = unsupported or pooling, None
    return Pooling(
        pooling or ("mean",),
        normalize,
        settings.max_seq_length,
        settings.do_lower_case,
        unsupported,
        *_prompts(file),
        with_prompt,
        tuple(dense),
        _similarity(model.similarity_fn_name),
        model.truncate_dim,
        model.activation_fn,
    ), Path(directory, transformer)


def _dense(files: Files, place: str) -> Dense | str:
    """The Dense in a directory, or a text that names the part of it that maxjax does not have."""
    file = _settings(files, place)
    raw = read_object(file)
    settings = _DenseConfig.from_dict(raw, path=file)
    allowed = (None, "sentence_embedding")
    if raw.get("use_residual"):
        return "a Dense module with 'use_residual'"
    for key in ("module_input_name", "module_output_name"):
        if raw.get(key) not in allowed:
            return f"a Dense module with '{key}' {shown(raw[key])}"
    kind = settings.activation_function.rpartition(".")[2]
    if kind not in _FUNCTIONS:
        return f"the activation function {shown(settings.activation_function)} of a Dense module"
    names = [*(_below(place, name) for name in DENSE), f"{place}.safetensors", f"{place}.bin"]
    candidates = [files / name for name in names]
    weights = next((path for path in candidates if is_there(path)), None)
    if weights is None:
        raise CheckpointMissingError(
            "the weights of a Dense module are missing", path=candidates[0]
        )
    shapes: dict[str, Any] = {"linear.weight": (settings.out_features, settings.in_features)}
    if settings.bias:
        shapes["linear.bias"] = (settings.out_features,)
    with open_checkpoint(os.fspath(weights)) as table:
        has = {name: tuple(entry.shape) for name, entry in table.entries.items()}
        if has != shapes:
            raise CheckpointMismatchError(
                "the tensors of a Dense module do not fit its config.json", path=weights,
                expected=str(shapes), found=str(has)[:200],
            )  # fmt: skip
        for name, entry in table.entries.items():
            if not entry.dtype.is_float():
                raise CheckpointMismatchError(
                    "is not a float tensor", path=weights, tensor=name, found=entry.dtype.name
                )
        arrays = {name: np.asarray(table.read(name)).astype(np.float32) for name in has}
    return Dense.of(arrays["linear.weight"], arrays.get("linear.bias"), _FUNCTIONS[kind])


def _similarity(name: str | None) -> str:
    """The name of the similarity; "cosine" if the file names none, or one that maxjax does not have."""
    found = _SIMILARITIES.get(name or "", name)
    return found if found in SIMILARITIES else "cosine"


def _prompts(file: Path) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """The (name, text) of a model's prompts, and the name of the default one."""
    settings = read_object(file) if is_there(file) else {}
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    prompts = {} if prompts is None else prompts
    if isinstance(prompts, dict):  # null counts as no text
        prompts = {name: "" if text is None else text for name, text in prompts.items()}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointFormatError("'prompts' is not an object of strings", path=file)
    known = {"query", "document", *prompts}
    if name is not None and (not isinstance(name, str) or name not in known):
        raise CheckpointFormatError(
            "'default_prompt_name' is not the name of a prompt", path=file,
            expected=", ".join(sorted(known)), found=shown(name),
        )  # fmt: skip
    return tuple(prompts.items()), name


def _settings(files: Files, place: str) -> Path:
    """The path of a module's configuration: in its directory, or in a JSON file of the same name.

    The JSON file is used in Orbax steps, where Orbax takes every directory for a tree of arrays.
    """
    flat, config = files / f"{place}.json", files / _below(place, "config.json")
    return flat if os.path.isfile(flat) and not os.path.isdir(config.parent) else config


def _below(place: str, name: str) -> str:
    """The name of a file in the subdirectory ``place``, which is "" for the directory itself."""
    return f"{place}/{name}" if place else name


def pooling_files(pooling: Pooling, width: int) -> dict[str, Any]:
    """The files from which :func:`read_pooling` makes ``pooling``: name → content as JSON values, or as bytes.

    Args:
        pooling: the settings.
        width: length of a token's hidden state, written as ``word_embedding_dimension``.

    Example:
        >>> sorted(pooling_files(Pooling(normalize=True), 384))
        ['1_Pooling/config.json', 'modules.json', 'sentence_bert_config.json']
    """
    model: dict[str, Any] = {}
    if pooling.prompts or pooling.prompt is not None:
        model = {"prompts": dict(pooling.prompts), "default_prompt_name": pooling.prompt}
    if pooling.similarity != "cosine":
        model["similarity_fn_name"] = pooling.similarity
    if pooling.truncate_dim is not None:
        model["truncate_dim"] = pooling.truncate_dim
    if pooling.activation is not None:
        model["activation_fn"] = pooling.activation
    sentence: dict[str, Any] = {
        "max_seq_length": pooling.max_length, "do_lower_case": pooling.lower_case,
    }  # fmt: skip
    places, found = {"": "Transformer"}, {}
    if pooling.unsupported is None:
        kinds = ["Pooling", *["Dense"] * len(pooling.dense), *["Normalize"] * pooling.normalize]
        places |= {f"{i}_{kind}": kind for i, kind in enumerate(kinds, 1)}
        found = _module_files(pooling, width, list(places)[1:])
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(places.items())
    ]
    if pooling.unsupported == _SCORES:
        sentence["transformer_task"], model["model_type"] = _SCORING, "CrossEncoder"
    elif pooling.unsupported is not None:  # a saved model must not fall back to the plain mean
        needs = {"type": "maxjax.Unsupported", "needs": pooling.unsupported}
        modules.append({"idx": 1, "name": "1", "path": "", **needs})
    found |= {"modules.json": modules, "sentence_bert_config.json": sentence}
    return found | ({_MODEL: model} if model else {})


def _module_files(pooling: Pooling, width: int, places: Sequence[str]) -> dict[str, Any]:
    """The files of the Pooling and Dense modules, which are at the first of ``places``."""
    modes: dict[str, Any] = {"word_embedding_dimension": width}
    if list(pooling.modes) == [mode for mode in POOLINGS if mode in pooling.modes]:
        modes |= {key: mode in pooling.modes for key, mode in _KEYS.items()}
    else:  # only the newer key gives an order
        modes["pooling_mode"] = list(pooling.modes)
    modes["include_prompt"] = pooling.include_prompt
    found: dict[str, Any] = {f"{places[0]}/config.json": modes}
    for place, dense in zip(places[1:], pooling.dense, strict=False):
        found[f"{place}/config.json"] = {
            "in_features": dense.in_features, "out_features": dense.out_features,
            "bias": bool(dense.bias), "activation_function": _CLASSES[dense.activation],
        }  # fmt: skip
        tensors = {"linear.weight": dense.matrix, "linear.bias": dense.vector}
        listed = [outgoing(name, array) for name, array in tensors.items() if array is not None]
        found[f"{place}/model.safetensors"] = b"".join(file_pieces(listed))
    return found


def _modules(file: Path) -> list[_Module]:
    entries = load_json(file, option="config_bytes")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointFormatError("not a list of modules", path=file)
    if len(entries) > _MOST_MODULES:
        raise CheckpointLimitError(
            "there are too many modules", path=file, expected=f"at most {_MOST_MODULES}",
            found=len(entries),
        )  # fmt: skip
    return [_Module.from_dict(entry, path=file) for entry in entries]


def _inside(path: str, file: Path) -> str:
    """The path of a module below the directory."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\\" in path or ":" in path or "\0" in path:
        raise CheckpointUnsafeError(
            "the path of a module leads out of the directory", path=file, found=path
        )
    return "/".join(parts)


def _modes(file: Path) -> tuple[str, ...] | str:
    """The modes of a Pooling module, or a text that names a mode that maxjax does not have."""
    settings = read_object(file)
    named = settings.get("pooling_mode")
    if named is not None:  # newer files: a name, or several in the order of their results
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointFormatError("'pooling_mode' is not a name", path=file)
        if not names:
            raise CheckpointFormatError("no pooling mode is set", path=file)
    else:
        names = []
        for key, value in settings.items():
            if key.startswith("pooling_mode_"):
                if not isinstance(value, bool):
                    raise CheckpointFormatError(f"'{key}' is not true or false", path=file)
                if value:
                    names.append(_KEYS.get(key, key))
    if len(names) > _MOST_MODES:  # each adds the width of a hidden state to an embedding
        raise CheckpointLimitError(
            "there are too many pooling modes", path=file, expected=f"at most {_MOST_MODES}",
            found=len(names),
        )  # fmt: skip
    if named is None:
        names.sort(key=[*POOLINGS, *names].index)
    unknown = [name for name in names if name not in POOLINGS]
    if unknown:
        return f"the pooling {shown(unknown[0])}"
    return tuple(names) or ("mean",)


def _sentence_config(files: Files, place: str) -> tuple[_SentenceConfig, str | None]:
    """The settings of the transformer, and the name of one that maxjax does not have."""
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"):
        file = files / _below(place, f"sentence_{kind}_config.json")
        if is_there(file):
            raw = read_object(file)
            limit = _of_tokenizer(raw).get("max_length")
            is_none = limit is None or (isinstance(limit, int | float) and limit > _MAX_LENGTH)
            limited = raw if is_none else {**raw, "max_seq_length": limit}
            return _SentenceConfig.from_dict(limited, path=file), _unsupported(raw)
    return _SentenceConfig(), None


def _of_tokenizer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with which the tokenizer is made and called; those of the call count more."""
    called = raw.get("processing_kwargs")
    called = called if isinstance(called, Mapping) else {}
    made = raw.get("tokenizer_args"), raw.get("processor_kwargs")
    found: dict[str, Any] = {}
    for group in (*made, called.get("common"), called.get("text")):
        for key, value in group.items() if isinstance(group, Mapping) else ():
            found["max_length" if key == "model_max_length" else key] = value
    return found


def _unsupported(raw: Mapping[str, Any]) -> str | None:
    """The name of a setting, of version 5.4 and later, that maxjax does not have."""
    kinds = raw.get("modality_config")
    kinds = kinds if isinstance(kinds, Mapping) else {}
    text = kinds.get("text")
    output = text.get("method_output_name") if isinstance(text, Mapping) else None
    if "message" in kinds:  # then sentence-transformers makes each text a message
        return CHAT_TEMPLATE
    if raw.get("transformer_task") == _SCORING:
        return _SCORES
    if output not in (None, "last_hidden_state", ["last_hidden_state"]):
        return f"the output {shown(output)} of the model ('modality_config')"
    if asked := [key for key in _of_tokenizer(raw) if key not in (*_PADDING, *_FINDING)]:
        return f"other settings of the tokenizer: {some(asked, 3)}"
    groups = (raw.get("config_kwargs"), raw.get("config_args"))
    changed = [key for group in groups if isinstance(group, Mapping) for key in group]
    changed = [key for key in changed if key not in _FINDING]
    return f"other settings of the model: {some(changed, 3)}" if changed else None
