"""Grammar: answers that a JSON schema, a regular expression or a grammar allows.

It is llguidance's (https://github.com/guidance-ai/llguidance), which ``pip install maxjax[structured]`` installs.
Before each token the grammar says which tokens may come next. That is computed on the host, as bits, and the logits of
the others become -inf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import UserInputError

MASK_BITS = 32
FORMS = frozenset({"schema", "regex", "grammar"})
"""The arguments that say what an answer must match, of which a prompt may have one."""
# JSON in one line: where any blanks may come, small models write nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Matcher:
    """Where an answer is in its grammar.

    Attributes:
        error: what is wrong; None if nothing is.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._mask = np.zeros(mask_words(vocab_size), np.int32)

    @property
    def error(self) -> str | None:
        return self._matcher.get_error() if self._matcher.is_error() else None

    @property
    def is_ended(self) -> bool:
        """Whether no further token can come."""
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, one bit each, as uint32 ``[⌈V / 32⌉]``."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._mask[None], 0)
        return self._mask.view(np.uint32)

    def accept(self, token: int) -> None:
        """Goes on to the state after a token."""
        self._matcher.consume_token(token)


def matcher_of(
    tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], *,
    schema: Any = None, regex: str | None = None, grammar: str | None = None,
) -> Matcher:  # fmt: skip
    """A matcher at the beginning of an answer.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: V, the width of the logits.
        eos_ids: tokens that end an answer, which may come where it is complete.
        schema: a JSON schema as a dict or text, a class of pydantic, or a dataclass. The answer is in one
            line, and an object of a class has its fields and no others.
        regex: a regular expression that the whole answer matches.
        grammar: a grammar in the syntax of Lark, or of llama.cpp (GBNF).

    Raises:
        UserInputError: not exactly one of the three is given, or it is invalid or not supported; there is no tokenizer
            or no token that ends an answer.
        ImportError: llguidance is not installed.
    """
    given = {"schema": schema, "regex": regex, "grammar": grammar}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise UserInputError(
            f"{' and '.join(named)} are given: an answer has one of schema, regex and grammar"
        )
    if tokenizer is None:
        raise UserInputError(
            f"{named[0]}= needs a tokenizer: without one there is no text that could match"
        )
    if not eos_ids:
        raise UserInputError(f"{named[0]}= needs a token that ends an answer: pass eos_ids=")
    llguidance = _llguidance()
    tokens = _tokens(tokenizer, vocab_size, tuple(eos_ids))
    make = llguidance.LLMatcher
    try:
        if schema is not None:
            source = make.grammar_from_json_schema(_json_schema(schema), overrides=_JSON_STYLE)
        elif regex is not None:
            source = make.grammar_from_regex(regex)
        else:
            source = llguidance.grammar_from("grammar", grammar)
    except (ValueError, TypeError) as error:
        raise UserInputError(f"{named[0]}: {error}") from error
    found = Matcher(make(tokens, source), vocab_size)
    if found.error is not None:
        raise UserInputError(f"{named[0]} is not supported: {found.error}")
    return found


def mask_words(vocab_size: int) -> int:
    """The number of 32-bit words with one bit for each token.

    Example:
        >>> mask_words(33)
        2
    """
    return -(-vocab_size // MASK_BITS)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ImportError(
            "schema=, regex= and grammar= need the package llguidance: pip install maxjax[structured]"
        ) from None
    return llguidance


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer; making it takes a second for a large vocabulary."""
    # Padding of the table of embeddings has no text, and is never allowed.
    size = max(vocab_size, tokenizer._backend.get_vocab_size(with_added_tokens=True))
    return _llguidance().LLTokenizer(
        tokenizer._backend.to_str(), n_vocab=size, eos_token=[*eos_ids]
    )


def _json_schema(schema: Any) -> Any:
    """The JSON schema as a dict or text."""
    if isinstance(schema, (str, Mapping)):
        return schema
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):  # a class of pydantic
        return _closed(schema.model_json_schema())
    if isinstance(schema, type) and dataclasses.is_dataclass(schema):
        try:
            from pydantic import TypeAdapter
        except ImportError:
            raise ImportError(
                "a dataclass as schema= needs pydantic: pip install maxjax[structured]"
            ) from None
        return _closed(TypeAdapter(schema).json_schema())
    raise TypeError(
        "schema must be a JSON schema as a dict or text, a class of pydantic or a dataclass, not "
        f"{type(schema).__name__}"
    )


def _closed(schema: Any) -> Any:
    """The schema of a class, whose objects have its fields and no others.

    Example:
        >>> _closed({"properties": {"a": {"type": "null"}}})
        {'properties': {'a': {'type': 'null'}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(one) for name, one in schema.items()}
    if isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found
