"""``run_job``: answers the prompts of a file of JSON lines, and writes a line for each answer.

A job that is killed and run again goes on where it was: no line is lost or written twice. Memory does not grow with
the number of prompts.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import stat
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from ...errors import UserInputError, first_line, shown
from ...images.decode import beside
from ...progress import Task, task
from ..pictures import with_pictures
from .answer import PendingAnswer
from .engine import Engine

# Each line of answers begins with it, also one that was cut.
_BEGINNING = b'{"index": '
_KINDS = ("prompt", "messages", "tokens")
# What an object may have beside one of them: any value, and an argument of submit.
_ID, _ADAPTER = "id", "adapter"


class JobResult(NamedTuple):
    """What a job has done.

    Attributes:
        answers, errors: number of prompts that were answered, and of those that could not be.
        before: number of prompts that earlier runs had written.
        tokens: number of tokens of the answers.
        seconds: time of this run.
    """

    answers: int
    errors: int
    before: int
    tokens: int
    seconds: float


class _Line(NamedTuple):
    number: int
    prompt: Any
    known: Mapping[str, Any]
    error: str | None
    settings: Mapping[str, Any] = MappingProxyType({})


def run_job(
    engine: Engine, source: str | os.PathLike[str], target: str | os.PathLike[str], **settings: Any
) -> JobResult:
    """Answers the prompts of a file, and appends a line to another one as each answer ends.

    Each line of ``source`` is a JSON text, or an object with "prompt" (a text), "messages" (a chat) or "tokens" (token
    ids), and perhaps with an "id" of any value, and with "adapter", the name of one of the engine's. Messages may have
    pictures, ``{"type": "image", "image": path}``; a relative path begins at the folder of ``source``. Each line of
    ``target`` is an object with "index", the number of the prompt's line from 0 on, its "id" if it has one, and "text",
    "finish_reason", "prompt_tokens" and "tokens" (numbers of tokens), or "error". Blank lines are skipped. Lines come
    in the order in which answers end.

    Args:
        engine: the engine.
        source: path of the prompts.
        target: path of the answers. Prompts whose answer is there are not answered again; a line at its end that was
            cut is.
        settings: arguments of :meth:`Engine.submit` for all prompts. Each prompt has its own random key, made of
            ``key`` and its index.

    Raises:
        UserInputError: a file cannot be opened or is not a regular one, ``target`` is not the result of such a job, or
            another process is writing it.
        OSError: a line cannot be written, as on a full disk. The job goes on from there when it is run again.

    Example:
        >>> import maxjax, tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "in.jsonl").write_text('"What is 2 + 3?"\\n{"prompt": "What is 1 + 1?", "id": "b"}\\n')
        >>> with maxjax.Engine(*maxjax.load("tiny"), slots=2) as engine:
        ...     run_job(engine, folder / "in.jsonl", folder / "out.jsonl").answers
        2
        >>> sorted((folder / "out.jsonl").read_text().splitlines())[1]
        '{"index": 1, "id": "b", "text": "1 + 1 = 2", "finish_reason": "stop", "prompt_tokens": 9, "tokens": 8}'
    """
    began = time.monotonic()
    try:
        _check_regular(source, must_exist=True)
        _check_regular(target, must_exist=False)
        total = _line_count(source)
        file = open(target, "a+b", buffering=0)
    except OSError as error:
        raise UserInputError(f"{error.filename}: {error.strerror}") from error
    with file, task("generating", total, unit=" texts") as progress:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserInputError(f"{target}: another process is writing it") from error
        if os.path.samefile(source, target):
            raise UserInputError(f"{target} is the file of prompts, not the result of such a job")
        done = _written(file, target)
        before = len(done)
        progress.add(before)
        job = _Job(engine, file, progress, settings, os.path.dirname(os.path.abspath(source)))
        try:
            for line in _lines(source):
                if line.number not in done:
                    job.start(line)
            job.finish()
        finally:
            job.cancel()
        os.fsync(file.fileno())
    return JobResult(job.answers, job.errors, before, job.tokens, time.monotonic() - began)


class _Job:
    """The answers that are being written, never many more than the engine has slots."""

    def __init__(
        self, engine: Engine, file: Any, progress: Task, settings: Mapping[str, Any], folder: str
    ):
        self._engine, self._file, self._progress, self._settings = engine, file, progress, settings
        self._folder = folder
        self._ended: queue.SimpleQueue[tuple[_Line, PendingAnswer]] = queue.SimpleQueue()
        self._open: set[PendingAnswer] = set()
        self._most = 2 * engine.slots
        self._began = time.monotonic()
        self.answers = self.errors = self.tokens = 0

    def start(self, line: _Line) -> None:
        """Puts a prompt into the engine, once there is room."""
        while len(self._open) >= self._most:
            self._write_next()
        if line.error is not None:
            return self._write(line, {"error": line.error})
        settings = {**self._settings, **line.settings}
        if settings.get("key") is not None:
            settings["key"] = jax.random.fold_in(settings["key"], line.number)
        try:
            answer = self._engine.submit(_beside(line.prompt, self._folder), **settings)
        except (UserInputError, TypeError) as error:
            return self._write(line, {"error": first_line(error)})
        self._open.add(answer)
        answer.add_done_callback(lambda one: self._ended.put((line, one)))

    def finish(self) -> None:
        """Waits for all answers."""
        while self._open:
            self._write_next()

    def cancel(self) -> None:
        """Ends the answers that nobody waits for any more."""
        for answer in self._open:
            answer.cancel()

    def _write_next(self) -> None:
        line, answer = self._ended.get()
        self._open.remove(answer)
        try:
            found = answer.result()
        except (FloatingPointError, UserInputError) as error:
            return self._write(line, {"error": first_line(error)})
        self.answers += 1
        self.tokens += len(found.tokens)
        rate = self.tokens / max(time.monotonic() - self._began, 1e-3)
        self._progress.note = f"{rate:,.0f} tokens a second"
        self._write(line, {
            "text": str(found), "finish_reason": found.finish_reason, "prompt_tokens": len(found.prompt_tokens),
            "tokens": len(found.tokens),
        })  # fmt: skip

    def _write(self, line: _Line, found: Mapping[str, Any]) -> None:
        self.errors += "error" in found
        text = json.dumps({"index": line.number, **line.known, **found}, ensure_ascii=False)
        # One call for the whole line: what a kill leaves is lines, or at worst a part of the last one.
        rest = text.encode("utf-8", "backslashreplace") + b"\n"
        while rest:  # a disk that becomes full takes a part, and the next call says why
            rest = rest[self._file.write(rest) :]
        self._progress.add(1)


def _check_regular(path: str | os.PathLike[str], must_exist: bool) -> None:
    """Raises UserInputError for a directory, pipe or device, before it is opened: that could wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if must_exist:
            raise
        return
    if not stat.S_ISREG(mode):
        raise UserInputError(f"{path} is not a regular file")


def _line_count(path: str | os.PathLike[str]) -> int:
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def _lines(path: str | os.PathLike[str]) -> Iterator[_Line]:
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if line.strip():
                yield _read_line(number, line)


def _read_line(number: int, line: bytes) -> _Line:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _Line(number, None, {}, f"the line is not JSON: {first_line(error)}")
    if isinstance(found, str):
        return _Line(number, found, {}, None)
    if not isinstance(found, dict):
        return _Line(number, None, {}, f"the line is neither a text nor an object: {shown(found)}")
    known, settings = ({name: found[name]} if name in found else {} for name in (_ID, _ADAPTER))
    unknown = found.keys() - {*_KINDS, _ID, _ADAPTER}
    given = [kind for kind in _KINDS if kind in found]
    if unknown or len(given) != 1:
        problem = f"it has {', '.join(sorted(map(shown, found)))}"
        return _Line(
            number,
            None,
            known,
            f"an object has one of {', '.join(_KINDS)}, and perhaps {_ID} and {_ADAPTER}: {problem}",
        )
    return _Line(number, found[given[0]], known, None, settings)


def _beside(prompt: Any, folder: str) -> Any:
    """A chat whose pictures with relative paths are in a folder; any other prompt as it is."""
    if not isinstance(prompt, list):
        return prompt
    return with_pictures(prompt, lambda part: beside(part, folder))


def _written(file: Any, path: str | os.PathLike[str]) -> set[int]:
    """The indices of the lines in the file of answers; a line at its end that was cut is removed."""
    file.seek(0)
    done: set[int] = set()
    end = 0
    for line in open(file.fileno(), "rb", closefd=False):
        is_ours = line.startswith(_BEGINNING[: len(line)])
        if is_ours and not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            number = json.loads(line)["index"] if is_ours else None
        except (ValueError, KeyError, TypeError, RecursionError):
            number = None
        if type(number) is not int:
            raise UserInputError(
                f"{path} exists, and is not the result of such a job: {shown(line)}"
            )
        done.add(number)
    file.truncate(end)
    return done
