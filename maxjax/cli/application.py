"""The ``maxjax`` command: parses the arguments, runs a subcommand, and returns the exit code.

Only the result goes to stdout; an error is one line on stderr (``--debug`` shows the traceback).
Exit codes: 0 success, 1 failure (or a plan that does not fit), 2 wrong usage, 130 interrupted,
141 stdout was closed by its reader. A command does all that can fail before it returns the lines to
print, so that a failure leaves stdout empty; only ``generate`` and ``chat`` write to stdout while
they run. Heavy modules are imported inside the command that needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..errors import UserInputError
from ..progress import draw_with
from .bench import bench, bench_arguments
from .chat import chat, chat_arguments
from .convert import convert, convert_arguments
from .embed import embed, embed_arguments
from .environment import env, env_arguments
from .evaluate import evaluate, evaluate_arguments
from .generate import generate, generate_arguments
from .inspect import inspect, inspect_arguments, verify, verify_arguments
from .options import Parser
from .plan import plan, plan_arguments
from .rerank import rerank, rerank_arguments
from .tables import is_terminal, show
from .terminal import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. ``argv`` excludes the program's name."""
    # A closed stream (`>&-`) is None, and print() would send the output for stderr to stdout.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if argv is None:
        # Imports and traces make many objects that stay, which the collector would look through
        # again and again: a fifth of the time to the first token.
        gc.set_threshold(100_000)
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest:  # reported by the subcommand, which knows its options
        options.error(f"unrecognized arguments: {' '.join(rest)}{options.like(rest[0])}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    if is_terminal(sys.stderr):
        draw_with(_bar)
    try:
        with _limits(options):
            show(options.run(options))
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _left(141, argv)
    except KeyboardInterrupt:
        print("maxjax: interrupted", file=sys.stderr)
        return _left(130, argv)
    except SystemExit as stop:
        _left(stop.code, argv)
        raise
    except Exception as error:
        if options.debug:
            raise
        print(f"maxjax: {explain(error)}", file=sys.stderr)
        return 1
    return getattr(options, "code", 0)


def _bar(stream: Any) -> Any:
    from .bars import RichBar

    return RichBar(stream)


def _limits(options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """A context in which the limits of ``--limit`` apply."""
    if not options.limit:
        return contextlib.nullcontext()
    from ..storage.limits import Limits, allowing

    try:
        return allowing(Limits.parse(options.limit))
    except UserInputError as error:
        return options.error(str(error))


def _left(code: Any, argv: Sequence[str] | None) -> Any:
    """Exits at once when run as a program; otherwise returns the exit code.

    The devices may still compute, on memory that Python's normal shutdown would free.
    """
    if argv is None and "jax" in sys.modules and isinstance(code, int):
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        os._exit(code)
    return code


def _parser() -> argparse.ArgumentParser:
    debug = Parser(add_help=False)
    debug.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    debug.add_argument(
        "--limit", action="append", default=[], metavar="NAME=N",
        help="set a limit, as an error names it, for files that you trust; may be given several times",
    )  # fmt: skip
    parser = Parser(
        prog="maxjax", description="Open checkpoints, look into them and run them in JAX."
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--version", action="version", version=f"maxjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, arguments, text in (
        ("generate", generate, generate_arguments, "continue a text with a language model"),
        ("chat", chat, chat_arguments, "chat with a language model"),
        ("bench", bench, bench_arguments, "measure a language model against the memory bandwidth"),
        ("eval", evaluate, evaluate_arguments, "measure how well a language model predicts a text"),
        ("inspect", inspect, inspect_arguments, "list the tensors of a checkpoint; reads headers only"),
        ("verify", verify, verify_arguments, "read all of a checkpoint and compare its checksums; 0 if it is intact"),
        ("convert", convert, convert_arguments, "write a checkpoint in another format, dtype or number of files"),
        ("plan", plan, plan_arguments, "memory of a checkpoint on the devices of a mesh; reads headers only"),
        ("embed", embed, embed_arguments, "embed texts; one JSON line for each, or a .npy file"),
        ("rerank", rerank, rerank_arguments, "sort documents by how well they answer a query; JSON lines"),
        ("env", env, env_arguments, "show versions, devices and caches"),
    ):  # fmt: skip
        command = commands.add_parser(name, parents=[debug], help=text, description=run.__doc__)
        command.set_defaults(run=run, error=command.error, like=command.like)
        arguments(command)
    return parser
