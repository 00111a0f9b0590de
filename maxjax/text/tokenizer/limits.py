"""Limits on a ``tokenizer.json``, checked before it is passed to the ``tokenizers`` package.

In that package each step may lengthen the text of the previous step, a template may repeat tokens,
and a table becomes a tree of hundreds of bytes per letter. Here the product of all of these is
computed first, so that a file of some kilobytes cannot take gigabytes or hours. Invalid content is
left to the package, which reports it.

Source: ``normalizers/``, ``processors/template.rs``, ``models/`` of the package, version 0.23.
"""

from __future__ import annotations

import base64
import binascii
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointFormatError, CheckpointLimitError, some
from .expressions import check_expressions, matches_something

# The largest published vocabulary has 901,629 tokens (XLM-V).
_MAX_TOKENS = 1 << 20
_MAX_MERGES = 1 << 20
# Published lists of words or merges have up to 6 MB.
_MAX_LIST_BYTES = 16 << 20
# Published tokenizers have about ten steps with some kilobytes; lists of replaced letters are longer.
_MAX_STEPS = 1000
_MAX_STEP_TEXT = 1 << 20
# Published tables have up to 320 thousand characters.
_MAX_CHARSMAP = 1 << 20
# Characters that one character may become: NFKC makes up to 18, byte-level 4, plus spaces.
_MAX_GROWTH = 512
_MAX_AFFIX = 256
_MAX_TEMPLATE_IDS = 4096
_MAX_COPIES = 16
# WordPiece looks up all parts of a word: 1,000 characters take 0.2 s, 10,000 take minutes.
_MAX_WORD = 1000
# The tree of a Unigram model takes 300 bytes per node, and is freed by a recursive function.
_MAX_NODES = 4_000_000
_LONGEST_PIECE = 1024
# The automaton of added tokens takes about 110 bytes for each byte of theirs.
MAX_ADDED = 1 << 17
MAX_ADDED_BYTES = 3 << 19
_MAX_NORMALIZED_BYTES = 8 << 20
# The number of leading bytes in which adjacent pieces are compared.
_COMPARED = 32


def check_tokenizer(document: Any, path: str | os.PathLike[str] | None = None) -> None:
    """Raises an error for a ``tokenizer.json`` that would take too much memory or time.

    Args:
        document: the content of the file.
        path: the path of the file, for messages.

    Raises:
        CheckpointLimitError: a limit is exceeded; the message names it.
        CheckpointFormatError: a step has no type, or a table is shorter than it says.

    Example:
        >>> twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        >>> check_tokenizer({"normalizer": {"type": "Sequence", "normalizers": [twice] * 30}})
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointLimitError: 'normalizer' and 'pre_tokenizer' may lengthen a text too much
        (expected at most 512 times, found 1073741824 times). No published tokenizer exceeds this. ...
    """
    if not isinstance(document, Mapping):
        return
    normalizer = list(_steps(document, "normalizer", "normalizers", path))
    splits = list(_steps(document, "pre_tokenizer", "pretokenizers", path))
    decoder = list(_steps(document, "decoder", "decoders", path))
    growth = _growth([*normalizer, *splits])
    _at_most(growth, _MAX_GROWTH, "'normalizer' and 'pre_tokenizer' may lengthen a text too much",
             path, " times")  # fmt: skip
    _at_most(_growth(decoder), _MAX_GROWTH, "'decoder' may lengthen a text too much",
             path, " times")  # fmt: skip
    _check_processors(document, path)
    _check_model(document.get("model"), path)
    _check_added(document.get("added_tokens"), growth, path)
    every = {"normalizer": normalizer, "pre_tokenizer": splits, "decoder": decoder}
    found = [
        (key, pattern["Regex"])
        for key, steps in every.items()
        for step in steps
        if isinstance(pattern := step.get("pattern"), Mapping)
        and isinstance(pattern.get("Regex"), str)
    ]
    hint = "To use the model without its tokenizer: tokenizer=False."
    check_expressions(found, path=path, hint=hint)


def check_list(data: bytes, path: str | os.PathLike[str]) -> None:
    """Raises an error for a text file with a word or a merge in each line that would take too much memory or time.

    Args:
        data: the content of the file.
        path: the path of the file, for messages.

    Raises:
        CheckpointLimitError: it has too many bytes or lines.
    """
    _at_most(len(data), _MAX_LIST_BYTES, "the file is too long", path, " bytes")
    _at_most(data.count(b"\n"), max(_MAX_TOKENS, _MAX_MERGES), "there are too many lines", path)


def _at_most(value: float, most: int, problem: str, path: Any, unit: str = "") -> None:
    if value > most:
        # A product of a thousand factors may have thousands of digits.
        found = f"{value}{unit}" if value < 1 << 63 else f"more than {1 << 63}{unit}"
        raise CheckpointLimitError(
            problem, path=path, expected=f"at most {most}{unit}", found=found,
            hint="No published tokenizer exceeds this. To load the model without its tokenizer, pass tokenizer=False.",
        )  # fmt: skip


# --- steps --------------------------------------------------------------------------------------


def _steps(
    document: Mapping[str, Any], key: str, inner: str, path: Any
) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    count = text = 0
    for step in _flat(document.get(key), inner):
        count += 1
        _at_most(count, _MAX_STEPS, f"'{key}' has too many steps", path)
        for name, value in step.items():
            pattern = _pattern(value) if name == "pattern" else None
            is_text = isinstance(value, str) and name != "precompiled_charsmap"
            text += len(pattern if pattern is not None else value if is_text else "")
            _at_most(text, _MAX_STEP_TEXT, f"the texts of '{key}' are too long", path,
                     " characters")  # fmt: skip
        _check_type(step, key, path)
        if step["type"] == "Precompiled":
            _check_charsmap(step.get("precompiled_charsmap"), path)
        yield step


def _check_type(step: Mapping[str, Any], key: str, path: Any) -> None:
    """Refuses a step without a type, which the package would guess from the other keys of some steps."""
    if not isinstance(step.get("type"), str):
        raise CheckpointFormatError(
            f"a step of '{key}' has no type", path=path, expected="a text as 'type'",
            found=f"an object with {some(list(step), 3) or 'no keys'}",
        )  # fmt: skip


def _check_charsmap(text: Any, path: Any) -> None:
    """Compares the lengths in a precompiled table with the bytes that it has: the package would allocate them.

    The table is the size of a trie in four bytes, the trie, and texts.
    """
    if not isinstance(text, str):
        return  # which the package refuses
    _at_most(len(text), _MAX_CHARSMAP, "'precompiled_charsmap' is too long", path,
             " characters")  # fmt: skip
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 4 <= size <= len(data) - 4:
        raise CheckpointFormatError(
            "'precompiled_charsmap' is not a table of SentencePiece", path=path,
            expected=f"a table of {4 + size} bytes or more" if len(data) >= 4 else "four bytes or more",
            found=f"{len(data)} bytes",
        )  # fmt: skip


def _flat(value: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Flattens nested sequences; the depth is limited where the JSON is read."""
    waiting = [value]
    while waiting:
        step = waiting.pop()
        if isinstance(step, Mapping):
            # The package takes a step with such a list for a sequence even if it has no type.
            listed = step.get(inner) if step.get("type", "Sequence") == "Sequence" else None
            if isinstance(listed, list):
                waiting.extend(reversed(listed))
            else:
                yield step


def _pattern(value: Any) -> str | None:
    """The text or regular expression that a step searches for."""
    found = value.get("Regex", value.get("String")) if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else None


class _Growth:
    """The number of characters that each character becomes in the later steps.

    It is computed from the last step to the first. Characters are those of the decomposed text
    (NFKD), so that Unicode normalisation lengthens nothing further; decomposition itself makes a
    text at most 18 times as long. A pattern counts as if its first character became the whole
    replacement.
    """

    def __init__(self) -> None:
        # The growth of a character is max(own, _floor) + _more: a step for all characters is cheap.
        self._own: dict[str, int] = {}
        self._floor, self._more, self._most = 1, 0, 1

    @property
    def most(self) -> int:
        return max(self._most, self._floor) + self._more

    def of(self, text: str) -> int:
        """The number of characters that a text becomes."""
        counts = Counter(unicodedata.normalize("NFKD", text)).items()
        return sum(n * (max(self._own.get(c, 1), self._floor) + self._more) for c, n in counts)

    def becomes(self, character: str, count: int) -> None:
        count -= self._more
        self._most = max(self._most, count)
        for same in {character, character.lower(), character.upper()}:
            self._own[same] = max(self._own.get(same, 1), count)

    def any_becomes(self, count: int) -> None:
        self._floor = max(self._floor, count - self._more)

    def any_gets(self, count: int) -> None:
        self._more += count


def _growth(steps: list[Mapping[str, Any]]) -> int:
    """The largest number of characters that one character may become in these steps."""
    after = _Growth()
    for step in reversed(steps):
        kind = step.get("type")
        if kind == "Replace":
            _replaced(step, after)
        elif kind == "Prepend":
            after.any_gets(after.of(_text_of(step.get("prepend"))))
        elif kind == "ByteLevel":
            if step.get("add_prefix_space", "add_prefix_space" in step) is not False:
                after.any_gets(after.most)
            after.any_becomes(4 * after.most)  # one letter for each byte of a character
        elif kind == "Metaspace":
            after.any_gets(after.of(_text_of(step.get("replacement"))))  # before each piece
        elif kind == "BertNormalizer":
            after.any_gets(2 * after.of(" "))  # on both sides of each Chinese character
        elif kind == "Precompiled":
            # Each character becomes one entry: all are computed before the first counts.
            entries = _entries(step.get("precompiled_charsmap"))
            after.any_becomes(max(map(after.of, entries), default=1))
        elif kind in ("BPEDecoder", "CTC", "WordPiece"):
            after.any_gets(after.of(" "))  # in the place of a mark; an empty mark is everywhere
        elif kind == "Nmt":
            after.any_becomes(after.of(" "))
    return after.most


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _replaced(step: Mapping[str, Any], after: _Growth) -> None:
    pattern, new = step.get("pattern"), after.of(_text_of(step.get("content")))
    old = _pattern(pattern) or ""
    if isinstance(pattern, Mapping) and "Regex" in pattern:
        (after.any_becomes if matches_something(old) else after.any_gets)(new)
    elif old:
        after.becomes(unicodedata.normalize("NFKD", old)[0], new)
    else:
        after.any_gets(new)


def _entries(charsmap: Any) -> list[str]:
    """The replacement texts in a precompiled table of SentencePiece."""
    if not isinstance(charsmap, str):
        return []
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return []
    size = int.from_bytes(data[:4], "little")
    entries = set(data[4 + size :].split(b"\0"))
    return [entry.decode("utf-8", "replace") for entry in entries]


# --- special tokens around a text ---------------------------------------------------------------


def _check_processors(document: Mapping[str, Any], path: Any) -> None:
    copies, ids = 1, 0
    for count, step in enumerate(_flat(document.get("post_processor"), "processors"), 1):
        _at_most(count, _MAX_STEPS, "'post_processor' has too many steps", path)
        _check_type(step, "post_processor", path)
        if step.get("type") != "TemplateProcessing":
            continue
        listed = step.get("special_tokens")
        listed = listed if isinstance(listed, Mapping) else {}
        length = {name: _length(item, "ids") for name, item in listed.items()}
        most_copies = most_ids = 0
        for key in ("single", "pair"):
            pieces = step.get(key)
            pieces = pieces.split() if isinstance(pieces, str) else pieces
            pieces = pieces if isinstance(pieces, list) else []
            found = [piece.get("SpecialToken") for piece in pieces if isinstance(piece, Mapping)]
            names = [item.get("id") for item in found if isinstance(item, Mapping)]
            most_ids = max(most_ids, sum(length.get(n, 1) for n in names if isinstance(n, str)))
            # A pair has two texts, so each is repeated half as often.
            texts = len(pieces) - len(names)
            most_copies = max(most_copies, texts if key == "single" else (texts + 1) // 2)
        copies *= max(1, most_copies)
        ids = ids * max(1, most_copies) + most_ids
        _at_most(copies, _MAX_COPIES, "'post_processor' repeats a text too often", path, " times")
        _at_most(ids, _MAX_TEMPLATE_IDS, "'post_processor' adds too many tokens", path)


def _length(item: Any, key: str) -> int:
    value = item.get(key) if isinstance(item, Mapping) else None
    return len(value) if isinstance(value, list) else 1


# --- tokens -------------------------------------------------------------------------------------


def _check_model(model: Any, path: Any) -> None:
    if not isinstance(model, Mapping):
        return
    vocab, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocab, (list, Mapping)):
        _at_most(len(vocab), _MAX_TOKENS, "there are too many tokens", path)
    if isinstance(merges, list):
        _at_most(len(merges), _MAX_MERGES, "there are too many merges", path)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model.get(key), str):
            _at_most(len(model[key]), _MAX_AFFIX, f"'{key}' is too long", path, " characters")
    most = model.get("max_input_chars_per_word")
    if type(most) is int:
        _at_most(most, _MAX_WORD, "'max_input_chars_per_word' is too large", path)
    if isinstance(vocab, list):
        _check_tree([item[0] for item in vocab if isinstance(item, list) and item], path)


def _check_tree(pieces: list[Any], path: Any) -> None:
    """Checks the size of a prefix tree of the pieces: their bytes without shared prefixes."""
    found = sorted(piece.encode() for piece in pieces if isinstance(piece, str))
    lengths = np.fromiter(map(len, found), np.int64, len(found))
    _at_most(int(lengths.max(initial=0)), _LONGEST_PIECE, "a token is too long", path, " bytes")
    total = int(lengths.sum())
    if total > _MAX_NODES:
        rows = np.array([piece[:_COMPARED] for piece in found], f"S{_COMPARED}")
        letters = rows.view(np.uint8).reshape(len(found), _COMPARED)
        same = np.logical_and.accumulate((letters[1:] == letters[:-1]) & (letters[1:] > 0), axis=1)
        total -= int(np.count_nonzero(same))
    _at_most(total, _MAX_NODES, "the tokens are too long together", path, " bytes")


def _check_added(added: Any, growth: int, path: Any) -> None:
    if not isinstance(added, list):
        return
    _at_most(len(added), MAX_ADDED, "there are too many added tokens", path)
    total = changed = 0
    for item in added:
        text = item.get("content") if isinstance(item, Mapping) else None
        if isinstance(text, str):
            total += len(text.encode())
            changed += len(text.encode()) if item.get("normalized") is True else 0
    problem = "the added tokens are too long together"
    _at_most(total, MAX_ADDED_BYTES, problem, path, " bytes")
    _at_most(changed * growth, _MAX_NORMALIZED_BYTES, problem, path, " bytes when normalized")
