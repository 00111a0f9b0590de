"""Added tokens: tokens in the files beside ``tokenizer.json``, and their ids.

A token such as ``<think>`` may be only in ``tokenizer_config.json``, ``special_tokens_map.json`` or
``added_tokens.json``. The precedence of these files is that of transformers 5. Unlike there, an
added token keeps the id that a file gives it if that id is free, even behind a gap: the
``tokenizers`` package would number added tokens consecutively, whatever the file says.

Source: ``_from_pretrained`` in transformers' tokenization_utils_base.py and ``__init__`` in its
tokenization_utils_tokenizers.py, version 5.23.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import CheckpointFormatError, CheckpointLimitError, shown, some
from .limits import MAX_ADDED, MAX_ADDED_BYTES

_LOG = logging.getLogger("maxjax")

SPECIAL = [f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
"""The names of special tokens in a ``tokenizer_config.json``."""
CONFIG, MAP, LIST = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_ID = 1 << 31


@dataclass(frozen=True)
class Added:
    """A token that is matched in the text before it is split; ``normalized=None`` means ``not special``."""

    content: str
    special: bool
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None

    def made(self) -> Any:
        """The same as a ``tokenizers.AddedToken``."""
        import tokenizers

        normalized = not self.special if self.normalized is None else self.normalized
        return tokenizers.AddedToken(
            self.content, single_word=self.single_word, lstrip=self.lstrip, rstrip=self.rstrip,
            normalized=normalized, special=self.special,
        )  # fmt: skip


@dataclass
class TokenFiles:
    """The tokens in the files beside a tokenizer.

    Attributes:
        named: the special tokens by their names in ``tokenizer_config.json``.
        tokens: all tokens to be added, in this order.
        numbers: the ids that the files give them.
    """

    named: dict[str, str] = field(default_factory=dict)
    tokens: list[Added] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)


def read_beside(
    settings: Mapping[str, Any],
    special_map: Mapping[str, Any],
    listed: Mapping[str, Any],
    own: Iterable[Mapping[str, Any]],
    *,
    directory: str | os.PathLike[str],
    defaults: Mapping[str, str] | None = None,
) -> TokenFiles:
    """Collects the tokens in the files beside a tokenizer.

    If ``tokenizer_config.json`` has an ``added_tokens_decoder``, the other files are used only for
    special tokens that it does not name. Otherwise ``special_tokens_map.json`` takes precedence.

    Args:
        settings: the content of ``tokenizer_config.json``.
        special_map: the content of ``special_tokens_map.json``.
        listed: the content of ``added_tokens.json``: tokens and their ids.
        own: the "added_tokens" of ``tokenizer.json``.
        directory: the directory of the files, for messages.
        defaults: the special tokens of the tokenizer's class.

    Raises:
        CheckpointFormatError: an entry is not a token; the message names file and key.
        CheckpointLimitError: there are too many tokens.
    """
    where = os.fspath(directory)
    config = os.path.join(where, CONFIG)
    given: dict[str, tuple[Any, str]] = {k: (v, config) for k, v in settings.items()}
    _special(given)  # raises for invalid entries, even if another file replaces them
    has_decoder = "added_tokens_decoder" in settings
    for key, value in special_map.items():
        if value is not None and (not has_decoder or settings.get(key) is None):
            given[key] = (value, os.path.join(where, MAP))
    for key, value in (defaults or {}).items():
        given.setdefault(key, (value, ""))
    named, extra = _special(given)
    own = [item for item in own if _is_own(item)]
    decoder: dict[int, Added] = {}
    if has_decoder:
        for number, token in _object(settings["added_tokens_decoder"], config).items():
            decoder[_number(number, token, config)] = _token(token, "added_tokens_decoder", config)
    else:
        origin = os.path.join(where, LIST)
        _check_count(len(listed), origin)
        special = {token.content for token in [*named.values(), *extra]}
        for text, number in listed.items():
            decoder[_number(number, text, origin)] = Added(text, text in special)
        decoder |= {item["id"]: _token(item, "added_tokens", where) for item in own}
    return _merged(named, extra, decoder, {item["content"]: item for item in own})


def _merged(
    named: dict[str, Added],
    extra: list[Added],
    decoder: dict[int, Added],
    own: Mapping[str, Mapping[str, Any]],
) -> TokenFiles:
    by_text = {token.content: token for token in decoder.values()}
    named = {name: by_text.get(token.content, token) for name, token in named.items()}
    # A token that was special once stays special: the package ignores later changes.
    special = {text for text, item in own.items() if item.get("special") is True}
    special |= {token.content for token in named.values()}
    tokens = [decoder[number] for number in sorted(decoder)]
    known = {*own, *by_text}
    for token in [*named.values(), *extra]:
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    return TokenFiles(
        {name: token.content for name, token in named.items()},
        [replace(t, special=t.special or t.content in special) for t in tokens if t.content],
        {token.content: number for number, token in decoder.items()},
    )


def _special(given: Mapping[str, tuple[Any, str]]) -> tuple[dict[str, Added], list[Added]]:
    """The special tokens by name, the usual ones first, and those without a name."""
    named: dict[str, Added] = {}
    own: dict[str, Added] = {}
    for name in SPECIAL:
        value, origin = given.get(name, (None, ""))
        if value is not None:
            named[name] = _token(value, name, origin)
    for name, (value, origin) in given.items():
        is_token = isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
        if name.endswith("_token") and name not in SPECIAL and is_token:
            own[name] = _token(value, name, origin)
    extra: list[Added] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value, origin = given.get(key, (None, ""))
        if isinstance(value, Mapping):
            _check_count(len(value), origin)
            own |= {str(n): _token(token, key, origin) for n, token in value.items()}
        elif isinstance(value, list):
            _check_count(len(value), origin)
            extra = [_token(token, key, origin) for token in value]
        elif value is not None:
            raise _wrong(key, "a list of tokens", value, origin)
        if extra:
            break  # the older key counts only if the newer one lists no tokens
    return {**named, **own}, extra


def _token(value: Any, key: str, origin: str) -> Added:
    """Reads a token, given as a text or as an object with the text as "content"."""
    if isinstance(value, str):
        return Added(value, True, normalized=False)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise _wrong(key, "a text, or an object with a text as 'content'", value, origin)
    flags = {name: value[name] for name in FLAGS if value.get(name) is not None}
    if wrong := [name for name, flag in flags.items() if type(flag) is not bool]:
        raise _wrong(f"{key}.{wrong[0]}", "true or false", flags[wrong[0]], origin)
    listed = key in ("added_tokens_decoder", "added_tokens")
    return Added(value["content"], **{"special": not listed, **flags})


def _is_own(item: Any) -> bool:
    """Whether an entry of a ``tokenizer.json`` is valid; the package reports invalid ones."""
    return (
        isinstance(item, Mapping)
        and isinstance(item.get("content"), str)
        and type(item.get("id")) is int
        and all(type(item.get(name, False)) is bool for name in FLAGS)
    )


def _object(value: Any, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong("added_tokens_decoder", "an object of tokens by number", value, origin)
    _check_count(len(value), origin)
    return value


def _number(value: Any, token: Any, origin: str) -> int:
    text = str(value)
    is_number = type(value) in (int, str) and text.isascii() and text.isdigit() and len(text) < 11
    if not is_number or int(text) >= _MAX_ID:
        key = token["content"] if isinstance(token, Mapping) else token
        raise _wrong(key, "a token id", value, origin)
    return int(text)


def _wrong(key: str, expected: str, found: Any, origin: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"'{key}' is not a token", path=origin or None, expected=expected, found=shown(found)
    )


def _check_count(count: int, origin: str) -> None:
    if count > MAX_ADDED:
        raise CheckpointLimitError(
            "there are too many added tokens", path=origin,
            expected=f"at most {MAX_ADDED}", found=count,
        )  # fmt: skip


# --- adding them to a tokenizer -----------------------------------------------------------------


def check_size(beside: TokenFiles, directory: Any) -> None:
    """Raises an error for tokens whose automaton would be too large.

    Raises:
        CheckpointLimitError: there are too many tokens, or they are too long.
    """
    _check_count(len(beside.tokens), os.fspath(directory))
    size = sum(len(token.content.encode("utf-8", "surrogatepass")) for token in beside.tokens)
    if size > MAX_ADDED_BYTES:
        raise CheckpointLimitError(
            "the added tokens are too long together", path=directory,
            expected=f"at most {MAX_ADDED_BYTES} bytes", found=f"{size} bytes",
        )  # fmt: skip


def with_numbers(
    backend: Any, document: Mapping[str, Any], beside: TokenFiles, path: Any
) -> dict[str, Any] | None:
    """A ``tokenizer.json`` that gives added tokens the ids that they have in the files.

    It puts such tokens into the vocabulary, because the package adds a token of the vocabulary
    under its id there. No id is given twice, and a token of the vocabulary keeps its id; a warning
    says so in both cases.

    Args:
        backend: the tokenizer of the document, with the tokens added.
        document: the content of the present ``tokenizer.json``.
        beside: the tokens in the files beside it.
        path: the path of the files, for messages.

    Returns:
        The changed content; None if all tokens have their ids, or nothing can be changed.
    """
    own = {i["content"]: i["id"] for i in document.get("added_tokens") or () if _is_own(i)}
    given = {text: n for text, n in {**beside.numbers, **own}.items() if text}
    every = [pair for pair in (*beside.numbers.items(), *own.items()) if pair[0]]
    unmet = {text: n for text, n in every if backend.token_to_id(text) != n}
    model = document.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    # If the vocabulary has gaps, the package would give the ids of other tokens a second time.
    has_gaps = isinstance(vocab, Mapping) and max(vocab.values(), default=-1) >= len(vocab)
    if not unmet and not has_gaps:
        return None
    if not isinstance(model, Mapping) or not isinstance(vocab, Mapping):
        _warn(unmet, path)
        return None
    inside = _numbered(vocab, given, [*own, *(token.content for token in beside.tokens)])
    _warn({text: n for text, n in unmet.items() if inside.get(text) != n}, path)
    if not inside or not (has_gaps or any(text in inside for text in unmet)):
        return None
    return {**document, "model": {**model, "vocab": {**vocab, **inside}}}


def _numbered(
    vocab: Mapping[str, int], given: Mapping[str, int], texts: list[str]
) -> dict[str, int]:
    """Ids for the tokens that are not in the vocabulary: the given ones where they are free."""
    taken = set(vocab.values())
    found: dict[str, int] = {}
    for text, number in given.items():
        if text not in vocab and number not in taken:
            found[text] = number
            taken.add(number)
    after = max(taken, default=-1)
    for text in dict.fromkeys(texts):
        if text and text not in vocab and text not in found:
            after += 1
            found[text] = after
    return found


def _warn(unmet: Mapping[str, int], path: Any) -> None:
    if unmet:
        listed = [f"{shown(text)} ({number})" for text, number in unmet.items()]
        _LOG.warning(
            "%s: these added tokens do not get the ids that the files give them, because another"
            " token has the id or the vocabulary has another id for them: %s",
            path, some(listed, 5),
        )  # fmt: skip
