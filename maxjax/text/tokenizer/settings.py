"""Settings of ``tokenizer_config.json`` that change how a ``tokenizer.json`` splits text.

transformers' classes build their steps anew from such settings, so that they have precedence over the file. Those
that are one value in the file are applied to it. Of the others, which are steps of their own, a warning says so if
the file does otherwise. ``add_bos_token`` and ``add_eos_token`` do nothing where there is a ``tokenizer.json``,
here as in transformers.

Source: the classes of transformers and ``_patch_mistral_regex`` of its tokenization_utils_tokenizers.py, version 5.24.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from ...models.gguf.tokenizer.splits import TEKKEN, sequence

_LOG = logging.getLogger("maxjax")

# The classes that read a setting, without "Tokenizer" and "Fast".
_BERTS = ("Bert", "DistilBert", "Electra", "MPNet")
_BYTE_LEVELS = ("GPT2", "Qwen2", "GPTNeoX", "Cohere", "Roberta", "CodeGen", "Bart", "Deberta")
_SPACES = ("XLMRoberta", "Camembert", "Albert", "DebertaV2")
# The classes whose ``model_input_names`` have token types, and the types of models with such a class.
_TYPED = frozenset(
    "Bert Electra ConvBert SqueezeBert MobileBert LayoutLM Lxmert DPRContextEncoder DPRQuestionEncoder Deberta "
    "DebertaV2 FNet LayoutLMv2 MarkupLM Tapas Canine".split()
)
_TYPED_MODELS = frozenset(
    "bert distilbert electra convbert squeezebert mobilebert layoutlm ernie megatron-bert nezha nomic_bert deberta "
    "deberta-v2 dpr fnet lxmert".split()
)
_NORMALIZER = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}  # fmt: skip
_MISTRALS = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
# transformers looks at larger vocabularies only.
_MISTRAL_SIZE = 100_000


def apply_settings(
    document: Any, settings: Mapping[str, Any], config: Mapping[str, Any], path: Any
) -> bool:
    """Change the content of a ``tokenizer.json`` to what ``tokenizer_config.json`` says.

    Args:
        document: the content of ``tokenizer.json``, which is changed.
        settings: the content of ``tokenizer_config.json``.
        config: the content of ``config.json``; empty if there is none.
        path: the path of ``tokenizer.json``, for messages.

    Returns:
        Whether something has changed.
    """
    if not isinstance(document, dict):
        return False
    named = settings.get("tokenizer_class")
    kind = named.removesuffix("Fast").removesuffix("Tokenizer") if isinstance(named, str) else ""
    steps = sequence(document.get("pre_tokenizer"), "pretokenizers")
    changes: list[tuple[Any, str, Any]] = []  # a step, its key, the value
    normalizer = document.get("normalizer")
    if (
        kind in _BERTS
        and isinstance(normalizer, dict)
        and normalizer.get("type") == "BertNormalizer"
    ):
        given = {new: settings.get(old) for old, new in _NORMALIZER.items()}
        changes += [(normalizer, key, v) for key, v in given.items() if isinstance(v, bool)]
    adds = settings.get("add_prefix_space")
    if isinstance(adds, bool) and kind in _BYTE_LEVELS:
        found = [step for step in steps if step.get("type") == "ByteLevel"]
        changes += [(step, "add_prefix_space", adds) for step in found]
    if isinstance(adds, bool) and kind in _SPACES:
        found = [*steps, *sequence(document.get("decoder"), "decoders")]
        scheme = "always" if adds else "first" if kind == "DebertaV2" else "never"
        changes += [(s, "prepend_scheme", scheme) for s in found if s.get("type") == "Metaspace"]
    changed = [(step, key, value) for step, key, value in changes if step.get(key) != value]
    for step, key, value in changed:
        step[key] = value
    _warn_of_others(document, settings, kind, path)
    is_fixed = settings.get("fix_mistral_regex") is True and _fix_mistral_regex(document, config)
    return is_fixed or bool(changed)


def gives_token_types(settings: Mapping[str, Any], config: Mapping[str, Any]) -> bool | None:
    """Return whether transformers' tokenizer gives a model token types; None if the files do not tell.

    Without ``model_input_names``, its class decides: the one that the files name, or that of the model's type.

    Args:
        settings: the content of ``tokenizer_config.json``.
        config: the content of ``config.json``; empty if there is none.
    """
    inputs = settings.get("model_input_names")
    if isinstance(inputs, list):
        return "token_type_ids" in inputs
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if isinstance(named, str):
        return named.removesuffix("Fast").removesuffix("Tokenizer") in _TYPED
    model_type = config.get("model_type")
    return model_type in _TYPED_MODELS if isinstance(model_type, str) else None


def _fix_mistral_regex(document: Any, config: Mapping[str, Any]) -> bool:
    """Give the tokenizer of a Mistral model the expression of its ``tekken.json``; return whether it was done.

    Some of their ``tokenizer.json`` have another one, by which "don't" and others are split differently.
    """
    current, model = document.get("pre_tokenizer"), document.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = document.get("added_tokens")
    size = sum(len(found) for found in (vocab, added) if isinstance(found, (dict, list)))
    if not config or not isinstance(current, dict) or size <= _MISTRAL_SIZE:
        return False
    version, model_type = config.get("transformers_version"), config.get("model_type")
    # Files that transformers 5 has written are right.
    is_new = isinstance(version, str) and re.match(r"([5-9]|\d\d)\.(?!0\.0\.?(dev|rc))", version)
    if is_new or (model_type is not None and model_type not in _MISTRALS):
        return False
    split = {"type": "Split", "pattern": {"Regex": TEKKEN}, "behavior": "Isolated", "invert": False}
    steps = sequence(current, "pretokenizers")
    if current.get("type") == "Sequence":
        steps = steps[1:]
    elif current.get("type") == "Metaspace":
        level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        steps = [{"type": "ByteLevel", **level}]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *steps]}
    return True


def _warn_of_others(
    document: Mapping[str, Any], settings: Mapping[str, Any], kind: str, path: Any
) -> None:
    """Warn of settings that are not applied, where the file does otherwise."""
    steps = {
        step.get("type"): step
        for part, key in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"))
        for step in sequence(document.get(part), key)
    }
    space = steps.get("Metaspace", {}).get("prepend_scheme")
    done: dict[str, bool] = {}
    if kind in ("Albert", "DebertaV2"):
        done["do_lower_case"] = "Lowercase" in steps
    if kind == "Albert":
        done["keep_accents"] = "StripAccents" not in steps
    if kind == "DebertaV2":
        done["split_by_punct"] = "Punctuation" in steps
    if kind == "Llama" and ("Prepend" in steps or "Metaspace" in steps or "Replace" in steps):
        done["add_prefix_space"] = "Prepend" in steps or space in ("always", "first")
        done["legacy"] = space != "first"
    wrong = {k: settings[k] for k in done if settings.get(k) is (not done[k])}
    if wrong:
        listed = ", ".join(f"{key}={str(value).lower()}" for key, value in wrong.items())
        _LOG.warning(
            "%s: %s of tokenizer_config.json is not applied: tokenizer.json decides. transformers"
            " may split texts differently", path, listed,
        )  # fmt: skip
