"""Checks of what public functions are given: a tokenizer, and texts."""

from __future__ import annotations

from collections.abc import Iterable
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


def checked_texts(texts: Iterable[str], which: str = "texts") -> list[str]:
    """The texts as a list, after a check of each.

    Raises:
        TypeError: ``texts`` is a single text, or an item is not a str; the message names it.
        UserInputError: a text is not valid Unicode.
    """
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"{which} must be a list of str: put a single text in brackets, [text]")
    if not isinstance(texts, Iterable):
        raise TypeError(f"{which} must be a list of str, not {type(texts).__name__}")
    texts = list(texts)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{which}[{i}] is a {type(text).__name__}, not a str")
        check_unicode(text, f"{which}[{i}]")
    return texts


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
