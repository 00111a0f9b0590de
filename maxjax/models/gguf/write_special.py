"""Floor 5. Special tokens and chat templates on their way into a GGUF file.

Below: metadata. Above: write_tokenizer.

Source: ``SpecialVocab`` in gguf-py's ``vocab.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointFormatError
from .metadata import short

# tokenizer_config.json's names of special tokens → GGUF's, and of BERT's, where [CLS] begins.
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding",
            "mask": "mask"}  # fmt: skip
BERT_SPECIAL = {"cls": "bos", "sep": "seperator", "unk": "unknown", "pad": "padding",
                 "mask": "mask"}  # fmt: skip


def special_ids(
    ids: Mapping[str, int],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    names: Mapping[str, str],
    path: Any,
) -> dict[str, int]:
    """The numbers of special tokens: as the tokenizer's settings say, else the configuration."""
    found = {}
    for name, key in names.items():
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = ids.get(token) if isinstance(token, str) else None
        if index is None:
            given = config.get(f"{name}_token_id")
            given = given[0] if isinstance(given, list) and given else given
            is_there = type(given) is int and given >= 0
            index = given if is_there and (not ids or given in ids.values()) else None
        if index is None and names is BERT_SPECIAL:
            index = ids.get(f"[{name.upper()}]")
        if index is not None:
            found[f"{key}_token_id"] = index
    return found


def added_around(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], ids: Mapping[str, Any]
) -> dict[str, bool]:
    """Whether a text gets a token before it and one after it."""
    before, after = _around(tokenizer.get("post_processor"))
    found = {"add_bos_token": before, "add_eos_token": after}
    for key in found:
        if isinstance(settings.get(key), bool):
            found[key] = settings[key]
    # llama.cpp adds whatever token stands there by default.
    found["add_bos_token"] &= "bos_token_id" in ids
    found["add_eos_token"] &= "eos_token_id" in ids
    return found


def _around(processor: Any) -> tuple[bool, bool]:
    """Whether a template has a special token before a single text, and one after it."""
    if not isinstance(processor, dict):
        return False, False
    if processor.get("type") == "Sequence":
        each = processor.get("processors")
        found = [_around(p) for p in each] if isinstance(each, list) else []
        return any(a for a, _ in found), any(b for _, b in found)
    single = processor.get("single")
    if processor.get("type") != "TemplateProcessing" or not isinstance(single, list) or not single:
        return False, False
    marks = ["SpecialToken" in item for item in single if isinstance(item, dict)]
    return (marks[0], marks[-1]) if marks else (False, False)


def templates(settings: Mapping[str, Any], given: str | None, path: Any) -> dict[str, Any]:
    """The chat templates: one, or several with names."""
    listed = given if given is not None else settings.get("chat_template")
    if listed is None:
        return {}
    listed = [{"name": "default", "template": listed}] if isinstance(listed, str) else listed
    found: dict[str, Any] = {}
    names = []
    for item in listed if isinstance(listed, list) else [listed]:
        if not isinstance(item, dict):
            raise wrong("chat_template", "a string, or a list of objects", item, path)
        name, text = typed(item, "name", str, path), typed(item, "template", str, path)
        if name == "default":
            found["tokenizer.chat_template"] = text
        else:
            names.append(name)
            found[f"tokenizer.chat_template.{name}"] = text
    return {"tokenizer.chat_templates": names, **found} if names else found


def typed(of: Mapping[str, Any], key: str, kind: type, path: Any, default: Any = ...) -> Any:
    value = of.get(key)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind):
        raise wrong(key, f"a {kind.__name__}", value, path)
    return value


def wrong(key: str, expected: str, found: Any, path: Any) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"'{key}' of the tokenizer is wrong", path=path, expected=expected, found=short(found)
    )
