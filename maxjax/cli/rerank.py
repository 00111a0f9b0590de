"""``maxjax rerank``: documents by how well they answer a query."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from ..errors import UserInputError
from .embed import batch_arguments, digits, load_model, model_argument, stdin_lines
from .options import positive
from .tables import json_line


def rerank_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("query", metavar="QUERY", help="what the documents should answer")
    parser.add_argument(
        "documents",
        nargs="*",
        default=[],
        metavar="DOCUMENT",
        help="a document (default: each line of stdin)",
    )
    parser.add_argument(
        "--top", type=positive, metavar="N", help="print the N best documents (default: all)"
    )
    parser.add_argument(
        "--template",
        metavar="TEXT",
        help="the prompt of a decoder, with {query} and {document} in it",
    )
    parser.add_argument(
        "--answers",
        nargs=2,
        metavar=("YES", "NO"),
        help="the two answers whose logits a decoder compares, one token each",
    )
    parser.add_argument("--activation", choices=["sigmoid", "linear"],
                        help="sigmoid: scores between 0 and 1; linear: logits (default: as the files say)")  # fmt: skip
    batch_arguments(parser, "documents")


def rerank(options: argparse.Namespace) -> Iterable[str]:
    """Sorts documents, from arguments or stdin, by relevance to QUERY; writes JSON lines."""
    if not options.documents and (sys.stdin is None or sys.stdin.isatty()):
        options.error("no DOCUMENT given, and none on stdin")
    documents = options.documents or stdin_lines()
    for name, text in [
        ("the query", options.query),
        *((f"document {i}", d) for i, d in enumerate(documents, 1)),
    ]:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UserInputError(f"{name} is not valid UTF-8")
    if not documents:
        raise UserInputError("there is no document to rerank: stdin is empty")
    model, tokenizer = load_model(options)
    from ..engine.rerank import rerank as scores_of

    scores = scores_of(
        model, tokenizer, options.query, documents, batch_size=options.batch_size,
        truncate=options.truncate, activation=options.activation, template=options.template,
        answers=None if options.answers is None else tuple(options.answers),
    )  # [n] float32  # fmt: skip
    best = (-scores).argsort(kind="stable")[: options.top]
    return (
        json_line({"index": int(i), "score": digits(scores[i]), "text": documents[i]}) for i in best
    )
