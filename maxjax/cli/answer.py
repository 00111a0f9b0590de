"""An answer on stdout as it is written, Ctrl-C while it is, and what there is to say of it."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..columns import columns, visible

# What is over sooner needs no line that says it is being done.
_MOMENT = 0.3


@contextmanager
def status(what: str) -> Iterator[Callable[[], None]]:
    """A line on stderr while a block lasts, if that is a terminal and the block takes a while.

    Args:
        what: Is being done.

    Yields:
        A function that takes the line away before the end of the block.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    lock, over, shown = threading.Lock(), threading.Event(), []

    def show() -> None:
        text = f"{visible(what)} …"[: shutil.get_terminal_size().columns - 1]
        with lock:
            if not over.is_set():
                sys.stderr.write(f"\r{text}")
                sys.stderr.flush()
                shown.append(len(text))

    def end() -> None:
        timer.cancel()
        with lock:
            over.set()
            if shown:
                sys.stderr.write(f"\r{' ' * shown.pop()}\r")
                sys.stderr.flush()

    timer = threading.Timer(_MOMENT, show)
    timer.daemon = True
    timer.start()
    try:
        yield end
    finally:
        end()


class Answer(NamedTuple):
    """An answer that was shown.

    Attributes:
        completion: Text, tokens and how it ended.
        first: Seconds to the first text; None if there was none.
        early: How many tokens that was made of.
        seconds: From beginning to end.
        stopped: Whether Ctrl-C ended it.
    """

    completion: Any
    first: float | None
    early: int
    seconds: float
    stopped: bool


def show(stream: Any, *, quiet: bool = False) -> Answer:
    """Writes an answer to stdout piece by piece, and a newline. A terminal shows what it waits for.

    Ctrl-C ends it between two tokens. Before there is any text, and a second time, it raises
    KeyboardInterrupt wherever it is.

    Args:
        stream: What ``maxjax.stream`` gives.
        quiet: Write nothing.
    """
    clean = visible_text if sys.stdout.isatty() else str
    began, first, early, wrote = time.perf_counter(), None, 0, False
    try:
        reading = "reading the prompt; the first time programs are compiled"
        with _interrupts() as stop, status(reading) as over:
            for piece in stream:
                if first is None:
                    over()
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
    return Answer(stream.completion, first, early, seconds, stop.asked)


def visible_text(text: str) -> str:
    """``text`` with control characters escaped, but for tabs and ends of lines.

    Example:
        >>> print(visible_text("red: \\x1b[31m\\nend"))
        red: \\x1b[31m
        end
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _steers(c) else visible(c) for c in text)


def _steers(character: str) -> bool:
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0


class _Stop:
    """Whether Ctrl-C was pressed, and whether it is only noted."""

    asked = gently = False

    def __call__(self, *_: Any) -> None:
        if self.asked or not self.gently:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def _interrupts() -> Iterator[_Stop]:
    stop, number = _Stop(), signal.SIGINT
    here = threading.current_thread() is threading.main_thread()
    # Who ignores it, as a job in the background does, or handles it himself, still does.
    if not here or signal.getsignal(number) is not signal.default_int_handler:
        yield stop
        return
    before = signal.signal(number, stop)
    try:
        yield stop
    finally:
        signal.signal(number, before)


def nan_error(model: Any, completion: Any, find: bool) -> FloatingPointError:
    """What to say when the logits of an answer are no numbers.

    Args:
        model: That wrote it.
        completion: The answer until then.
        find: Whether to look for the layer; takes a pass without ``jit``.
    """
    count = len(completion.tokens)
    told = f"after {count} tokens of the answer the logits are NaN or infinite"
    if not find:
        return FloatingPointError(f"{told}: --debug-nans names the layer")
    from ..engine.generate.nans import first_nan

    name = first_nan(model, [*completion.prompt_tokens, *completion.tokens])
    if name is None:
        return FloatingPointError(f"{told}, but not if the same tokens are read layer by layer")
    return FloatingPointError(f"{told}: the first layer that makes them is {name}")


def stats(
    answer: Answer, sampling: Any, seed: int | None, loaded: float | None = None
) -> Iterable[str]:
    """Lines that say how long an answer took and how it ended."""
    found = answer.completion
    rows = [] if loaded is None else [["loaded", f"{loaded:.2f} s"]]
    if answer.first is not None:
        prompt = f"a prompt of {tokens(found.prompt_tokens)}"
        rows.append(
            [
                "first text",
                f"{answer.first:.2f} s, with {prompt} and what had to be compiled",
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


def _settings(sampling: Any) -> str:
    names = ("temperature", "top_k", "top_p", "min_p")
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    found = [(name, getattr(sampling, name)) for name in names]
    return ", ".join(f"{n.replace('_', '-')} {v:g}" for n, v in found if off.get(n) != v)


def _end(answer: Answer) -> str:
    found = answer.completion
    after = f"after {tokens(found.tokens)}"
    if answer.stopped:
        return f"{after}, by Ctrl-C"
    if isinstance(found.stop, str):
        return f"{after}, by the text {visible(repr(found.stop))}"
    if found.stop is not None:
        return f"{after}, by the token {found.stop}"
    return f"{after}: it may be no longer"


def tokens(ids: Sequence[int]) -> str:
    """How many they are, in words.

    Example:
        >>> tokens([5])
        '1 token'
    """
    return f"{len(ids):,} token{'s' * (len(ids) != 1)}"


def say(lines: Iterable[str]) -> None:
    """Lines on stderr."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)
