"""Reads the text model in a checkpoint of a multimodal model, where settings are nested and names prefixed.

A multimodal model is read as the language model that it contains: :func:`text_settings` extracts the
configuration of that, and the rows ``multimodal_rows`` of ``names`` its tensors. Tensors for images and audio are
left out. In most multimodal models, ``text_config`` may be of any family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from ..errors import UnsupportedModelError, shown
from .registry import ENTRIES

# Keys outside ``text_config`` that apply to the text model too.
_TOP_LEVEL = ("quantization_config", "quantization", "dtype", "torch_dtype", "eos_token_id")
_TIE = "tie_word_embeddings"
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
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrapper:
    """A kind of multimodal model, as transformers' class for its settings reads them.

    Attributes:
        text: ``model_type`` of the text model, for a file that does not have it in ``text_config``.
        tied: whether the head is tied to the embedding table, for a file without ``tie_word_embeddings`` at its
            top level; "text": as ``text_config`` says; "either": if one of the two says so.
        text_models: the text models that occur only within multimodal models or have other defaults there, by
            ``model_type`` in ``text_config``.
        takes_any: whether the text model may be of any family; if not, it is always the same one.
        defaults: values for keys that a file leaves out, whichever the text model is.
        always: values for keys of the text model that have another meaning there, or none.
        flat: whether old files hold the text model's settings at the top level, and not in ``text_config``.
        vision: the class of the vision part: its file in ``models/vision`` and its name; "": there is none in maxjax.
    """

    text: str
    tied: bool | Literal["text", "either"] = False
    text_models: Mapping[str, TextModel] = field(default_factory=dict)
    takes_any: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = False
    vision: str = ""

    def text_model(self, name: str | None = None) -> TextModel | None:
        """Return the text model with a ``model_type`` in ``text_config``; None if no family has this type."""
        kind = (
            self.text
            if name is None or not self.takes_any and name not in self.text_models
            else name
        )
        if kind in self.text_models:
            return self.text_models[kind]
        names = (one.architectures.split() for one in ENTRIES.values() if one.model_type == kind)
        found = (one[0] for one in names if one and one[0].endswith(_DECODERS))
        architecture = next(found, None)
        if architecture is None:
            return None
        sizes = dict(zip(_SIZE_KEYS, _SIZES.get(kind, ()), strict=False))
        return TextModel(kind, architecture, {**sizes, **self.defaults}, self.always)


# How the names of decoders end.
_DECODERS = ("ForCausalLM", "LMHeadModel")
# Sizes of transformers' classes, which files of multimodal models leave out where they are the same.
_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
)
_SIZES = {
    "llama": (32_000, 4096, 11_008, 32, 32),
    "mistral": (32_000, 4096, 14_336, 32, 32),
    "qwen2": (151_936, 4096, 22_016, 32, 32),
    "qwen3": (151_936, 4096, 22_016, 32, 32),
    "qwen3_moe": (151_936, 2048, 6144, 24, 32),
    "granite": (32_000, 4096, 11_008, 32, 32),
    "gemma": (256_000, 3072, 24_576, 28, 16),
    "gemma2": (256_000, 2304, 9216, 26, 8),
    "phi3": (32_064, 3072, 8192, 32, 32),
    "cohere": (256_000, 8192, 22_528, 40, 64),
    "cohere2": (256_000, 8192, 22_528, 40, 64),
    "exaone4": (102_400, 4096, 16_384, 32, 32),
    "lfm2": (65_536, 2560, 12_288, 32, 32),
    "olmo2": (50_304, 4096, 11_008, 32, 32),
    "smollm3": (128_256, 2048, 11_008, 36, 16),
}


def _only(text: TextModel, tied: Any = False, *, flat: bool = False, vision: str = "") -> Wrapper:
    """A multimodal model whose text model is always the same."""
    texts = {text.model_type: text}
    return Wrapper(text.model_type, tied, texts, takes_any=False, flat=flat, vision=vision)


_QWEN2 = TextModel(
    "qwen2", "Qwen2ForCausalLM", {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
)
_OMNI = TextModel("qwen2", "Qwen2ForCausalLM", {"rope_theta": 1e6, "num_key_value_heads": 4})
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
_GLM4V = {"glm4v_text": _GLM4, "glm4v_moe_text": _GLM4_MOE}
_GEMMA3 = TextModel("gemma3_text", "Gemma3ForCausalLM", always={"final_logit_softcapping": None})
_GEMMA3N = TextModel("gemma3n_text", "Gemma3nForCausalLM")
_GEMMA4 = TextModel("gemma4_text", "Gemma4ForCausalLM")
_LLAMA4 = TextModel("llama4_text", "Llama4ForCausalLM")
_QWEN35 = TextModel("qwen3_5_text", "Qwen3_5ForCausalLM")
_QWEN35_MOE = TextModel("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
_DEEPSEEK_V3 = TextModel("deepseek_v3", "DeepseekV3ForCausalLM")
_EXAONE4 = TextModel("exaone4", "Exaone4ForCausalLM")
# Voxtral's files may leave out what is as in its small model.
_VOXTRAL = {
    "vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}  # fmt: skip
_EITHER_LLAMA, _EITHER_QWEN2 = Wrapper("llama", "either"), Wrapper("qwen2", "either")

# ``model_type`` of each multimodal model.
WRAPPERS: dict[str, Wrapper] = {
    "qwen2_vl": _only(_QWEN2, "either", flat=True, vision="qwen2_vl.Qwen2Vision"),
    "qwen2_5_vl": _only(_QWEN2, "either", flat=True, vision="qwen2_5_vl.Qwen25Vision"),
    "qwen3_vl": _only(_QWEN3, vision="qwen3_vl.Qwen3Vision"),
    "qwen3_vl_moe": _only(_QWEN3_MOE, vision="qwen3_vl.Qwen3Vision"),
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), _only(_OMNI)),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), _only(_OMNI_MOE)),
    "qwen3_5": _only(_QWEN35, vision="qwen3_vl.Qwen3Vision"),
    "qwen3_5_moe": _only(_QWEN35_MOE, vision="qwen3_vl.Qwen3Vision"),
    "gemma3": _only(_GEMMA3, True, vision="gemma3.Gemma3Vision"),
    "gemma3n": _only(_GEMMA3N, True),
    "gemma4": _only(_GEMMA4, True),
    "llama4": _only(_LLAMA4),
    "glm4v": Wrapper("glm4v_text", "either", _GLM4V, takes_any=False),
    "glm4v_moe": _only(_GLM4_MOE, "either"),
    "glm46v": Wrapper("glm4v_text", False, _GLM4V),
    "kimi_k25": Wrapper("deepseek_v3", True, {"kimi_k2": _DEEPSEEK_V3}),
    "exaone4_5": Wrapper("exaone4", False, {"exaone4_5_text": _EXAONE4}),
    "voxtral": Wrapper("llama", defaults=_VOXTRAL),
    "llava": Wrapper("llama", "either", vision="llava.LlavaVision"),
    "llava_next_video": _EITHER_LLAMA,
    "llava_onevision": Wrapper("qwen2", "either", vision="llava_onevision.LlavaOnevisionVision"),
    **dict.fromkeys(("fast_vlm", "video_llama_3"), _EITHER_QWEN2),
    "perception_lm": Wrapper("llama", "text"),
    "llava_next": Wrapper("llama", vision="llava_next.LlavaNextVision"),
    **dict.fromkeys(("idefics3", "smolvlm"), Wrapper("llama", vision="idefics3.Idefics3Vision")),
    **dict.fromkeys(("video_llava", "vipllava", "omniasr"), Wrapper("llama")),
    "idefics2": Wrapper("mistral"),
    **dict.fromkeys(
        ("qwen2_audio", "audioflamingo3", "musicflamingo", "vibevoice_asr"), Wrapper("qwen2")
    ),
    "qianfan_ocr": Wrapper("qwen3"),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), Wrapper("qwen3_5_text")),
    # Its text model is causal; what sees later tokens is the prompt.
    "paligemma": Wrapper(
        "gemma",
        True,
        always={"use_bidirectional_attention": False},
        vision="paligemma.PaliGemmaVision",
    ),
    "mistral3": Wrapper("mistral", True, vision="pixtral.Mistral3Vision"),
    **dict.fromkeys(("internvl", "got_ocr2", "ovis2"), Wrapper("qwen2", True)),
    **dict.fromkeys(
        ("glmasr", "deepseek_vl", "deepseek_vl_hybrid", "janus"), Wrapper("llama", True)
    ),
    **dict.fromkeys(("aya_vision", "cohere2_vision"), Wrapper("cohere2", True)),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), Wrapper("granite", True)),
    **dict.fromkeys(
        ("lighton_ocr", "qwen3_asr", "moss_transcribe_diarize"), Wrapper("qwen3", True)
    ),
    "minicpm_ocr": Wrapper("qwen3_5_text", True),
    "lfm2_vl": Wrapper("lfm2", True),
    "nemotron_h_omni": Wrapper("nemotron_h", "text"),
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), Wrapper("opt", "text")),
}
# The results of ``module_prefixes`` that are not the usual one.
_PREFIXES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), {"model.text_model.": "model."}),
    **dict.fromkeys(
        ("nemotron_h_omni", "blip-2", "instructblip", "instructblipvideo"), {"language_model.": ""}
    ),
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"),
        {"thinker.model.language_model.": "model.", "thinker.": ""},
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "llama4"), {}),
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
    "PaliGemmaForConditionalGeneration": "paligemma",
    "InternVLForConditionalGeneration": "internvl",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "smolvlm",
    "VoxtralForConditionalGeneration": "voxtral",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "LlavaNextVideoForConditionalGeneration": "llava_next_video",
    "VipLlavaForConditionalGeneration": "vipllava",
    "VideoLlavaForConditionalGeneration": "video_llava",
    "VideoLlama3ForConditionalGeneration": "video_llama_3",
    "FastVlmForConditionalGeneration": "fast_vlm",
    "PerceptionLMForConditionalGeneration": "perception_lm",
    "Idefics2ForConditionalGeneration": "idefics2",
    "AyaVisionForConditionalGeneration": "aya_vision",
    "Cohere2VisionForConditionalGeneration": "cohere2_vision",
    "GotOcr2ForConditionalGeneration": "got_ocr2",
    "Ovis2ForConditionalGeneration": "ovis2",
    "DeepseekVLForConditionalGeneration": "deepseek_vl",
    "DeepseekVLHybridForConditionalGeneration": "deepseek_vl_hybrid",
    "JanusForConditionalGeneration": "janus",
    "LightOnOcrForConditionalGeneration": "lighton_ocr",
    "QianfanOCRForConditionalGeneration": "qianfan_ocr",
    "Exaone4_5_ForConditionalGeneration": "exaone4_5",
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv4_6",
    "MiniCPMV4_7ForConditionalGeneration": "minicpmv4_7",
    "MiniCPMOcrForConditionalGeneration": "minicpm_ocr",
    "GlmAsrForConditionalGeneration": "glmasr",
    "GraniteSpeechForConditionalGeneration": "granite_speech",
    "GraniteSpeechPlusForConditionalGeneration": "granite_speech_plus",
    "AudioFlamingo3ForConditionalGeneration": "audioflamingo3",
    "MusicFlamingoForConditionalGeneration": "musicflamingo",
    "VibeVoiceAsrForConditionalGeneration": "vibevoice_asr",
    "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "OmniASRForConditionalGeneration": "omniasr",
    "MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe_diarize",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h_omni",
    "Blip2ForConditionalGeneration": "blip-2",
    "InstructBlipForConditionalGeneration": "instructblip",
    "InstructBlipVideoForConditionalGeneration": "instructblipvideo",
}


def text_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's configuration in that of a multimodal model; any other configuration unchanged.

    Raises:
        ValueError: the settings of the text model are missing or are not an object.
        UnsupportedModelError: maxjax has no family for the text model.

    Example:
        >>> text_settings({"model_type": "gemma4", "text_config": {"hidden_size": 8}})
        {'hidden_size': 8, 'tie_word_embeddings': True, 'architectures': ['Gemma4ForCausalLM'],
         'model_type': 'gemma4_text'}
    """
    kind = _kind(raw)
    wrapper = WRAPPERS.get(kind) if isinstance(kind, str) else None
    outer = raw if wrapper is None else _outer(raw)
    given = outer.get("text_config")
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"'text_config' must be an object, not {type(given).__name__}")
    if wrapper is None:
        return raw
    if given is None and isinstance(outer.get("llm_config"), Mapping):  # of Nemotron Omni
        given = outer["llm_config"]
    if given is None:
        if not wrapper.flat or "hidden_size" not in raw:
            raise ValueError("'text_config' is missing")
        given = {
            key: value for key, value in raw.items()
            if not key.endswith("_config") and key != "model_type"
        }  # fmt: skip
    inner = given.get("model_type")
    text = wrapper.text_model(inner if isinstance(inner, str) else None)
    if text is None:
        raise UnsupportedModelError(
            f"a text model of type {shown(inner)} is not supported for {kind}: "
            "maxjax.models.families() lists the supported ones"
        )
    shared = {key: outer[key] for key in _TOP_LEVEL if outer.get(key) is not None}
    tied = _is_tied(wrapper, outer.get(_TIE), given.get(_TIE))
    shared |= {} if tied is None else {_TIE: tied}
    names = {"architectures": [text.architecture], "model_type": text.model_type}
    defaults = {key: value for key, value in text.defaults.items() if _ALSO.get(key) not in given}
    return {**defaults, **_without_sections(given), **shared, **text.always, **names}


def _kind(raw: Mapping[str, Any]) -> Any:
    """The ``model_type`` that ``architectures`` stands for, or else that of the file."""
    listed = raw.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    return ARCHITECTURES.get(first) if isinstance(first, str) else raw.get("model_type")


def module_prefixes(raw: Mapping[str, Any]) -> Mapping[str, str]:
    """Return where the text model is among the modules of transformers' model of a ``config.json``.

    Returns:
        Prefix of the names there → prefix in the text model alone; empty if the model is not multimodal, or if
        transformers loads the text model alone as a language model.

    Example:
        >>> module_prefixes({"model_type": "gemma3"}), module_prefixes({"model_type": "llama"})
        ({'model.language_model.': 'model.'}, {})
    """
    kind = _kind(raw)
    usual = {"model.language_model.": "model."} if kind in WRAPPERS else {}
    return _PREFIXES.get(kind, usual)


def _is_tied(wrapper: Wrapper, outer: Any, inner: Any) -> Any:
    """``tie_word_embeddings`` of the text model; None: its default.

    Args:
        wrapper: the kind of multimodal model.
        outer, inner: the key's values at the top level and in ``text_config``; None: there is none.
    """
    if outer is not None and (outer is not False or wrapper.tied != "either"):
        return outer
    return inner if isinstance(wrapper.tied, str) else wrapper.tied


def vision_class(raw: Mapping[str, Any]) -> Any:
    """The class of the vision part of a vision-language model; None if maxjax or the settings do not have it.

    Example:
        >>> vision_class({"model_type": "llava", "vision_config": {}}).__name__, vision_class({"model_type": "llama"})
        ('LlavaVision', None)
    """
    wrapper = WRAPPERS.get(_kind(raw)) if isinstance(_kind(raw), str) else None
    tower = _outer(raw).get("vision_config") if wrapper is not None else None
    if wrapper is None or not wrapper.vision or not isinstance(tower, Mapping):
        return None
    is_pixtral = tower.get("model_type") == "pixtral" and _kind(raw) == "llava"
    found = "pixtral.PixtralVision" if is_pixtral else wrapper.vision
    file, name = found.split(".")
    return getattr(import_module(f".vision.{file}", __package__), name)


def is_multimodal(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a multimodal model whose text model is known."""
    return text_settings(raw) is not raw


def rope_sections(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of RoPE's pairs that turn by a token's time, row and column in a multimodal model; () without them.

    Example:
        >>> rope = {"rope_type": "default", "mrope_section": [16, 24, 24]}
        >>> rope_sections({"model_type": "qwen2_5_vl", "text_config": {"rope_scaling": rope}})
        (16, 24, 24)
    """
    if not is_multimodal(raw):
        return ()
    found = _rope_settings(raw).get("mrope_section")
    if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
        return ()
    return tuple(found)


def _rope_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of RoPE of the text model that have sections; empty if none have."""
    given = _outer(raw).get("text_config") or raw
    each = (given.get(name) for name in ("rope_scaling", "rope_parameters"))
    return next((one for one in each if isinstance(one, Mapping) and "mrope_section" in one), {})


def with_sections(config: Any, raw: Mapping[str, Any]) -> Any:
    """Settings of a text model, whose RoPE knows of the rows and columns of images as the whole file says."""
    sections = rope_sections(raw)
    if not sections:
        return config
    alternate = _rope_settings(raw).get("mrope_interleaved") is True
    rope = replace(config.rope_parameters, sections=sections, sections_alternate=alternate)
    return replace(config, rope_parameters=rope)


def deepstack_layers(raw: Mapping[str, Any]) -> int | None:
    """The number of layers of the text model that take features of images (Qwen3-VL); None without a list of them."""
    vision = _outer(raw).get("vision_config")
    found = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return len(found) if isinstance(found, list) else None


def _outer(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that have ``text_config``: those of the file, or of its ``thinker_config``."""
    thinker = raw.get("thinker_config")
    return {**raw, **thinker} if isinstance(thinker, Mapping) else raw


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
