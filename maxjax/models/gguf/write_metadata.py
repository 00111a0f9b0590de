"""Makes the metadata of a GGUF file from the content of ``config.json``.

It applies the tables of ``config.read`` in reverse. The result is then read back, and a
configuration that changes in this round trip is refused.

Source: ``set_gguf_parameters`` of the classes in llama.cpp's converter, ``Keys`` and
``LlamaFileType`` in gguf-py's ``constants.py``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...dtype import DType
from ...errors import CheckpointMismatchError, one_of
from ...graph.weights import WeightData
from ...rendering.row import short
from ..parts.rotary import rope_settings
from .config.families import FamilyConfig, read_config
from .config.llama_cpp import check_read
from .config.read import LABELS, POOLING, WINDOWS, hf_config, window_period
from .config.rope import rope_keys
from .metadata import unsupported
from .names import CLASSIFIER
from .table import GGUF_TABLES, GGUFTable
from .tensors.types import MIXTURES, is_wide

_LOG = logging.getLogger("maxjax")
# Numbers of general.file_type: the type of most values in the file, or the mixture of types.
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
FILE_TYPES |= {name.upper(): mixture.file_type for name, mixture in MIXTURES.items()}
_PLAIN = {DType.float32: "F32", DType.float16: "F16", DType.bfloat16: "BF16"}
_QUANTIZATION_VERSION = 2
# Settings that the round trip does not compare: they are stored elsewhere, may be spelled differently, or
# are checked separately.
_NOT_COMPARED = {
    "architectures", "model_type", "torch_dtype", "rope_scaling", "id2label", "label2id"
}  # fmt: skip


def gguf_metadata(
    config: Mapping[str, Any],
    tensors: Mapping[str, WeightData],
    *,
    encoding: str | None = None,
    dtype: DType | None = None,
    name: str | None = None,
    pooling: str | None = None,
    path: Any = None,
) -> dict[str, Any]:
    """Makes the metadata of a GGUF file for a model, without that of its tokenizer.

    Floats are stored as float32. The configuration that ``hf_config`` makes from the result describes
    the same model.

    Args:
        config: content of ``config.json``.
        tensors: tensors of the file, as ``gguf_tensors`` returns them.
        encoding: encoding or mixture to which the tensors will be quantised, a key of ``MIXTURES`` in
            upper case, such as "Q4_K_M"; None: they are not quantised.
        dtype: dtype to which the tensors will be converted; None: they are not converted.
        name: name of the model.
        pooling: pooling type of an encoder, as :func:`~maxjax.models.gguf.pooling` returns it.
        path: path of the checkpoint, for messages.

    Raises:
        UnsupportedModelError: the architecture has no table, or a GGUF file cannot represent a
            setting, which the message names.
        UserInputError: ``pooling`` is unknown.
        CheckpointMismatchError: the configuration does not fit the tensors.
        CheckpointFormatError: a setting is missing or wrong; the message names it.
    """
    model = read_config(config, path=path)
    found: dict[str, Any] = {"general.architecture": model.architecture, "general.type": "model"}
    if name:
        found["general.name"] = name
    found |= file_type(encoding or dtype or _most(tensors))
    keys = gguf_settings(model, path)
    if pooling is not None:
        numbers = {text: number for number, text in POOLING.items()}
        keys["pooling_type"] = numbers[one_of("pooling", pooling, filter(None, numbers))]
    labels: Mapping[int, str] | None = getattr(model.config, "id2label", None)
    if labels is not None and f"{CLASSIFIER}.weight" in tensors:
        # llama.cpp makes a head of as many labels as there are names: of one without them.
        keys[LABELS] = [*labels.values()]
    for line in check_read(model.architecture, keys, tensors, path=path):
        _LOG.warning("%s%s", "" if path is None else f"{path}: ", line)
    found |= {f"{model.architecture}.{key}": value for key, value in keys.items()}
    if getattr(model.config, "type_vocab_size", 0):
        found["tokenizer.ggml.token_type_count"] = model.config.type_vocab_size
    _check(model, found, tensors, path)
    return found


def gguf_settings(model: FamilyConfig, path: Any = None) -> dict[str, Any]:
    """The metadata of a model's settings, without settings that depend on its tensors.

    Args:
        model: configuration of the model, as ``read_config`` returns it.
        path: path of the checkpoint, for messages.

    Raises:
        UnsupportedModelError: a GGUF file cannot represent a setting; the message names it.
    """
    table = GGUF_TABLES[model.architecture]
    _check_windows(table, model, path)
    return _decoder(table, model, path) if table.is_decoder else _plain(table, model)


def file_type(kind: str | DType) -> dict[str, Any]:
    """The metadata for the type of most values in a file, or for a mixture.

    Example:
        >>> file_type("Q8_0"), file_type(DType.float16)
        ({'general.file_type': 7, 'general.quantization_version': 2}, {'general.file_type': 1})
    """
    name = _PLAIN.get(kind, kind.name) if isinstance(kind, DType) else kind
    found = {"general.file_type": FILE_TYPES[name]} if name in FILE_TYPES else {}
    if name not in _PLAIN.values():
        found["general.quantization_version"] = _QUANTIZATION_VERSION
    return found


def _most(tensors: Mapping[str, WeightData]) -> str:
    """The type of most values in the file, as a key of ``FILE_TYPES``."""
    sizes: Counter[str] = Counter()
    for name, data in tensors.items():
        shape = tuple(map(int, data.logical_shape))
        if not is_wide(name, shape):
            encoding = data.quantization_encoding if data.is_packed else None
            kind = encoding.value if encoding else _PLAIN.get(data.dtype, data.dtype.name)
            sizes[kind] += math.prod(shape)
    return sizes.most_common(1)[0][0] if sizes else "F32"


# --- metadata of several architectures ----------------------------------------------------------


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 0),
        "attention.head_count": getattr(config, "num_attention_heads", 0),
    }


def _decoder(table: GGUFTable, model: FamilyConfig, path: Any) -> dict[str, Any]:
    size = model.config
    found = {**_sizes(size), table.epsilon[0]: _epsilon(size, table.epsilon[1])}
    if not getattr(size, "is_causal", True):
        found["attention.causal"] = False
    if table.attends:
        found["attention.head_count_kv"] = model.kv_heads
        found["attention.key_length"] = found["attention.value_length"] = model.head_dim
    else:
        found |= {"attention.head_count": 0, "feed_forward_length": 0}
    if model.has_rope:
        found["rope.dimension_count"] = model.rotated
        found["rope.freq_base"] = model.rope.theta
        found |= rope_keys(
            model.rope,
            rope_settings(model.settings)[1],
            path=path,
            truncates=table.truncates,
            is_long=table.is_long,
            log_multiplier=table.log_multiplier,
        )
    if model.experts:
        found |= _experts(model)
    return found | _of_table(table, model, path) | dict(model.multimodal or {})


def _epsilon(config: Any, key: str) -> float:
    """The number that norms add to the variance, which files of the architecture have under a key."""
    names = (key, "rms_norm_eps", "layer_norm_eps")
    return next(getattr(config, name) for name in names if hasattr(config, name))


def _of_table(table: GGUFTable, model: FamilyConfig, path: Any) -> dict[str, Any]:
    """The metadata keys that an architecture's table adds."""
    size, found = model.config, {}
    if table.has_head and size.tie_word_embeddings:
        raise unsupported(f"a tied head in a GGUF file of {table.architecture!r}", path)
    if table.is_square and size.num_attention_heads * model.head_dim != size.hidden_size:
        raise unsupported(
            f"'head_dim' {model.head_dim} in a GGUF file of {table.architecture!r}, whose heads are together "
            "as wide as the hidden states", path,
        )  # fmt: skip
    fields = {f.metadata.get("key") or f.name: f.name for f in dataclasses.fields(size)}
    for key, name in table.keys.items():
        value = getattr(size, fields[name]) if name in fields else model.settings.get(name)
        if value is not None:
            found[key] = value
    more = dict(table.write(size) if table.write is not None else {})
    slides = model.slides
    if "attention.sliding_window" in more:
        pass
    elif table.lists_windows:
        found["attention.sliding_window"] = size.sliding_window or size.max_position_embeddings
        found[WINDOWS] = slides
    elif any(slides) and not ("attention.sliding_window" in found and all(slides)):
        if table.period is None or window_period(slides, table.period) != table.period:
            raise unsupported(
                f"a sliding window in layers that llama.cpp's {table.architecture!r} gives none",
                path,
            )
        found["attention.sliding_window"] = size.sliding_window
    return found | more


def _experts(model: FamilyConfig) -> dict[str, Any]:
    size = model.config
    found = {"expert_count": model.experts, "expert_used_count": size.num_experts_per_tok}
    if getattr(size, "moe_intermediate_size", None):
        found["expert_feed_forward_length"] = size.moe_intermediate_size
    return found


def _check_windows(table: GGUFTable, model: FamilyConfig, path: Any) -> None:
    """Refuses a list of layers with a sliding window, if llama.cpp gives none to the architecture."""
    listed = model.settings.get("layer_types")
    if isinstance(listed, list) and not table.has_windows:
        kinds = {kind for kind in listed if isinstance(kind, str)}
        alike = table.write is not None and len(kinds) == 1 and any(model.slides)
        if kinds - {"full_attention"} and not alike:
            raise unsupported(
                f"'layer_types' with {sorted(kinds)[-1][:60]!r} in a GGUF file of "
                f"{model.architecture!r}", path,
            )  # fmt: skip


def _plain(table: GGUFTable, model: FamilyConfig) -> dict[str, Any]:
    """The settings of an architecture that shares none with Llama-like decoders."""
    epsilon, name = table.epsilon
    found = {**_sizes(model.config), epsilon: _epsilon(model.config, name)}
    return found | dict(table.write(model.config) if table.write is not None else {})


# --- whether the configuration survives the round trip -------------------------------------------


def _check(
    model: FamilyConfig, metadata: Mapping[str, Any], tensors: Mapping[str, WeightData], path: Any
) -> None:
    settings = dict(model.settings)
    if settings.get("n_inner", ...) is None:
        settings["n_inner"] = 4 * model.config.hidden_size
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in tensors.items()}
    again = hf_config(metadata, shapes, divisors=model.divisors(path), path=path)
    if model.has_rope:
        again["head_dim"] = model.head_dim
        if not again.get("sliding_window") or not any(
            kind == "sliding_attention" for kind in again.get("layer_types", ["sliding_attention"])
        ):
            settings.pop("sliding_window", None)  # no layer uses it
    if hasattr(model.config, "type_vocab_size"):
        settings.pop("tie_word_embeddings", None)  # an encoder has no head
    table = GGUF_TABLES[model.architecture]
    for key, value in {"is_causal": True, **table.required, **again}.items():
        given = settings.get(key)
        if key in (*_NOT_COMPARED, *table.computed) or given is None or _alike(given, value):
            continue
        if key in ("vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias"):
            raise CheckpointMismatchError(
                f"the configuration's '{key}' does not fit the tensors",
                path=path,
                expected=given,
                found=value,
            )
        raise unsupported(f"{key!r} {short(given)} in a GGUF file (it would be {value})", path)


def _alike(a: Any, b: Any) -> bool:
    """Whether two settings are equal, up to the rounding of floats to float32."""
    numbers = (int, float)
    if type(a) in numbers and type(b) in numbers:
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b
