"""Request: the checked arguments of a call of ``generate``, ``stream`` or ``Conversation``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError, checked_integer
from ...lockstep import Lockstep
from ...models.weights import model_facts
from ...text.chat import answer_format, chat_prompt, is_message
from ...text.tokenizer.arguments import check_is_tokenizer, check_unicode
from ..pictures import Pictures, SeenPictures, pictures_in, placed_pictures, read_pictures
from ..sampling.penalties import check_tokens
from ..sampling.sequences import check_sequences
from ..sampling.settings import Sampling, eos_token_ids
from ..sampling.texts import resolved
from .checks import check_model
from .completion import PartialCompletion
from .defaults import GenerationDefaults, check_stops, chosen_sampling

_LOG = logging.getLogger("maxjax")
_MAX_NEW_TOKENS = 256


class Prompt(NamedTuple):
    """What the model reads before it writes.

    Attributes:
        ids: the token ids.
        text: the text that was encoded: a chat as its template formats it, or a text as it was given; None for
            token ids.
        is_chat: whether the template has formatted it.
        pictures: its pictures; None for none.
    """

    ids: list[int]
    text: str | None
    is_chat: bool
    pictures: Pictures | None = None


class Request:
    """The checked arguments that all prompts of a call share.

    Attributes:
        longest: largest number of tokens of a text.
        seen: the features of pictures that are kept.
        fills: whether the answer may be as long as there is room, because nobody has said how long it is.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_new_tokens: float | None,
        stop: str | Sequence[str] | None,
        eos_ids: Sequence[int] | None,
        sampling: Sampling | None,
        values: dict[str, Any],
        chat: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        shows_marks: bool = False,
        seen: SeenPictures | None = None,
    ):
        check_model(model)
        check_is_tokenizer(tokenizer)
        defaults = getattr(model, "generation", None)
        ends = tuple(getattr(tokenizer, "eos_ids", ()))
        if defaults is None:
            defaults = GenerationDefaults(eos_ids=ends)
        self.model, self.tokenizer = model, tokenizer
        self.template_kwargs = _template_kwargs(template_kwargs, chat)
        self._skip_special, self._shows_marks = skip_special_tokens, shows_marks
        self._has_warned = False
        self.seen = SeenPictures() if seen is None else seen
        self._chat = _is_chat(chat, tokenizer, self.template_kwargs)
        chosen = chosen_sampling(defaults, sampling, values)
        self.sampling = resolved(chosen, tokenizer, model.config.vocab_size)
        outside = [
            i
            for i in eos_token_ids({"eos_ids": eos_ids}, "eos_ids")
            if i >= model.config.vocab_size
        ]
        if outside:
            raise UserInputError(
                f"eos_ids has the token id {outside[0]}, which is outside the model's vocabulary of "
                f"{model.config.vocab_size} tokens"
            )
        if eos_ids is None:
            # Chat models that were tuned from a base model may have its end token in generation_config.json alone.
            eos_ids = list(dict.fromkeys((*defaults.eos_ids, *(ends if self._chat else ()))))
        self.eos_ids = eos_token_ids({"eos_ids": eos_ids}, "eos_ids")
        _check_choice(self.sampling, self.eos_ids, model.config.vocab_size)
        self.stops = defaults.stop if stop is None else check_stops("stop", _stops(stop))
        if self.stops and tokenizer is None:
            raise UserInputError("stop= needs a tokenizer: without one there is no text to search")
        self.longest = model.max_length
        self.fills = max_new_tokens in (None, math.inf)
        if max_new_tokens == math.inf:
            max_new_tokens = model.max_length
        if max_new_tokens is None:
            max_new_tokens = defaults.max_new_tokens
            if max_new_tokens is None and defaults.max_length is not None:
                self.longest = max_new_tokens = min(defaults.max_length, model.max_length)
            max_new_tokens = max_new_tokens or _MAX_NEW_TOKENS
        self.max_new_tokens = checked_integer("max_new_tokens", max_new_tokens)
        PartialCompletion(None, (), (), self.stops)  # raises for invalid stop strings

    def prompt(self, given: Any, which: str = "the prompt") -> Prompt:
        """Return a prompt's token ids, checked against the vocabulary and the context length.

        Args:
            given: text, the messages of a chat, token ids, or what an earlier call has returned.
            which: name of the prompt for error messages.
        """
        if isinstance(given, Prompt):
            found = given
        elif isinstance(given, str):
            found = self._of_text(given, which)
        elif _is_messages(given):
            if self._chat is False:
                raise UserInputError(
                    f"{which} is a list of messages: chat=False takes text or token ids"
                )
            found = self.of_messages(given)
        else:
            found = Prompt(prompt_ids(given, which), None, False)
        self.check(found.ids, which)
        return found

    def of_messages(self, messages: Iterable[Any], **options: Any) -> Prompt:
        """Format and encode the messages of a chat; the template writes the special tokens."""
        messages, items = pictures_in(messages)
        inputs = read_pictures(self.model, self.tokenizer, items) if items else []
        options = self.template_kwargs | options
        if items and not self.tokenizer.chat_templates and "chat_template" not in options:
            options["chat_template"] = getattr(self.tokenizer.images.tokens, "template", None)
        text = chat_prompt(self.tokenizer, messages, **options)
        if items:
            text = self.tokenizer.images.expand(text, inputs)
        ids = self.tokenizer.encode(text, special=False)
        pictures = placed_pictures(self.model, ids, inputs, self.seen) if items else None
        return Prompt(ids, text, True, pictures)

    def _of_text(self, text: str, which: str) -> Prompt:
        if self.tokenizer is None:
            raise UserInputError(
                f"{which} is text, and there is no tokenizer: the model's directory has no "
                "tokenizer.json. Pass token ids instead"
            )
        check_unicode(text, which)
        if not text:
            return Prompt([], text, False)
        if self._chat:
            if not self._has_warned:
                self._has_warned = _warn_if_formatted(self.tokenizer, text, which)
            return self.of_messages([{"role": "user", "content": text}])
        return Prompt(encoded(self.tokenizer, text), text, False)

    def check(self, ids: Sequence[int], which: str = "the prompt") -> None:
        """Raise UserInputError unless the ids are in the vocabulary and leave room for an answer."""
        size, longest = self.model.config.vocab_size, self.longest
        if not ids:
            raise UserInputError(f"{which} is empty: it must have at least one token")
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise UserInputError(
                f"{which} has the token id {wrong}, which is outside the model's vocabulary of {size} "
                "tokens"
            )
        if len(ids) >= longest:
            context = longest == self.model.max_length
            what = "the model's context" if context else "max_length in generation_config.json"
            rest = "Shorten it" if context else "Pass max_new_tokens="
            raise UserInputError(
                f"{which} has {len(ids)} tokens, and {what} is {longest}: there is no room for an "
                f"answer. {rest}"
            )

    def limit(self, prompt: Sequence[int]) -> int:
        """The largest number of tokens of a text, its prompt included."""
        return min(len(prompt) + self.max_new_tokens, self.longest)

    def partial_completion(self, prompt: Prompt) -> PartialCompletion:
        # An answer is a message of its own; without a chat, or if a message is continued, it is the rest of a text.
        continues = not prompt.is_chat or bool(self.template_kwargs.get("continue_final_message"))
        options = self.template_kwargs if prompt.is_chat else {}
        return PartialCompletion(
            self.tokenizer, prompt.ids, self.eos_ids, self.stops, prompt_text=prompt.text,
            continues=continues, skip_special=self._skip_special, shows_marks=self._shows_marks,
            logprobs=self.sampling.logprobs, format=answer_format(self.tokenizer, **options),
            tools=options.get("tools"),
        )  # fmt: skip

    def agree(
        self, together: Lockstep, prompts: Sequence[Sequence[int]], key: Any, **others: Any
    ) -> None:
        """Compares all that decides the answers, if several processes make the call together.

        Raises:
            ProgramMismatchError: something differs.
        """
        if not together.is_shared:
            return
        ids = None if self.tokenizer is None else self.tokenizer.digest
        drawn = None if self.sampling.is_greedy else _key_data(key)
        together.agree(
            prompts=[list(map(int, prompt)) for prompt in prompts],
            max_new_tokens=self.max_new_tokens, stop=list(self.stops), eos_ids=list(self.eos_ids),
            sampling=str(self.sampling), key=drawn, tokenizer=ids, skips=self._skip_special,
            **{name: str(value) for name, value in others.items()}, **model_facts(self.model),
        )  # fmt: skip


# --- chats ------------------------------------------------------------------------------------


def _template_kwargs(given: Any, chat: bool | None) -> dict[str, Any]:
    if chat is not None and type(chat) is not bool:
        raise TypeError(f"chat must be True, False or None, not {type(chat).__name__}")
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"template_kwargs must be a dict, not {type(given).__name__}")
    if given and chat is False:
        raise UserInputError("template_kwargs= needs a chat: with chat=False there is no template")
    return dict(given or {})


def _is_chat(chat: bool | None, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> bool | None:
    """Return whether texts are user messages; False if the caller says so, None if there is no template."""
    if chat is None:
        return bool(getattr(tokenizer, "chat_templates", None)) or bool(template_kwargs) or None
    return chat


def _warn_if_formatted(tokenizer: Any, text: str, which: str) -> bool:
    """Warn if a text has special tokens, as one that ``chat_prompt`` has returned; return whether."""
    found = next((special for special in tokenizer.special_ids if special in text), None)
    if found is not None:
        _LOG.warning(
            "%s has the special token %r and is a user's message, which the chat template formats:"
            " if it is formatted already, pass chat=False", which, found,
        )  # fmt: skip
    return found is not None


# --- checks ---------------------------------------------------------------------------------


def _stops(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, (bytes, Mapping)) or not isinstance(stop, Iterable):
        raise TypeError(f"stop must be a str or a list of str, not {type(stop).__name__}")
    return tuple(stop)


def _check_choice(sampling: Sampling, eos_ids: Sequence[int], size: int) -> None:
    """Raises an error for ids outside the vocabulary, or if every token is excluded."""
    check_tokens(sampling, size)
    check_sequences(sampling, size)
    never = {token for token, bias in dict(sampling.logit_bias).items() if bias == -math.inf}
    never.update(sampling.banned)
    if len(never) >= size:
        raise UserInputError("banned and logit_bias exclude every token of the vocabulary")
    ends = [token for token in eos_ids if token < size]
    if sampling.min_new_tokens and len(never.union(ends)) >= size:
        raise UserInputError(
            "banned and logit_bias exclude every token but those that end a text, which min_new_tokens delays"
        )


def _key_data(key: Any) -> Any:
    key = jax.random.key(0) if key is None else key
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key).tolist()


# --- prompts --------------------------------------------------------------------------------


def listed(prompts: Any) -> tuple[bool, list[Any]]:
    """Return whether ``prompts`` is a single prompt, and the list of prompts.

    Raises:
        TypeError: ``prompts`` is neither text, messages nor token ids, nor a list of these.

    Example:
        >>> listed([1, 2]), listed(["a", [1, 2]])
        ((True, [[1, 2]]), (False, ['a', [1, 2]]))
        >>> listed([{"role": "user", "content": "Hi"}])[0]
        True
    """
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, Mapping):
        raise TypeError(
            "a chat must be a list of messages: put a single message in brackets, [message]"
        )
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise TypeError(
            f"prompts must be text, messages or token ids, not {type(prompts).__name__}"
        )
    if isinstance(prompts, (np.ndarray, jax.Array)) and prompts.shape == (0,):
        return True, [prompts]
    found = list(prompts)
    one = bool(found) and (all(map(_is_number, found)) or is_message(found[0]))
    return one, [found] if one else found


def _is_messages(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and is_message(given[0])


def _is_number(item: Any) -> bool:
    if isinstance(item, str):  # a NumPy string has ndim 0 too
        return False
    return isinstance(item, Integral) or getattr(item, "ndim", None) == 0


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Encode a text, with one token at its beginning where the text and the tokenizer both put one there."""
    ids, first = tokenizer.encode(text), tokenizer.bos_id
    is_twice = first is not None and ids[:2] == [first, first]
    if is_twice and tokenizer.encode("")[:1] == [first]:
        return ids[1:]  # the text begins with it already, as rendered chat templates do
    return ids


def prompt_ids(prompt: Any, which: str) -> list[int]:
    """Return token ids as a list.

    Raises:
        TypeError: they are no integers in one row.
    """
    try:
        found = None if isinstance(prompt, (bytes, Mapping)) else np.asarray(prompt)
    except ValueError:  # rows of several lengths
        found = None
    if found is not None and found.size == 0 and found.ndim == 1:
        return []
    if found is None or found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{which} must be text, messages or token ids, not {type(prompt).__name__}")
    return found.tolist()
