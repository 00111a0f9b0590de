"""Floor 5. How text is split before it becomes tokens: ``tokenizer.json`` → llama.cpp's names.

Below: metadata, tokenizer_splits. Above: write_tokenizer.

Source: ``llm_tokenizer_bpe`` and the table of ``tokenizer_pre`` in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .metadata import short, unsupported
from .tokenizer_splits import GPT2, GPT4O, LLAMA3, QWEN2, TEKKEN

# The pattern of a tokenizer.json, and whether a word that is a token is taken as it is
# (ignore_merges, which llama.cpp has in its code) → the name.
_PATTERNS = {
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
    (TEKKEN, True): "tekken",
    (GPT4O, False): "gpt-4o",
    (GPT2, False): "gpt-2",
    (GPT2.removesuffix(r"|\s+"), False): "gpt-2",
}


def pre_name(tokenizer: Mapping[str, Any], model: Mapping[str, Any], path: Any) -> str:
    """The name that llama.cpp has for how a tokenizer of GPT-2's kind splits text.

    Raises:
        UnsupportedModelError: It has none.

    Example:
        >>> pre_name({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}, {}, None)
        'gpt-2'
    """
    for item in _sequence(tokenizer.get("normalizer"), "normalizers"):
        if item.get("type") != "NFC":  # llama.cpp leaves it out, as texts mostly are so already
            raise unsupported(f"the normalizer {short(item.get('type'))} in a GGUF file", path)
    steps = _sequence(tokenizer.get("pre_tokenizer"), "pretokenizers")
    ignores = model.get("ignore_merges") is True
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") is True:
        kinds = ", ".join(str(step.get("type"))[:40] for step in steps) or "nothing"
        raise unsupported(f"text split by {kinds} in a GGUF file", path)
    splits, whole = steps[:-1], last.get("use_regex", True) is not False
    name = None
    if whole and not splits and not ignores:
        name = "gpt-2"
    elif whole and len(splits) == 1 and splits[0].get("type") == "Digits" and not ignores:
        name = "smollm" if splits[0].get("individual_digits") is True else None
    elif not whole and len(splits) == 1:
        name = _PATTERNS.get((_pattern(splits[0]) or "", ignores))
    if name is None:
        how = f"; ignore_merges is {ignores}"
        raise unsupported(f"text split by {short(steps and _shown(steps), 300)}{how}", path)
    return name


def space_prefix(tokenizer: Mapping[str, Any], path: Any) -> bool:
    """Whether a tokenizer of Llama's kind puts a space before a text.

    Raises:
        UnsupportedModelError: It does something else to texts that llama.cpp does not.

    Example:
        >>> space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        >>> space_prefix({"normalizer": space, "pre_tokenizer": None}, None)
        False
    """
    prefix = replaces = False
    for item in _sequence(tokenizer.get("normalizer"), "normalizers"):
        kind = item.get("type")
        if kind == "Prepend" and item.get("prepend") == "▁":
            prefix = True
        elif kind == "Replace" and item.get("content") == "▁" and _pattern(item) == " ":
            replaces = True
        else:
            raise unsupported(f"the normalizer {short(kind)} in a GGUF file", path)
    for item in _sequence(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        kind = item.get("type")
        if kind == "Metaspace" and item.get("replacement") == "▁" and item.get("split") is not True:
            given = item.get("prepend_scheme")
            old = "always" if item.get("add_prefix_space", True) else "never"
            prefix, replaces = prefix or (given or old) != "never", True
        elif not (kind == "Split" and _pattern(item) == " " and replaces):  # none are left
            raise unsupported(f"text split by {short(kind)} in a GGUF file", path)
    if not replaces:
        raise unsupported("a tokenizer that leaves spaces in a GGUF file", path)
    return prefix


def bert_flags(tokenizer: Mapping[str, Any], path: Any) -> dict[str, bool]:
    """What is done to a text before BERT's tokens are looked for.

    Raises:
        UnsupportedModelError: It is not what BERT does.
    """
    normalizer, splits = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    usual = isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer"
    if not usual or not isinstance(splits, dict) or splits.get("type") != "BertPreTokenizer":
        raise unsupported("WordPiece without BERT's normalizer and splitting in a GGUF file", path)
    assert isinstance(normalizer, dict)
    for key in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(key, True) is not True:
            raise unsupported(f"BERT's normalizer without {key!r} in a GGUF file", path)
    found = {"normalizer.lowercase": normalizer.get("lowercase", True) is not False}
    if isinstance(normalizer.get("strip_accents"), bool):
        found["normalizer.strip_accents"] = normalizer["strip_accents"]
    return found


def _sequence(value: Any, key: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer; none, one, or a Sequence."""
    if not isinstance(value, dict):
        return []
    if value.get("type") == "Sequence":
        each = value.get(key)
        return [item for item in each if isinstance(item, dict)] if isinstance(each, list) else []
    return [value]


def _pattern(step: Mapping[str, Any]) -> str | None:
    """The pattern or the text that a step looks for, if matches are what stays together."""
    pattern = step.get("pattern")
    if not isinstance(pattern, dict):
        return None
    if step.get("type") == "Split":
        kept = {("Isolated", False), ("Removed", True), ("MergedWithPrevious", False)}
        if (step.get("behavior"), step.get("invert") is True) not in kept:
            return None
    found = pattern.get("Regex", pattern.get("String"))
    return found if isinstance(found, str) else None


def _shown(steps: list[Mapping[str, Any]]) -> str:
    return ", ".join(f"{step.get('type')} {step.get('pattern', '')}" for step in steps)
