"""Conversation: a chat of several turns with a language model.

A turn reuses the KV cache of the turns before, as far as its prompt begins with the same tokens.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ...errors import UnknownArgumentError
from ...lockstep import Lockstep
from ...models.weights import shardings_of
from ...rendering.rendered import Rendered
from ...rendering.row import Row, counted, short
from ...rendering.transcript import transcript
from ...text.chat import answer_message, write_messages
from ...text.tokenizer.arguments import check_unicode
from ..batching.running import RunningText
from ..batching.scheduler import Scheduler
from ..isolation import isolated
from ..sampling.settings import Sampling
from .completion import Completion, PartialCompletion
from .request import Prompt, Request
from .stream import STREAM_S, Stream, checked_guesses, scheduler_for

_OPENING = ("system", "developer")


class Conversation(Rendered):
    """A chat with a model whose tokenizer has a chat template.

    Args:
        model, tokenizer: the pair that ``maxjax.load`` returns.
        messages: the messages that the chat begins with: ``{"role": "system", "content": …}`` …
        max_new_tokens, stop, eos_ids, key, sampling, chunk, cache_dtype, speculation, draft, values: the arguments of
            :func:`maxjax.generate`.
        template: the name of one of the tokenizer's chat templates, or the source of a template.
        template_kwargs: further variables of the template, e.g. ``{"enable_thinking": False}``.
        skip_special_tokens: as for :func:`maxjax.generate`.

    Attributes:
        messages: the chat so far, including the generated part of an answer that was interrupted. The
            reasoning of an answer is under "reasoning_content" if the template reads it; else it is in
            "content", with its marks. Calls of functions are under "tool_calls".
        completion: the last answer; None before the first.

    Raises:
        UserInputError: there is no chat template, or an argument is invalid as for ``generate``.

    Example:
        >>> import maxjax
        >>> model, tokenizer = maxjax.load("tiny")
        >>> chat = maxjax.Conversation(model, tokenizer)
        >>> "".join(chat.say("What is 37 + 48?"))
        '37 + 48 = 85'
        >>> len(chat.messages)
        2
    """

    @isolated()
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
        speculation: str | None = None,
        draft: Any = None,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        **values: Any,
    ):
        chosen = {} if template is None else {"chat_template": template}
        self._request = Request(
            model, tokenizer, max_new_tokens, stop, eos_ids, sampling, values, True,
            {**(template_kwargs or {}), **chosen}, skip_special_tokens,
        )  # fmt: skip
        # The last message that is left out. An index would be wrong once the caller changes the list.
        self._left_out: dict[str, Any] | None = None
        self._key = jax.random.key(0) if key is None else key
        self._chunk, self._cache_dtype = chunk, cache_dtype
        together = Lockstep("Conversation", shardings_of(model))
        self._guesses = checked_guesses(model, together, speculation, draft)
        self._turns = 0
        # The cache of the turns before, and the last text in it.
        self._scheduler: Scheduler | None = None
        self._last: RunningText | None = None
        self._lock = threading.RLock()
        self._current_stream: Callable[[], Stream | None] = lambda: None
        self.messages: list[dict[str, Any]] = [_message(message) for message in messages]
        self._opening = list(self.messages)
        self.completion: Completion | None = None
        self._prompt([{"role": "user", "content": "?"}])  # raises now if there is no template

    @isolated()
    def say(self, text: str | Mapping[str, Any], **unknown: Any) -> Stream:
        """Sends a user message, or another message such as the result of a function, and streams the answer.

        Once the stream ends, is closed or is dropped, the message and the answer are added to
        :attr:`messages`, unless no token was generated. The next call of ``say`` ends an answer
        that is still being streamed.

        Raises:
            UserInputError: the chat is longer than the model's context (see :meth:`make_room`), or
                the template rejects it.
            TypeError: ``text`` is neither a str nor a message, or there are further arguments.
        """
        for name in unknown:
            raise UnknownArgumentError(
                f"Conversation.say() got an unexpected keyword argument {name!r}: settings are those of the whole "
                f"chat, use maxjax.Conversation(model, tokenizer, {name}=…)"
            )
        with self._lock:  # threads take turns
            self._interrupt()
            return self._stream(text)

    def _stream(self, text: str | Mapping[str, Any]) -> Stream:
        with Lockstep("say", shardings_of(self._request.model)) as together:
            message = [_said(text)]
            prompt = self._prompt(message)
            key = None
            if not self._request.sampling.is_greedy:
                key = jax.random.fold_in(self._key, self._turns)
            self._request.agree(
                together, [prompt.ids], key, chunk=self._chunk, cache_dtype=self._cache_dtype
            )
            self._turns += 1
            scheduler, self._scheduler = self._scheduler, None
            before, self._last = self._last, None
            if scheduler is None:
                scheduler, before = self._new_scheduler(prompt, together), None
            scheduler.calls.together = together

            def ended(text: RunningText, clean: bool) -> None:
                self._take(message, text.partial)
                if clean:
                    self._scheduler = scheduler
                    self._last = before if text.slot is None else text  # None: nothing was read
                else:  # interrupted within a step: the content of the cache is not known
                    scheduler.close()

            stream = Stream(scheduler, self._request, prompt, key, ended, before)
        self._current_stream = weakref.ref(stream)
        return stream

    def _new_scheduler(self, prompt: Prompt, together: Lockstep) -> Scheduler:
        # A turn may begin before the end of the last one, so that layers with a window need all tokens.
        return scheduler_for(
            self._request, [prompt], 1, chunk=self._chunk, cache_dtype=self._cache_dtype, together=together,
            longest=self._request.longest, dispatch_s=STREAM_S, window_pages=0, **self._guesses,
        )  # fmt: skip

    def _take(self, message: list[dict[str, Any]], partial: PartialCompletion) -> None:
        """Adds a message and its answer to the chat, unless no token was generated."""
        if partial.tokens:
            self.completion = partial.completion()
            answer = answer_message(
                self.completion, self._request.tokenizer, **self._request.template_kwargs
            )
            self.messages += [*message, answer]

    def make_room(self, text: str | Mapping[str, Any], tokens: int | None = None) -> int:
        """Drops the oldest turns from the prompt until ``text`` and an answer to it fit.

        System messages at the beginning stay in the prompt. Dropped messages stay in
        :attr:`messages`, but the model does not see them again before :meth:`reset`.

        Args:
            text: the next message, as for :meth:`say`.
            tokens: the number of tokens kept free for the answer; by default ``max_new_tokens``,
                but at most a quarter of the context, so that the next turns fit as well.

        Returns:
            The number of messages that were dropped by this call; 0 if everything fits, or if
            ``text`` alone does not fit, for which :meth:`say` raises an error.

        Raises:
            UserInputError: the template rejects the chat.
        """
        longest = self._request.longest
        if tokens is None:
            tokens = min(self._request.max_new_tokens, longest // 4)
        message = [_said(text)]
        before = max(self._start, self._system_length())
        turns = [
            i for i, one in enumerate(self.messages) if one.get("role") == "user" and i > before
        ]
        for start in [before, *turns, len(self.messages)]:
            length = len(self._formatted(message, start).ids)
            if length + tokens <= longest or (start == len(self.messages) and length < longest):
                if start > before:
                    self._left_out = self.messages[start - 1]
                return start - before
        return 0

    @property
    def content(self) -> str | None:
        """The last answer without its reasoning; None before the first."""
        return None if self.completion is None else self.completion.content

    @property
    def reasoning(self) -> str | None:
        """The reasoning of the last answer; None if there is none."""
        return None if self.completion is None else self.completion.reasoning

    def reset(self) -> None:
        """Starts the chat again with the messages that it was made with."""
        self._interrupt()
        self.messages, self._left_out = list(self._opening), None
        self._scheduler = self._last = None
        self.completion = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the messages as a JSON file, and replaces one that exists.

        Raises:
            UserInputError: a message holds a picture that is neither a path nor a ``data:`` address.
            CheckpointError: the file cannot be written; an existing file is unchanged.
        """
        write_messages(path, self.messages)

    def _mx_title(self, row: Row) -> str:
        model = type(self._request.model).__name__
        last = f", last: {_beginning(self.messages[-1])}" if self.messages else ""
        out = self._start - self._system_length()
        left = f", {counted(out, 'message')} left out" if out > 0 else ""
        return f"Conversation({model}, {counted(len(self.messages), 'message')}{left}{last})"

    def _mx_html(self) -> str:
        return transcript(self._mx_title(Row()), self.messages)

    def _interrupt(self) -> None:
        """Ends the answer that is still being streamed."""
        stream = self._current_stream()
        if stream is not None:
            stream.close()

    def _prompt(self, message: list[dict[str, Any]]) -> Prompt:
        prompt = self._formatted(message, self._start)
        self._request.check(prompt.ids)
        return prompt

    def _formatted(self, message: list[dict[str, Any]], start: int) -> Prompt:
        """Format the chat: the system messages, then the messages from ``start`` on."""
        opening = self._system_length()
        messages = [*self.messages[:opening], *self.messages[max(start, opening) :], *message]
        return self._request.of_messages(messages)

    @property
    def _start(self) -> int:
        """The index of the first message that is not left out; system messages before it are not either."""
        places = (i for i, one in enumerate(self.messages, 1) if one is self._left_out)
        return 0 if self._left_out is None else next(places, 0)

    def _system_length(self) -> int:
        """The number of system messages at the beginning of the chat."""
        others = (i for i, one in enumerate(self.messages) if one.get("role") not in _OPENING)
        return next(others, len(self.messages))


def _beginning(message: Any) -> str:
    return f"{short(message.get('role'), 20)}: {short(message.get('content'), 60)!r}"


def _said(text: Any) -> dict[str, Any]:
    """The message of a user who says a text, or a copy of the given message."""
    if isinstance(text, Mapping):
        return dict(text)
    if not isinstance(text, str):
        raise TypeError(f"the message must be a str or a dict, not {type(text).__name__}")
    check_unicode(text, "the message")
    return {"role": "user", "content": text}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"messages are dicts with 'role' and 'content', not {type(message).__name__}"
        )
    return dict(message)
