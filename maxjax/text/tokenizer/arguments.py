"""Checks of what public functions are given: a tokenizer, and texts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...errors import UserInputError


def check_is_tokenizer(tokenizer: Any, method: str = "tokens") -> None:
    """Checks that what a public function was given as a tokenizer has the method that it calls, or is None.

    Raises:
        TypeError: it has not.
    """
    if tokenizer is not None and not hasattr(tokenizer, method):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}: it must be a tokenizer of maxjax, from "
            "maxjax.load or maxjax.load_tokenizer, or None"
            + (
                ". The tokenizer is the second argument, the text the third"
                if isinstance(tokenizer, str)
                else ""
            )
        )


def checked_texts(texts: Any, which: str = "texts") -> list[str]:
    """Return the texts as a list, after a check of each.

    Raises:
        TypeError: ``texts`` is a single text or a dict, or an item is not a str; the message names it.
        UserInputError: a text is not valid Unicode.
    """
    listed = items_of(texts, which, "a list of str", _hint(texts))
    return [_text(item, f"{which}[{i}]", "a str") for i, item in enumerate(listed)]


def checked_pairs(pairs: Any, which: str = "pairs") -> list[tuple[str, str]]:
    """Return the pairs of texts as a list of tuples, after a check of each. The errors are as in ``checked_texts``."""
    listed = items_of(pairs, which, "a list of pairs of texts, [(a, b), …]", _hint(pairs))
    return [
        _pair(item, f"{which}[{i}]", "a pair of texts, (a, b)") for i, item in enumerate(listed)
    ]


def checked_texts_or_pairs(texts: Any, which: str = "texts") -> list[str | tuple[str, str]]:
    """Return texts and pairs of texts as a list, after a check of each. The errors are as in ``checked_texts``."""
    listed = items_of(
        texts, which, "a list of texts or of pairs of texts, [(a, b), …]", _hint(texts)
    )
    wanted = "a text or a pair of texts, (a, b)"
    return [
        (_text if isinstance(item, str) else _pair)(item, f"{which}[{i}]", wanted)
        for i, item in enumerate(listed)
    ]


def items_of(given: Any, which: str, wanted: str, hint: str = "") -> list[Any]:
    """Return the items of a list that a caller gave; a text, bytes or a dict are none."""
    items = None
    if not isinstance(given, (str, bytes, bytearray, Mapping)):
        with suppress(TypeError):  # as of an array without dimensions
            items = iter(given)
    if items is None:
        raise TypeError(f"{which} must be {wanted}, not {type(given).__name__}{hint}")
    return list(items)


def _hint(given: Any) -> str:
    if isinstance(given, Mapping):
        return ": pass its text, or a tuple (text, text_pair)"
    return ": put a single text in brackets, [text]" if isinstance(given, str) else ""


def _text(text: Any, which: str, wanted: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{which} is a {type(text).__name__}, not {wanted}{_hint(text)}")
    check_unicode(text, which)
    return text


def _pair(pair: Any, which: str, wanted: str) -> tuple[str, str]:
    if isinstance(pair, (tuple, list)) and len(pair) != 2:
        raise TypeError(f"{which} has {len(pair)} items: it must be {wanted}")
    try:
        first, second = items_of(pair, which, wanted, _hint(pair))
    except (TypeError, ValueError):
        hint = _hint(pair) if isinstance(pair, Mapping) else ""
        raise TypeError(f"{which} is a {type(pair).__name__}, not {wanted}{hint}") from None
    return _text(first, f"{which}[0]", "a str"), _text(second, f"{which}[1]", "a str")


def check_unicode(text: str, which: str) -> None:
    """Raises an error for text with a lone surrogate, which UTF-8 cannot encode.

    Raises:
        UserInputError: the text is not valid Unicode; the message names it as ``which``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserInputError(
            f"{which} is not valid Unicode: a lone surrogate at {error.start}"
        ) from None
