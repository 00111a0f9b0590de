"""What a call of ``generate`` asks for, checked: prompts, how they end, how tokens are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np

from ...errors import UserInputError
from ...text.tokenizer.tokenizer import check_unicode
from ..sampling.settings import Sampling, eos_token_ids
from .batch import Batch, check_model
from .completion import PartialCompletion
from .defaults import GenerationDefaults, chosen_sampling

_MAX_NEW_TOKENS = 256


class Request:
    """What all texts of a call have in common, checked."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_new_tokens: int | None,
        stop: str | Sequence[str] | None,
        eos_ids: Sequence[int] | None,
        sampling: Sampling | None,
        values: dict[str, Any],
    ):
        check_model(model)
        if tokenizer is not None and not hasattr(tokenizer, "_backend"):
            raise TypeError(
                f"tokenizer is a {type(tokenizer).__name__}: one of maxjax is wanted, as maxjax.load "
                "and maxjax.load_tokenizer give it, or None"
            )
        defaults = getattr(model, "generation", None)
        if defaults is None:
            ends = getattr(tokenizer, "eos_ids", ())
            defaults = GenerationDefaults(eos_ids=tuple(ends))
        self.model, self.tokenizer = model, tokenizer
        self.sampling = chosen_sampling(defaults, sampling, values)
        _check_choice(self.sampling, model.config.vocab_size)
        given = defaults.eos_ids if eos_ids is None else eos_ids
        self.eos_ids = eos_token_ids({"eos_token_id": given})
        self.stops = defaults.stop if stop is None else _stops(stop)
        if self.stops and tokenizer is None:
            raise UserInputError("a text that stops needs a tokenizer")
        if max_new_tokens is None:
            max_new_tokens = defaults.max_new_tokens or _MAX_NEW_TOKENS
        self.max_new_tokens = positive("max_new_tokens", max_new_tokens)
        PartialCompletion(None, (), (), self.stops)  # refuses what is no stop text

    def tokens(self, prompt: Any, index: int, single: bool) -> list[int]:
        """The ids of a prompt's tokens."""
        which = "the prompt" if single else f"prompts[{index}]"
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserInputError(
                    f"{which} is text, and there is no tokenizer: the model's directory has no "
                    "tokenizer.json. Give the ids of its tokens"
                )
            check_unicode(prompt, which)
            ids = self.tokenizer.encode(prompt) if prompt else []
        else:
            ids = _ids(prompt, which)
        size, longest = self.model.config.vocab_size, self.model.max_length
        if not ids:
            raise UserInputError(f"{which} is empty: there is nothing to go on with")
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise UserInputError(
                f"{which} has the token id {wrong}, which is not one of the {size} of the model's "
                "vocabulary"
            )
        if len(ids) >= longest:
            raise UserInputError(
                f"{which} has {len(ids)} tokens, and the model's context is {longest}: there is no "
                "room for an answer"
            )
        return ids

    def limit(self, prompt: Sequence[int]) -> int:
        """How many tokens a text may have."""
        return min(len(prompt) + self.max_new_tokens, self.model.max_length)

    def growing(self, prompt: Sequence[int]) -> PartialCompletion:
        return PartialCompletion(self.tokenizer, prompt, self.eos_ids, self.stops)

    def decoding(self, prompt: Sequence[int], key: Any, chunk: int, cache_dtype: Any) -> Batch:
        return Batch(
            self.model, [prompt], [self.limit(prompt)], sampling=self.sampling,
            eos_ids=self.eos_ids, key=key, chunk=chunk, cache_dtype=cache_dtype,
        )  # fmt: skip


# --- checks ---------------------------------------------------------------------------------


def positive(name: str, value: Any) -> int:
    """A positive integer.

    Raises:
        UserInputError: ``value`` is none.

    Example:
        >>> positive("batch_size", 0)
        Traceback (most recent call last):
        maxjax.errors.UserInputError: batch_size is 0: a positive integer is wanted
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UserInputError(f"{name} is {value!r}: a positive integer is wanted")
    return int(value)


def _stops(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, (bytes, Mapping)) or not isinstance(stop, Iterable):
        raise TypeError(f"stop is a text or a list of texts, not {type(stop).__name__}")
    return tuple(stop)


def _check_choice(sampling: Sampling, size: int) -> None:
    """Refuses tokens that are none, and a choice of nothing."""
    biases = dict(sampling.logit_bias)
    for name, tokens in (("logit_bias", biases), ("banned", sampling.banned)):
        wrong = max(tokens, default=0)
        if wrong >= size:
            raise UserInputError(f"{name} names token {wrong}: the vocabulary has {size} tokens")
    never = {token for token, bias in biases.items() if bias == -math.inf}
    if len(never.union(sampling.banned)) >= size:
        raise UserInputError("banned and logit_bias leave no token that could be chosen")


# --- prompts --------------------------------------------------------------------------------


def listed(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether it is one prompt, and a list of prompts.

    Raises:
        TypeError: It is neither.

    Example:
        >>> listed([1, 2]), listed(["a", [1, 2]])
        ((True, [[1, 2]]), (False, ['a', [1, 2]]))
    """
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        raise TypeError(f"prompts are texts or ids of tokens, not {type(prompts).__name__}")
    if isinstance(prompts, (np.ndarray, jax.Array)) and prompts.shape == (0,):
        return True, [prompts]
    found = list(prompts)
    one = bool(found) and all(map(_is_number, found))
    return one, [found] if one else found


def _is_number(item: Any) -> bool:
    if isinstance(item, str):  # NumPy's have no axes either
        return False
    return isinstance(item, Integral) or getattr(item, "ndim", None) == 0


def _ids(prompt: Any, which: str) -> list[int]:
    try:
        found = None if isinstance(prompt, (bytes, Mapping)) else np.asarray(prompt)
    except ValueError:  # rows of several lengths
        found = None
    if found is not None and found.size == 0 and found.ndim == 1:
        return []
    if found is None or found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{which} is neither text nor ids of tokens but {type(prompt).__name__}")
    return found.tolist()
