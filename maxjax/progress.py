"""Progress: work that takes a while is shown on stderr, as a bar or as a line with the elapsed seconds.

The code that does the work only counts. A separate thread draws the count, for the first time after half a
second and then ten times a second, so that short work shows nothing and long work is not slowed down. There is
one bar at a time: work inside a task that is shown adds to that task's count, or sets its note.

``MAXJAX_PROGRESS=0`` turns it off and ``1`` on. By default it is shown if stderr is a terminal or the
process is the kernel of a notebook, never under pytest, and only by the first of several processes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .errors import printable
from .rendering.row import short

VARIABLE = "MAXJAX_PROGRESS"
# Seconds until work is shown, and between two drawings of it.
DELAY, EVERY = 0.5, 0.1


def is_on() -> bool:
    """Whether this process shows progress."""
    wanted = os.environ.get(VARIABLE)
    if wanted == "0":
        return False
    tested = "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ
    if wanted != "1" and (tested or not (_is_terminal() or in_notebook())):
        return False
    return _is_first()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stderr, or it is closed
        return False


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _is_first() -> bool:
    """Whether this process is the first of several, or alone."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return True
    from .heartbeat import coordinator

    service = coordinator()
    return service is None or service.process == 0


class Task:
    """Work that is shown while it lasts; made by :func:`task`.

    Attributes:
        what: what is being done.
        note: the present part of the work, in brackets after ``what``; "" for none.
        total: the amount of work in ``unit``; None if it is not known.
        unit: what is counted: "B" for bytes.
        done: the amount that is done.
        began: time of the beginning in seconds, by ``time.monotonic``.
        reads: whether bytes that are read from checkpoints are counted.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "B", reads: bool = False):
        self.what, self.total, self.unit, self.reads = printable(what), total, unit, reads
        self.note, self.done, self.began = "", 0, time.monotonic()
        self._counting = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def title(self) -> str:
        """What is being done, with the note."""
        return f"{self.what} ({self.note})" if self.note else self.what

    def add(self, count: int) -> None:
        """Adds to the amount that is done; any thread may call it."""
        with self._counting:
            self.done += count

    def telling(self, also: Callable[[int], Any] | None) -> Callable[[int], Any]:
        """A function that calls :meth:`add`, and then ``also`` if it is not None."""
        if also is None:
            return self.add

        def add(count: int) -> None:
            self.add(count)
            also(count)

        return add

    def expect(self, count: int) -> None:
        """Adds to the total; if the total was unknown, counting starts again at 0."""
        with self._counting:
            if self.total is None:
                self.total = self.done = 0
            self.total += count

    def finish(self) -> None:
        """Marks all work as done, even if not all of it was counted."""
        if self.total is not None:
            self.done = self.total

    def show(self) -> None:
        """Starts the thread that draws the task once it has lasted half a second."""
        stream = sys.stderr
        self._thread = threading.Thread(target=self._draw, args=(stream,), name="maxjax-progress")
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and removes the drawing."""
        global _shown
        self._over.set()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            with _LOCK:
                _shown = None if _shown is self else _shown

    def _draw(self, stream: Any) -> None:
        """The work of the thread: draws until the task is over, then removes the drawing."""
        if self._over.wait(self.began + DELAY - time.monotonic()):
            return
        drawing = None
        try:
            drawing, is_over = _drawer(stream), False
            while not is_over:
                drawing.draw(self)
                is_over = self._over.wait(EVERY)
            drawing.draw(self)
        except Exception:  # stderr is closed, …: no reason for the work itself to fail
            pass
        finally:
            if drawing is not None:
                try:
                    drawing.close()
                except Exception:
                    pass


# The task that is shown.
_shown: Task | None = None
_LOCK = threading.Lock()


def _begin(one: Task) -> bool:
    """Shows a task unless another is shown already; returns whether it did."""
    global _shown
    with _LOCK:
        if _shown is not None:
            return False
        _shown = one
    try:
        one.show()
    except RuntimeError:  # there can be no more threads: Python is ending
        one.close()
    return True


@contextmanager
def task(
    what: str, total: int | None = None, *, unit: str = "B", reads: bool = False
) -> Iterator[Task]:
    """Shows the work in this context, if it takes a while and no other task is shown.

    Args:
        what: what is being done, such as "loading model.safetensors".
        total: the amount of work in ``unit``; None shows only the seconds.
        unit: what is counted; "B" for bytes.
        reads: whether bytes that are read from checkpoints are counted automatically.

    Example:
        >>> with task("counting", 3, unit=" sheep") as one:
        ...     for _ in range(3):
        ...         one.add(1)
        >>> one.done
        3
    """
    one = Task(what, total, unit, reads)
    if is_on():
        _begin(one)
    try:
        yield one
        one.finish()
    finally:
        one.close()


def last_part(path: str | os.PathLike[str]) -> str:
    """The last part of a path, which leaves room for a bar.

    Example:
        >>> last_part("/models/org/name/"), last_part("model-" + 40 * "0" + ".gguf")
        ('name', 'model-00000000000000…00000000000000.gguf')
    """
    path = os.fspath(path)
    name = os.path.basename(path.rstrip("/")) or path
    return short(name, 40)


def reading(total: int = 0) -> Callable[[int], None] | None:
    """The function that counts bytes read from checkpoints; None if no task counts them.

    Args:
        total: bytes that will be read, in addition to those announced before.
    """
    one = _shown
    if one is None or not one.reads:
        return None
    if total:
        one.expect(total)
    return one.add


# --- compilation ----------------------------------------------------------------------------


class compiling:
    """A context that shows the compilation of a program, with its stage, if there is one.

    If the program is compiled already, it costs a few microseconds: JAX reports each stage of a
    compilation, and only a report begins a task.

    Args:
        what: name of the program.
        when: whether compilation may be shown.
    """

    __slots__ = ("_began", "_is_on", "_note", "_task", "what")

    def __init__(self, what: str, when: bool = True):
        self.what, self._is_on = what, when
        self._task: Task | None = None
        self._note: Task | None = None

    def __enter__(self) -> None:
        self._is_on = self._is_on and is_on()
        if self._is_on:
            _listen()
            self._began = time.monotonic()
            _scopes().append(self)

    def __exit__(self, *error: object) -> None:
        if not self._is_on:
            return
        _scopes().remove(self)
        if self._task is not None:
            self._task.close()
        if self._note is not None:
            self._note.note = ""

    def report(self, stage: str) -> None:
        """Shows that the compiler has begun a stage."""
        if self._task is None:
            if self._note is None or self._note is not _shown:
                self._task = Task(f"compiling {self.what}")
                self._task.began, self._task.note = self._began, stage
                if not _begin(self._task):
                    self._task, self._note = None, _shown
        if self._task is not None:
            self._task.note = stage
        elif self._note is not None:
            self._note.note = f"compiling {self.what}, {stage}"


_LOCAL = threading.local()
_is_listening = False
# JAX's event at the end of a stage → the stage that follows.
_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "XLA",
    "/jax/core/compile/backend_compile_duration": "tracing",
}


def _scopes() -> list[compiling]:
    found = getattr(_LOCAL, "scopes", None)
    if found is None:
        found = _LOCAL.scopes = []
    return found


def _listen() -> None:
    """Registers the listener for JAX's compilation events, once."""
    global _is_listening
    if not _is_listening:
        import jax.monitoring

        _is_listening = True
        jax.monitoring.register_event_duration_secs_listener(_heard)


def _heard(event: str, duration_secs: float, **about: Any) -> None:
    del duration_secs, about
    scopes = _scopes()
    if scopes and event in _STAGES:
        scopes[-1].report(_STAGES[event])


# --- drawings -------------------------------------------------------------------------------


class Drawing(Protocol):
    """Something that shows a task on stderr."""

    def draw(self, one: Task) -> None:
        """Shows the task as it is now."""
        ...

    def close(self) -> None:
        """Removes what it has drawn."""
        ...


class Tqdm:
    """A bar or a line of tqdm: a widget in a notebook, text elsewhere."""

    def __init__(self, stream: Any):
        self._stream, self._bar, self._total = stream, None, -1

    def draw(self, one: Task) -> None:
        """Shows the task as it is now."""
        if self._bar is None or one.total != self._total:
            self.close()
            self._bar, self._total = self._new(one), one.total
        if one.total is None:
            self._bar.set_description_str(line(one), refresh=False)
        else:
            self._bar.set_description(one.title, refresh=False)
            self._bar.n = min(one.done, one.total)
        self._bar.refresh()

    def close(self) -> None:
        """Removes what it has drawn."""
        if self._bar is not None:
            self._bar.total = None  # a widget that is not full would stay, in red
            self._bar.close()
            self._bar = None

    def _new(self, one: Task) -> Any:
        from tqdm.auto import tqdm

        bar = tqdm(
            desc=line(one) if one.total is None else one.what, total=one.total, unit=one.unit,
            unit_scale=one.unit == "B", leave=False,
            file=self._stream, mininterval=0, dynamic_ncols=True,
            bar_format="{desc}" if one.total is None else None,
        )  # fmt: skip
        bar.start_t -= time.monotonic() - one.began  # its rate is that of the whole task
        return bar


def line(one: Task) -> str:
    """A task whose size is not known, with its seconds."""
    return f"{one.title} … {time.monotonic() - one.began:.1f} s"


class Displayed:
    """A bar of tqdm as the text of an output, for a notebook without widgets.

    On stderr each drawing would be a part of the cell's output, which is kept in the file.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, one: Task) -> None:
        """Shows the task as it is now."""
        from tqdm import tqdm

        text = line(one)
        if one.total is not None:
            text = tqdm.format_meter(
                min(one.done, one.total), one.total, time.monotonic() - one.began, ncols=100,
                prefix=one.title, unit=one.unit, unit_scale=one.unit == "B",
            )  # fmt: skip
        self._put(text)

    def close(self) -> None:
        """Removes what it has drawn."""
        if self._handle is not None:
            self._put("")

    def _put(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def _by_tqdm(stream: Any) -> Drawing:
    """A drawing by tqdm; in a notebook without widgets not by ``tqdm.auto``, which would warn."""
    from importlib.util import find_spec

    without_widgets = in_notebook() and find_spec("ipywidgets") is None
    return Displayed() if without_widgets else Tqdm(stream)


_drawer: Callable[[Any], Drawing] = _by_tqdm


def draw_with(drawer: Callable[[Any], Drawing]) -> None:
    """Replaces tqdm by another drawing of tasks.

    Args:
        drawer: function from the stream to a new Drawing.
    """
    global _drawer
    _drawer = drawer
