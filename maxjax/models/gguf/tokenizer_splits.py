"""Floor 5. How text is split before it becomes tokens: llama.cpp's names → ``tokenizer.json``.

The other way round is pretokenizers. llama.cpp has patterns of its own where its regular
expressions are poorer; here stand those of the tokenizers that the names were made for. Above:
tokenizer_bpe.

Source: ``llm_tokenizer_bpe`` and the table of ``tokenizer_pre`` in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
_SEED = rf"{_SHORT}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
# Letters that have cases, as DeepSeek lists them. Written by number is what an editor may compose.
_CASED = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮ\u2cf2\u2cf3Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


@dataclass(frozen=True)
class Splitting:
    """What a tokenizer does to a text first, and what it is by default.

    Attributes:
        patterns: Cut after one another, each what the one before left.
        ignore_merges: Whether a word that is a token is taken as it is.
        adds_bos: Whether a text begins with a token of its own if the file does not say.
        composes: Whether accents are joined to their letters (NFC), which llama.cpp leaves out.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    @property
    def normalizer(self) -> dict[str, Any] | None:
        """That of a ``tokenizer.json``."""
        return {"type": "NFC"} if self.composes else None

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """That of a ``tokenizer.json``."""
        return _pre_tokenizer(self.patterns)


def _pre_tokenizer(patterns: tuple[str, ...]) -> dict[str, Any]:
    """The patterns in a row; GPT-2's, if it is the last, is built in."""
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
        " trillion granite-docling", GPT2,
    ),
    **_kinds("mpt olmo", GPT2, composes=True),
    **_kinds("starcoder refact smollm codeshell exaone minerva-7b", r"\p{N}", GPT2),
    **_kinds("command-r", r"\p{N}", GPT2, composes=True),
    **_kinds(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", LLAMA3,
        ignore_merges=True, adds_bos=True,
    ),
    **_kinds("dbrx smaug-bpe glm4 chatglm-bpe", LLAMA3),
    **_kinds("qwen2", QWEN2, composes=True),
    **_kinds("qwen35", _QWEN35, composes=True),
    **_kinds("deepseek-r1-qwen stablelm2 hunyuan grok-2 megrez kormo", QWEN2),
    **_kinds("tekken", TEKKEN, ignore_merges=True, adds_bos=True),
    **_kinds("gpt-4o llama4 minimax-m2", GPT4O),
    **_kinds("seed-coder", _SEED),
    **_kinds("poro-chat bloom gpt3-finnish", _BLOOM),
    **_kinds("viking", _BLOOM, r"\p{N}"),
    **_kinds(
        "deepseek-llm", r"[\r\n]", _CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+",
    ),
    **_kinds("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    **_kinds("deepseek-v3 hunyuan-dense", r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    **_kinds("falcon", r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    **_kinds("default", r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
"""The name in "tokenizer.ggml.pre" → what it stands for."""
