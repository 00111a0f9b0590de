"""Streams of generated text: they turn token ids, one by one, into pieces of text up to a stop string.

A piece that was returned does not change any more.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import UserInputError
from .stream_decoders import DecoderStep, clean_up, ended, is_byte, steps_of, through
from .stream_decoders import token_id as checked

_REPLACEMENT = "\ufffd"
# So many tokens before a text are decoded with it: some may be special tokens or parts of a character.
_BEFORE = 32


class TextStream:
    """Turns token ids into pieces of text, which never end inside a character.

    All pieces joined, with that of :meth:`flush`, equal ``tokenizer.decode(ids)``. The time for a
    token does not grow with the number of tokens before it. A run of tokens for single bytes is
    returned when it has ended, because only then is it known whether its bytes are valid text.

    Args:
        tokenizer: a :class:`~maxjax.text.tokenizer.tokenizer.Tokenizer`.
        skip_special: whether to leave special tokens out of the text.
        keep: special tokens that have their text all the same.
        before: the token ids before the first one: the text then is what they are followed by. It
            begins with a space where the text of a SentencePiece tokenizer alone would have none.

    Example:
        >>> from tokenizers import Tokenizer as Backend, decoders, models
        >>> from maxjax.text.tokenizer.tokenizer import Tokenizer
        >>> backend = Backend(models.BPE({"ð": 0, "Ł": 1, "Ļ": 2, "Ĥ": 3, "!": 4}, []))
        >>> backend.decoder = decoders.ByteLevel()
        >>> stream = TextStream(Tokenizer(backend))
        >>> [stream.push(i) for i in [4, 0, 1, 2, 3]], stream.flush()
        (['!', '', '', '', '🙂'], '')
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special: bool = True,
        keep: Collection[str] = (),
        before: Sequence[int] = (),
    ):
        backend = tokenizer._backend
        steps = steps_of(backend)
        self._decoder: _Steps | _Window
        if steps is None:
            self._decoder = _Window(tokenizer, skip_special and not keep)
        else:
            skipped = set(tokenizer.special_ids).difference(keep) if skip_special else set()
            self._decoder = _Steps(backend.id_to_token, skipped, steps)
        # The last step, also for decoders without steps here.
        self._clean = clean_up() if getattr(tokenizer, "cleans_up", False) else []
        self._ended = False
        self._held = ""  # the text of ``before`` that comes only with later tokens
        if len(before):
            before = _last(backend, before)
            text = "".join([self.push(i) for i in before])
            with suppress(UserInputError):  # the package's Strip fails for a text without letters
                self._held = tokenizer.decode(before, skip_special=skip_special)[len(text) :]

    def push(self, token_id: int) -> str:
        """The text that has become certain with one more token; it may be empty.

        An id that is not a token has no text, as in ``decode``.

        Raises:
            TypeError: the id is not an integer.
            UserInputError: the id is not from 0 to 2**32 - 1, or :meth:`flush` was called.
        """
        if self._ended:
            raise UserInputError("the stream has been flushed: make a new one")
        return self._without_held(through(self._clean, [self._decoder.push(checked(token_id))]))

    def flush(self) -> str:
        """Ends the text and returns what was held back; an incomplete character becomes U+FFFD."""
        if self._ended:
            return ""
        self._ended = True
        text = through(self._clean, [self._decoder.flush()]) + ended(self._clean)
        return self._without_held(text)

    def _without_held(self, text: str) -> str:
        if text and self._held:
            count = len(os.path.commonprefix([self._held, text]))
            self._held = self._held[count:] if count == len(text) else ""
            text = text[count:]
        return text


def _last(backend: Any, ids: Sequence[int]) -> list[int]:
    """Return the last tokens, enough to decode what follows; a run of byte tokens is not cut."""
    start = max(0, len(ids) - _BEFORE)
    while start and is_byte(backend.id_to_token(checked(ids[start]))):
        start -= 1
    return list(ids[start:])


class _Steps:
    """The steps of the tokenizer's decoder, applied token by token."""

    def __init__(self, text_of: Any, skipped: set[str], steps: list[DecoderStep]):
        self._text_of, self._skipped, self._steps = text_of, skipped, steps

    def push(self, token_id: int) -> str:
        text = self._text_of(token_id)
        if text is None or text in self._skipped:
            return ""
        return through(self._steps, [text])

    def flush(self) -> str:
        return ended(self._steps)


class _Window:
    """The fallback for other decoders: decodes the last tokens with and without the new one.

    If a token changes the text of those before it, which was returned already, what differs from it is
    returned too: a stream may have a few characters that ``decode`` has not, but it lacks none.
    """

    def __init__(self, tokenizer: Any, skip_special: bool):
        self._decode = lambda ids: tokenizer._decoded(ids, skip_special)
        self._ids: list[int] = []
        self._start = self._given = 0  # tokens before the window; tokens whose text was given
        self._shown = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, now = self._part(self._given), self._part(len(self._ids))
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        self._start, self._given = self._given, len(self._ids)
        new = _after(before, now)
        self._shown += new
        return new

    def flush(self) -> str:
        text = self._decode(self._ids)
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return _after(self._part(self._given), self._part(len(self._ids)))

    def _part(self, end: int) -> str:
        """The text of the window's tokens before ``end``."""
        ids = self._ids[self._start : end]
        try:
            return self._decode(ids) if ids else ""
        except (
            UserInputError
        ):  # the package's Strip fails for a text that is shorter than what it strips
            return ""


def _after(before: str, now: str) -> str:
    """What follows in ``now`` after the beginning that it has in common with ``before``."""
    return now[len(os.path.commonprefix([before, now])) :]


class StopStrings:
    """Cuts a text that comes in pieces before its first stop string, which may span several pieces.

    The first stop string is the one that is complete first; of two that end together, the longer.
    Only text that may be the beginning of a stop string is held back.

    Args:
        stops: stop strings, or a single one. None of them may be empty.

    Attributes:
        stopped: the stop string that was found, or None.
        position: number of characters before the stop string, or that were returned if none has
            been found.

    Raises:
        UserInputError: a stop string is empty.
        TypeError: a stop string is not a str.

    Example:
        >>> stops = StopStrings(["\\n\\n", "User:"])
        >>> [stops.push(piece) for piece in ["Four", ".\\nUs", "e", "r: no"]]
        ['Four', '.\\n', '', '']
        >>> stops.stopped, stops.position
        ('User:', 6)
    """

    def __init__(self, stops: str | Iterable[str]):
        stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in stops:
            if not isinstance(stop, str):
                raise TypeError(f"a stop string must be a str, not {type(stop).__name__}")
            if not stop:
                raise UserInputError("a stop string is empty")
        self._build(stops)
        self._state, self._held = 0, ""
        self.stopped: str | None = None
        self.position = 0

    def _build(self, stops: list[str]) -> None:
        """Builds the Aho-Corasick automaton: each state is a prefix of a stop string."""
        self._next: list[dict[str, int]] = [{}]
        self._depth, self._found = [0], [""]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append("")
                state = self._next[state][character]
            self._found[state] = stop
        self._shorter = [0] * len(self._next)
        states = list(self._next[0].values())
        for state in states:  # breadth first; the list grows meanwhile
            for character, after in self._next[state].items():
                self._shorter[after] = self._step(self._shorter[state], character)
                states.append(after)
            self._found[state] = self._found[state] or self._found[self._shorter[state]]

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def push(self, piece: str) -> str:
        """The text that is certain to be before any stop string; "" once one was found."""
        if self.stopped is not None:
            return ""
        state = self._state
        for end, character in enumerate(piece, 1):
            state = self._step(state, character)
            if self._found[state]:
                self.stopped = self._found[state]
                text = (self._held + piece[:end])[: -len(self.stopped)]
                self._held = ""
                self.position += len(text)
                return text
        self._state = state
        text = self._held + piece
        cut = len(text) - self._depth[state]
        self._held = text[cut:]
        self.position += cut
        return text[:cut]

    def flush(self) -> str:
        """Ends the text and returns what was held back, since no stop string followed."""
        text, self._held, self._state = self._held, "", 0
        self.position += len(text)
        return text
