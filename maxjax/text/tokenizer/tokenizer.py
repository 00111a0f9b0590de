"""Tokenizer: text ↔ token ids, as the ``tokenizer.json`` of a checkpoint says.

The work is done by the ``tokenizers`` package, imported when the first one is loaded;
what it raises is turned into maxjax's own errors here.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointMissingError,
    UnsupportedModelError,
    UserInputError,
)
from ...models.gguf import chat_template, tokenizer_json
from ...models.gguf.tokenizer.read import end_ids, special_tokens
from ...storage.limits import Limits, allowing
from ...storage.open import beside_of, orbax_checkpoint
from ...storage.save.beside import settled
from ..stream_decoders import cleaned
from ..template.files import TEMPLATE_FILE, listed_templates, read_templates
from .added import CONFIG, MAP, SPECIAL
from .files import FILE, backend_of, guarded, read_tokenizer_files
from .limits import check_tokenizer

# Hugging Face writes int(1e30) for "no limit".
_NO_LIMIT = 10**9


class Tokens(NamedTuple):
    """One text: its token ids, and to which part of a pair each belongs."""

    ids: list[int]
    type_ids: list[int]


class Batch(NamedTuple):
    """Texts of one padded length: int32 ``[B, T]`` each, named as a model's arguments."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    token_type_ids: np.ndarray


class Tokenizer:
    """Text ↔ token ids. Made by :func:`load_tokenizer`; safe to use from several threads.

    It can be copied and pickled, so that processes of a data loader take it along.

    Attributes:
        pad_id: The id that fills up a batch.
        max_length: The most tokens its model takes, as its files say; None if they do not.
        cleans_up: Whether decoding takes away spaces before punctuation, as the files say
            ("clean_up_tokenization_spaces").
        chat_templates: The Jinja templates of a chat by name; that without a name is "default".
        special_tokens: Special tokens by the names of a ``tokenizer_config.json``, e.g.
            "bos_token" → "<s>".
        eos_ids: The tokens that end a text, or an answer, as the tokenizer's files say.
    """

    def __init__(
        self,
        backend: Any,
        *,
        pad_id: int = 0,
        max_length: int | None = None,
        chat_template: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] | None = None,
        beside: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        # Files may carry the padding and truncation of whoever trained them.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._lock = threading.Lock()
        self.pad_id = pad_id
        self.max_length = max_length
        self.chat_templates = dict(chat_templates or {})
        if chat_template is not None:
            self.chat_templates["default"] = chat_template
        self.special_tokens = dict(special_tokens or {})
        eos = self._special_id("eos_token") if eos_ids is None else None
        self.eos_ids: tuple[int, ...] = tuple(eos_ids or ()) if eos is None else (eos,)
        self._beside = dict(beside or {})
        self._configure()

    def _configure(self) -> None:
        """What the settings change that no ``tokenizer.json`` has."""
        settings = self._beside.get(CONFIG, {})
        if settings.get("split_special_tokens") is True:
            self._backend.encode_special_tokens = True
        # As in transformers: in the text of byte pairs the spaces are meant.
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_bpe = type(self._backend.model).__name__ == "BPE" and settings.get(forced) is not True
        cleans = settings.get("clean_up_tokenization_spaces") is True
        self.cleans_up: bool = cleans and not is_bpe

    # Threads of one process share the lock with what it guards; another process has its own.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._configure()

    def __copy__(self) -> Tokenizer:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    @cached_property
    def vocab_size(self) -> int:
        """Ids are below this."""
        size = self._backend.get_vocab_size()
        # With gaps the last number is more than the count.
        return max(size, 1 + max(self._backend.get_vocab().values(), default=-1))

    @property
    def chat_template(self) -> str | None:
        """The template of a chat that has no name; None if there is none."""
        return self.chat_templates.get("default")

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text; None if there is none."""
        return self._special_id("bos_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def tokens(
        self, texts: Iterable[str], *, max_length: int | None = None, special: bool = True
    ) -> list[Tokens]:
        """The tokens of each text with the special ones its model expects.

        Args:
            texts: Any number of texts; an empty one is a text.
            max_length: Cut the middle out so that no text, special tokens and all, is
                longer.
            special: Whether there are special tokens around each text.

        Raises:
            TypeError: A text is not a str, or ``texts`` is one.
            UserInputError: A text is not valid Unicode, or cannot be tokenised.
        """
        texts = _checked(texts)
        with self._lock:
            if max_length is not None:
                self._truncate_to(max_length)
            try:
                encodings = guarded(self._backend.encode_batch, texts, False, special)
            finally:
                self._backend.no_truncation()
        return [Tokens(encoding.ids, encoding.type_ids) for encoding in encodings]

    def _truncate_to(self, max_length: int) -> None:
        least = self._backend.num_special_tokens_to_add(False) + 1
        if max_length < least:
            raise UserInputError(f"max_length must be at least {least}, not {max_length}")
        self._backend.enable_truncation(max_length)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of one text. Raises as :meth:`tokens`."""
        return self.tokens([text], special=special)[0].ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids."""
        text = self._decoded([int(i) for i in ids], skip_special)
        return cleaned(text) if self.cleans_up else text

    def _decoded(self, ids: list[int], skip_special: bool) -> str:
        return guarded(self._backend.decode, ids, skip_special)

    def batch(self, texts: Iterable[str], *, max_length: int | None = None) -> Batch:
        """The texts as arrays, padded to the longest. Raises as :meth:`tokens`."""
        return self.pad(self.tokens(texts, max_length=max_length))

    def pad(
        self, rows: Sequence[Tokens], length: int | None = None, count: int | None = None
    ) -> Batch:
        """Rows of tokens as arrays ``[count, length]``, filled up at the right and below.

        Both default to what is needed. Rows that were added are masked throughout.
        """
        length = max((len(row.ids) for row in rows), default=0) if length is None else length
        count = len(rows) if count is None else count
        ids = np.full((count, length), self.pad_id, np.int32)
        mask = np.zeros((count, length), np.int32)
        types = np.zeros((count, length), np.int32)
        for i, row in enumerate(rows):
            n = len(row.ids)
            ids[i, :n], types[i, :n], mask[i, :n] = row.ids, row.type_ids, 1
        return Batch(ids, mask, types)

    def files(self) -> dict[str, str]:
        """What a directory needs so that :func:`load_tokenizer` and transformers find it: name → text."""
        with self._lock:
            text = self._backend.to_str(pretty=True)
        settings = dict(self._beside.get("tokenizer_config.json", {}))
        if not settings:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            settings["pad_token"] = self._backend.id_to_token(self.pad_id)
            if self.max_length is not None:
                settings["model_max_length"] = self.max_length
            if self.chat_templates:
                settings["chat_template"] = self._written_templates()
        for name, token in self.special_tokens.items():  # those of a class stand in no file
            given = settings.get(name)
            if token != (given.get("content") if isinstance(given, Mapping) else given):
                settings[name] = token
        # Where this is, an added_tokens.json that lies about does not count, here and in transformers.
        settings["added_tokens_decoder"] = self._added()
        found = {**self._beside, "tokenizer_config.json": settings}
        written = {
            n: json.dumps(d, indent=2, ensure_ascii=False) + "\n" for n, d in found.items() if d
        }
        jinja = self._chat_file()
        return {"tokenizer.json": text, **written, **({TEMPLATE_FILE: jinja} if jinja else {})}

    def _added(self) -> dict[str, dict[str, Any]]:
        """The added tokens by number, as transformers writes them."""
        flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        tokens = sorted(self._backend.get_added_tokens_decoder().items())
        return {str(i): {flag: getattr(token, flag) for flag in flags} for i, token in tokens}

    def _written_templates(self) -> str | list[dict[str, str]]:
        """One by itself, several as a list with names."""
        if list(self.chat_templates) == ["default"]:
            return self.chat_templates["default"]
        return [{"name": n, "template": text} for n, text in self.chat_templates.items()]

    def _chat_file(self) -> str | None:
        """The template, if the settings do not have it."""
        settings = self._beside.get("tokenizer_config.json", {})
        has_it = self.chat_template == listed_templates(settings).get("default")
        return None if has_it or not settings else self.chat_template

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, max_length={self.max_length})"


def load_tokenizer(
    path: str | os.PathLike[str], *, limits: Limits | None = None
) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None when it has none.

    It is read out of ``tokenizer.json``; where there is none, out of ``vocab.json`` and
    ``merges.txt``, or ``vocab.txt``, as the class of transformers does that
    ``tokenizer_config.json`` names. Special tokens, the longest sequence and tokens that were added
    later come from ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json``,
    with transformers' precedence.

    Raises:
        CheckpointMissingError: There is no such directory, or one of two files is not there.
        CheckpointFormatError: One of the files is broken; names it.
        CheckpointLimitError: One asks for more than ``limits`` allow, or for too much memory or
            time; names what.
        UnsupportedModelError: There is a tokenizer of a kind that is not read (SentencePiece's
            ``tokenizer.model`` alone, another class); names it.
    """
    directory = Path(os.fsdecode(path))
    directory = Path(orbax_checkpoint(directory) or directory)
    if not directory.exists():
        raise CheckpointMissingError("no such directory", path=directory)
    if directory.is_file():
        directory = directory.parent

    def once() -> Tokenizer | None:
        with beside_of(directory).files() as folder:
            return tokenizer_in(folder)

    with allowing(limits):
        return settled(once)


def tokenizer_in(directory: Path) -> Tokenizer | None:
    """As :func:`load_tokenizer`, of files that are known to belong together."""
    found = read_tokenizer_files(directory)
    if found is None:
        return None
    backend, settings = found.backend, found.settings
    pad = found.named.get("pad_token")
    pad_id = backend.token_to_id(pad) if pad else None
    if pad_id is None and backend.padding:
        pad_id = backend.padding["pad_id"]
    return Tokenizer(
        backend,
        pad_id=pad_id or 0,
        max_length=_max_length(settings, directory / CONFIG),
        chat_templates=read_templates(directory, settings),
        special_tokens={name: found.named[name] for name in SPECIAL if name in found.named},
        beside={CONFIG: settings, MAP: found.special_map},
    )


def gguf_tokenizer(
    metadata: Mapping[str, Any],
    *,
    path: str | os.PathLike[str] | None = None,
    beside: str | os.PathLike[str] | None = None,
) -> Tokenizer | None:
    """The tokenizer in the metadata of a GGUF file, or None when there is none.

    Args:
        metadata: The file's key-value pairs.
        path: The file, for messages.
        beside: A directory whose ``tokenizer.json``, if it has one, is taken where the metadata
            cannot be rebuilt into one. All else is still as the metadata says.

    Raises:
        CheckpointMismatchError: The ``tokenizer.json`` beside has other tokens than the file.
        UnsupportedModelError: It is of a kind that is not rebuilt from metadata, or splits text in an
            unknown way; names it.
        CheckpointFormatError: A key is missing or wrong; names it.
    """
    if metadata.get("tokenizer.ggml.model", "none") == "none":
        return None
    try:
        document = tokenizer_json(metadata, path=path)
    except UnsupportedModelError:
        found = None
        with suppress(UnsupportedModelError):  # what is wrong with the file itself is told
            found = None if beside is None else read_tokenizer_files(Path(beside))
        if found is None:
            raise
        backend = found.backend
        _same_tokens(backend, metadata, Path(beside or "") / FILE)
    else:
        check_tokenizer(document, path)
        backend = backend_of(json.dumps(document), path)
    pad = metadata.get("tokenizer.ggml.padding_token_id", 0)
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return Tokenizer(
        backend,
        pad_id=int(pad),
        max_length=int(length) if length else None,
        chat_templates=_gguf_templates(metadata, path),
        special_tokens=special_tokens(metadata, path=path),
        eos_ids=end_ids(metadata, path=path),
    )


def _same_tokens(backend: Any, metadata: Mapping[str, Any], file: Path) -> None:
    """Refuses a ``tokenizer.json`` that is of another model than the GGUF file beside it.

    llama.cpp's converter fills the vocabulary up to the number of embeddings.
    """
    theirs = metadata.get("tokenizer.ggml.tokens", ())
    ours = backend.get_vocab_size()
    same = sum(backend.token_to_id(str(token)) == i for i, token in enumerate(theirs[:ours]))
    if ours > len(theirs) or same < 0.5 * ours:
        raise CheckpointMismatchError(
            "is the tokenizer of another model than the GGUF file beside it", path=file,
            expected=f"{len(theirs)} tokens", found=f"{ours}, of which {same} are the same",
            hint="Put the right one there, or load the model alone with tokenizer=False.",
        )  # fmt: skip


def _gguf_templates(metadata: Mapping[str, Any], path: Any) -> dict[str, str]:
    """All chat templates in the metadata of a GGUF file."""
    start = "tokenizer.chat_template."
    names = [key[len(start) :] for key in metadata if key.startswith(start)]
    found = {name: chat_template(metadata, name, path=path) for name in [*names, None]}
    return {name or "default": text for name, text in found.items() if text is not None}


def _max_length(settings: dict[str, Any], file: Path) -> int | None:
    value = settings.get("model_max_length")
    if value is None:
        return None
    if type(value) not in (int, float) or not value >= 1:
        found = type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
        raise CheckpointFormatError(
            "'model_max_length' is not a length",
            path=file,
            expected="a positive number",
            found=found,
        )
    return None if value >= _NO_LIMIT else int(value)


def _checked(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, (str, bytes)):
        raise TypeError("texts must be a list of str: put a single text in brackets, [text]")
    texts = list(texts)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts[{i}] is a {type(text).__name__}, not a str")
        check_unicode(text, f"texts[{i}]")
    return texts


def check_unicode(text: str, which: str) -> None:
    """Refuses a text that has halves of characters.

    Raises:
        UserInputError: Names ``which`` it is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserInputError(
            f"{which} is not valid Unicode: a lone surrogate at {error.start}"
        ) from None
