"""``maxjax eval``: measures how good a language model is."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable

from .model import model_arguments, open_model
from .options import file_path, integer, positive
from .terminal import decoded


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("measure", nargs="?", choices=["perplexity"], default="perplexity",
                        help="perplexity, the default: how well the model predicts a text")  # fmt: skip
    parser.add_argument(
        "--text",
        required=True,
        type=file_path,
        metavar="FILE",
        help="the text, in UTF-8; - reads stdin",
    )
    model_arguments(parser, generates=False)
    parser.add_argument("--context", type=integer(2), metavar="N",
                        help="tokens per window (default: 512, at most the model's context)")  # fmt: skip
    parser.add_argument("--stride", type=positive, metavar="N",
                        help="tokens between the beginnings of two windows (default: half of the"
                        " context)")  # fmt: skip
    parser.add_argument("--batch", type=positive, default=8, metavar="N",
                        help="windows computed at a time (default 8)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")


def evaluate(options: argparse.Namespace) -> Iterable[str]:
    """Computes the perplexity of a language model on a text: exp of the mean loss per token.

    Windows overlap, and every token but the first is scored once, with at least context - stride
    tokens before it. Compare only figures of the same text, context and stride.
    """
    if options.context is not None and options.stride is not None:
        if options.stride > options.context:
            options.error(f"--stride {options.stride} is more than --context {options.context}")
    if str(options.text) == "-":
        text = decoded(sys.stdin.buffer.read() if sys.stdin else b"", "stdin")
    else:
        with open(options.text, "rb") as file:
            text = decoded(file.read(), str(options.text))
    opened = open_model(options)
    from dataclasses import asdict

    from ..engine.perplexity import perplexity

    found = perplexity(
        opened.model, opened.tokenizer, text,
        context=options.context, stride=options.stride, batch_size=options.batch,
    )  # fmt: skip
    if not options.json:
        return [str(found)]
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(found).items()
    }
    return [json.dumps({"model": str(options.model), "text": str(options.text), **values})]
