"""Reads the text model in a checkpoint of a multimodal model, where settings are nested and names prefixed.

A multimodal model is read as the language model that it contains: ``text_settings`` extracts the
configuration of that, and the rows ``MULTIMODAL`` of ``names`` its tensors. Tensors for images and audio are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import UnsupportedModelError

# Keys outside ``text_config`` that apply to the text model too.
_TOP_LEVEL = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
# Keys that mean the same as another one, which files may have instead.
_ALSO = {"num_local_experts": "num_experts"}
# RoPE settings for the positions of images. A text token has the same position in all sections.
_SECTIONS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TextModel:
    """The text model of a kind of multimodal model.

    Attributes:
        model_type, architecture: names of the text model alone.
        defaults: values for keys that a file leaves out, where they differ from the defaults of
            ``model_type``.
        always: values for keys that transformers' code of the model ignores, whatever a file says.
        flat: whether old files hold its settings at the top level, and not in ``text_config``.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = False
    always: Mapping[str, Any] = field(default_factory=dict)


_MISTRAL = TextModel("mistral", "MistralForCausalLM")
_MINISTRAL = TextModel("ministral3", "Ministral3ForCausalLM")
_QWEN2 = TextModel(
    "qwen2", "Qwen2ForCausalLM",
    {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}, True,
)  # fmt: skip
_OMNI = TextModel(
    "qwen2", "Qwen2ForCausalLM",
    {"rope_theta": 1e6, "tie_word_embeddings": True, "num_key_value_heads": 4},
)  # fmt: skip
_QWEN3 = TextModel(
    "qwen3", "Qwen3ForCausalLM", {"rope_theta": 5e5, "max_position_embeddings": 128_000}
)
_QWEN3_MOE = TextModel(
    "qwen3_moe", "Qwen3MoeForCausalLM",
    {
        "rope_theta": 5e5, "max_position_embeddings": 128_000, "num_key_value_heads": 16,
        # By the name that is looked at second: files have it or num_experts.
        "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    },
    always={"norm_topk_prob": True},
)  # fmt: skip
# LLaVA's files leave out values that are transformers' defaults for a Llama, Mistral or Qwen 2.
_USUAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_INSIDE = {
    "llama": TextModel(
        "llama", "LlamaForCausalLM", {"vocab_size": 32_000, **_USUAL, "intermediate_size": 11_008}
    ),
    "mistral": TextModel(
        "mistral", "MistralForCausalLM",
        {"vocab_size": 32_000, **_USUAL, "intermediate_size": 14_336, "num_key_value_heads": 8},
    ),
    "qwen2": TextModel(
        "qwen2", "Qwen2ForCausalLM", {"vocab_size": 151_936, **_USUAL, "intermediate_size": 22_016}
    ),
    "qwen3": TextModel("qwen3", "Qwen3ForCausalLM"),
}  # fmt: skip
# Voxtral's files may leave out what is as in its small model, whatever its text model is.
_SMALL_VOXTRAL = {
    "vocab_size": 131_072, **_USUAL, "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 30, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e8,
}  # fmt: skip
_LLAMA: dict[str | None, TextModel] = {None: _INSIDE["llama"], **_INSIDE}
_VOXTRAL = {name: replace(text, defaults=_SMALL_VOXTRAL) for name, text in _LLAMA.items()}
_OF_QWEN2: dict[str | None, TextModel] = {None: _INSIDE["qwen2"], **_INSIDE}
_OMNI_MOE = TextModel(
    "qwen3_moe", "Qwen3MoeForCausalLM", {"rope_theta": 1e6, "norm_topk_prob": True}
)
_GLM4 = TextModel(
    "glm4", "Glm4ForCausalLM", {"rms_norm_eps": 1e-5, "max_position_embeddings": 32_768},
    always={"attention_bias": True},
)  # fmt: skip
_GLM4_MOE = TextModel(
    "glm4_moe", "Glm4MoeForCausalLM", {"attention_bias": True, "max_position_embeddings": 65_536},
    always={"use_qk_norm": False},
)  # fmt: skip
_GLM4V = {None: _GLM4, "glm4v_text": _GLM4, "glm4v_moe_text": _GLM4_MOE}
_LFM2 = TextModel("lfm2", "Lfm2ForCausalLM")
_QWEN35 = TextModel("qwen3_5_text", "Qwen3_5ForCausalLM")
_QWEN35_MOE = TextModel("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
_DEEPSEEK_V3 = TextModel("deepseek_v3", "DeepseekV3ForCausalLM")
_GEMMA3N = TextModel("gemma3n_text", "Gemma3nForCausalLM")
_GEMMA4 = TextModel("gemma4_text", "Gemma4ForCausalLM")
_GEMMA3 = TextModel("gemma3_text", "Gemma3ForCausalLM")
_LLAMA4 = TextModel("llama4_text", "Llama4ForCausalLM")

# ``model_type`` of a multimodal model → its text models, by ``model_type`` in ``text_config``. None is
# the key for files without a known one there, or with the text model's settings at the top level.
TEXTS: dict[str, dict[str | None, TextModel]] = {
    "mistral3": {None: _MISTRAL, "mistral": _MISTRAL, "ministral3": _MINISTRAL},
    "qwen2_vl": {None: _QWEN2},
    "qwen2_5_vl": {None: _QWEN2},
    "qwen3_vl": {None: _QWEN3},
    "qwen3_vl_moe": {None: _QWEN3_MOE},
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), {None: _OMNI}),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), {None: _OMNI_MOE}),
    **dict.fromkeys(("glm4v", "glm46v"), _GLM4V),
    "glm4v_moe": {None: _GLM4_MOE},
    "qwen3_5": {None: _QWEN35},
    "qwen3_5_moe": {None: _QWEN35_MOE},
    "kimi_k25": {None: _DEEPSEEK_V3},
    "gemma3": {None: _GEMMA3},
    "gemma3n": {None: _GEMMA3N},
    "gemma4": {None: _GEMMA4},
    "llama4": {None: _LLAMA4},
    "lfm2_vl": {None: _LFM2},
    **dict.fromkeys(("llava", "llava_next", "idefics3", "smolvlm"), _LLAMA),
    "voxtral": _VOXTRAL,
    **dict.fromkeys(("llava_onevision", "internvl", "qwen2_audio"), _OF_QWEN2),
}
# ``architectures`` of multimodal models → their ``model_type``.
ARCHITECTURES: dict[str, str] = {
    "Mistral3ForConditionalGeneration": "mistral3",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    **dict.fromkeys(("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"), "qwen2_5_omni"),
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni_thinker",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen3_omni_moe_thinker",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm46VForConditionalGeneration": "glm46v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "Kimi_K25ForConditionalGeneration": "kimi_k25",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Llama4ForConditionalGeneration": "llama4",
    "Lfm2VlForConditionalGeneration": "lfm2_vl",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision",
    "InternVLForConditionalGeneration": "internvl",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "VoxtralForConditionalGeneration": "voxtral",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
}


def text_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's configuration in that of a multimodal model; any other configuration unchanged.

    Raises:
        ValueError: the settings of the text model are missing or are not an object.
        UnsupportedModelError: maxjax does not know multimodal models with a text model of that type.

    Example:
        >>> text_settings({"model_type": "gemma3", "text_config": {"hidden_size": 8}})
        {'hidden_size': 8, 'architectures': ['Gemma3ForCausalLM'], 'model_type': 'gemma3_text'}
    """
    listed = raw.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    kind = ARCHITECTURES.get(first) if isinstance(first, str) else raw.get("model_type")
    texts, outer = TEXTS.get(kind) if isinstance(kind, str) else None, raw.get("thinker_config")
    outer = raw if texts is None or not isinstance(outer, Mapping) else {**raw, **outer}
    given = outer.get("text_config")
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"'text_config' must be an object, not {type(given).__name__}")
    if texts is None:
        return raw
    if given is None:
        if not texts[None].flat or "hidden_size" not in raw:
            raise ValueError("'text_config' is missing")
        given = {key: value for key, value in raw.items() if not key.endswith("_config")}
    inner = given.get("model_type")
    text = texts.get(inner) if isinstance(inner, str) else None
    if text is None and inner is not None and len({*texts} - {None}) > 1:
        known = ", ".join(sorted(name for name in texts if name is not None))
        raise UnsupportedModelError(
            f"{kind} with a text model of type {str(inner)[:60]!r} (supported are {known})"
        )
    text = text or texts[None]
    shared = {key: outer[key] for key in _TOP_LEVEL if outer.get(key) is not None}
    names = {"architectures": [text.architecture], "model_type": text.model_type}
    defaults = {key: value for key, value in text.defaults.items() if _ALSO.get(key) not in given}
    return {**defaults, **_without_sections(given), **shared, **text.always, **names}


def is_multimodal(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a multimodal model whose text model is known."""
    return text_settings(raw) is not raw


def _without_sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without RoPE's sections for images."""
    found = dict(given)
    for name in ("rope_scaling", "rope_parameters"):
        rope = found.get(name)
        if isinstance(rope, Mapping) and any(key in rope for key in _SECTIONS):
            kept = {key: value for key, value in rope.items() if key not in _SECTIONS}
            plain = ("mrope", "default")
            kept = {key: "default" if value in plain else value for key, value in kept.items()}
            found[name] = kept if set(kept) - {"type", "rope_type"} else None
    return found
