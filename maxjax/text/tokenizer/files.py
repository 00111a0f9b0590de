"""Reads all tokenizer files of a directory into one tokenizer of the ``tokenizers`` package.

``tokenizer.json``, or the older files without it, define how text is split and numbered; up to three
more files have added tokens. Loading, converting and writing a tokenizer all read it here, so that
they see the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, UserInputError
from ...models.config import read_object
from ...storage.files import is_there
from ...storage.limits import in_force
from ...storage.save.beside import Files
from ...storage.strict_json import load_json, read_json_bytes
from .added import CONFIG, FLAGS, LIST, MAP, TokenFiles, check_size, read_beside, with_numbers
from .limits import check_tokenizer
from .sentencepiece_classes import around_language
from .settings import apply_settings, gives_token_types
from .vocab import Read, post_processor, read_vocabulary

FILE = "tokenizer.json"


@dataclass
class TokenizerDocuments:
    """The tokenizer of a directory.

    Attributes:
        backend: the ``tokenizers.Tokenizer``.
        named: the special tokens by their names in ``tokenizer_config.json``.
        settings: the content of ``tokenizer_config.json``.
        special_map: the content of ``special_tokens_map.json``.
        document: the content of ``tokenizer.json``, or None if other files change the tokenizer.
        has_types: whether the model gets token types from it; None if the files do not tell.
    """

    backend: Any
    named: dict[str, str]
    settings: dict[str, Any]
    special_map: dict[str, Any]
    document: dict[str, Any] | None
    has_types: bool | None


def read_tokenizer_files(directory: Path | Files) -> TokenizerDocuments | None:
    """Reads the tokenizer of a directory with its added tokens; None if there is none.

    Raises:
        UnsupportedModelError: the format or class of the tokenizer is not supported; the message
            names it.
        CheckpointError: a file is missing, corrupt or over a limit; the message names it.
    """
    file = directory / FILE
    settings = optional(directory / CONFIG)
    is_told = "model_input_names" in settings and "fix_mistral_regex" not in settings
    config = {} if is_told else optional(directory / "config.json")
    if is_there(file):
        data = read_json_bytes(file, in_force())
        # Strict JSON: of duplicate keys, the package would use the last.
        document, text, vocabulary = load_json(data, name=str(file)), data.decode(), None
        check_tokenizer(document, file)
        if apply_settings(document, settings, config, file):
            text = json.dumps(document)
    else:
        vocabulary = read_vocabulary(directory, settings)
        if vocabulary is None:
            return None
        document, text, file = vocabulary.document, json.dumps(vocabulary.document), vocabulary.file
        check_tokenizer(document, file)
    backend = backend_of(text, file)
    special_map = optional(directory / MAP)
    own = document.get("added_tokens") or [] if isinstance(document, dict) else []
    beside = read_beside(
        settings, special_map, optional(directory / LIST), own, directory=directory,
        defaults=None if vocabulary is None else vocabulary.kind.special,
    )  # fmt: skip
    check_size(beside, directory)
    is_changed = _changes_tokens(own, beside)
    changed = _with_added(backend, document, beside, is_changed, file)
    if vocabulary is not None:
        _set_post_processor(changed, vocabulary, settings, beside)
    is_unchanged = vocabulary is None and changed is backend and not is_changed
    return TokenizerDocuments(
        changed, beside.named, settings, special_map, document if is_unchanged else None,
        gives_token_types(settings, config),
    )  # fmt: skip


def backend_of(text: str, path: Any) -> Any:
    """Makes a tokenizer from the content of a ``tokenizer.json``.

    Raises:
        CheckpointFormatError: the content is not a tokenizer.
    """
    import tokenizers

    try:
        return guarded(tokenizers.Tokenizer.from_str, text)
    except UserInputError as error:
        reason = str(error).removeprefix("the tokenizer failed: ")
        raise CheckpointFormatError(f"not a tokenizer: {reason}", path=path) from None


def guarded(function: Any, *args: Any) -> Any:
    """Calls a function of the ``tokenizers`` package, and turns its errors into UserInputError.

    A panic of its compiled code is a BaseException, but not an Exception.
    """
    try:
        return function(*args)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = str(error).splitlines() or [type(error).__name__]
        raise UserInputError(f"the tokenizer failed: {text[0]}") from None


def optional(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_object(file) if is_there(file) else {}


def _with_added(
    backend: Any, document: Mapping[str, Any], beside: TokenFiles, is_changed: bool, path: Path
) -> Any:
    """The tokenizer with the added tokens; a new one if they get their ids only in a new one."""
    tokens = [token.made() for token in beside.tokens] if is_changed else []
    guarded(backend.add_tokens, tokens)
    changed = with_numbers(backend, document, beside, path)
    if changed is None:
        return backend
    found = backend_of(json.dumps(changed), path)
    guarded(found.add_tokens, tokens)
    return found


def _changes_tokens(own: list[Any], beside: TokenFiles) -> bool:
    """Whether the other files change the list of added tokens in ``tokenizer.json``."""
    listed = {item.get("content"): item for item in own if isinstance(item, dict)}
    for token in beside.tokens:
        item, added = listed.get(token.content), token.made()
        if item is None or any(getattr(added, n) != item.get(n, False) for n in FLAGS):
            return True
    return False


def _set_post_processor(
    backend: Any, vocabulary: Read, settings: Mapping[str, Any], beside: TokenFiles
) -> None:
    if vocabulary.kind.post_processor == "language":
        from tokenizers.processors import TemplateProcessing

        eos = beside.named["eos_token"]
        found = around_language(settings, eos, backend.token_to_id, vocabulary.file)
        backend.post_processor = guarded(TemplateProcessing, *found)
        return
    processor = guarded(
        post_processor, vocabulary.kind, settings, beside.named, backend.token_to_id
    )
    if processor is not None:
        backend.post_processor = processor
