"""The decoders of the ``tokenizers`` package, applied to one token at a time.

That package decodes a complete list; here each step takes a token's text and returns the text that
is certain by then. The package's ``DecodeStream``, and a window over the last tokens, return other
text than decoding the list: for bytes that are not valid text, after runs of byte tokens, and where
spaces are stripped at the ends.

Source: ``decoders/`` and ``pre_tokenizers/byte_level.rs`` of the package, version 0.23.
"""

from __future__ import annotations

import codecs
import json
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from ..errors import UserInputError

_BYTE = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")
# The replacements of transformers' clean-up, in its order.
_SPACES = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
# WordPiece's own clean-up has one more.
_CLEANUP = (*_SPACES[:7], (" do not", " don't"), *_SPACES[7:])


def token_id(value: Any) -> int:
    """A token id, also one that is a tensor of one number, as an int.

    Raises:
        TypeError: it is not an integer.
        UserInputError: it is not from 0 to 2**32 - 1.
    """
    try:
        # A TensorValue has no __index__; the number in its array has.
        number = operator.index(np.asarray(value)[()] if hasattr(value, "__array__") else value)
    except TypeError:
        raise TypeError(f"a token id must be an integer, not {type(value).__name__}") from None
    if not 0 <= number < 1 << 32:
        raise UserInputError(f"{number} is not a token id")
    return number


def is_byte(token: str | None) -> bool:
    """Return whether a token is one for a single byte, such as <0xE2>."""
    return token is not None and _BYTE.fullmatch(token) is not None


class DecoderStep(Protocol):
    """A step of a decoder: texts of tokens → texts of tokens; ``end`` returns what was held back."""

    def feed(self, text: str) -> list[str]: ...

    def end(self) -> list[str]: ...


def steps_of(backend: Any) -> list[DecoderStep] | None:
    """The steps of a tokenizer's decoder; None if one of them has no implementation here."""
    decoder = backend.decoder
    if decoder is None:
        return [_EachToken(lambda i, text: " " + text if i else text)]
    try:
        data = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return None
    listed = data.get("decoders") if data.get("type") == "Sequence" else [data]
    steps: list[DecoderStep] = []
    is_fused = False  # whether all tokens have been fused into one, of which later steps see parts
    for item in listed or ():
        kind = item.get("type")
        if kind == "Fuse":
            is_fused = True
            continue
        if kind == "Strip":
            step = _strip(item, is_fused)
        else:
            step = None if is_fused or kind not in _KINDS else _KINDS[kind](item)
        if step is None:
            return None
        steps.append(step)
        is_fused = is_fused or kind == "ByteLevel"
    return steps


def through(steps: list[DecoderStep], texts: list[str]) -> str:
    """The text that is certain after the steps were fed these texts."""
    for step in steps:
        texts = [out for text in texts for out in step.feed(text)]
    return "".join(texts)


def ended(steps: list[DecoderStep]) -> str:
    """The text that the steps held back, each passed through the steps after it."""
    return "".join(through(steps[i + 1 :], step.end()) for i, step in enumerate(steps))


class _EachToken:
    """A change to each token separately, which may depend on the token's index."""

    def __init__(self, change: Callable[[int, str], str]):
        self._change, self._index = change, 0

    def feed(self, text: str) -> list[str]:
        text = self._change(self._index, text)
        self._index += 1
        return [text]

    def end(self) -> list[str]:
        return []


class _ByteLevel:
    """GPT-2's letters for bytes → UTF-8; a token with any other character is kept as text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, text: str) -> list[str]:
        table = byte_letters()
        found = [table.get(letter) for letter in text]
        data = text.encode() if None in found else bytes(b for b in found if b is not None)
        return [self._decoder.decode(data)]

    def end(self) -> list[str]:
        return [self._decoder.decode(b"", True)]


@lru_cache
def byte_letters() -> dict[str, int]:
    """GPT-2's letter → byte: printable bytes are their own letters, the others have letters from 256 on.

    Example:
        >>> table = byte_letters()
        >>> len(table), table["a"], table["Ġ"]
        (256, 97, 32)
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): b for i, b in enumerate(others)}


class _ByteRuns:
    """Byte tokens such as <0xE2>: a run of them is UTF-8, or one U+FFFD for each if it is invalid."""

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, text: str) -> list[str]:
        if match := _BYTE.fullmatch(text):
            self._run.append(int(match[1], 16))
            return []
        return [*self.end(), text]

    def end(self) -> list[str]:
        data = bytes(self._run)
        self._run.clear()
        try:
            return [data.decode()] if data else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(data)


class _StripEnds:
    """Strips a character from both ends of the complete text, at most the given numbers of times."""

    def __init__(self, content: str, start: int, stop: int):
        self._content, self._left, self._stop = content, start, stop
        self._tail = ""

    def feed(self, text: str) -> list[str]:
        while self._left and text:
            if text[0] != self._content:
                self._left = 0
            else:
                text, self._left = text[1:], self._left - 1
        text = self._tail + text
        rest = text.rstrip(self._content)
        keep = max(len(rest), len(text) - self._stop)
        self._tail = text[keep:]
        return [text[:keep]]

    def end(self) -> list[str]:
        return []  # the characters held back are those to strip at the end


class _ReplaceAll:
    """Replaces a text in the concatenation of all tokens, from the left."""

    def __init__(self, old: str, new: str):
        self._old, self._new = old, new
        self._held = ""

    def feed(self, text: str) -> list[str]:
        *before, last = (self._held + text).split(self._old)
        most = min(len(self._old) - 1, len(last))
        keep = next((n for n in range(most, 0, -1) if last.endswith(self._old[:n])), 0)
        self._held = last[len(last) - keep :]
        return [self._new.join([*before, last[: len(last) - keep]])]

    def end(self) -> list[str]:
        text, self._held = self._held, ""
        return [text]


def cleaned(text: str) -> str:
    """A text without the spaces that tokenisation puts before punctuation, as in transformers.

    Example:
        >>> cleaned("I 'm here , am n't I ?")
        "I'm here, amn't I?"
    """
    for old, new in _SPACES:
        text = text.replace(old, new)
    return text


def clean_up() -> list[DecoderStep]:
    """The steps of :func:`cleaned` for a text in pieces."""
    return [_ReplaceAll(old, new) for old, new in _SPACES]


class _Suffix:
    """Replaces the suffix that marks the end of a word by a space, and removes it from the last token."""

    def __init__(self, suffix: str):
        self._suffix = suffix
        self._last: str | None = None

    def feed(self, text: str) -> list[str]:
        before, self._last = self._last, text
        return [] if before is None else [before.replace(self._suffix, " ")]

    def end(self) -> list[str]:
        return [] if self._last is None else [self._last.replace(self._suffix, "")]


def _strip(item: Mapping[str, Any], is_fused: bool) -> DecoderStep:
    content, start, stop = item["content"], item["start"], item["stop"]
    if is_fused:
        return _StripEnds(content, start, stop)

    def stripped(index: int, text: str) -> str:
        first = min(start, len(text) - len(text.lstrip(content)))
        last = min(stop, len(text) - len(text.rstrip(content)))
        return text[first : len(text) - last]

    return _EachToken(stripped)


def _replace(item: Mapping[str, Any]) -> DecoderStep | None:
    """A step that replaces a string; None for a regular expression, whose syntax differs in Python."""
    pattern = item["pattern"].get("String")
    return _EachToken(lambda i, text: text.replace(pattern, item["content"])) if pattern else None


def _metaspace(item: Mapping[str, Any]) -> DecoderStep:
    mark, is_first_kept = item["replacement"], item.get("prepend_scheme", "always") == "never"
    return _EachToken(
        lambda i, text: text.replace(mark, " " if i or is_first_kept else ""),
    )


def _wordpiece(item: Mapping[str, Any]) -> DecoderStep:
    prefix = item["prefix"]

    def change(index: int, text: str) -> str:
        if index:
            text = text[len(prefix) :] if text.startswith(prefix) else " " + text
        for old, new in _CLEANUP if item["cleanup"] else ():
            text = text.replace(old, new)
        return text

    return _EachToken(change)


_KINDS: dict[str, Callable[[Mapping[str, Any]], DecoderStep | None]] = {
    "ByteLevel": lambda item: _ByteLevel(),
    "ByteFallback": lambda item: _ByteRuns(),
    "BPEDecoder": lambda item: _Suffix(item["suffix"]),
    "Metaspace": _metaspace,
    "Replace": _replace,
    "WordPiece": _wordpiece,
}
