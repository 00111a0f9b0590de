"""Conversation: a chat of several turns with a language model.

What the turns before have put into the cache of keys and values is used again, as far as the
prompt begins with the same tokens.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ...storage.save.durable import replace_file, require_writable
from ...text.chat import chat_tokens
from ...text.tokenizer.tokenizer import check_unicode
from ..sampling.settings import Sampling
from .batch import Batch
from .completion import PartialCompletion
from .request import Request
from .texts import Stream

_OPENING = ("system", "developer")


class Conversation:
    """A chat with a model that has a chat template.

    Args:
        model, tokenizer: As ``maxjax.load`` gives them.
        messages: What has been said: ``{"role": "system", "content": …}`` and so on.
        max_new_tokens, stop, eos_ids, key, sampling, chunk, cache_dtype, values: As of
            :func:`~maxjax.engine.generate.generate`.
        template: The name of one of the tokenizer's chat templates, or a template.
        template_kwargs: Further variables of the template, e.g. ``{"enable_thinking": False}``.

    Attributes:
        messages: The chat so far; an answer that was interrupted as far as it came.

    Raises:
        UserInputError: No chat template; and as ``generate``.

    Example:
        >>> import maxjax
        >>> model, tokenizer = maxjax.load("tiny")
        >>> chat = maxjax.Conversation(model, tokenizer)
        >>> "".join(chat.say("What is 37 + 48?"))
        '37 + 48 = 85'
        >>> len(chat.messages)
        2
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        messages: Iterable[Mapping[str, Any]] = (),
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        eos_ids: Sequence[int] | None = None,
        key: jax.Array | None = None,
        sampling: Sampling | None = None,
        chunk: int = 512,
        cache_dtype: Any = None,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **values: Any,
    ):
        self._request = Request(model, tokenizer, max_new_tokens, stop, eos_ids, sampling, values)
        self._tokenizer, self._template = tokenizer, template
        self._template_kwargs = dict(template_kwargs or {})
        self._left_out = 0  # so many messages, with those of the system at the beginning
        self._key = jax.random.key(0) if key is None else key
        self._chunk, self._cache_dtype = chunk, cache_dtype
        self._turns = 0
        self._decoding: Batch | None = None
        self._speaking: Callable[[], Stream | None] = lambda: None
        self.messages: list[dict[str, Any]] = [_message(message) for message in messages]
        self._opening = list(self.messages)
        self._prompt([{"role": "user", "content": "?"}])  # no template: said now, not later

    def say(self, text: str) -> Stream:
        """The answer to what the user says, piece by piece.

        Both are among :attr:`messages` once it has ended, also if it was closed before, or dropped;
        a turn to which not one token was written is as if it had not been. An answer that has not
        ended when the next thing is said ends there.

        Raises:
            UserInputError: The chat has become longer than the model's context, see
                :meth:`make_room`; the template refuses it.
            TypeError: ``text`` is none.
        """
        if not isinstance(text, str):
            raise TypeError(f"what is said is a text, not {type(text).__name__}")
        check_unicode(text, "what is said")
        self._interrupt()
        said = [{"role": "user", "content": text}]
        prompt = self._prompt(said)
        limit = self._request.limit(prompt)
        key = None
        if not self._request.sampling.is_greedy:
            key = jax.random.fold_in(self._key, self._turns)
        self._turns += 1
        decoding, self._decoding = self._decoding, None
        if decoding is None or not decoding.resume(prompt, limit, key):
            decoding = self._request.decoding(prompt, key, self._chunk, self._cache_dtype)

        def ended(growing: PartialCompletion, whole: bool) -> None:
            if growing.tokens:
                answer = {"role": "assistant", "content": str(growing.completion())}
                self.messages += [*said, answer]
            if whole:
                decoding.wrote(growing.tokens)
                self._decoding = decoding
            else:  # interrupted somewhere: what is in the cache is not known
                decoding.close()

        stream = Stream(self._request, decoding, prompt, ended)
        self._speaking = weakref.ref(stream)
        return stream

    def make_room(self, text: str, tokens: int | None = None) -> int:
        """Leaves the oldest turns out of the prompt until ``text`` and an answer to it fit.

        Messages of the system at the beginning stay in it. What is left out stays among
        :attr:`messages`, and the model does not see it again before :meth:`reset`.

        Args:
            text: What the user is about to say.
            tokens: Of the answer; by default as many as it may have, at most a quarter of the
                context, so that not every turn has to make room anew.

        Returns:
            How many messages are left out that were not before; 0 if all fits, or if ``text`` does not
            fit even by itself, which :meth:`say` refuses.

        Raises:
            UserInputError: The template refuses the chat.
        """
        longest = self._request.model.max_length
        if tokens is None:
            tokens = min(self._request.max_new_tokens, longest // 4)
        said = [{"role": "user", "content": text}]
        before = max(self._left_out, self._opening_length())
        turns = [
            i for i, one in enumerate(self.messages) if one.get("role") == "user" and i > before
        ]
        for start in [before, *turns, len(self.messages)]:
            length = len(self._ids(said, start))
            if length + tokens <= longest or (start == len(self.messages) and length < longest):
                self._left_out = start
                return start - before
        return 0

    def reset(self) -> None:
        """Begins anew, with the messages it was made with."""
        self._interrupt()
        self.messages, self._decoding, self._left_out = list(self._opening), None, 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the messages as a JSON file, in the place of one that is there.

        Raises:
            CheckpointError: It cannot be written; what was there still is.
        """
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        # Half a character becomes what JSON's own escape of it is.
        require_writable(os.fsdecode(path))
        replace_file(os.fsdecode(path), [text.encode("utf-8", "backslashreplace")])

    def _interrupt(self) -> None:
        """Ends the answer that still goes on."""
        stream = self._speaking()
        if stream is not None:
            stream.close()

    def _prompt(self, said: list[dict[str, Any]]) -> list[int]:
        return self._request.tokens(self._ids(said, self._left_out), 0, True)

    def _ids(self, said: list[dict[str, Any]], start: int) -> list[int]:
        """The tokens of the chat, without the messages between its opening and number ``start``."""
        opening = self._opening_length()
        messages = [*self.messages[:opening], *self.messages[max(start, opening) :], *said]
        return chat_tokens(
            self._tokenizer, messages, chat_template=self._template, **self._template_kwargs
        )

    def _opening_length(self) -> int:
        """How many messages of the system stand at the beginning."""
        others = (i for i, one in enumerate(self.messages) if one.get("role") not in _OPENING)
        return next(others, len(self.messages))


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"messages are dicts with 'role' and 'content', not {type(message).__name__}"
        )
    return dict(message)
