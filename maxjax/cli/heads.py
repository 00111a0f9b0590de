"""``maxjax fill-mask``, ``tag``, ``classify`` and ``answer``: what the heads of encoders say of texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from .embed import (
    batch_arguments,
    digits,
    given_texts,
    json_lines,
    load_model,
    model_argument,
    text_arguments,
)
from .options import positive


def fill_mask_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    text_arguments(parser, "a text with mask tokens, such as [MASK]")
    parser.add_argument("--top", type=positive, default=5, metavar="N",
                        help="tokens for each mask (default %(default)s)")  # fmt: skip
    batch_arguments(parser, "texts", truncates=False)


def fill_mask(options: argparse.Namespace) -> Iterable[str]:
    """Finds the most probable tokens for each mask in texts, from arguments or stdin; writes JSON lines."""
    texts = given_texts(options, options.texts)
    found = _called("fill_mask", options, texts, top=options.top)
    masks = ([[_plain(one) for one in mask] for mask in row] for row in found)
    return json_lines(texts, masks, "masks")


def tag_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    text_arguments(parser, "a text to tag")
    parser.add_argument("--aggregation", default="simple", choices=["none", "simple", "first", "average", "max"],
                        help="how the labels of tokens become those of spans (default %(default)s)")  # fmt: skip
    parser.add_argument("--stride", type=int, metavar="N",
                        help="split long texts into windows that share N tokens (default: an error)")  # fmt: skip
    batch_arguments(parser, "texts", truncates=False)


def tag(options: argparse.Namespace) -> Iterable[str]:
    """Finds the labelled spans of texts, from arguments or stdin; writes JSON lines."""
    texts = given_texts(options, options.texts)
    more = {"aggregation": options.aggregation, "stride": options.stride}
    found = _called("tag", options, texts, **more)
    return json_lines(texts, ([_plain(one) for one in row] for row in found), "tags")


def classify_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    text_arguments(parser, "a text to classify")
    parser.add_argument(
        "--top", type=positive, metavar="N", help="labels for each text (default: all)"
    )
    batch_arguments(parser, "texts")


def classify(options: argparse.Namespace) -> Iterable[str]:
    """Computes the probabilities of the labels of texts, from arguments or stdin; writes JSON lines."""
    texts = given_texts(options, options.texts)
    found = _called("classify", options, texts, top=options.top, truncate=options.truncate)
    return json_lines(texts, ([_plain(one) for one in row] for row in found), "labels")


def answer_arguments(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    parser.add_argument("question", metavar="QUESTION", help="what the texts should answer")
    text_arguments(parser, "a text with the answer")
    batch_arguments(parser, "texts", truncates=False)


def answer(options: argparse.Namespace) -> Iterable[str]:
    """Finds the answer to QUESTION in each text, from arguments or stdin; writes JSON lines."""
    texts = given_texts(options, options.texts)
    question = given_texts(options, [options.question])
    found = _called("answer", options, question * len(texts), texts)
    return json_lines(texts, map(_plain, found), "answer")


def _called(name: str, options: argparse.Namespace, *texts: list[str], **more: Any) -> Any:
    """Loads the model and makes the call of this name."""
    model, tokenizer = load_model(options)
    import maxjax

    return getattr(maxjax, name)(model, tokenizer, *texts, batch_size=options.batch_size, **more)


def _plain(found: Any) -> dict[str, Any]:
    """The fields of a result."""
    return {**found._asdict(), "score": digits(found.score)}
