"""``maxjax embed``: one vector for each text."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserInputError
from ..progress import last_part, task
from .options import auto_or_float, file_path, pooling, positive
from .tables import json_line


def model_argument(parser: argparse.ArgumentParser) -> None:
    """Declares ``--model`` for a command without a default model."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="a directory, a GGUF file, or org/name on the hub",
    )


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Loads the model and the tokenizer that the options name, with a bar while it reads."""
    with task(f"loading {last_part(options.model)}", reads=True):
        from ..engine.load import load

        return load(options.model, dtype=options.dtype)


def text_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Declares the texts of a command, which are lines of stdin by default; the help says ``what`` they are."""
    parser.add_argument(
        "texts", nargs="*", default=[], metavar="TEXT", help=f"{what} (default: each line of stdin)"
    )


def given_texts(options: argparse.Namespace, texts: list[str]) -> list[str]:
    """The texts of a command: those of its arguments, or the lines of stdin.

    Raises:
        UserInputError: there is none, or one is not valid UTF-8.
    """
    if not texts and (sys.stdin is None or sys.stdin.isatty()):
        options.error("no TEXT given, and none on stdin")
    texts = texts or stdin_lines()
    for number, text in enumerate(texts, 1):
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UserInputError(f"text {number} is not valid UTF-8")
    if not texts:
        raise UserInputError("there is no text: stdin is empty")
    return texts


def batch_arguments(parser: argparse.ArgumentParser, what: str, truncates: bool = True) -> None:
    """Declares the options of batches and dtype; the help calls the texts ``what``."""
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N",
                        help=f"{what} computed at a time (default %(default)s)")  # fmt: skip
    if truncates:
        parser.add_argument(
            "--truncate",
            action="store_true",
            help="truncate texts that are longer than the model's limit (default: an error)",
        )
    parser.add_argument(
        "--dtype",
        default="auto",
        type=auto_or_float,
        metavar="TYPE",
        help="dtype of the weights, such as bf16 or float32 (default: the checkpoint's)",
    )


def embed_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    text_arguments(parser, "a text to embed")
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="write FILE.npy, one float32 array [texts, width], or FILE.jsonl, JSON lines "
        "(default: JSON lines on stdout)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--pooling",
        type=pooling,
        metavar="MODE",
        help="lasttoken, mean, … (default: what the model's files say)",
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="put the prompt with this name, from the model's files, before each text",
    )
    parser.add_argument(
        "--truncate-dim",
        type=positive,
        metavar="N",
        help="keep the first N numbers of each vector (for models trained for it)",
    )
    batch_arguments(parser, "texts")


def output_file(found: str) -> Path:
    """The type of a file of embeddings, whose name says its format."""
    if found.lower().endswith((".npy", ".jsonl")):
        return file_path(found)
    raise argparse.ArgumentTypeError(
        f"{found}: it must end in .npy (one array) or .jsonl (JSON lines)"
    )


def embed(options: argparse.Namespace) -> Iterable[str]:
    """Computes embeddings of texts, from arguments or stdin; writes JSON lines or a .npy file."""
    texts = given_texts(options, options.texts)
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise UserInputError(f"{options.output}: its directory does not exist")
    if options.output is not None and options.output.is_dir():
        raise UserInputError(f"{options.output} is a directory, not a file to write")
    if options.output is not None and os.path.lexists(options.output) and not options.overwrite:
        raise UserInputError(f"{options.output} exists: --overwrite replaces it")

    model, tokenizer = load_model(options)
    from ..engine.embed import embed as embed_texts

    embeddings = embed_texts(
        model, tokenizer, texts, batch_size=options.batch_size, truncate=options.truncate,
        pooling=options.pooling, prompt_name=options.prompt_name, truncate_dim=options.truncate_dim,
    )  # [n, d] float32  # fmt: skip
    lines = json_lines(texts, ([*map(digits, row)] for row in embeddings), "embedding")
    if options.output is None:
        return lines
    from ..storage.save.durable import replace_file

    pieces: Iterable[Any] = (f"{line}\n".encode() for line in lines)
    if options.output.name.lower().endswith(".npy"):
        import numpy as np

        array = io.BytesIO()
        np.save(array, embeddings)
        pieces = [array.getbuffer()]
    replace_file(os.fspath(options.output), pieces)
    return []


def json_lines(texts: Iterable[str], found: Iterable[Any], key: str) -> Iterator[str]:
    """A JSON object for each text, with what was found for it under a key."""
    for text, one in zip(texts, found, strict=True):
        yield json_line({"text": text, key: one})


def digits(value: Any) -> float:
    """A float32 as the number with the fewest digits that gives the same float32 again."""
    import numpy as np

    return float(str(np.float32(value)))


def stdin_lines() -> list[str]:
    """The lines of stdin."""
    text = sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines  # the last newline ends a line
