"""Text as it is generated: token ids one by one → pieces of text, up to a stop string.

Nothing here takes back what it gave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import UserInputError
from .stream_decoders import Step, clean_up, ended, steps_of, through

_BROKEN = "\ufffd"


class TextStream:
    """Token ids → pieces of text, never half a character.

    All pieces joined, with that of :meth:`flush`, are ``tokenizer.decode(ids)``. A token takes the
    same time however many came before it. A run of tokens that stand for single bytes comes out
    when it has ended: only then is it known whether its bytes are text.

    Args:
        tokenizer: A :class:`~maxjax.text.tokenizer.tokenizer.Tokenizer`.
        skip_special: Whether special tokens have no text.

    Example:
        >>> from tokenizers import Tokenizer as Backend, decoders, models
        >>> from maxjax.text.tokenizer.tokenizer import Tokenizer
        >>> backend = Backend(models.BPE({"ð": 0, "Ł": 1, "Ļ": 2, "Ĥ": 3, "!": 4}, []))
        >>> backend.decoder = decoders.ByteLevel()
        >>> stream = TextStream(Tokenizer(backend))
        >>> [stream.push(i) for i in [4, 0, 1, 2, 3]], stream.flush()
        (['!', '', '', '', '🙂'], '')
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool = True):
        backend = tokenizer._backend
        steps = steps_of(backend)
        self._work: _Steps | _Window
        if steps is None:
            self._work = _Window(tokenizer, skip_special)
        else:
            added = backend.get_added_tokens_decoder().values() if skip_special else ()
            skipped = {token.content for token in added if token.special}
            self._work = _Steps(backend.id_to_token, skipped, steps)
        # After all else, also where the decoder is not known here.
        self._clean = clean_up() if getattr(tokenizer, "cleans_up", False) else []
        self._ended = False

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token; may be empty.

        An id that is no token has no text, as in ``decode``.

        Raises:
            UserInputError: The id is no whole number of 0 or more, or :meth:`flush` was called.
        """
        if self._ended:
            raise UserInputError("the stream of text has ended: make a new one")
        token_id = int(token_id)
        if not 0 <= token_id < 1 << 32:
            raise UserInputError(f"{token_id} is no token id")
        return through(self._clean, [self._work.push(token_id)])

    def flush(self) -> str:
        """Ends the text: what was held back, a broken character as U+FFFD."""
        if self._ended:
            return ""
        self._ended = True
        return through(self._clean, [self._work.flush()]) + ended(self._clean)


class _Steps:
    """What the tokenizer's decoder does, token by token."""

    def __init__(self, text_of: Any, skipped: set[str], steps: list[Step]):
        self._text_of, self._skipped, self._steps = text_of, skipped, steps

    def push(self, token_id: int) -> str:
        text = self._text_of(token_id)
        if text is None or text in self._skipped:
            return ""
        return through(self._steps, [text])

    def flush(self) -> str:
        return ended(self._steps)


class _Window:
    """For other decoders: decodes the last tokens with and without the new one."""

    def __init__(self, tokenizer: Any, skip_special: bool):
        self._decode = lambda ids: tokenizer._decoded(ids, skip_special)
        self._ids: list[int] = []
        self._start = self._given = 0  # tokens before the window; tokens whose text was given
        self._shown = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._given])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith(_BROKEN) or not now.startswith(before):
            return ""
        self._start, self._given = self._given, len(self._ids)
        self._shown += now[len(before) :]
        return now[len(before) :]

    def flush(self) -> str:
        whole = self._decode(self._ids)
        return whole[len(self._shown) :] if whole.startswith(self._shown) else ""


class StopStrings:
    """Pieces of text → the text before the first stop string, wherever the borders of pieces are.

    The first is the one that is complete first, and of two that end together the longer. Only
    what may be the beginning of a stop string is held back.

    Args:
        stops: The stop strings; one may be given by itself. None of them may be empty.

    Attributes:
        stopped: The stop string that was found, or None.
        position: How many characters of the text stand before it; as long as there is none, how
            many were given.

    Raises:
        UserInputError: A stop string is empty.
        TypeError: One is no str.

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
        """The automaton of Aho and Corasick: a state is how much of which string has been seen."""
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
        for state in states:  # grows: nearer ones first
            for character, after in self._next[state].items():
                self._shorter[after] = self._step(self._shorter[state], character)
                states.append(after)
            self._found[state] = self._found[state] or self._found[self._shorter[state]]

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def push(self, piece: str) -> str:
        """The text that is certain to stand before any stop string; nothing once one was found."""
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
        """Ends the text: what was held back, as no stop string followed."""
        text, self._held, self._state = self._held, "", 0
        self.position += len(text)
        return text
