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
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .. import __version__
from ..errors import UserInputError, closest
from ..progress import draw_with
from .options import Parser
from .tables import is_terminal, show
from .terminal import explain, stoppable

# Command → file and function of this folder, and what the help says; FUNCTION_arguments adds its options.
COMMANDS = {
    "generate": ("generate.generate", "generate text with a language model"),
    "chat": ("chat.chat", "chat with a language model"),
    "serve": ("serve.serve", "answer OpenAI's API on a port"),
    "bench": ("bench.bench", "measure the speed of a language model against its limit"),
    "eval": ("evaluate.evaluate", "measure the perplexity of a language model on a text"),
    "inspect": ("inspect.inspect", "list the tensors of a checkpoint; reads headers only"),
    "verify": ("inspect.verify", "read all of a checkpoint and check its checksums"),
    "convert": ("convert.convert", "write a checkpoint in another format, dtype or number of files"),
    "repair": ("repair.repair", "finish or remove what an interrupted save left in a directory"),
    "plan": ("plan.plan", "show the memory that a model needs on each device of a mesh"),
    "embed": ("embed.embed", "compute embeddings of texts, as JSON lines or a .npy file"),
    "rerank": ("rerank.rerank", "sort documents by how well they answer a query"),
    "fill-mask": ("heads.fill_mask", "find the most probable tokens for the masks in texts"),
    "tag": ("heads.tag", "find labelled spans in texts, such as names"),
    "classify": ("heads.classify", "compute the probabilities of the labels of texts"),
    "answer": ("heads.answer", "find the answer to a question in texts"),
    "kernels": ("kernels.kernels", "compile the CPU kernels now, instead of at first use"),
    "env": ("environment.env", "show versions, devices and caches"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. ``argv`` excludes the program's name."""
    # A closed stream (`>&-`) is None, and print() would send the output for stderr to stdout.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    if argv is None:
        # Imports and traces make many objects that stay, which the collector would look through
        # again and again: a fifth of the time to the first token.
        gc.set_threshold(100_000)
        # There is no line of the user's code that a warning could point at.
        warnings.formatwarning = lambda message, *args, **kwargs: f"maxjax: warning: {message}\n"
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("maxjax: interrupted", file=sys.stderr)
        return _left(130, argv)


def _run(argv: Sequence[str] | None) -> int:
    given = sys.argv[1:] if argv is None else argv
    with stoppable():
        parser = _parser(given)
        if not given:
            # On stdout as git's, for `maxjax | less`; not 0, so that no script takes it for success.
            parser.print_help()
            return 2
        options, rest = parser.parse_known_args(given)
    if rest:  # reported by the subcommand, which knows its options
        options.error(f"unrecognized arguments: {' '.join(rest)}{options.like(rest[0])}")
    if is_terminal(sys.stderr):
        draw_with(_bar)
    try:
        with _limits(options):
            with stoppable():
                lines = options.run(options)
            show(lines)
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _left(141, argv)
    except SystemExit as stop:
        _left(stop.code, argv)
        raise
    except Exception as error:
        if options.debug:
            raise
        print(f"maxjax: {explain(error, options.option_for)}", file=sys.stderr)
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


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command line, which has the options of the command that is called."""
    debug = Parser(add_help=False)
    debug.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    debug.add_argument(
        "--limit", action="append", default=[], metavar="NAME=N",
        help="set the limit that an error message names, for files that you trust; may be repeated",
    )  # fmt: skip
    parser = Parser(
        prog="maxjax", description="Open, inspect, convert and run model checkpoints in JAX."
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--version", action="version", version=f"maxjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Options before the command have no values.
    chosen = next((word for word in argv if not word.startswith("-")), None)
    if chosen is None and argv:
        for word in argv:
            if not any(name.startswith(word) for name in parser._option_string_actions):
                parser.error(f"unrecognized arguments: {word}{parser.like(word)}")
    elif chosen is not None and chosen not in COMMANDS:
        like = closest(chosen, COMMANDS)
        hint = f"did you mean {like}?" if like else f"there are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {chosen!r}: {hint}")
    for name, (place, text) in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=text)
            continue
        file, _, function = place.partition(".")
        module = import_module(f"{__package__}.{file}")
        run = getattr(module, function)
        command = commands.add_parser(name, parents=[debug], help=text, description=run.__doc__)
        command.set_defaults(
            run=run, error=command.error, like=command.like, option_for=command.option_for
        )
        getattr(module, f"{function}_arguments")(command)
    return parser
