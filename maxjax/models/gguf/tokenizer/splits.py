"""The ways of splitting text before tokenisation: llama.cpp's names and the steps of a ``tokenizer.json``.

llama.cpp replaces some patterns, because its regular expressions have fewer features. The patterns here
are those of the original tokenizers.

Source: ``llm_tokenizer_bpe`` and the table of ``tokenizer_pre`` in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import shown
from ..metadata import unsupported

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
QWEN2 = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
TEKKEN = rf"{_CASES % ('', '')}|\p{{N}}|{_PATHS}|{_SPACES}"
GPT4O = rf"{_CASES % (_SHORT + '?', _SHORT + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
# Kimi K2: as GPT4O, where Chinese characters are words of their own.
_NOT_HAN = tuple(f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_SHORT}?"
    rf"|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
)
_SEED = rf"{_SHORT}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
# Letters with upper and lower case, as DeepSeek lists them. Letters that an editor may compose are escaped.
_CASED = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮ\u2cf2\u2cf3Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


BYTE_LEVEL_DECODER = {
    "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
}  # fmt: skip
"""The decoder of GPT-2's kind of tokenizer."""


@dataclass(frozen=True)
class Splitting:
    """How a kind of tokenizer normalises and splits text, and its defaults.

    Attributes:
        patterns: regular expressions that split a text one after another; each splits the pieces that
            the previous one made.
        ignore_merges: whether a word that is a token is used without merging.
        adds_bos: whether a bos token is put before a text by default, if the file does not say.
        composes: whether letters and accents are composed (NFC), which llama.cpp does not do.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    @property
    def normalizer(self) -> dict[str, Any] | None:
        """The normalizer of a ``tokenizer.json``; None: there is none."""
        return {"type": "NFC"} if self.composes else None

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """The pre-tokenizer of a ``tokenizer.json``."""
        return _pre_tokenizer(self.patterns)


def _pre_tokenizer(patterns: tuple[str, ...]) -> dict[str, Any]:
    """A pre-tokenizer of these patterns; for GPT-2's pattern at the end, ``ByteLevel`` has it built in."""
    is_gpt2 = patterns[-1] == GPT2
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    last["use_regex"] = is_gpt2
    steps = [_step(pattern) for pattern in (patterns[:-1] if is_gpt2 else patterns)]
    return {"type": "Sequence", "pretokenizers": [*steps, last]} if steps else last


def _step(pattern: str) -> dict[str, Any]:
    if pattern == r"\p{N}":
        return {"type": "Digits", "individual_digits": True}
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


def _kinds(names: str, *patterns: str, **more: bool) -> dict[str, Splitting]:
    return {name: Splitting(patterns, **more) for name in names.split()}


SPLITTINGS: dict[str, Splitting] = {
    **_kinds(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 jais"
        " trillion granite-docling modern-bert roberta-bpe jina-v1-en jina-v2-code", GPT2,
    ),
    **_kinds("mpt olmo", GPT2, composes=True),
    **_kinds("starcoder refact smollm codeshell exaone minerva-7b", r"\p{N}", GPT2),
    **_kinds("command-r", r"\p{N}", GPT2, composes=True),
    **_kinds(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", LLAMA3,
        ignore_merges=True, adds_bos=True,
    ),
    **_kinds("dbrx smaug-bpe glm4 chatglm-bpe", LLAMA3),
    **_kinds("qwen2 f2llmv2", QWEN2, composes=True),
    **_kinds("qwen35", _QWEN35, composes=True),
    **_kinds("deepseek-r1-qwen stablelm2 hunyuan grok-2 megrez kormo solar-open", QWEN2),
    **_kinds("tekken", TEKKEN, ignore_merges=True, adds_bos=True),
    **_kinds("gpt-4o llama4 minimax-m2 kanana2", GPT4O),
    **_kinds("kimi-k2", KIMI),
    **_kinds("seed-coder", _SEED),
    **_kinds("poro-chat bloom gpt3-finnish", _BLOOM),
    **_kinds("viking", _BLOOM, r"\p{N}"),
    **_kinds(
        "deepseek-llm", r"[\r\n]", _CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+",
    ),
    **_kinds("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    **_kinds("deepseek-v3 hunyuan-dense joyai-llm", r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    **_kinds("falcon", r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    **_kinds("default", r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
"""The name in "tokenizer.ggml.pre" → the way of splitting text that it stands for."""
# (Pattern of a tokenizer.json, whether a word that is a token is used without merging: ignore_merges, which
# llama.cpp fixes for each name) → the name.
_PATTERNS = {
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
    (TEKKEN, True): "tekken",
    (GPT4O, False): "gpt-4o",
    (KIMI, False): "kimi-k2",
    (GPT2, False): "gpt-2",
    (GPT2.removesuffix(r"|\s+"), False): "gpt-2",
}


def pre_name(tokenizer: Mapping[str, Any], model: Mapping[str, Any], path: Any) -> str:
    """llama.cpp's name for the way in which a tokenizer of GPT-2's kind splits text.

    Raises:
        UnsupportedModelError: llama.cpp has no name for it.

    Example:
        >>> pre_name({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}, {}, None)
        'gpt-2'
    """
    for item in sequence(tokenizer.get("normalizer"), "normalizers"):
        if item.get("type") != "NFC":  # llama.cpp leaves NFC out; most texts are in NFC already
            raise unsupported(f"the normalizer {shown(item.get('type'))} in a GGUF file", path)
    steps = sequence(tokenizer.get("pre_tokenizer"), "pretokenizers")
    ignores = model.get("ignore_merges") is True
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") is True:
        kinds = ", ".join(str(step.get("type"))[:40] for step in steps)
        what = f"the pre-tokenizer {kinds}" if kinds else "a tokenizer without a pre-tokenizer"
        raise unsupported(f"{what} in a GGUF file", path)
    splits, by_words = steps[:-1], last.get("use_regex", True) is not False
    name = None
    if by_words and not splits and not ignores:
        name = "gpt-2"
    elif by_words and len(splits) == 1 and splits[0].get("type") == "Digits" and not ignores:
        name = "smollm" if splits[0].get("individual_digits") is True else None
    elif not by_words and len(splits) == 1:
        name = _PATTERNS.get((_pattern(splits[0]) or "", ignores))
    if name is None:
        listed = ", ".join(f"{step.get('type')} {step.get('pattern', '')}" for step in steps)
        what = f"the pre-tokenizer {shown(listed, 300)} with ignore_merges={ignores} in a GGUF file"
        raise unsupported(what, path)
    return name


def space_prefix(tokenizer: Mapping[str, Any], path: Any) -> bool:
    """Whether a tokenizer of Llama's kind puts a space before a text.

    Raises:
        UnsupportedModelError: the tokenizer changes texts in a way that llama.cpp does not.

    Example:
        >>> space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        >>> space_prefix({"normalizer": space, "pre_tokenizer": None}, None)
        False
    """
    prefix = replaces = False
    for item in sequence(tokenizer.get("normalizer"), "normalizers"):
        kind = item.get("type")
        if kind == "Prepend" and item.get("prepend") == "▁":
            prefix = True
        elif kind == "Replace" and item.get("content") == "▁" and _pattern(item) == " ":
            replaces = True
        else:
            raise unsupported(f"the normalizer {shown(kind)} in a GGUF file", path)
    for item in sequence(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        kind = item.get("type")
        if kind == "Metaspace" and item.get("replacement") == "▁" and item.get("split") is not True:
            given = item.get("prepend_scheme")
            old = "always" if item.get("add_prefix_space", True) else "never"
            prefix, replaces = prefix or (given or old) != "never", True
        elif not (kind == "Split" and _pattern(item) == " " and replaces):  # none are left
            raise unsupported(f"the pre-tokenizer {shown(kind)} in a GGUF file", path)
    if not replaces:
        raise unsupported("a tokenizer that does not replace spaces in a GGUF file", path)
    return prefix


def bert_flags(tokenizer: Mapping[str, Any], path: Any) -> dict[str, bool]:
    """The metadata keys for BERT's normalizer.

    Raises:
        UnsupportedModelError: the tokenizer normalises or splits text differently from BERT.
    """
    normalizer, splits = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    usual = isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer"
    if not usual or not isinstance(splits, dict) or splits.get("type") != "BertPreTokenizer":
        raise unsupported(
            "WordPiece without BERT's normalizer and pre-tokenizer in a GGUF file", path
        )
    assert isinstance(normalizer, dict)
    for key in ("clean_text", "handle_chinese_chars"):
        if normalizer.get(key, True) is not True:
            raise unsupported(f"BERT's normalizer without {key!r} in a GGUF file", path)
    found = {"normalizer.lowercase": normalizer.get("lowercase", True) is not False}
    if isinstance(normalizer.get("strip_accents"), bool):
        found["normalizer.strip_accents"] = normalizer["strip_accents"]
    return found


def sequence(value: Any, key: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer; none, one, or a Sequence."""
    if not isinstance(value, dict):
        return []
    if value.get("type") == "Sequence":
        each = value.get(key)
        return [item for item in each if isinstance(item, dict)] if isinstance(each, list) else []
    return [value]


def _pattern(step: Mapping[str, Any]) -> str | None:
    """The pattern or text of a step, if its matches stay together as pieces; else None."""
    pattern = step.get("pattern")
    if not isinstance(pattern, dict):
        return None
    if step.get("type") == "Split":
        kept = [("Isolated", False), ("Removed", True), ("MergedWithPrevious", False)]
        if (step.get("behavior"), step.get("invert") is True) not in kept:
            return None
    found = pattern.get("Regex", pattern.get("String"))
    return found if isinstance(found, str) else None
