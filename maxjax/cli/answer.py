"""Shows an answer on stdout while it is generated, handles Ctrl-C, and prints statistics."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..columns import columns
from ..errors import printable
from ..progress import task
from .tables import is_terminal, wrapped
from .terminal import interrupts


class Shown(NamedTuple):
    """An answer that was shown, with its times.

    Attributes:
        completion: the :class:`~maxjax.engine.generate.completion.Completion`.
        first: seconds to the first piece of text; None if there was none.
        early: the number of tokens in that piece.
        seconds: seconds of the whole answer.
        stopped: whether Ctrl-C ended it.
    """

    completion: Any
    first: float | None
    early: int
    seconds: float
    stopped: bool


def show(stream: Any, *, quiet: bool = False) -> Shown:
    """Writes an answer to stdout piece by piece, then a newline.

    On a terminal, a status line is shown until the first text. Ctrl-C ends the answer between two
    tokens; before the first text, or pressed a second time, it raises KeyboardInterrupt at once.

    Args:
        stream: the stream that ``maxjax.stream`` returns.
        quiet: whether nothing is written to stdout.
    """
    clean: Callable[[str], str] = visible_text if sys.stdout.isatty() else str
    if is_terminal(sys.stdout):
        clean = WordWrap(lambda: shutil.get_terminal_size().columns)
    began, first, early, wrote = time.perf_counter(), None, 0, False
    try:
        with _interrupts() as stop, task("reading the prompt") as waiting:
            for piece in stream:
                if first is None:
                    waiting.close()
                    first, early = time.perf_counter() - began, len(stream.completion.tokens)
                    stop.gently = True
                if not quiet:
                    wrote = True
                    sys.stdout.write(clean(piece))
                    sys.stdout.flush()
                if stop.asked:
                    stream.close()
                    break
        wrote = not quiet
    finally:
        if wrote:
            sys.stdout.write("\n")
            sys.stdout.flush()
    seconds = time.perf_counter() - began
    return Shown(stream.completion, first, early, seconds, stop.asked)


def visible_text(text: str) -> str:
    """``text`` with what steers a terminal escaped, except tabs and newlines: an answer may have any script.

    Example:
        >>> print(visible_text("red: \\x1b[31m\\nend"))
        red: \\x1b[31m
        end
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _steers(c) else printable(c) for c in text)


def _steers(character: str) -> bool:
    code = ord(character)
    # The last two are embeddings, overrides and isolates of direction, which reorder what comes after them.
    return (
        code < 0x20 or 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    )


class WordWrap:
    """Text for a terminal, piece by piece, with line breaks between words; control characters are escaped.

    A piece is shown at once; if the word that it continues grows beyond the line, the word is erased
    and written again on the next line. A word that is longer than a line is left to the terminal.

    Args:
        columns: returns the width of the terminal, which may change.

    Example:
        >>> wrap = WordWrap(lambda: 8)
        >>> [wrap(piece) for piece in ("one t", "wo th", "ree")]
        ['one t', 'wo\\nth', 'ree']
    """

    def __init__(self, columns: Callable[[], int]):
        self._columns = columns
        self._column = self._gap = 0  # the cursor, and spaces that are not written yet
        self._word, self._width = "", 0

    def __call__(self, piece: str) -> str:
        """Return what to write for the next piece of the text."""
        from rich.cells import cell_len

        limit = self._columns() - 1  # in the last column, terminals differ in where the cursor is
        shown = []
        for character in visible_text(piece):
            if character in "\n\t ":
                self._word, self._width = "", 0
                if character == "\n":
                    self._column = self._gap = 0
                    shown.append(character)
                else:
                    self._gap += 1 if character == " " else 8 - (self._column + self._gap) % 8
                continue
            cells = cell_len(character)
            if cells > 1:  # scripts of wide characters have no spaces: each is a word
                self._word, self._width = "", 0
            if self._column + self._gap + cells > limit and self._column > self._width:
                erase = f"\x1b[{self._width}D\x1b[K" if self._width else ""
                shown.append(f"{erase}\n{self._word}")
                self._column, self._gap = self._width, 0
            shown.append(" " * self._gap + character)
            self._column += self._gap + cells
            self._gap = 0
            self._word, self._width = self._word + character, self._width + cells
        return "".join(shown)


class _Stop:
    """A handler of Ctrl-C: ``asked`` says that it was pressed, ``gently`` that a first press only sets ``asked``."""

    asked = gently = False

    def __init__(self, otherwise: Any):
        self._otherwise = otherwise

    def __call__(self, number: int, frame: Any) -> None:
        if self.asked or not self.gently:
            self._otherwise(number, frame)
        self.asked = True


@contextmanager
def _interrupts() -> Iterator[_Stop]:
    number = signal.SIGINT
    stop = _Stop(before := signal.getsignal(number))
    is_main = threading.current_thread() is threading.main_thread()
    # A process that ignores SIGINT, such as a background job, or has its own handler keeps it.
    if not is_main or not interrupts(before):
        yield stop
        return
    signal.signal(number, stop)
    try:
        yield stop
    finally:
        signal.signal(number, before)


def nan_error(model: Any, completion: Any, find: bool) -> FloatingPointError:
    """The error for an answer whose logits are not finite.

    Args:
        model: the model that generated it.
        completion: the answer until then.
        find: whether to search for the layer, which takes a forward pass without ``jit``.
    """
    count = len(completion.tokens)
    problem = f"after {count} tokens of the answer the logits are NaN or infinite"
    if not find:
        return FloatingPointError(f"{problem}. --debug-nans names the layer")
    from ..engine.generate.nans import first_nan

    name = first_nan(model, [*completion.prompt_tokens, *completion.tokens])
    if name is None:
        return FloatingPointError(f"{problem}, but not if the same tokens are run layer by layer")
    return FloatingPointError(f"{problem}. The first layer with such an output is {name}")


def stats(
    answer: Shown,
    sampling: Any,
    seed: int | None,
    loaded: float | None = None,
    *,
    is_chat: bool = True,
) -> Iterable[str]:
    """The lines of ``--stats``: how long an answer took, and how it ended."""
    found = answer.completion
    rows = [] if loaded is None else [["loaded", f"{loaded:.2f} s"]]
    rows.append(["prompt", "a chat, by the chat template" if is_chat else "the text as it is"])
    if answer.first is not None:
        prompt = f"a prompt of {tokens(found.prompt_tokens)}"
        rows.append(
            [
                "first text",
                f"{answer.first:.2f} s, including {prompt} and compilation",
            ]
        )
        later, spent = len(found.tokens) - answer.early, answer.seconds - answer.first
        if later > 0 and spent > 0:
            rate = f"{spent / later * 1e3:.2f} ms each, {later / spent:,.1f} a second"
            rows.append(
                ["then", f"{spent:.2f} s for the other {later:,} of {tokens(found.tokens)}: {rate}"]
            )
    rows.append(["sampling", "greedy" if seed is None else f"{_settings(sampling)}, seed {seed}"])
    return columns([*rows, ["ended", _end(answer)]], right=set())


def remote_stats(answer: Shown) -> Iterable[str]:
    """The lines of ``--stats`` for the answer of a server."""
    found = answer.completion
    rows = []
    if answer.first is not None:
        rows.append(["first text", f"{answer.first:.2f} s"])
        spent = answer.seconds - answer.first
        rows.append(["then", f"{spent:.2f} s for the rest of {tokens(found.tokens)}"])
    how = "by Ctrl-C" if answer.stopped else f"with the finish reason {found.finish_reason!r}"
    return columns([*rows, ["ended", f"after {tokens(found.tokens)}, {how}"]], right=set())


def _settings(sampling: Any) -> str:
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "top_n_sigma",
        "xtc_probability",
    )
    off = {name: getattr(type(sampling)(), name) for name in names}
    found = [(name, getattr(sampling, name)) for name in names]
    return ", ".join(f"{n.replace('_', '-')} {v:g}" for n, v in found if off.get(n) != v)


def _end(answer: Shown) -> str:
    found = answer.completion
    after = f"after {tokens(found.tokens)}"
    if answer.stopped:
        return f"{after}, by Ctrl-C"
    if isinstance(found.stop, str):
        return f"{after}, by the stop string {found.stop!r}"
    if found.stop is not None:
        return f"{after}, by the token {found.stop}"
    return f"{after}: the largest length was reached"


def tokens(ids: Sequence[int]) -> str:
    """The number of tokens, as text.

    Example:
        >>> tokens([5])
        '1 token'
    """
    return f"{len(ids):,} token{'s' * (len(ids) != 1)}"


def say(lines: Iterable[str]) -> None:
    """Prints lines to stderr; in a terminal dimmed, so that answers stand out."""
    before, after = ("\x1b[2m", "\x1b[0m") if is_terminal(sys.stderr) else ("", "")
    for line in wrapped(lines) if before else lines:
        print(f"{before}{line}{after}" if line else line, file=sys.stderr, flush=True)
