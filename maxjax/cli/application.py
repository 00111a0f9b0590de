"""The command line: ``maxjax generate``, ``inspect``, ``convert``, ``plan`` and so on.

The result goes to stdout and nothing else does; an error is one line on stderr
(``--debug`` shows the traceback). Exit codes: 0 done, 1 failed (or planned, and it does not
fit), 2 wrong usage, 130 interrupted, 141 the reader of stdout went away. Each command does all
that can fail before it returns the lines to print, so a failure leaves stdout empty; only
``generate`` and ``chat`` write to stdout themselves, as the text comes. Everything heavy is imported
inside the command that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from .. import __version__
from ..errors import UserInputError
from .bench import bench, bench_arguments
from .chat import chat, chat_arguments
from .convert import convert, convert_arguments
from .embed import embed, embed_arguments
from .environment import env, env_arguments
from .generate import generate, generate_arguments
from .inspect import inspect, inspect_arguments, verify, verify_arguments
from .options import Parser
from .plan import plan, plan_arguments
from .terminal import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. ``argv`` is what follows the program's name."""
    # Closed (`>&-`), they are None, and print() would write to stdout what is meant for stderr.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest:  # said by the command itself, which has the options
        options.error(f"unrecognized arguments: {' '.join(rest)}{options.like(rest[0])}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        with _limits(options):
            _print(options.run(options))
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would complain.
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


def _limits(options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Puts the limits in force that ``--limit`` changes."""
    if not options.limit:
        return contextlib.nullcontext()
    from ..storage.limits import Limits, allowing

    try:
        return allowing(Limits.parse(options.limit))
    except UserInputError as error:
        return options.error(str(error))


def _left(code: Any, argv: Sequence[str] | None) -> Any:
    """Ends the program at once, if it is one; else the code.

    The devices may still be at work, on memory that Python's own way out takes from them.
    """
    if argv is None and "jax" in sys.modules and isinstance(code, int):
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        os._exit(code)
    return code


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    debug = Parser(add_help=False)
    debug.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    debug.add_argument(
        "--limit", action="append", default=[], metavar="NAME=N",
        help="what a file that you trust may ask for, as an error names it; may be given several times",
    )  # fmt: skip
    parser = Parser(
        prog="maxjax", description="Open checkpoints, look into them and run them in JAX."
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--version", action="version", version=f"maxjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, arguments, text in (
        ("generate", generate, generate_arguments, "have a language model go on with a text"),
        ("chat", chat, chat_arguments, "chat with a language model"),
        ("bench", bench, bench_arguments, "measure a language model beside the memory's bandwidth"),
        ("inspect", inspect, inspect_arguments, "list the tensors of a checkpoint; reads headers only"),
        ("verify", verify, verify_arguments, "read all of a checkpoint and compare its checksums; 0 if it is sound"),
        ("convert", convert, convert_arguments, "write a checkpoint in another format, type or number of files"),
        ("plan", plan, plan_arguments, "what a checkpoint takes on the devices of a mesh; reads headers only"),
        ("embed", embed, embed_arguments, "embed texts; one JSON line for each, or a .npy file"),
        ("env", env, env_arguments, "show versions, devices and caches"),
    ):  # fmt: skip
        command = commands.add_parser(name, parents=[debug], help=text, description=run.__doc__)
        command.set_defaults(run=run, error=command.error, like=command.like)
        arguments(command)
    return parser
