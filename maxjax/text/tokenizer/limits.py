"""What a ``tokenizer.json`` may ask for before it is handed to the ``tokenizers`` package.

That package multiplies: each step may lengthen what the one before gave, a template repeats its
tokens, a table becomes a tree of hundreds of bytes a letter. Here everything that multiplies is
summed up in numbers first, so that a file of some kilobytes asks for no gigabytes and no hours.
What is broken is left to the package, which says so.

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

from ...errors import CheckpointLimitError, UserInputError
from .patterns import check_pattern, matches_something

# The largest that is published has 901,629 (XLM-V); the time to read more is that of its words.
_MOST_TOKENS = 1 << 20
_MOST_MERGES = 1 << 21
# Published: some ten steps with some kilobytes; a list of replaced letters is longer.
_MOST_STEPS = 1000
_MOST_STEP_TEXT = 1 << 20
# Published: 320 thousand.
_MOST_CHARSMAP = 1 << 20
# How many characters one may become on its way: NFKC's 18, four letters of bytes, a space before.
_MOST_GROWTH = 512
_MOST_AFFIX = 256
_MOST_TEMPLATE_IDS = 4096
_MOST_COPIES = 16
# A word is looked up in all its parts: a thousand characters take 0.2 s, ten thousand minutes.
_MOST_WORD = 1000
# The tree of a Unigram takes 300 bytes a node, and is dropped by a function that calls itself.
_MOST_NODES = 4_000_000
_LONGEST_PIECE = 1024
# The automaton of added tokens takes some 70 bytes for each of theirs.
_MOST_ADDED = 1 << 18
_MOST_ADDED_BYTES = 4 << 20
_MOST_NORMALIZED_BYTES = 8 << 20
# As wide as pieces are compared at once.
_COMPARED = 32


def check_tokenizer(document: Any, path: str | os.PathLike[str] | None = None) -> None:
    """Refuses the content of a ``tokenizer.json`` that would take too much memory or time.

    Args:
        document: The content.
        path: The file, for messages.

    Raises:
        CheckpointLimitError: Names what there is too much of.

    Example:
        >>> twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        >>> check_tokenizer({"normalizer": {"type": "Sequence", "normalizers": [twice] * 30}})
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointLimitError: 'normalizer' and 'pre_tokenizer' may lengthen a text too much
        (expected at most 512 times, found 1073741824 times). No published tokenizer does; ...
    """
    if not isinstance(document, Mapping):
        return
    normalizer = list(_steps(document, "normalizer", "normalizers", path))
    splits = list(_steps(document, "pre_tokenizer", "pretokenizers", path))
    decoder = list(_steps(document, "decoder", "decoders", path))
    growth = _growth([*normalizer, *splits])
    _at_most(growth, _MOST_GROWTH, "'normalizer' and 'pre_tokenizer' may lengthen a text too much",
             path, " times")  # fmt: skip
    _at_most(_growth(decoder), _MOST_GROWTH, "'decoder' may lengthen a text too much",
             path, " times")  # fmt: skip
    _check_processors(document, path)
    _check_model(document.get("model"), path)
    _check_added(document.get("added_tokens"), growth, path)


def _at_most(value: float, most: int, problem: str, path: Any, unit: str = "") -> None:
    if value > most:
        # The product of a thousand factors is a number of thousands of digits.
        found = f"{value}{unit}" if value < 1 << 63 else f"more than {1 << 63}{unit}"
        raise CheckpointLimitError(
            problem, path=path, expected=f"at most {most}{unit}", found=found,
            hint="No published tokenizer does; to use the model without it: tokenizer=False.",
        )  # fmt: skip


# --- steps --------------------------------------------------------------------------------------


def _steps(
    document: Mapping[str, Any], key: str, inner: str, path: Any
) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, a pre-tokenizer or a decoder, those of sequences one by one."""
    count = text = 0
    for step in _flat(document.get(key), inner):
        count += 1
        _at_most(count, _MOST_STEPS, f"'{key}' has too many steps", path)
        for name, value in step.items():
            pattern = _pattern(value) if name == "pattern" else None
            length = len(pattern if pattern is not None else value if _is_text(name, value) else "")
            text += length
            _at_most(text, _MOST_STEP_TEXT, f"the texts of '{key}' are too long", path,
                     " characters")  # fmt: skip
            if isinstance(value, Mapping) and pattern is not None and "Regex" in value:
                try:
                    check_pattern(pattern)
                except UserInputError as error:
                    raise CheckpointLimitError(
                        f"'{key}' has a regular expression that is refused: {error}", path=path,
                        hint="To use the model without its tokenizer: tokenizer=False.",
                    ) from None  # fmt: skip
        if step.get("type") == "Precompiled":
            _at_most(len(str(step.get("precompiled_charsmap"))), _MOST_CHARSMAP,
                     "'precompiled_charsmap' is too long", path, " characters")  # fmt: skip
        yield step


def _is_text(name: str, value: Any) -> bool:
    return isinstance(value, str) and name != "precompiled_charsmap"


def _flat(value: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Steps of sequences within sequences; their depth is bounded where the JSON is read."""
    waiting = [value]
    while waiting:
        step = waiting.pop()
        if isinstance(step, Mapping):
            listed = step.get(inner) if step.get("type") == "Sequence" else None
            if isinstance(listed, list):
                waiting.extend(reversed(listed))
            else:
                yield step


def _pattern(value: Any) -> str | None:
    """What a step looks for: a text or a regular expression."""
    found = value.get("Regex", value.get("String")) if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else None


class _Growth:
    """How many characters each character becomes in the steps that follow, the last step first.

    Characters are those of a text whose every character is taken apart (NFKD): then Unicode's own
    forms lengthen nothing, whatever stands between them, and a text is 18 times as long at most to
    begin with. Of a pattern it is its first character that becomes what replaces it.
    """

    def __init__(self) -> None:
        # That of a character is max(its own, _floor) + _more, so that a step for all costs nothing.
        self._own: dict[str, int] = {}
        self._floor, self._more, self._most = 1, 0, 1

    @property
    def most(self) -> int:
        return max(self._most, self._floor) + self._more

    def of(self, text: str) -> int:
        """What a text becomes."""
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
    """How many characters one character may become in these steps."""
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
            after.any_becomes(4 * after.most)  # letters for the bytes of a character
        elif kind == "Metaspace":
            after.any_gets(after.of(_text_of(step.get("replacement"))))  # before each piece
        elif kind == "BertNormalizer":
            after.any_gets(2 * after.of(" "))  # on both sides of each Chinese character
        elif kind == "Precompiled":
            for entry in _entries(step.get("precompiled_charsmap")):
                after.any_becomes(after.of(entry))
        elif kind in ("BPEDecoder", "CTC", "WordPiece"):
            after.any_gets(after.of(" "))  # for a mark, and an empty mark is everywhere
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
    """The texts that a table of SentencePiece's puts in the place of others."""
    if not isinstance(charsmap, str):
        return []
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return []
    size = int.from_bytes(data[:4], "little")
    entries = set(data[4 + size :].split(b"\0"))
    return [entry.decode("utf-8", "replace") for entry in entries]


# --- what stands around a text ------------------------------------------------------------------


def _check_processors(document: Mapping[str, Any], path: Any) -> None:
    copies, ids = 1, 0
    for count, step in enumerate(_flat(document.get("post_processor"), "processors"), 1):
        _at_most(count, _MOST_STEPS, "'post_processor' has too many steps", path)
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
            # A pair is two texts; to one of them the template of the other adds nothing.
            texts = len(pieces) - len(names)
            most_copies = max(most_copies, texts if key == "single" else (texts + 1) // 2)
        copies *= max(1, most_copies)
        ids = ids * max(1, most_copies) + most_ids
        _at_most(copies, _MOST_COPIES, "'post_processor' repeats a text too often", path, " times")
        _at_most(ids, _MOST_TEMPLATE_IDS, "'post_processor' adds too many tokens", path)


def _length(item: Any, key: str) -> int:
    value = item.get(key) if isinstance(item, Mapping) else None
    return len(value) if isinstance(value, list) else 1


# --- tokens -------------------------------------------------------------------------------------


def _check_model(model: Any, path: Any) -> None:
    if not isinstance(model, Mapping):
        return
    vocab, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocab, (list, Mapping)):
        _at_most(len(vocab), _MOST_TOKENS, "there are too many tokens", path)
    if isinstance(merges, list):
        _at_most(len(merges), _MOST_MERGES, "there are too many merges", path)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model.get(key), str):
            _at_most(len(model[key]), _MOST_AFFIX, f"'{key}' is too long", path, " characters")
    most = model.get("max_input_chars_per_word")
    if type(most) is int:
        _at_most(most, _MOST_WORD, "'max_input_chars_per_word' is too large", path)
    if isinstance(vocab, list):
        _check_tree([item[0] for item in vocab if isinstance(item, list) and item], path)


def _check_tree(pieces: list[Any], path: Any) -> None:
    """The nodes of a tree of these pieces: their letters without those they begin with together."""
    found = sorted(piece.encode() for piece in pieces if isinstance(piece, str))
    lengths = np.fromiter(map(len, found), np.int64, len(found))
    _at_most(int(lengths.max(initial=0)), _LONGEST_PIECE, "a token is too long", path, " bytes")
    total = int(lengths.sum())
    if total > _MOST_NODES:
        rows = np.array([piece[:_COMPARED] for piece in found], f"S{_COMPARED}")
        letters = rows.view(np.uint8).reshape(len(found), _COMPARED)
        same = np.logical_and.accumulate((letters[1:] == letters[:-1]) & (letters[1:] > 0), axis=1)
        total -= int(np.count_nonzero(same))
    _at_most(total, _MOST_NODES, "the tokens are too long together", path, " bytes")


def _check_added(added: Any, growth: int, path: Any) -> None:
    if not isinstance(added, list):
        return
    _at_most(len(added), _MOST_ADDED, "there are too many added tokens", path)
    whole = changed = 0
    for item in added:
        text = item.get("content") if isinstance(item, Mapping) else None
        if isinstance(text, str):
            whole += len(text.encode())
            changed += len(text.encode()) if item.get("normalized") is True else 0
    problem = "the added tokens are too long together"
    _at_most(whole, _MOST_ADDED_BYTES, problem, path, " bytes")
    _at_most(changed * growth, _MOST_NORMALIZED_BYTES, problem, path, " bytes when normalized")
