"""``mmproj`` files: the vision part of a model whose text half is in another GGUF file.

The class of a vision part has a table of its files, ``VisionPart.gguf``. Both files together become the tensors, the
``config.json`` and the settings of the image processor of one checkpoint of Hugging Face's.

Sources: the subclasses of ``MmprojModel`` in llama.cpp's converter, and its ``tools/mtmd/clip.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...dtype import DType
from ...errors import CheckpointFormatError, CheckpointMismatchError, shown
from ...graph.weights import GGUFWeights, WeightData
from ..multimodal import ARCHITECTURES, WRAPPERS, vision_class
from .config.read import SECTIONS, VISION
from .metadata import MAX_LAYERS, Settings, unsupported
from .names import NO_SUFFIX, FileSizes, Rule, TensorNames, plain_table, sources_of
from .pieces import computed, rows
from .sources import relaid

Config = dict[str, Any]
Tensors = dict[str, WeightData]
# llama.cpp's name of a connector → ``model_type`` of the models that may have it, by which their text halves differ.
_PROJECTORS: Mapping[str, Sequence[str]] = {
    "gemma3": ("gemma3",),
    "idefics3": ("idefics3",),
    "qwen2.5vl_merger": ("qwen2_5_vl",),
    "qwen3vl_merger": ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
}
_HINT = "Pass the file of this model as mmproj=, or load the text model alone with vision=False."


@dataclass(frozen=True)
class MmprojTable:
    """How ``mmproj`` files name the tensors and settings of a vision part.

    Attributes:
        tensors: GGUF's name of a tensor, with ``*`` for a number, → Hugging Face's, as in a ``GGUFTable``.
        read: function of the settings and the shapes of the tensors → keys of ``config.json``.
        placeholders: the token that features stand in place of; others are taken where a vocabulary lacks it.
        processor: function of the settings and ``config.json`` → ``preprocessor_config.json`` and
            ``processor_config.json``.
        rope: settings of RoPE that only code says, where pairs turn by rows and columns.
        join: function of the settings and the tensors by Hugging Face's names → tensors of a checkpoint, for files that
            hold parts of tensors.
    """

    tensors: Mapping[str, str | Rule]
    read: Callable[[Settings, Mapping[str, Sequence[int]]], Config]
    placeholders: Sequence[str]
    processor: Callable[[Settings, Config], tuple[Config, Config]]
    rope: Mapping[str, Any] = field(default_factory=dict)
    join: Callable[[Settings, Tensors], Tensors] | None = None


def whole_config(text: Config, weights: GGUFWeights, part: GGUFWeights) -> Config:
    """The content of a ``config.json`` for a model in two files.

    Args:
        text: that of the text half.
        weights: the file of the text half.
        part: the ``mmproj`` file.

    Raises:
        UnsupportedModelError: the connector, or the text half for it, is none that maxjax knows.
        CheckpointMismatchError: the files are of different models.
        CheckpointFormatError: a key is missing or wrong.
    """
    given, kind, table = _described(text, part)
    width, own = given.count("projection_dim"), text["hidden_size"]
    if width != own:
        raise CheckpointMismatchError(
            "the mmproj file is of another model", path=part._path,
            expected=f"'{given.prefix}projection_dim' {own}, as in {weights._path}", found=width, hint=_HINT,
        )  # fmt: skip
    vocabulary = Settings(weights.metadata, "tokenizer.ggml.", weights._path)
    tokens = vocabulary.items("tokens", str)
    token = _placeholder(table, tokens)
    if token is None:
        raise vocabulary.wrong(
            "tokens", f"the token {table.placeholders[0]}, which stands for pictures", "none",
            "is of a text model", is_text=True,
        )  # fmt: skip
    sections = Settings(weights.metadata, f"{weights.metadata['general.architecture']}.").items(
        SECTIONS, int, None
    )
    if sections is not None:
        rope = {"rope_type": "default", **(text.get("rope_scaling") or {}), **table.rope}
        text = {**text, "rope_scaling": {**rope, "mrope_section": sections[:3]}}
    return {
        "architectures": [next(name for name, one in ARCHITECTURES.items() if one == kind)],
        "model_type": kind, "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": tokens.index(token), **table.read(given, _shapes(part)),
    }  # fmt: skip


def vision_tensors(part: GGUFWeights) -> Tensors:
    """The tensors of an ``mmproj`` file, by the names and in the layouts of Hugging Face's checkpoints.

    Raises:
        UnsupportedModelError, CheckpointMismatchError, CheckpointFormatError: as for ``hf_names``.
    """
    given, table = _settings(part), _table(_projector(part), part)
    names = TensorNames(plain_table(table.tensors, ""), FileSizes(given))
    in_file = _unswapped(given, {name: place.data() for name, place in part.items()})
    shapes = {name: tuple(map(int, data.logical_shape)) for name, data in in_file.items()}
    found = relaid(in_file, sources_of(names, shapes, "such a vision part", part._path))
    # Files mix dtypes, and float16 of weights does not say that it has the range of activations: llama.cpp computes a
    # vision part in float32.
    found = {name: data.astype(DType.float32) for name, data in found.items()}
    return found if table.join is None else table.join(given, found)


def processor_settings(
    weights: GGUFWeights, part: GGUFWeights, config: Config
) -> tuple[Config, Config]:
    """The contents of ``preprocessor_config.json`` and ``processor_config.json`` for a model in two files.

    Args:
        weights: the file of the text half.
        part: the ``mmproj`` file.
        config: what :func:`whole_config` returns.
    """
    given, table = _settings(part), _table(_projector(part), part)
    colours = {key: given.items(key, float, count=3) for key in ("image_mean", "image_std")}
    inner, outer = table.processor(given, config)
    tokens = Settings(weights.metadata, "tokenizer.ggml.").items("tokens", str)
    return {**inner, **colours}, {"image_token": _placeholder(table, tokens), **outer}


def _described(text: Config, part: GGUFWeights) -> tuple[Settings, str, MmprojTable]:
    """The settings of a vision part, ``model_type`` of the model of both files, and the table."""
    projector = _projector(part)
    table = _table(projector, part)
    for kind in _PROJECTORS[projector]:
        wrapper = WRAPPERS[kind]
        found = wrapper.text_model(text["model_type"] if wrapper.takes_any else None)
        if found is not None and found.model_type == text["model_type"]:
            return _settings(part), kind, table
    raise CheckpointMismatchError(
        "the mmproj file is of another model", path=part._path,
        expected=f"one for a text model of type {text['model_type']}", found=f"projector_type '{projector}'",
        hint=_HINT,
    )  # fmt: skip


def _projector(part: GGUFWeights) -> str:
    """llama.cpp's name of the connector of an ``mmproj`` file."""
    general = Settings(part.metadata, "", part._path)
    if (found := general.text("general.architecture")) != VISION:
        raise CheckpointFormatError(
            "not an mmproj file", path=part._path, expected=f"the architecture '{VISION}'",
            found=shown(found),
        )  # fmt: skip
    default = general.text("clip.vision.projector_type", None)
    return general.text("clip.projector_type", default or ...)


def _table(projector: str, part: GGUFWeights) -> MmprojTable:
    kinds = _PROJECTORS.get(projector)
    if kinds is None:
        what = f"an mmproj file with projector_type {shown(projector)} (maxjax supports {', '.join(_PROJECTORS)})"
        raise unsupported(what, part._path)
    return vision_class({"model_type": kinds[0], "vision_config": {}}).gguf


def _settings(part: GGUFWeights) -> Settings:
    return Settings(part.metadata, "clip.vision.", part._path)


def _placeholder(table: MmprojTable, tokens: Sequence[str]) -> str | None:
    """The token of a vocabulary that features stand in place of."""
    return next((token for token in table.placeholders if token in tokens), None)


def _shapes(part: GGUFWeights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, place.data().logical_shape)) for name, place in part.items()}


def _unswapped(given: Settings, found: Tensors) -> Tensors:
    """The tensors, with the two maps of an MLP by their names of today: files of 2024 have them the other way round."""
    first = found.get("v.blk.0.ffn_down.weight")
    sizes = [given.count(key) for key in ("embedding_length", "feed_forward_length")]
    if first is None or list(map(int, first.logical_shape)) != sizes[::-1] or sizes[0] == sizes[1]:
        return found
    other = {".ffn_up.": ".ffn_down.", ".ffn_down.": ".ffn_up."}
    return {
        next((name.replace(a, b) for a, b in other.items() if a in name), name): data
        for name, data in found.items()
    }


# --- what several vision parts have


def tower_config(given: Settings) -> Config:
    """The sizes of a tower, by their keys in ``vision_config`` of a CLIP or a SigLIP."""
    return {
        "hidden_size": given.count("embedding_length"),
        "intermediate_size": given.count("feed_forward_length"),
        "num_hidden_layers": given.count("block_count", maximum=MAX_LAYERS),
        "num_attention_heads": given.count("attention.head_count"),
        "image_size": given.count("image_size"),
        "patch_size": given.count("patch_size"),
        "layer_norm_eps": given.number("attention.layer_norm_epsilon"),
        "hidden_act": _activation(given),
    }


def qwen_config(given: Settings) -> Config:
    """The sizes of a tower, by their keys in ``vision_config`` of Qwen's models."""
    return {
        "hidden_size": given.count("embedding_length"),
        "intermediate_size": given.count("feed_forward_length"),
        "depth": given.count("block_count", maximum=MAX_LAYERS),
        "num_heads": given.count("attention.head_count"),
        "patch_size": given.count("patch_size"),
        "spatial_merge_size": given.count("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "out_hidden_size": given.count("projection_dim"),
        "hidden_act": _activation(given),
    }


def _activation(given: Settings) -> str:
    of = Settings(given.metadata, "clip.", given.path)
    if of.flag("use_gelu", False):
        return "gelu_pytorch_tanh"
    return "silu" if of.flag("use_silu", False) else "quick_gelu"


def tower_names(prefix: str) -> dict[str, str]:
    """The names of the tensors of a CLIP or a SigLIP.

    Args:
        prefix: what precedes ``encoder`` in Hugging Face's names.
    """
    layer = f"{prefix}encoder.layers.*."
    return {
        "v.patch_embd": f"{prefix}embeddings.patch_embedding",
        "v.position_embd": f"{prefix}embeddings.position_embedding",
        "v.post_ln": f"{prefix}post_layernorm",
        "v.blk.*.ln1": f"{layer}layer_norm1",
        "v.blk.*.attn_q": f"{layer}self_attn.q_proj",
        "v.blk.*.attn_k": f"{layer}self_attn.k_proj",
        "v.blk.*.attn_v": f"{layer}self_attn.v_proj",
        "v.blk.*.attn_out": f"{layer}self_attn.out_proj",
        "v.blk.*.ln2": f"{layer}layer_norm2",
        "v.blk.*.ffn_up": f"{layer}mlp.fc1",
        "v.blk.*.ffn_down": f"{layer}mlp.fc2",
    }


# The names that the towers of Qwen's models share. A convolution over two frames is in two tensors.
QWEN_NAMES: Mapping[str, str | Rule] = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.patch_embd.weight.*": Rule("visual.patch_embed.proj.weight.*", only=NO_SUFFIX),
    "v.blk.*.ln1": "visual.blocks.*.norm1",
    "v.blk.*.attn_qkv": "visual.blocks.*.attn.qkv",
    "v.blk.*.attn_out": "visual.blocks.*.attn.proj",
    "v.blk.*.ln2": "visual.blocks.*.norm2",
}


def with_frames(found: Tensors) -> Tensors:
    """The tensors with the convolution over patches of two frames in one."""
    name = "visual.patch_embed.proj.weight"
    parts = [found[one] for one in (name, f"{name}.1") if one in found]
    if len(parts) < 2:
        return found  # what is missing is an error when the values are loaded
    shape = tuple(map(int, parts[0].logical_shape))
    rest = {one: data for one, data in found.items() if one != f"{name}.1"}
    stack = lambda *frames: np.stack(frames, axis=2)
    return {**rest, name: computed(name, parts, stack, (*shape[:2], 2, *shape[2:]))}


def with_one_map(found: Tensors) -> Tensors:
    """The tensors with the queries, keys and values of a layer, where they are apart, in one."""
    done = dict(found)
    for name in found:
        if ".attn.q." in name:
            each = [done.pop(name.replace(".attn.q.", f".attn.{one}."), None) for one in "qkv"]
            whole = name.replace(".attn.q.", ".attn.qkv.")
            parts = [data for data in each if data is not None]
            count = sum(int(data.shape[0]) for data in parts)
            done[whole] = rows(whole, parts, np.arange(count))
    return done


def qwen_processor(
    name: str, pixels: tuple[int, int], given: Settings, config: Config
) -> tuple[Config, Config]:
    """The settings of an image processor of Qwen's models.

    Args:
        name: the class of the processor.
        pixels: bounds of the number of pixels of a picture, for files without them.
        given: the settings.
        config: the content of ``config.json``.
    """
    tower = config["vision_config"]
    least, most = (
        given.count(key, default)
        for key, default in zip(("image_min_pixels", "image_max_pixels"), pixels, strict=True)
    )
    inner = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": tower["patch_size"],
        "merge_size": tower["spatial_merge_size"], "temporal_patch_size": tower["temporal_patch_size"],
        "size": {"shortest_edge": least, "longest_edge": most},
    }  # fmt: skip
    return inner, {"processor_class": name}
