"""Floor 7. The command line: ``maxjax generate``, ``inspect``, ``convert``, ``plan`` and so on.

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
import dataclasses
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .cli_answer import status
from .cli_bench import bench, bench_arguments
from .cli_chat import chat, chat_arguments
from .cli_convert import convert, convert_arguments
from .cli_errors import explain
from .cli_generate import generate, generate_arguments
from .cli_options import Parser, positive
from .cli_plan import plan, plan_arguments
from .columns import columns, visible
from .errors import UserInputError

# Items of a list of metadata that `inspect` shows.
_SHOWN_ITEMS = 16
_SHOWN_CHARACTERS = 80


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
    from .storage.limits import Limits, allowing

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
    for name, run, text in (
        ("generate", generate, "have a language model go on with a text"),
        ("chat", chat, "chat with a language model"),
        ("bench", bench, "measure a language model beside the memory's bandwidth"),
        ("inspect", inspect, "list the tensors of a checkpoint; reads headers only"),
        ("verify", verify, "read all of a checkpoint and compare its checksums; 0 if it is sound"),
        ("convert", convert, "write a checkpoint in another format, type or number of files"),
        ("plan", plan, "what a checkpoint takes on the devices of a mesh; reads headers only"),
        ("embed", embed, "embed texts; one JSON line for each, or a .npy file"),
        ("env", env, "show versions, devices and caches"),
    ):
        command = commands.add_parser(name, parents=[debug], help=text, description=run.__doc__)
        command.set_defaults(run=run, error=command.error, like=command.like)
        _ARGUMENTS[name](command)
    return parser


# --- maxjax inspect -----------------------------------------------------------------------


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="+", help="a file, a directory, an index, or the files of a set"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def inspect(options: argparse.Namespace) -> Iterable[str]:
    """Lists every tensor: name, dtype, shape, bytes, file; and the totals of each dtype."""
    from .storage.index import open_checkpoint

    paths = options.path if len(options.path) > 1 else options.path[0]
    table = open_checkpoint(paths, verify=False)  # headers only
    try:
        files = [{"path": os.fspath(file.path), "bytes": file.size} for file in table.files]
        tensors = [
            {
                "name": entry.name,
                "dtype": entry.encoding or entry.dtype.name,
                "shape": _logical(entry),
                "bytes": entry.nbytes,
                "file": files[entry.file]["path"],
            }
            for entry in table.entries.values()
        ]
        document = {
            "format": table.format,
            "metadata": {key: _plain(value) for key, value in table.metadata.items()},
            "files": files,
            "tensors": tensors,
            "totals": _totals(tensors),
        }
    finally:
        table.close()
    return [json.dumps(document, indent=1)] if options.json else _inspect_table(document)


def _logical(entry: Any) -> list[int]:
    """The shape of a tensor counted in weights, where it is packed in blocks."""
    if entry.encoding is None:
        return list(entry.shape)
    from .graph.quantization import QuantizationEncoding

    return list(QuantizationEncoding(entry.encoding).logical_shape(entry.shape))


def _plain(value: Any) -> Any:
    """A value of a file's metadata as JSON has it; a vocabulary is counted, not shown."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, list):
        return items
    if len(items) > _SHOWN_ITEMS:
        return {"items": len(items), "first": [_plain(item) for item in items[:3]]}
    return [_plain(item) for item in items]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['items']:,} items: {', '.join(map(str, value['first']))[:40]} …"
    text = visible(str(value))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


# --- maxjax verify ------------------------------------------------------------------------


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="+", help="a file, a directory, an index, or several files")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def verify(options: argparse.Namespace) -> Iterable[str]:
    """Reads every tensor, compares the checksums there are, and says so; exit code 1 if one is wrong.

    The structure is checked in any format. Checksums are in PyTorch's and NumPy's archives, in the
    maxjax_digests.json beside what maxjax wrote, and in the names of files of Hugging Face's cache.
    The headers of safetensors files are read once more by the library of that name, as others do.
    """
    from .storage.index import open_checkpoint
    from .storage.verify import second_reading
    from .storage.verify import verify as verify_table

    with open_checkpoint(options.path if len(options.path) > 1 else options.path[0]) as table:
        found, format = verify_table(table), table.format
        others = second_reading(table) if format == "safetensors" else None
    for line in others or ():
        print(f"maxjax: warning: {line}: other programs may not open it", file=sys.stderr)
    if options.json:
        return [json.dumps({"sound": True, "format": format} | dataclasses.asdict(found), indent=1)]
    sums = f"{found.checksums:,} checksums agree" if found.checksums else "it has no checksums"
    if found.blobs:
        sums += f"; the SHA-256 of {found.blobs} files is their name in the cache"
    if others == []:
        sums += "; the safetensors library lists the same tensors"
    return [
        f"sound: {format}, {found.tensors:,} tensors, {found.nbytes:,} bytes, {found.files} files; {sums}"
    ]


def _totals(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each dtype, and last for all: how many tensors, values and bytes."""
    keys = ("tensors", "values", "bytes")
    totals: dict[str, dict[str, Any]] = {}
    every: dict[str, Any] = {"dtype": "all"} | dict.fromkeys(keys, 0)
    for tensor in tensors:
        dtype = tensor["dtype"]
        row = totals.setdefault(dtype, {"dtype": dtype} | dict.fromkeys(keys, 0))
        for key, number in zip(keys, (1, math.prod(tensor["shape"]), tensor["bytes"]), strict=True):
            row[key] += number
            every[key] += number
    return [*totals.values(), every]


def _inspect_table(document: dict[str, Any]) -> Iterator[str]:
    if document["metadata"]:
        rows = [[visible(key), _short(value)] for key, value in document["metadata"].items()]
        yield from columns([["metadata", "value"], *rows], right=set())
        yield ""
    yield from columns(
        [["name", "dtype", "shape", "bytes", "file"]]
        + [
            [
                visible(tensor["name"]),
                tensor["dtype"],
                "x".join(map(str, tensor["shape"])) or "scalar",
                f"{tensor['bytes']:,}",
                visible(os.path.basename(tensor["file"])),
            ]
            for tensor in document["tensors"]
        ],
        right={3},
    )
    yield ""
    yield from columns(
        [["dtype", "tensors", "values", "bytes"]]
        + [
            [row["dtype"], *(f"{row[key]:,}" for key in ("tensors", "values", "bytes"))]
            for row in document["totals"]
        ],
        right={1, 2, 3},
    )


# --- maxjax embed -------------------------------------------------------------------------


def _embed_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="the model's directory")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="without any: lines from stdin")
    parser.add_argument("--output", type=Path, metavar="FILE.npy", help="write float32 [n, d]")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE.npy if it is there")
    parser.add_argument(
        "--pooling", metavar="MODE", help="lasttoken, mean, …; by default as the files say"
    )
    parser.add_argument(
        "--prompt-name", metavar="NAME", help="a prompt that the model's files name"
    )
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"]
    )


def embed(options: argparse.Namespace) -> Iterable[str]:
    """Embeds texts, given or one per line on stdin: JSON lines, or a .npy file."""
    if not options.texts and (sys.stdin is None or sys.stdin.isatty()):
        options.error("no TEXT given, and none on stdin")
    texts = options.texts or _stdin_lines()
    for number, text in enumerate(texts, 1):
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UserInputError(f"text {number} is not valid UTF-8")
    if not texts:
        raise UserInputError("there is no text to embed: stdin is empty")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise UserInputError(f"{options.output}: its directory does not exist")
    if options.output is not None and options.output.is_dir():
        raise UserInputError(f"{options.output} is a directory, not a file to write")
    if options.output is not None and os.path.lexists(options.output) and not options.overwrite:
        raise UserInputError(f"{options.output} is there: --overwrite replaces it")

    with status(f"loading {options.model}"):
        from .engine.embed import embed as embed_texts
        from .engine.load import load

        model, tokenizer = load(options.model, dtype=options.dtype)
    try:
        with status(f"embedding {len(texts):,} texts; the first time programs are compiled"):
            embeddings = embed_texts(
                model, tokenizer, texts, batch_size=options.batch_size, truncate=options.truncate,
                pooling=options.pooling, prompt_name=options.prompt_name,
            )  # [n, d] float32  # fmt: skip
    except UserInputError as error:
        said = str(error).replace("truncate=True", "--truncate").replace("pooling='", "--pooling '")
        raise UserInputError(said) from error
    if options.output is not None:
        _save_npy(options.output, embeddings)
        return []
    return (
        # The shortest digits that give the same float32 again.
        json.dumps({"text": text, "embedding": [float(str(v)) for v in row]}, ensure_ascii=False)
        for text, row in zip(texts, embeddings, strict=True)
    )


def _stdin_lines() -> list[str]:
    text = sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines  # the last newline ends a line, no new one


def _save_npy(path: Path, array: Any) -> None:
    """Writes beside ``path`` and renames, so that no half-written file is ever there."""
    import numpy as np

    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, suffix=".npy.part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# --- maxjax env ---------------------------------------------------------------------------


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def env(options: argparse.Namespace) -> Iterable[str]:
    """Shows versions, devices and caches; warns when JAX silently runs on the CPU."""
    from .environment import environment
    from .graph import compile_cache

    compile_cache.enable()
    found = environment()
    for problem in found["problems"]:
        print(f"maxjax: warning: {problem}", file=sys.stderr)
    return [json.dumps(found, indent=1)] if options.json else _env_lines(found)


def _env_lines(found: dict[str, Any]) -> Iterator[str]:
    yield from _section(
        "versions", [[k, v or "not installed"] for k, v in found["versions"].items()]
    )
    rows = [
        [f"{d['platform']}:{d['id']}", d["kind"], f"{d['memory']:,} bytes" if d["memory"] else ""]
        for d in found["devices"]
    ]
    yield from _section("devices", rows or [["none"]])
    yield from _section("caches", [[k, v or "none"] for k, v in found["caches"].items()])
    yield from _section("kernels", [[k, v] for k, v in found["kernels"].items()])
    if found["variables"]:
        yield from _section("variables", [[k, v] for k, v in found["variables"].items()])


def _section(title: str, rows: list[list[str]]) -> Iterator[str]:
    yield title
    yield from (f"  {line}" for line in columns(rows, right=set()))


_ARGUMENTS = {
    "generate": generate_arguments, "chat": chat_arguments, "bench": bench_arguments,
    "inspect": _inspect_arguments, "verify": _verify_arguments, "convert": convert_arguments,
    "plan": plan_arguments, "embed": _embed_arguments,
    "env": _env_arguments,
}  # fmt: skip
