"""Reads SentencePiece's models (``tokenizer.model``) without ``tokenizer.json``: Unigram and BPE.

The file is a protocol buffer. It is parsed here, bounded by its size, into the form that GGUF has for such
tokenizers, from which ``models.gguf.tokenizer`` builds a ``tokenizer.json``.

Source: ``sentencepiece_model.proto`` of sentencepiece 0.2; ``XLMRobertaConverter`` of transformers 5.23.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, CheckpointLimitError, UnsupportedModelError
from ...models.gguf.metadata import Settings
from ...models.gguf.tokenizer.bpe import sentencepiece
from ...models.gguf.tokenizer.tokens import CONTROL, NORMAL, UNKNOWN
from ...models.gguf.tokenizer.unigram import normalizer, unigram
from ...storage.files import open_regular, read_whole
from .sentencepiece_classes import CLASSES, Pieces, check_count

FILES = (
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "sentencepiece.model",
    "spm.model",
)
"""The names that these files have."""

_UNIGRAM, _BPE = 1, 2
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_KINDS = {3: "words", 4: "characters"}
# The longest published file has 18 MB (XLM-V). Fields are read one by one, and may have two bytes each.
_MAX_BYTES = 24 << 20
# The fields of one message: a piece has three, the settings have some fifty and a list of tokens.
_MAX_FIELDS = 100_000
_MAX_CHARSMAP = 1 << 20
# Classes of transformers whose first ids are those of fairseq, before the pieces of the file.
_FAIRSEQ = ("XLMRoberta",)
_FIRST = ["<s>", "<pad>", "</s>", "<unk>"]


def read_sentencepiece(
    path: Path, settings: Mapping[str, Any], kind: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a ``tokenizer.json`` for a SentencePiece model, and its special tokens by name.

    Args:
        path: the file.
        settings: the content of ``tokenizer_config.json``.
        kind: name of transformers' class of the tokenizer, without "Tokenizer"; "" if it is not known.

    Raises:
        CheckpointFormatError: the file is not such a model, or a value is wrong.
        CheckpointLimitError: the file is too long, or has too many tokens.
        UnsupportedModelError: the model is of words or of characters, or marks the ends of words, or the files
            do not list the language of its texts.
    """
    model = _Model(path)
    if kind in CLASSES:
        pieces = Pieces(
            path, list(zip(model.pieces, model.scores, strict=True)), model.types,
            max(model.ids["unknown"], 0), model.charsmap, settings,
        )  # fmt: skip
        return CLASSES[kind].document(pieces), dict(CLASSES[kind].special)
    keys: dict[str, Any] = {
        "add_space_prefix": model.adds_prefix, "remove_extra_whitespaces": model.squeezes,
        "precompiled_charsmap": model.charsmap,
    }  # fmt: skip
    for flag in ("add_bos_token", "add_eos_token"):
        if isinstance(settings.get(flag), bool):
            keys[flag] = settings[flag]
    if model.kind == _UNIGRAM:
        if kind in _FAIRSEQ:
            model.as_fairseq()
            keys |= {"add_bos_token": True, "add_eos_token": True, "seperator_token_id": 2}
        else:
            keys = {"add_bos_token": False, **keys}
    keys |= {
        "tokens": model.pieces, "scores": model.scores, "token_type": model.types,
        **{f"{name}_token_id": i for name, i in model.ids.items() if 0 <= i < len(model.pieces)},
    }  # fmt: skip
    given = Settings(keys, "", path)
    if model.kind == _UNIGRAM:
        return unigram(given), model.special()
    document = sentencepiece(given)
    # As in transformers: only the beginning of the text gets a space, not what follows a special token.
    only_first = settings.get("legacy") is False and model.adds_prefix
    # llama.cpp, whose rules the document has, neither normalises by a table nor removes spaces.
    document["normalizer"] = normalizer(
        given, model.adds_prefix and not only_first, keeps_first=only_first
    )
    if only_first:
        document["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False
        }  # fmt: skip
    return document, model.special()


class _Model:
    """The parts of a file that decide how text is cut."""

    def __init__(self, path: Path):
        self.path = path
        self.pieces: list[str] = []
        self.scores: list[float] = []
        self.types: list[int] = []
        self.kind, self.ids = _UNIGRAM, {"unknown": 0, "bos": 1, "eos": 2, "padding": -1}
        self.charsmap, self.adds_prefix, self.squeezes = b"", True, True
        data = _content(path)
        others = 0
        for field, value in self._fields(data, 0):
            others += field != 1
            if others > _MAX_FIELDS:
                raise self._wrong(0, f"it has more than {_MAX_FIELDS} fields that are not tokens")
            if field == 1:
                self._piece(value)
            elif field == 2:
                self._trainer(value)
            elif field == 3:
                self._normalizer(value)
        if not self.pieces:
            raise self._wrong(0, "it has no tokens")
        if len(set(self.pieces)) < len(self.pieces):
            raise self._wrong(0, "a token is there twice")

    def _wrong(self, offset: int, problem: str) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"not a SentencePiece model: {problem}", path=self.path, offset=offset
        )

    def _fields(self, data: memoryview, start: int) -> Iterator[tuple[int, Any]]:
        """(Number, value) of each field of a message: an int, a float, or (its bytes, their offset)."""
        at, end = 0, len(data)
        while at < end:
            key, at = self._varint(data, at, start)
            field, wire = key >> 3, key & 7
            if wire == 0:
                value, at = self._varint(data, at, start)
                yield field, value
                continue
            if wire == 2:
                size, at = self._varint(data, at, start)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise self._wrong(start + at, f"a field has the unknown type {wire}")
            if size > end - at:
                raise self._wrong(start + at, "a field is longer than the file")
            part = data[at : at + size]
            if wire == 2:
                yield field, (part, start + at)
            else:
                yield field, struct.unpack("<d" if wire == 1 else "<f", part)[0]
            at += size

    def _varint(self, data: memoryview, at: int, start: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(data):
                break
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & (1 << 64) - 1, at
        raise self._wrong(start + at, "a number does not end")

    def _message(self, value: Any) -> dict[int, Any]:
        """The last value of each field of a message."""
        if not isinstance(value, tuple):
            raise self._wrong(0, "a number stands in the place of a message")
        found = {}
        for count, (field, one) in enumerate(self._fields(*value)):
            if count == _MAX_FIELDS:
                raise self._wrong(value[1], f"it has more than {_MAX_FIELDS} fields in one place")
            found[field] = one
        return found

    def _text(self, value: Any) -> str:
        if not isinstance(value, tuple):
            raise self._wrong(0, "a number stands in the place of a text")
        try:
            return bytes(value[0]).decode()
        except UnicodeDecodeError:
            raise self._wrong(value[1], "a text is not UTF-8") from None

    def _piece(self, value: Any) -> None:
        found = self._message(value)
        score, kind = found.get(2, 0.0), found.get(3, NORMAL)
        if not isinstance(score, float) or not isinstance(kind, int) or not 1 <= kind <= 6:
            raise self._wrong(value[1], "a token has a wrong score or type")
        if not (text := self._text(found.get(1, (memoryview(b""), 0)))):
            raise self._wrong(value[1], "a token is empty")
        self._add(text, score, kind)

    def _add(self, text: str, score: float, kind: int) -> None:
        self.pieces.append(text)
        self.scores.append(score)
        self.types.append(kind)
        check_count(len(self.pieces), self.path)

    def _trainer(self, value: Any) -> None:
        found = self._message(value)
        self.kind = self._int(found, 3, _UNIGRAM)
        if self.kind not in (_UNIGRAM, _BPE):
            raise _unsupported(
                self.path,
                f"this SentencePiece model is one of {_KINDS.get(self.kind, 'an unknown kind')}",
            )
        if self._int(found, 24, 0):
            raise _unsupported(
                self.path, "this SentencePiece model puts spaces at the ends of words"
            )
        numbers = {"unknown": 40, "bos": 41, "eos": 42, "padding": 43}
        for name, field in numbers.items():
            found_id = self._int(found, field, self.ids[name])
            self.ids[name] = -1 if found_id >= 1 << 31 else found_id  # -1 is a number of 64 bits

    def _normalizer(self, value: Any) -> None:
        found = self._message(value)
        if 2 in found:
            if not isinstance(found[2], tuple) or len(found[2][0]) > _MAX_CHARSMAP:
                raise self._wrong(value[1], "the table of replacements is too long")
            self.charsmap = bytes(found[2][0])
        self.adds_prefix = bool(self._int(found, 3, 1))
        self.squeezes = bool(self._int(found, 4, 1))
        if not self._int(found, 5, 1):
            raise _unsupported(self.path, "this SentencePiece model keeps spaces as they are")

    def _int(self, found: Mapping[int, Any], field: int, default: int) -> int:
        value = found.get(field, default)
        if not isinstance(value, int):
            raise self._wrong(0, f"the setting {field} is not a number")
        return value

    def special(self) -> dict[str, str]:
        """The special tokens by their names in a ``tokenizer_config.json``."""
        found = {}
        for short, name in _NAMES.items():
            i, kind = self.ids[name], UNKNOWN if name == "unknown" else CONTROL
            if 0 <= i < len(self.pieces) and self.types[i] == kind:
                found[f"{short}_token"] = self.pieces[i]
        return found

    def as_fairseq(self) -> None:
        """Gives the tokens the ids of fairseq: its own four first, a mask last."""
        self.pieces = [*_FIRST, *self.pieces[3:], "<mask>"]
        self.scores = [0.0] * 4 + self.scores[3:] + [0.0]
        self.types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *self.types[3:], CONTROL]
        self.ids = {"bos": 0, "padding": 1, "eos": 2, "unknown": 3}


def _unsupported(path: Path, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: {what}, which maxjax does not support: put the model's "
        "tokenizer.json beside it. To load the model without it: maxjax.load(…, tokenizer=False)."
    )


def _content(path: Path) -> memoryview:
    with closing(open_regular(path)) as file:
        if file.size > _MAX_BYTES:
            raise CheckpointLimitError(
                "the SentencePiece model is too long", path=path,
                expected=f"at most {_MAX_BYTES} bytes", found=f"{file.size} bytes",
            )  # fmt: skip
        data = read_whole(file)
    if data[:1] != b"\n":  # the first field of every published model, a token
        raise CheckpointFormatError("not a SentencePiece model", path=path, offset=0)
    _check_count(data, path)
    return memoryview(data)


def _check_count(data: bytes, path: Path) -> None:
    """Counts the tokens at the beginning by their lengths, which is much faster than reading them."""
    at = count = 0
    last = len(data) - 2
    while at < last and data[at] == 10 and data[at + 1] < 128:
        at += 2 + data[at + 1]
        count += 1
    check_count(count, path)
