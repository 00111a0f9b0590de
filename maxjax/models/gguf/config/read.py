"""Converts the metadata of a GGUF file to the content of Hugging Face's ``config.json``.

One table per architecture maps keys to settings. Values that are in llama.cpp's code, and not in the
file, are constants in this module.

Sources: ``set_gguf_parameters`` of the classes in llama.cpp's converter, ``load_hparams`` in its
reader, ``Keys`` in gguf-py's ``constants.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....errors import CheckpointFormatError, shown
from ...config import label_names
from ..by_architecture import ByArchitecture
from ..metadata import (
    MAX_EXPERTS,
    MAX_LAYERS,
    Settings,
    settings,
    token_id,
    unknown_architecture,
    unsupported,
)
from ..names import CLASSIFIER
from .rope import required, rope_scaling

Config = dict[str, Any]
Shapes = Mapping[str, Sequence[int]]

_GELU = "gelu_pytorch_tanh"
# general.file_type → the dtype of a model's values. Quantised files do not say from which dtype they
# were made, so they get bfloat16, which has the range of all dtypes.
_FILE_TYPES = {0: "float32", 1: "float16"}
POOLING = {0: None, 1: "mean", 2: "cls", 3: "last", 4: "rank"}
# The architecture of mmproj files, which have the vision part of a model.
VISION = "clip"
# Key of the layers with a sliding window: n, where every n-th layer has none, or a list of flags.
WINDOWS = "attention.sliding_window_pattern"
# Key of the names of a head's labels.
LABELS = "classifier.output_labels"
# Keys of the text half of a multimodal model: the numbers of RoPE's pairs that turn by each of a token's four
# positions, and of the layers that take features of images. A text token's first three positions are the same.
SECTIONS, DEEPSTACK = "rope.dimension_sections", "n_deepstack_layers"


@dataclass(frozen=True, kw_only=True)
class MetadataTable:
    """The part of a ``GGUFTable``, which describes these attributes, that says how metadata becomes settings."""

    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Settings, Shapes, Config], Config] | None = None
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    period: int | None = None
    has_rope: bool = True
    attends: bool = True
    listed: Collection[str] = ()
    is_partial: bool = False
    width: str | None = None
    log_multiplier: float = 0.0
    is_decoder: bool = True
    required: Mapping[str, Any] = field(default_factory=dict)
    has_sections: bool = False


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF files.

    Attributes:
        model_type, architecture: its names in ``config.json``.
        table: how its metadata becomes settings.
    """

    model_type: str
    architecture: str
    table: MetadataTable


def hf_config(
    metadata: Mapping[str, Any],
    tensors: Shapes,
    *,
    divisors: Mapping[str, np.ndarray] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Config:
    """Makes the content of a ``config.json`` for the model in a GGUF file.

    Args:
        metadata: key-value pairs of the file.
        tensors: shape ``[out, in]`` of each tensor, by name. The vocabulary has the size of the
            embedding table, and the model has a head of its own if there is ``output.weight``.
        divisors: values of the tensors with divisors of RoPE's frequencies (``rope_freqs.weight``, or
            ``rope_factors_short.weight`` and ``rope_factors_long.weight``), by name, if the file has them.
        path: path of the file, for messages.

    Raises:
        UnsupportedModelError: the architecture is unknown, or the file describes a model that
            Hugging Face's class of that name cannot represent.
        CheckpointFormatError: a key is missing, of the wrong type or out of range; the message
            names it.
        UserInputError: the file has a tensor of divisors, and its values were not passed.

    Example:
        >>> metadata = {
        ...     "general.architecture": "qwen2", "qwen2.block_count": 1, "qwen2.context_length": 64,
        ...     "qwen2.embedding_length": 8, "qwen2.feed_forward_length": 16,
        ...     "qwen2.attention.head_count": 2, "qwen2.attention.layer_norm_rms_epsilon": 1e-6}
        >>> config = hf_config(metadata, {"token_embd.weight": (100, 8)})
        >>> config["architectures"], config["vocab_size"], config["tie_word_embeddings"]
        (['Qwen2ForCausalLM'], 100, True)
    """
    general = Settings(metadata, "general.", path)
    kind = general.text("type", "model")
    if general.text("architecture", None) == VISION:
        raise unsupported(
            "an mmproj file, the vision part of a model, without the file of its text half (mmproj= of maxjax.load)",
            path,
        )
    if kind != "model":
        what = f"a GGUF file of the type {shown(kind)} (general.type), which holds no model,"
        raise unsupported(what, path)
    given = settings(metadata, path=path)
    architecture = given.prefix[:-1]
    model = MODELS.get(architecture)
    if model is None:
        raise unknown_architecture(architecture, MODELS, path)
    config: Config = {"architectures": [model.architecture], "model_type": model.model_type}
    config |= model.table.constants
    config["vocab_size"] = rows_of("token_embd.weight", tensors, path)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if model.table.is_decoder:
        config |= _decoder(given, tensors, required(divisors, tensors), model.table)
        if config["architectures"][0].endswith("ForCausalLM") and not given.flag(
            "attention.causal", True
        ):
            config["is_causal"] = False
    if model.table.read is not None:
        config |= model.table.read(given, tensors, config)
    file_type = Settings(metadata, "general.", path).count("file_type", None, minimum=0)
    if file_type is not None:
        config["torch_dtype"] = _FILE_TYPES.get(file_type, "bfloat16")
    return config | _token_ids(metadata, config["vocab_size"], path)


def pooling(
    metadata: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
) -> str | None:
    """The pooling type of an encoder: "mean", "cls", "last" or "rank"; None if the file has none.

    Example:
        >>> pooling({"general.architecture": "bert", "bert.pooling_type": 2})
        'cls'
    """
    given = settings(metadata, path=path)
    kind = given.count("pooling_type", 0, minimum=0)
    if kind not in POOLING:
        raise given.wrong("pooling_type", f"0 to {max(POOLING)}", kind, "is unknown")
    return POOLING[kind]


# --- settings of several architectures ---------------------------------------------------------


def _decoder(
    given: Settings, tensors: Shapes, divisors: Mapping[str, np.ndarray], table: MetadataTable
) -> Config:
    given = given.firsts(table.listed)
    epsilon, name = table.epsilon
    found: Config = {
        "hidden_size": given.count("embedding_length"),
        "num_hidden_layers": given.count("block_count", maximum=MAX_LAYERS),
        "max_position_embeddings": given.count("context_length"),
        name: given.number(epsilon),
    }
    if table.attends:
        found |= _attention(given, tensors, table)
    if table.attends and table.has_rope:
        head_dim, theta = found["head_dim"], given.number("rope.freq_base", 10_000.0)
        rotated = given.count("rope.dimension_count", head_dim)
        found["rope_theta"] = theta
        found["rope_scaling"] = rope_scaling(
            given, rotated, theta, divisors, log_multiplier=table.log_multiplier
        )
        if table.is_partial:
            found["partial_rotary_factor"] = rotated / head_dim
    if table.has_sections and any(given.items(SECTIONS, int, [])[3:]):
        raise given.unsupported(
            f"pairs that turn by a fourth position ('{given.prefix}{SECTIONS}')"
        )
    for key, name in table.keys.items():
        if given.has(key):
            found[name] = given.any(key)  # its family checks type and range
            if name == "sliding_window" and found[name] == 0:  # none, as in Phi-4
                found[name] = None
    window = given.count("attention.sliding_window", 0, minimum=0) if table.period else 0
    if table.period and window:
        found["sliding_window"] = window
        found["layer_types"] = layer_types(given, found, table.period)
    return found


def _attention(given: Settings, tensors: Shapes, table: MetadataTable) -> Config:
    """The sizes of attention and MLPs; files list them for each layer if some layers have none."""
    heads = given.count("attention.head_count")
    checked = table.has_rope and not table.is_partial
    inner = "feed_forward_length"
    # Some files leave out the MLP's width if every layer has experts, or list a 0 for each.
    listed = given.any(inner, None)
    none = isinstance(listed, list) and len(listed) > 0 and not any(listed)
    left_out = none or given.has(f"expert_{inner}")
    return {
        "intermediate_size": given.some(inner, None if left_out else ...),
        "num_attention_heads": heads,
        "num_key_value_heads": given.some("attention.head_count_kv", heads),
        "head_dim": given.count(table.width) if table.width else _head_dim(given, heads, checked),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
    }


def _head_dim(given: Settings, heads: int, is_whole: bool) -> int:
    """The width of a head, which keys and values share; if ``is_whole``, RoPE must rotate all of it."""
    width = given.count("attention.key_length", None)
    if width is None:
        hidden = given.count("embedding_length")
        if hidden % heads:
            raise given.wrong(
                "embedding_length", f"a multiple of {heads} heads", hidden, "does not fit"
            )
        width = hidden // heads
    for key in ("attention.value_length", *(["rope.dimension_count"] if is_whole else [])):
        if (other := given.count(key, width)) != width:
            raise given.unsupported(
                f"a model whose '{given.prefix}{key}' is {other} and whose heads are {width} wide"
            )
    return width


def rows_of(tensor: str, tensors: Shapes, path: Any) -> int:
    """The number of rows of an embedding table."""
    if tensor not in tensors:
        raise CheckpointFormatError("the tensor is missing", path=path, tensor=tensor)
    shape = tuple(tensors[tensor])
    if len(shape) != 2 or not shape[0]:
        raise CheckpointFormatError(
            "not an embedding table",
            path=path,
            tensor=tensor,
            expected="shape [rows, width]",
            found=shape,
        )
    return int(shape[0])


def _token_ids(metadata: Mapping[str, Any], vocab_size: int, path: Any) -> Config:
    """The ids of special tokens in a ``config.json``, for those that the file has."""
    given = Settings(metadata, "tokenizer.ggml.", path)
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: token_id(given, key, vocab_size) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


# --- settings of one architecture --------------------------------------------------------------


def read_qwen_experts(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the settings of the experts of a Qwen."""
    width = given.count("expert_feed_forward_length", None)
    if width is None:  # in old files, the rows of an expert give it
        width = _expert_rows(given, tensors)
    shared = given.count("expert_shared_feed_forward_length", None)
    if shared is None and "blk.0.ffn_gate_shexp.weight" in tensors:
        shared = rows_of("blk.0.ffn_gate_shexp.weight", tensors, given.path)
    found = {**expert_counts(given), "moe_intermediate_size": width}
    if config["intermediate_size"] is None:
        found["intermediate_size"] = width
    if shared is not None:
        found["shared_expert_intermediate_size"] = shared
    return found


def _expert_rows(given: Settings, tensors: Shapes) -> int:
    shape = tuple(tensors.get("blk.0.ffn_up_exps.weight", ()))
    if len(shape) != 3 or not shape[1]:
        return given.count("expert_feed_forward_length")  # raises: it is missing
    return int(shape[1])


def expert_counts(given: Settings) -> Config:
    """Return the numbers of experts and of those that a token goes to."""
    experts = given.count("expert_count", maximum=MAX_EXPERTS)
    used = given.count("expert_used_count", maximum=experts)
    return {"num_experts": experts, "num_experts_per_tok": used}


def layer_types(given: Settings, config: Config, period: int) -> list[str]:
    """Return the kinds of the layers: all but every ``period``-th slide, unless the file has another pattern."""
    layers, pattern = config["num_hidden_layers"], given.any(WINDOWS, None)
    if isinstance(pattern, list):
        slides = given.items(WINDOWS, bool, count=layers)
    else:
        period = given.count(WINDOWS, period)
        slides = [bool((i + 1) % period) for i in range(layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def window_period(slides: Sequence[bool], usual: int) -> int | None:
    """Return n, where every n-th layer has full attention, as in llama.cpp; None if there is no such n.

    Args:
        slides: whether each layer has a sliding window.
        usual: the n to prefer.

    Example:
        >>> window_period([True, True, False], 6), window_period([False, True], 6)
        (3, None)
    """
    for period in (usual, *range(1, len(slides) + 2)):
        if list(slides) == [bool((i + 1) % period) for i in range(len(slides))]:
            return period
    return None


def read_classifier(architecture: str, given: Settings, tensors: Shapes) -> Config:
    """The class and the labels of a model with a head for texts; nothing for other models."""
    if (tensor := f"{CLASSIFIER}.weight") not in tensors:
        return {}
    labels = rows_of(tensor, tensors, given.path)
    if answers_yes_or_no(given):
        return {"architectures": [architecture], "num_labels": 1 if labels == 2 else labels}
    names = given.items(LABELS, str, [])
    if names and len(names) != labels:
        raise given.wrong(
            LABELS, f"{labels} names", len(names), "does not fit the head", is_text=True
        )  # fmt: skip
    found = {"architectures": [architecture], "num_labels": labels}
    return {**found, **label_names(names)} if names else found


def answers_yes_or_no(given: Settings) -> bool:
    """Whether the score is the share of the first of two labels in a softmax over both, as of Qwen3-Reranker.

    It is the sigmoid of one number: that of the first label minus that of the second.
    """
    return given.prefix == "qwen3." and len(given.items(LABELS, str, [])) == 2


MODELS = ByArchitecture(
    lambda family: Architecture(family.model_type, family.architectures[0], family.gguf)
)
