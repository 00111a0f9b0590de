"""The token ids of the texts in settings: of ``bad_words`` and ``dry_sequence_breakers``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from ...errors import UserInputError
from .settings import Sampling

_DEFAULT_BREAKERS = ("\n", ":", '"', "*")
# llama.cpp's limits on a breaker, in characters and tokens.
_MOST_CHARACTERS, _MOST_TAIL = 40, 20


def resolved(sampling: Sampling, tokenizer: Any, vocab_size: int) -> Sampling:
    """The settings with token ids in place of texts.

    Args:
        sampling: the settings.
        tokenizer: the model's tokenizer, or None.
        vocab_size: number of tokens that the model can choose.

    Raises:
        UserInputError: there is a text, and no tokenizer.

    Example:
        >>> resolved(Sampling(bad_words=[[3, 4]]), None, 10).bad_words
        ((3, 4),)
    """
    words, breakers = sampling.bad_words, sampling.dry_sequence_breakers
    uses_dry = sampling.dry_multiplier > 0
    if uses_dry and breakers is None:
        breakers = () if tokenizer is None else _DEFAULT_BREAKERS
    given = {"bad_words": words, "dry_sequence_breakers": breakers or ()}
    for name, each in given.items():
        text = next((one for one in each if isinstance(one, str)), None)
        if text is not None and tokenizer is None:
            raise UserInputError(
                f"{name} has the text {text!r}, and there is no tokenizer: pass token ids instead"
            )
    return dataclasses.replace(
        sampling,
        bad_words=_all(words, lambda text: _words(tokenizer, text)),
        dry_sequence_breakers=_all(breakers, lambda text: _breakers(tokenizer, text, vocab_size))
        if uses_dry and breakers is not None
        else None,
    )


def _all(given: Iterable[Any], ids_of: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for one in given:
        found += ids_of(one) if isinstance(one, str) else [one]
    return found


def _words(tokenizer: Any, text: str) -> list[tuple[int, ...]]:
    """A word as it is encoded with and without a space before it."""
    word = text.lstrip()
    forms = [word, f" {word}"] if word else [text]
    each = [tuple(tokenizer.encode(form, special=False)) for form in forms]
    return [ids for ids in each if ids]


@functools.lru_cache(maxsize=64)
def _breakers(tokenizer: Any, text: str, vocab_size: int) -> list[tuple[int, ...]]:
    """The sequences of tokens in which a breaker ends.

    Each token that has the text is one; one that ends with a beginning of it is followed by the tokens of the rest.
    """
    text = text[:_MOST_CHARACTERS]
    found: list[tuple[int, ...]] = []
    for token, piece in enumerate(_texts_of_tokens(tokenizer, vocab_size)):
        if text in piece:
            found.append((token,))
            continue
        for size in range(min(len(piece), len(text) - 1), 0, -1):
            if piece.endswith(text[:size]):
                rest = tokenizer.encode(text[size:], special=False)[:_MOST_TAIL]
                found.append((token, *rest))
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=4)
def _texts_of_tokens(tokenizer: Any, vocab_size: int) -> list[str]:
    """The text of each token by itself."""
    count = min(vocab_size, tokenizer._backend.get_vocab_size(with_added_tokens=True))
    each = [[token] for token in range(count)]
    return tokenizer._backend.decode_batch(each, skip_special_tokens=False)
