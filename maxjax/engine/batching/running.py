"""RunningText: one prompt and its answer, from the queue to its last token.

    WAITING ──▶ READING ──▶ WRITING ──▶ ENDED

* **WAITING**: in the queue, without memory. The scheduler gives it a slot and pages. Pages that hold the first tokens
  of its prompt already are shared, and these tokens are not read again (``pages.py``).
* **READING** (prefill): the model reads its tokens piece by piece. The last piece gives the first token of the answer.
* **WRITING** (decoding): each step reads the last token and gives the next one. A *dispatch* is a call of a program for
  some steps of many texts, one in each row; :meth:`RunningText.receive` adds its tokens. Text is made of them
  afterwards (:meth:`RunningText.pieces`), while the devices go on: by the scheduler, or by the reader of a stream.
* **ENDED**: by an end-of-text token, a stop string, the end of a grammar, its limit or a cancel; or with an error: its
  logits are not finite, no token is allowed, its grammar or its adapter has failed, or the engine was closed. The
  scheduler then takes slot and pages.

A text that is WRITING goes back to WAITING (preemption) when pages run out and its ``priority`` is the largest, or when
it has outgrown the length for which RoPE rotates its keys. It keeps its tokens; those whose pages are lost are read
again. A turn of a conversation goes on with the slot and the pages of the turn before.

How the next token is chosen goes to the devices with each call, as arrays (``TextRows``): settings, the mask of a
grammar, the place of an adapter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UserInputError
from ...nn.random_key import checked_key
from ..generate.completion import PartialCompletion, token_logprobs
from ..generate.request import Prompt, Request
from ..isolation import isolated
from ..pictures import Pictures
from ..sampling.penalties import check_tokens
from ..sampling.rows import RowSettings, uses_words
from ..sampling.sequences import Sequences, sequences_of
from ..sampling.settings import Sampling
from ..token_losses import TokenLosses
from .adapters import LoadedAdapter
from .dispatch import DispatchTokens
from .grammar import Matcher
from .pages import Key


class Stage(Enum):
    """Where a text is in its life."""

    WAITING = "waiting"
    READING = "reading"
    WRITING = "writing"
    ENDED = "ended"


class RunningText:
    """A prompt and its answer.

    Args:
        partial: the answer so far; it decodes tokens and finds stop strings.
        prompt: token ids of the prompt.
        limit: largest number of tokens, the prompt included.
        settings: how tokens are chosen, as NumPy scalars.
        bias: what is added to logits, float32 ``[V]``; None for nothing.
        sequences: the sequences of tokens that are biased or end repetitions; None for none.
        matcher: where the answer is in its grammar; None for an answer without one.
        number: the number of the text, for messages and captures.
        priority: texts with a smaller number are started first.
        salt: only texts with an equal salt share pages.
        adapter: the name of its adapter; None for none.
        prompt_logprobs: number of most probable tokens that are reported beside each token of the prompt; None: nothing
            is reported about the prompt.
        on_text: function that is called with each piece of text.
        on_end: function that is called with this object when it has ended.
        is_lazy: whether somebody else than the scheduler makes its :meth:`pieces`. It then keeps slot and pages when it
            has ended.
        pictures: the pictures of its prompt; None for none.
        after: a lazy text that has ended, whose slot and pages this one takes over; tokens with which both begin are
            not read again.

    Attributes:
        stage: where it is in its life.
        tokens: the prompt and the tokens of the answer.
        stored: number of tokens whose keys and values are in its pages.
        found: number of its first tokens that were in pages when it started, and whose hidden states are not known.
        recorded: the largest number that ``stored`` has had: what captures have seen.
        slot, pages: what it has of the engine's memory.
        window_pages: its pages in layers with a window that have pages of their own; -1 for those that were given back.
        keys: what its full pages are known by; None until the scheduler has computed them.
        cuts: numbers of tokens after which a piece of reading ends, as the state of recurrent layers is kept there.
        is_cancelled: whether it is to end as it is.
        has_last_token: whether the last of its tokens is there, whose text may still have to be made.
        received: tokens whose text has not been made: dispatches, and the text's row in each.
        text_length: the length for which RoPE rotates its keys, and the largest length for which it stays that.
        loaded: its adapter, once it is in the queue.
        error: what ended it instead of its last token.
    """

    def __init__(
        self, partial: PartialCompletion, prompt: list[int], limit: int, settings: RowSettings, *,
        bias: np.ndarray | None = None, sequences: Sequences | None = None, matcher: Matcher | None = None,
        number: int = 0, priority: int = 0, salt: bytes = b"", adapter: str | None = None,
        prompt_logprobs: int | None = None,
        on_text: Callable[[str], None] = lambda piece: None,
        on_end: Callable[[RunningText], None] = lambda text: None, is_lazy: bool = False,
        after: RunningText | None = None, pictures: Pictures | None = None,
    ):  # fmt: skip
        self.partial, self.limit, self.settings, self.bias = partial, limit, settings, bias
        self.sequences = sequences
        self.prompt_length, self.tokens = len(prompt), list(prompt)
        self.number, self.priority, self.salt, self.matcher = number, priority, salt, matcher
        self.adapter, self._prompt_logprobs, self.pictures = adapter, prompt_logprobs, pictures
        self._losses: list[TokenLosses] = []
        self.loaded: LoadedAdapter | None = None
        self._on_text, self._on_end = on_text, on_end
        self.stage = Stage.WAITING
        self.error: BaseException | None = None
        self.stored = self.recorded = self.found = 0
        self.slot: int | None = None
        self.pages: list[int] = []
        self.window_pages: list[int] = []
        self.keys: list[Key] | None = None
        self.cuts: list[int] = []
        self.text_length: tuple[int, int] = (0, 0)
        self.is_lazy, self.after = is_lazy, after
        self.is_cancelled = self.has_last_token = False
        self.received: deque[tuple[DispatchTokens, int]] = deque()
        self._ends = frozenset(settings.ends.tolist())

    @property
    def written(self) -> int:
        """The number of tokens of the answer."""
        return len(self.tokens) - self.prompt_length

    @property
    def unread(self) -> int:
        """The number of tokens that the model must read before it can choose the next one."""
        return len(self.tokens) - self.stored

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are to be computed when it is read."""
        return self._prompt_logprobs is not None and self.partial.prompt_logprobs is None

    def receive_losses(self, found: TokenLosses) -> None:
        """Adds what is known of the tokens after those of the prompt that have been read last."""
        self._losses.append(found)
        if self.stored < self.prompt_length:
            return
        losses, _, tokens, logprobs = map(np.concatenate, zip(*self._losses, strict=True))
        n, prompt, self._losses = self._prompt_logprobs, self.tokens[1 : self.prompt_length], []
        each = token_logprobs(prompt, -losses[:-1], tokens[:-1, :n], logprobs[:-1, :n])
        self.partial.prompt_logprobs = None, *each

    def receive(self, found: DispatchTokens, row: int) -> None:
        """Adds the tokens that a dispatch has chosen for the text in a row; their text is made by :meth:`pieces`."""
        # If the logits were not finite, the last token is meaningless.
        count, is_bad = int(found.counts[row]), bool(found.bad[row])
        new = found.tokens[row, : count - is_bad].tolist()
        self.tokens += new
        self.has_last_token = (
            is_bad or not self._ends.isdisjoint(new[-1:]) or len(self.tokens) >= self.limit
        )
        self.received.append((found, row))

    def take(self, is_symmetric: bool) -> None:
        """Tells the pieces of the tokens that it has received; it may end with one of them.

        An error, as of the tokenizer, ends this text alone. If the call ``is_symmetric``, so that other processes make
        this text too, the error is raised, as the others do not have it.
        """
        try:
            for piece in self.pieces():
                self._on_text(piece)
        except Exception as error:
            if is_symmetric:
                raise
            self.end(error)

    def pieces(self) -> Iterator[str]:
        """The text of the received tokens, lazily: a token is added to the answer when its piece is asked for."""
        partial = self.partial
        while self.received and self.stage is not Stage.ENDED:
            found, row = self.received.popleft()
            before = len(partial.tokens)
            yield from partial.pieces(found, row)
            if self.matcher is not None:
                self._match(partial.tokens[before:])
            if found.bad[row] and not partial.done:
                self.end(self._nothing_chosen())
            elif partial.done or (self.has_last_token and not self.received):
                self.end()

    def _nothing_chosen(self) -> Exception:
        """The error that says why no token could be chosen."""
        if self.matcher is not None:
            choices = np.unpackbits(self.matcher.allowed().view(np.uint8), bitorder="little")
            excluded = [] if self.bias is None else np.flatnonzero(np.isneginf(self.bias))
            choices[excluded] = 0
            if self.written < self.settings.min_new_tokens:
                choices[self.settings.ends] = 0
            if not choices.any():
                return UserInputError(
                    f"prompt {self.number}: after {self.written} tokens of its answer, banned, logit_bias or "
                    "min_new_tokens exclude every token that its grammar allows"
                )
        or_banned = ", or no_repeat_ngram_size and bad_words exclude all" if self.sequences else ""
        return FloatingPointError(
            f"after {self.written} tokens of the answer to prompt {self.number} the logits are NaN or infinite"
            f"{or_banned}: no token can be chosen. maxjax.first_nan(model, ids) names the layer"
        )

    def _match(self, tokens: list[int]) -> None:
        """Goes on in the grammar; the text ends where the grammar does."""
        assert self.matcher is not None
        for token in tokens:
            self.matcher.accept(token)
        if (problem := self.matcher.error) is not None:
            self.end(UserInputError(f"prompt {self.number}: its grammar has failed: {problem}"))
        elif self.matcher.is_ended and not self.partial.done:
            self.partial.complete()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the text as it is, with an error if there is one; received tokens without pieces are dropped."""
        if self.stage is Stage.ENDED:
            return
        self.stage, self.error = Stage.ENDED, error
        if error is None:
            try:
                if rest := self.partial.flush():
                    self._on_text(rest)
            except Exception as problem:  # of the tokenizer
                self.error = problem
        self._on_end(self)

    def wait_again(self) -> None:
        """Goes back to the queue, after the scheduler has taken its slot and pages."""
        self.stage, self.stored, self.keys, self._losses = Stage.WAITING, 0, None, []


@isolated()
def running_text(
    request: Request, prompt: Prompt, key: Any, index: int, **options: Any
) -> RunningText:
    """The text of a request that is checked.

    Args:
        request: the settings.
        prompt: what the model reads.
        key: random key; None for ``jax.random.key(0)``.
        index: number of the text among those with this key.
        options: further arguments of ``RunningText``.
    """
    sampling, size = request.sampling, request.model.config.vocab_size
    ends = np.asarray(request.eos_ids, np.int32)
    sequences = sequences_of(sampling, size) if sampling.needs_order else None
    words = key_words(None if sampling.is_greedy else key)
    settings = RowSettings.of(sampling, words, index, ends, size)
    return RunningText(
        request.partial_completion(prompt),
        prompt.ids,
        request.limit(prompt.ids),
        settings,
        bias=bias_of(sampling, size) if uses_words(sampling) else None,
        sequences=sequences,
        pictures=prompt.pictures,
        **options,
    )


def key_words(key: Any) -> np.ndarray:
    """Return the words of a key of any generator, uint32 ``[2]``; those of ``jax.random.key(0)`` for None.

    Example:
        >>> key_words(jax.random.key(7)).tolist()
        [0, 7]
    """
    if key is None:
        return np.zeros(2, np.uint32)
    checked = checked_key(key)
    typed = jnp.issubdtype(checked.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(checked) if typed else checked)[..., :2]


def bias_of(sampling: Sampling, vocab_size: int) -> np.ndarray:
    """What settings add to the logit of each token, float32 ``[V]``; -inf for banned ones.

    Raises:
        UserInputError: a token is outside the vocabulary.

    Example:
        >>> bias_of(Sampling(banned=[1], logit_bias={0: 2.0}), 3).tolist()
        [2.0, -inf, 0.0]
    """
    check_tokens(sampling, vocab_size)
    bias = np.zeros(vocab_size, np.float32)
    for token, amount in dict(sampling.logit_bias).items():
        bias[token] = amount
    bias[list(sampling.banned)] = -np.inf
    return bias
