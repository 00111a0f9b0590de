"""Tokenizer: encodes text to token ids and decodes them, by the ``tokenizer.json`` of a checkpoint.

It wraps the ``tokenizers`` package, which is imported when the first tokenizer is loaded, and turns
the errors of that package into maxjax's own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...elsewhere import TOKENIZER_METHODS
from ...errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointMissingError,
    UnsupportedModelError,
    UserInputError,
)
from ...storage.files import is_there
from ...storage.hub import checkpoint_path
from ...storage.limits import Limits, allowing
from ...storage.open import beside_of, orbax_checkpoint
from ...storage.save.beside import Files, files_of, settled
from ..stream_decoders import cleaned, token_id
from ..template.files import TEMPLATE_FILE, listed_templates, read_templates
from .added import CONFIG, FLAGS, MAP, SPECIAL
from .arguments import checked_pairs, checked_texts, checked_texts_or_pairs
from .files import FILE, backend_of, guarded, read_tokenizer_files
from .limits import check_tokenizer

# Hugging Face writes int(1e30) for "no limit".
_NO_LIMIT = 10**9


class Encoding(NamedTuple):
    """The tokens of a text or of a text pair, with one item per token in each list.

    Attributes:
        ids: the token ids.
        type_ids: the segment (0 or 1) of a text pair, as the model takes it.
        offsets: the start and end of the token in its text, in characters; (0, 0) for special tokens that
            the tokenizer has added. None unless the call asked for offsets, as are the following.
        sequence_ids: the text (0 or 1) of a text pair that the token is from; None for an added special token.
        word_ids: the index of the word of its text, as the tokenizer splits it into words; None for an
            added special token.
    """

    ids: list[int]
    type_ids: list[int]
    offsets: list[tuple[int, int]] | None = None
    sequence_ids: list[int | None] | None = None
    word_ids: list[int | None] | None = None


class BatchEncoding(NamedTuple):
    """Texts padded to one length: three int32 arrays ``[B, T]`` named like a model's arguments."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    token_type_ids: np.ndarray


class Tokenizer:
    """Encodes text to token ids and decodes them. Made by :func:`load_tokenizer`; thread-safe.

    It can be copied and pickled, for example for the worker processes of a data loader.

    Attributes:
        pad_id: the token id with which a batch is padded.
        max_length: the largest number of tokens that the model takes, by the tokenizer's files;
            None if they do not say.
        cleans_up: whether decoding removes spaces before punctuation
            ("clean_up_tokenization_spaces" of the files).
        chat_templates: the Jinja chat templates by name; the unnamed one is "default".
        special_tokens: the special tokens by their names in ``tokenizer_config.json``, e.g.
            "bos_token" → "<s>", also those of the model itself, such as "image_token".
        eos_ids: the ids of the tokens that end a text or an answer, by the tokenizer's files.
        images: the image processor (``maxjax.images.ImageProcessor``) of a model that takes images; else None.
    """

    images: Any = None

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
        has_types: bool | None = None,
        beside: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        # A file may contain the padding and truncation that were used in training.
        self._truncated_side: str = (backend.truncation or {}).get("direction", "right")
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
        eos = self.special_id("eos_token") if eos_ids is None else None
        self.eos_ids: tuple[int, ...] = tuple(eos_ids or ()) if eos is None else (eos,)
        self._has_types = has_types
        self._beside = dict(beside or {})
        self._configure()

    def _configure(self) -> None:
        """Applies the settings that a ``tokenizer.json`` cannot express."""
        settings = self._beside.get(CONFIG, {})
        if settings.get("split_special_tokens") is True:
            self._backend.encode_special_tokens = True
        if settings.get("truncation_side") in ("left", "right"):
            self._truncated_side = settings["truncation_side"]
        # As in transformers: a BPE tokenizer keeps its spaces.
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_bpe = type(self._backend.model).__name__ == "BPE" and settings.get(forced) is not True
        cleans = settings.get("clean_up_tokenization_spaces") is True
        self.cleans_up: bool = cleans and not is_bpe
        # CLIP's words end with "</w>", which the decoder in its files leaves in the text.
        is_of_bytes = type(self._backend.decoder).__name__ == "ByteLevel"
        suffix = getattr(self._backend.model, "end_of_word_suffix", None)
        self._word_end: str = (suffix or "") if is_of_bytes else ""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Raise an error: the tokenizers of transformers are called, those of maxjax have methods."""
        raise TypeError(
            "a tokenizer of maxjax is not called: tokenizer.encode(text) returns token ids, "
            "tokenizer.tokens(texts, offsets=True) also where they are in the text, and "
            "tokenizer.batch(texts) the padded ids of several texts"
        )

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; for names of transformers' tokenizers it says what to write."""
        if name in TOKENIZER_METHODS:
            what = f"'Tokenizer' object has no attribute '{name}': {TOKENIZER_METHODS[name]}"
            raise AttributeError(what, name=name, obj=self)
        return object.__getattribute__(self, name)  # the usual error, or that of a property

    # A copy shares the backend and its lock; an unpickled tokenizer has its own of both.

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
        """A number above all token ids: the largest id plus one."""
        size = self._backend.get_vocab_size()
        # If there are gaps, the largest id is not below the count.
        return max(size, 1 + max(self._backend.get_vocab().values(), default=-1))

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The texts and ids of all special tokens, also of those that have no name."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if token.special}

    @cached_property
    def digest(self) -> str:
        """A digest of all that decides which ids a text has, and which text ids have."""
        with self._lock:
            facts = [self.cleans_up, self.pad_id, self._backend.encode_special_tokens]
            text = f"{facts} {self._backend.to_str()}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The default chat template; None if there is none."""
        return self.chat_templates.get("default")

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text; None if there is none."""
        return self.special_id("bos_token")

    def special_id(self, name: str) -> int | None:
        """The id of the special token of a name, such as "mask_token"; None if there is none."""
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @cached_property
    def subword_prefix(self) -> str:
        """What tokens begin with that continue a word, such as "##"; "" if the vocabulary does not tell them."""
        return getattr(self._backend.model, "continuing_subword_prefix", None) or ""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The tokens of these ids as the vocabulary spells them, such as "##ing"; "" for ids without a token."""
        return [self._backend.id_to_token(token_id(i)) or "" for i in ids]

    def tokens(
        self,
        texts: Iterable[str],
        *,
        max_length: int | None = None,
        special: bool = True,
        offsets: bool = False,
    ) -> list[Encoding]:
        """Encodes texts, with the special tokens that the model expects.

        Args:
            texts: any number of texts, which may be empty.
            max_length: the largest number of tokens of a text, special tokens included; longer texts
                are truncated, at the end or where ``truncation_side`` of the files says. By default no
                text is truncated.
            special: whether special tokens are added around each text.
            offsets: whether to return where each token is in its text (``return_offsets_mapping`` in transformers),
                and its word.

        Raises:
            TypeError: a text is not a str, or ``texts`` is a single str.
            UserInputError: a text is not valid Unicode, or cannot be tokenised.
        """
        return self._encoded(checked_texts(texts), max_length, special, offsets)

    def pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        max_length: int | None = None,
        offsets: bool = False,
    ) -> list[Encoding]:
        """Encodes text pairs as one row of tokens each, with the special tokens around and between them.

        Args:
            pairs: any number of pairs of texts.
            max_length: the largest number of tokens of a pair, special tokens included; in a longer pair
                the longer text is truncated first. By default no pair is truncated.
            offsets: as for :meth:`tokens`; each offset is in the token's own text.

        Raises:
            TypeError, UserInputError: as for :meth:`tokens`.
        """
        return self._encoded(checked_pairs(pairs), max_length, True, offsets)

    def windows(
        self, texts: Iterable[Any], *, max_length: int, stride: int = 0
    ) -> list[list[Encoding]]:
        """Encodes each text as one or several windows of at most ``max_length`` tokens, with offsets.

        Args:
            texts: texts, or pairs of texts. Of a pair the second text is split, and each window has the whole first.
            max_length: the largest number of tokens of a window, special tokens included.
            stride: the number of tokens that a window shares with the next one.

        Raises:
            TypeError, UserInputError: as for :meth:`tokens`; or ``stride`` leaves no room for new tokens, or
                the first text of a pair for the second.
        """
        checked: list[Any] = checked_texts_or_pairs(texts)
        is_pair = any(not isinstance(item, str) for item in checked)
        checked = checked_pairs(checked, "texts") if is_pair else checked
        room = max_length - self._backend.num_special_tokens_to_add(is_pair)
        if type(stride) is not int:
            raise UserInputError(f"stride must be an int, not {stride!r:.60}")
        self._check_length(max_length, is_pair)
        if not 0 <= stride < room:
            raise UserInputError(
                f"stride must be from 0 to {room - 1}, not {stride}: max_length is {max_length}"
            )
        if is_pair:
            for i, first in enumerate(self.tokens([a for a, _ in checked], special=False)):
                if len(first.ids) + stride >= room:
                    raise UserInputError(
                        f"the first text of pair {i} has {len(first.ids)} tokens; at most "
                        f"{room - stride - 1} leave room for the second: shorten it"
                    )
        with self._lock:
            which = "only_second" if is_pair else "only_first"
            self._truncate_to(max_length, is_pair, stride=stride, strategy=which)
            try:
                found = guarded(self._backend.encode_batch, checked, False, True)
            finally:
                self._backend.no_truncation()
        return [[self._encoding(one, True) for one in (row, *row.overflowing)] for row in found]

    def _encoded(
        self, texts: list[Any], max_length: int | None, special: bool, offsets: bool
    ) -> list[Encoding]:
        with self._lock:
            if max_length is not None:
                self._truncate_to(max_length, bool(texts) and isinstance(texts[0], tuple))
            try:
                encodings = guarded(self._backend.encode_batch, texts, False, special)
            finally:
                self._backend.no_truncation()
        return [self._encoding(encoding, offsets) for encoding in encodings]

    def _encoding(self, found: Any, offsets: bool) -> Encoding:
        # A model that gets no token types has seen type 0 only.
        types = [0] * len(found.ids) if self._has_types is False else found.type_ids
        if not offsets:
            return Encoding(found.ids, types)
        return Encoding(found.ids, types, found.offsets, found.sequence_ids, found.word_ids)

    def _check_length(self, max_length: int, is_pair: bool) -> None:
        least = self._backend.num_special_tokens_to_add(is_pair) + 1
        if max_length < least:
            raise UserInputError(f"max_length must be at least {least}, not {max_length}")

    def _truncate_to(self, max_length: int, is_pair: bool, **options: Any) -> None:
        self._check_length(max_length, is_pair)
        self._backend.enable_truncation(max_length, direction=self._truncated_side, **options)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of one text. The errors are those of :meth:`tokens`."""
        return self.tokens([text], special=special)[0].ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decodes token ids to text; special tokens are left out by default.

        Raises:
            TypeError: an id is not an integer.
            UserInputError: an id is not from 0 to 2**32 - 1.
        """
        text = self._decoded([token_id(i) for i in ids], skip_special)
        if self._word_end:
            text = text.replace(self._word_end, " ").strip()
        return cleaned(text) if self.cleans_up else text

    def _decoded(self, ids: list[int], skip_special: bool) -> str:
        return guarded(self._backend.decode, ids, skip_special)

    def batch(self, texts: Iterable[str], *, max_length: int | None = None) -> BatchEncoding:
        """The texts as arrays, padded to the longest. The errors are those of :meth:`tokens`."""
        return self.pad(self.tokens(texts, max_length=max_length))

    def pad(
        self, rows: Sequence[Encoding], length: int | None = None, count: int | None = None
    ) -> BatchEncoding:
        """Rows of tokens as arrays ``[count, length]``, padded at the right and with empty rows.

        By default rows are padded to the longest one, and no rows are added. The mask of padding is 0.
        """
        length = max((len(row.ids) for row in rows), default=0) if length is None else length
        count = len(rows) if count is None else count
        ids = np.full((count, length), self.pad_id, np.int32)
        mask = np.zeros((count, length), np.int32)
        types = np.zeros((count, length), np.int32)
        for i, row in enumerate(rows):
            n = len(row.ids)
            ids[i, :n], types[i, :n], mask[i, :n] = row.ids, row.type_ids, 1
        return BatchEncoding(ids, mask, types)

    def files(self) -> dict[str, str]:
        """The files, by name, from which :func:`load_tokenizer` and transformers load this tokenizer."""
        with self._lock:
            text = self._backend.to_str(pretty=True)
        given = self._beside.get(CONFIG, {})
        settings = dict(given)
        if not settings:
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            is_words = type(self._backend.model).__name__ == "WordPiece"
            if is_words if self._has_types is None else self._has_types:  # not the class's default
                settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
            settings["pad_token"] = self._backend.id_to_token(self.pad_id)
            if self.max_length is not None:
                settings["model_max_length"] = self.max_length
        if self._truncated_side == "left":  # which the tokenizer.json alone may have said
            settings["truncation_side"] = "left"
        listed = listed_templates(given)
        # There was no such file, or named templates were in separate ones.
        lists_templates = not given or not self.chat_templates.keys() <= {"default", *listed}
        if self.chat_templates and lists_templates:
            settings["chat_template"] = self._written_templates()
        for name in SPECIAL:  # the defaults of a class are in no file
            token, said = self.special_tokens.get(name), settings.get(name)
            said = said.get("content") if isinstance(said, Mapping) else said
            if token is not None and token != said:
                settings[name] = token
        # With this entry, an old added_tokens.json is ignored, here and in transformers.
        settings["added_tokens_decoder"] = self._added()
        found = {FILE: text}
        for name, content in {**self._beside, CONFIG: settings}.items():
            if content:
                found[name] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        default = self.chat_template
        if default and not lists_templates and default != listed.get("default"):
            found[TEMPLATE_FILE] = default
        return found if self.images is None else found | self.images.files()

    def _added(self) -> dict[str, dict[str, Any]]:
        """The added tokens by id, in the form that transformers writes."""
        flags = ("content", *FLAGS)
        tokens = sorted(self._backend.get_added_tokens_decoder().items())
        return {str(i): {flag: getattr(token, flag) for flag in flags} for i, token in tokens}

    def _written_templates(self) -> str | list[dict[str, str]]:
        """A single template as a str, several as a list of named ones."""
        if list(self.chat_templates) == ["default"]:
            return self.chat_templates["default"]
        return [{"name": n, "template": text} for n, text in self.chat_templates.items()]

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, max_length={self.max_length})"


def load_tokenizer(
    path: str | os.PathLike[str], *, limits: Limits | None = None
) -> Tokenizer | None:
    """Loads the tokenizer of a checkpoint directory; None if it has none.

    It is read from ``tokenizer.json``. Without that file, it is read from ``vocab.json`` and
    ``merges.txt``, or from ``vocab.txt``, as the transformers class that ``tokenizer_config.json``
    names would; from a SentencePiece ``tokenizer.model``; or from ``tekken.json``. Special tokens,
    the maximum length and added tokens come from ``tokenizer_config.json``,
    ``special_tokens_map.json`` and ``added_tokens.json``, with transformers' precedence.

    Args:
        path: the directory, or a file in it; or a name as for :func:`maxjax.load` (``org/name``, ``"tiny"``).
        limits: the limits on the files; raise one if an error message says that it is exceeded.

    Raises:
        CheckpointMissingError: there is no such directory, or one of two needed files is missing.
        CheckpointFormatError: a file is corrupt; the message names it.
        CheckpointLimitError: a file exceeds ``limits``, or needs too much memory or time; the
            message says what.
        UnsupportedModelError: the tokenizer is of an unsupported kind, such as a tiktoken file, or
            of an unsupported class; the message names it.
    """
    directory = Path(checkpoint_path(path))
    directory = Path(orbax_checkpoint(directory) or directory)
    if not is_there(directory):
        raise CheckpointMissingError("no such directory", path=directory)
    if directory.is_file():
        directory = directory.parent

    def once() -> Tokenizer | None:
        with beside_of(directory).files() as folder:
            return tokenizer_in(folder)

    with allowing(limits):
        return settled(once)


def tokenizer_in(directory: Path | Files) -> Tokenizer | None:
    """Loads a tokenizer as :func:`load_tokenizer` does, from files known to belong together."""
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
        special_tokens=found.named,
        has_types=found.has_types,
        beside={CONFIG: settings, MAP: found.special_map},
    )


def gguf_tokenizer(
    metadata: Mapping[str, Any],
    *,
    path: str | os.PathLike[str] | None = None,
    beside: str | os.PathLike[str] | None = None,
) -> Tokenizer | None:
    """Builds the tokenizer in the metadata of a GGUF file; None if there is none.

    Args:
        metadata: the key-value pairs of the file.
        path: the file, for messages.
        beside: a directory whose ``tokenizer.json``, if any, is used if none can be built from the
            metadata. Everything else still comes from the metadata.

    Raises:
        CheckpointMismatchError: that ``tokenizer.json`` has other tokens than the GGUF file.
        UnsupportedModelError: the tokenizer is of a kind that cannot be built from metadata, or
            splits text in an unknown way; the message names it.
        CheckpointFormatError: a key is missing or invalid; the message names it.
    """
    from ...models.gguf import tokenizer_json
    from ...models.gguf.metadata import Settings
    from ...models.gguf.tokenizer.read import end_ids, padding_id, special_tokens

    if Settings(metadata, "tokenizer.ggml.", path).text("model", "none") == "none":
        return None
    try:
        document = tokenizer_json(metadata, path=path)
    except UnsupportedModelError:
        found = None
        with suppress(UnsupportedModelError):  # the first error, about the GGUF file, is raised
            found = None if beside is None else read_tokenizer_files(files_of(beside))
        if found is None:
            raise
        backend = found.backend
        _same_tokens(backend, metadata, files_of(beside or "") / FILE)
    else:
        check_tokenizer(document, path)
        backend = backend_of(json.dumps(document), path)
    pad = padding_id(metadata, path=path)
    architecture = Settings(metadata, "general.", path).text("architecture", None)
    length = Settings(metadata, f"{architecture}.", path).count("context_length", None)
    return Tokenizer(
        backend,
        pad_id=pad,
        max_length=length,
        chat_templates=_gguf_templates(metadata, path),
        special_tokens=special_tokens(metadata, path=path),
        eos_ids=end_ids(metadata, path=path),
    )


def _same_tokens(backend: Any, metadata: Mapping[str, Any], file: Path) -> None:
    """Raises an error for a ``tokenizer.json`` of another model than the GGUF file beside it.

    The GGUF file may have more tokens: llama.cpp's converter pads the vocabulary to the number of
    embeddings.
    """
    from ...models.gguf.metadata import Settings

    theirs = Settings(metadata, "tokenizer.ggml.").items("tokens", str, [])
    ours = backend.get_vocab_size()
    same = sum(backend.token_to_id(token) == i for i, token in enumerate(theirs[:ours]))
    if ours > len(theirs) or same < 0.5 * ours:
        raise CheckpointMismatchError(
            "is the tokenizer of another model than the GGUF file beside it", path=file,
            expected=f"{len(theirs)} tokens", found=f"{ours}, of which {same} are the same",
            hint="Put the right file there, or load the model alone with tokenizer=False.",
        )  # fmt: skip


def _gguf_templates(metadata: Mapping[str, Any], path: Any) -> dict[str, str]:
    """All chat templates in the metadata of a GGUF file."""
    from ...models.gguf import chat_template

    start = "tokenizer.chat_template."
    names = [key[len(start) :] for key in metadata if key.startswith(start)]
    found = {name: chat_template(metadata, name, path=path) for name in [*names, None]}
    return {name or "default": text for name, text in found.items() if text is not None}


def _max_length(settings: dict[str, Any], file: Path) -> int | None:
    value = settings.get("model_max_length")
    if value is None:
        return None
    if type(value) not in (int, float) or not 1 <= value < math.inf:
        found = type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
        raise CheckpointFormatError(
            "'model_max_length' is not a length",
            path=file,
            expected="a positive number",
            found=found,
        )
    return None if value >= _NO_LIMIT else int(value)
