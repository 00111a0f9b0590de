"""Completion: an answer as a str with its token ids; PartialCompletion builds it token by token."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...rendering.rendered import boxed
from ...rendering.row import counted
from ...rendering.transcript import paragraph
from ...text.formats import MARKS
from ...text.reasoning import AnswerParser, Parts, parts_of, reasoning_tokens
from ...text.stream import StopStrings, TextStream
from ..batching.dispatch import DispatchTokens


class TokenLogprob(NamedTuple):
    """A token of an answer and its log-probability.

    Attributes:
        token: the token id.
        logprob: the natural logarithm of its probability in the model's own distribution, that
            is, before temperature, penalties and filters.
        top: the most probable tokens at this position as ``(token id, logprob)``, most probable
            first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    tokens: Sequence[int], logprobs: Any, top_tokens: Any, top_logprobs: Any
) -> tuple[TokenLogprob, ...]:
    """Tokens with their log-probabilities ``[T]``, and the most probable ones ``[T, n]``, arrays of NumPy."""
    pairs = zip(top_tokens.tolist(), top_logprobs.tolist(), strict=True)
    tops = (tuple(zip(*pair, strict=True)) for pair in pairs)
    return tuple(map(TokenLogprob, tokens, logprobs.tolist(), tops))


class Completion(str):
    """The text that a model generated: a str with the token ids and the finish reason.

    Attributes:
        tokens: the ids of all generated tokens, including an end-of-text token.
        finish_reason: ``"stop"`` after an end-of-text token or a stop string, or where a grammar ends;
            ``"length"`` if the answer reached its largest length.
        stop: the id of that token, or the stop string, or None. A stop string is not part of the
            text.
        prompt_tokens: the token ids of the prompt.
        prompt: the text that the model has continued: a chat as its template has formatted it, or a
            text as it was given; None if the prompt was token ids.
        logprobs: one :class:`TokenLogprob` for each token, or None if they were not requested.
        prompt_logprobs: the same for each token of the prompt, with None for the first one; None if they were not
            requested.
        marked: the text with the marks of its parts, such as ``[THINK]``, which the text is without
            where they are special tokens.
        near_ties: the positions in ``tokens`` of those that rounding may have decided: the two best logits, with the
            noise of drawing where tokens are drawn, differ by less than 1e-4 of the standard deviation of all, or by
            a step of the model's dtype. From the first of them on, the same prompt may get another text on another
            mesh or beside other prompts.
        cached_tokens: number of tokens of the prompt that were not read, because the cache had them.
        format: the name of the format in which the model writes calls of functions; None if it is not known.
        tools: the functions that the prompt offers, as they were given; None if it is not known which there are.
        token_texts: what each token has added to ``marked``; a part of a character comes with the token that ends it.

    Example:
        >>> text = Completion("four", tokens=(7, 2), finish_reason="stop", stop=2)
        >>> text.upper(), text.tokens, text.finish_reason
        ('FOUR', (7, 2), 'stop')
    """

    tokens: tuple[int, ...]
    finish_reason: str
    stop: int | str | None
    prompt_tokens: tuple[int, ...]
    prompt: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    marked: str
    near_ties: tuple[int, ...]
    cached_tokens: int
    format: str | None
    tools: Any
    token_texts: tuple[str, ...]

    def __new__(
        cls,
        text: str = "",
        *,
        tokens: Sequence[int] = (),
        finish_reason: str = "length",
        stop: int | str | None = None,
        prompt_tokens: Sequence[int] = (),
        prompt: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
        prompt_logprobs: Sequence[TokenLogprob | None] | None = None,
        marked: str | None = None,
        near_ties: Sequence[int] = (),
        cached_tokens: int = 0,
        format: str | None = None,
        tools: Any = None,
        token_texts: Sequence[str] = (),
    ) -> Completion:
        made = super().__new__(cls, text)
        made.tokens, made.prompt_tokens = tuple(tokens), tuple(prompt_tokens)
        made.finish_reason, made.stop, made.prompt = finish_reason, stop, prompt
        made.logprobs = None if logprobs is None else tuple(logprobs)
        made.prompt_logprobs = None if prompt_logprobs is None else tuple(prompt_logprobs)
        made.marked = text if marked is None else marked
        made.near_ties, made.cached_tokens = tuple(near_ties), cached_tokens
        made.format, made.tools, made.token_texts = format, tools, tuple(token_texts)
        return made

    @property
    def parts(self) -> Parts:
        """The reasoning, the content and the calls of functions, taken apart."""
        return parts_of(self.marked, self.prompt or "", self.format, self.tools)

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning, with the mark that ends it."""
        parser = AnswerParser(self.format, self.prompt or "", self.tools)
        return reasoning_tokens(self.token_texts, parser)

    @property
    def reasoning(self) -> str | None:
        """The text of the model's reasoning; None if no marks say what is reasoning."""
        return self.parts.reasoning

    @property
    def content(self) -> str:
        """The answer without its reasoning and without calls of functions."""
        return self.parts.content

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """The functions that the answer calls, as ``{"name": …, "arguments": {…}}``."""
        return self.parts.tool_calls

    def _repr_html_(self) -> str:
        facts = [
            counted(len(self.tokens), "token"),
            f"after a prompt of {len(self.prompt_tokens):,}",
        ]
        stop = "" if self.stop is None else f" ({self.stop!r})"
        facts.append(f"finish reason: {self.finish_reason}{stop}")
        if self.logprobs:
            mean = sum(one.logprob for one in self.logprobs) / len(self.logprobs)
            facts.append(f"mean log-probability {mean:.3f}")
        return boxed(f"{paragraph(str(self))}<s>{html.escape(', '.join(facts))}</s>")


class PartialCompletion:
    """An answer while it is generated: it takes tokens and gives text.

    Args:
        tokenizer: the tokenizer that decodes the tokens; None for an answer without text.
        prompt: the token ids of the prompt.
        eos_ids: the token ids that end the answer; they have no text.
        prompt_text: the text that the prompt was encoded from.
        continues: whether the answer continues the text of the prompt, and is not a message of its own.
        skip_special: whether special tokens have no text.
        shows_marks: whether the tokens that mark the parts of an answer, such as ``[THINK]``, have text all the same.
        logprobs: the number of most probable tokens that are reported beside each token; None: no log-probabilities.
        stops: the stop strings. Special tokens in them, which have no text, are found too: one that is
            a special token ends the answer at that token.
        format, tools: as in :class:`Completion`.

    Attributes:
        done: whether an end-of-text token or a stop string has ended the answer.
        flushed: whether :meth:`flush` has ended it.
        prompt_logprobs: those of the prompt, once it has been read; None if they are not reported.
        cached_tokens: as in :class:`Completion`; 0 before the prompt has a slot.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        eos_ids: Sequence[int],
        stops: Sequence[str],
        *,
        prompt_text: str | None = None,
        continues: bool = False,
        skip_special: bool = True,
        shows_marks: bool = False,
        logprobs: int | None = None,
        format: str | None = None,
        tools: Any = None,
    ):
        self._prompt, self._eos, self._prompt_text = prompt, frozenset(eos_ids), prompt_text
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._before, self._logprobs = prompt if continues else (), logprobs
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.cached_tokens, self._format, self._tools = 0, format, tools
        self._kept = [
            mark for mark in (tokenizer.special_ids if tokenizer else ()) if mark in MARKS
        ]
        self._shown = self._kept if shows_marks else []
        self._marks = _special_tokens(tokenizer, stops, self._shown) if skip_special else {}
        self._written = {_marked(s, self._marks): s for s in stops} if self._marks else {}
        self._stop_strings = [*self._written, *stops]  # a special token may also be spelt out
        self._most: int | None = None
        self._restart()

    def _restart(self) -> None:
        self._stream = self._marked_stream = None
        if self._tokenizer is not None:
            make = functools.partial(TextStream, self._tokenizer, before=self._before)
            self._stream = make(skip_special=self._skip_special, keep=self._shown)
            if (self._kept and not self._shown) or not self._skip_special:
                self._marked_stream = make(keep=self._kept)
        self._marked: list[str] = []
        self._decoded: list[str] = []  # also what follows a stop string
        self._stops = StopStrings(self._stop_strings) if self._stop_strings else None
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.near_ties: list[int] = []
        self._pieces: list[str] = []
        self.flushed = self.done = self._is_whole = False
        self._stop: int | str | None = None

    def take(self, written: DispatchTokens, row: int) -> str:
        """Adds the tokens of a row until the answer ends, and returns the text that is now certain."""
        return "".join(self.pieces(written, row))

    def pieces(self, written: DispatchTokens, row: int) -> Iterator[str]:
        """The pieces of :meth:`take`, lazily: a token is added when its piece is asked for."""
        near_ties = written.sampled.is_near_tie
        # If the logits of a row were not finite, its last token is meaningless.
        for i in range(int(written.counts[row]) - bool(written.bad[row])):
            if self.done or len(self.tokens) == self._most:
                break
            piece = self._push(int(written.tokens[row, i]))
            if self._logprobs is not None:
                self.logprobs.append(_logprob(written, row, i, self._logprobs))
            if near_ties is not None and near_ties[row, i]:
                self.near_ties.append(len(self.tokens) - 1)
            self._pieces.append(piece)
            if piece:
                yield piece

    def unended_tokens(self) -> list[int]:
        """The tokens so far, without an end-of-text token that has ended the answer."""
        found = list(self.tokens)
        return found[:-1] if isinstance(self._stop, int) and found else found

    def cut(self, dispatches: Iterable[DispatchTokens], count: int, flushed: bool) -> None:
        """Makes this the answer of the first ``count`` tokens in row 0 of these dispatches."""
        if (len(self.tokens), self.flushed) != (count, flushed):
            self._restart()
            self._most = count
            for written in dispatches:
                self.take(written, 0)
            if flushed:
                self.flush()

    def _push(self, token: int) -> str:
        self.tokens.append(token)
        if token in self._eos:
            self.done, self._stop = True, token
            return ""
        text = "" if self._stream is None else self._stream.push(token)
        if self._marked_stream is not None:
            self._decoded.append(text)
            self._marked.append(self._marked_stream.push(token))
        if token in self._marks:
            mark = self._marks[token].mark
            if mark in self._written:  # text that the stream holds back is before it
                self.done, self._stop = True, self._written[mark]
                return self._before_stop(text)
            text += mark
        return self._before_stop(text)

    def _before_stop(self, text: str) -> str:
        if self._stops is None:
            return text
        text = self._stops.push(text)
        if self._stops.stopped is not None and not self.done:
            self.done = True
            self._stop = self._written.get(self._stops.stopped, self._stops.stopped)
        return self._unmarked(text)

    def _unmarked(self, text: str) -> str:
        for one in self._marks.values():
            text = text.replace(one.mark, "")
        return text

    def complete(self) -> None:
        """Ends the answer: nothing can follow what it has."""
        self.done = self._is_whole = True

    def flush(self) -> str:
        """Ends the answer and returns the text that was held back."""
        if self.flushed:
            return ""
        self.flushed = True
        is_cut = self._stops is not None and self._stops.stopped is not None
        text = "" if self._stream is None or is_cut else self._stream.flush()
        if self._marked_stream is not None:
            self._marked.append(self._marked_stream.flush())
        text = self._before_stop(text)
        if self._stops is not None:
            text += self._unmarked(self._stops.flush())
        self._pieces.append(text)
        return text

    def completion(self) -> Completion:
        """The answer so far."""
        marked = None
        if self._marked_stream is not None:
            marked = "".join(self._marked)
            if isinstance(self._stop, str):
                cut = "".join(self._decoded)[sum(map(len, self._pieces)) :]
                if not self._skip_special:
                    cut = re.sub("|".join(map(re.escape, self._tokenizer.special_ids)), "", cut)
                marked = _without_end(marked, self._kept, len(cut))
        return Completion(
            "".join(self._pieces), tokens=self.tokens, prompt_tokens=self._prompt, stop=self._stop,
            finish_reason="length" if self._stop is None and not self._is_whole else "stop",
            logprobs=self.logprobs or None, prompt_logprobs=self.prompt_logprobs, near_ties=self.near_ties,
            prompt=self._prompt_text, marked=marked, cached_tokens=self.cached_tokens, format=self._format,
            tools=self._tools, token_texts=self._token_texts(),
        )  # fmt: skip

    def _token_texts(self) -> list[str]:
        """What each token has added to the marked text; what was held back to the end is of the last one."""
        texts = self._pieces if self._marked_stream is None else self._marked
        found, rest = texts[: len(self.tokens)], "".join(texts[len(self.tokens) :])
        if rest and found:
            found[-1] += rest
        return found


def _without_end(text: str, marks: Sequence[str], length: int) -> str:
    """Return the text without its last ``length`` characters, not counting marks."""
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    while pieces and length > 0:
        piece = pieces.pop()
        if piece not in marks:
            if length < len(piece):
                pieces.append(piece[: len(piece) - length])
            length -= len(piece)
    return "".join(pieces)


class _Special(NamedTuple):
    """A special token in a stop string, and the character that stands for it while stop strings are searched."""

    content: str
    mark: str


def _special_tokens(
    tokenizer: Any, stops: Sequence[str], shown: Sequence[str]
) -> dict[int, _Special]:
    """The special tokens without text that stop strings contain, by their ids; the longest first."""
    if tokenizer is None or not stops:
        return {}
    joined = "\n".join(stops)
    special = tokenizer.special_ids.items()
    found = [(i, text) for text, i in special if text in joined and text not in shown]
    found = sorted(found, key=lambda one: -len(one[1]))
    # No text of a tokenizer has lone surrogates.
    marks = (chr(i) for i in range(0xD800, 0xE000) if chr(i) not in joined)
    return {i: _Special(content, mark) for (i, content), mark in zip(found, marks, strict=False)}


def _marked(stop: str, marks: Mapping[int, _Special]) -> str:
    for one in marks.values():
        stop = stop.replace(one.content, one.mark)
    return stop


def _logprob(written: DispatchTokens, row: int, i: int, count: int) -> TokenLogprob:
    found = written.sampled
    assert found.logprobs is not None
    top: tuple[tuple[int, float], ...] = ()
    if found.top_tokens is not None and found.top_logprobs is not None:
        ids, values = (a[row, i, :count].tolist() for a in (found.top_tokens, found.top_logprobs))
        top = tuple(zip(ids, values, strict=True))
    return TokenLogprob(int(written.tokens[row, i]), float(found.logprobs[row, i]), top)
