"""``rerank``: computes a score of each document for a query.

A cross-encoder reads query and document as a text pair, and its classification head gives the score. A decoder
reads both in a template; its head gives the score, or the logit of one answer ("yes") minus another's ("no").
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..elsewhere import unknown_argument
from ..errors import UnsupportedModelError, UserInputError, checked_integer, releasing, shown
from ..lockstep import Lockstep
from ..models import LanguageModel
from ..models.pooling import Pooling
from ..models.sentence_files import CHAT_TEMPLATE
from ..models.weights import check_loaded, shardings_of
from ..nn.layer.walk import check_module
from ..text.tokenizer.arguments import check_is_tokenizer, checked_texts
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .embed import pooled_rows
from .rows import check_lengths, text_limit

_PLACES = ("{query}", "{document}")
ACTIVATIONS = {"sigmoid": lambda x: np.exp(-np.logaddexp(0, -x)), "linear": lambda x: x}
"""The functions, by name, that turn the output of a head into scores."""


def rerank(
    model: Any,
    tokenizer: Tokenizer | None,
    query: str,
    documents: Iterable[str],
    *,
    batch_size: int = 32,
    truncate: bool = False,
    activation: str | None = None,
    template: str | None = None,
    answers: tuple[str, str] | None = None,
    **unknown: Any,
) -> np.ndarray:
    """Computes how well each document answers a query; a larger score is a better answer.

    ``maxjax.rerank(…).argsort()[::-1]`` gives the indices of the documents, the best first. As in
    ``embed``, short pairs are packed into rows, and all processes that share the model's mesh must
    make the call.

    Args:
        model: an encoder or decoder with a classification head of one label (``…ForSequenceClassification``), or
            another decoder, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer.
        query: the query.
        documents: the documents; an empty one is allowed.
        batch_size: the maximum number of rows in one batch.
        truncate: whether to truncate pairs longer than the model's limit, the longer text first;
            otherwise they are an error. A template is never truncated.
        activation: "sigmoid" or "linear"; None follows the model's files, and without them
            sentence-transformers: "sigmoid" for a classification head, "linear" for answers.
        template: the text that a decoder reads, with ``{query}`` and ``{document}`` in it. Special tokens
            are written as text, and the tokenizer adds none. With a classification head it may be left out: then
            it is the tokenizer's template "rerank", or without one the decoder reads the tokenizer's pair.
        answers: two texts of one token each. A decoder's score is the logit of the first as the next token,
            minus that of the second: ``("yes", "no")`` for Qwen3-Reranker.

    Returns:
        The scores, float32 ``[len(documents)]``.

    Raises:
        TypeError: the query, a document, the template or an answer is not a str; or an argument is unknown, and
            the message suggests the right name if it can.
        UserInputError: there is no tokenizer; a pair is too long; the model has no head of one label, or
            is a decoder without ``template`` and ``answers``; the model's weights are not loaded.
        UnsupportedModelError: the files name an activation function or a chat template that maxjax does not have.
        ProgramMismatchError: the model, a text or an option is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.
    """
    for name in unknown:
        raise unknown_argument(rerank, name)
    if not isinstance(query, str):
        raise TypeError(f"query is a {type(query).__name__}, not a str")
    if template is not None and not isinstance(template, str):
        raise TypeError(f"template is a {type(template).__name__}, not a str")
    if activation not in (None, *ACTIVATIONS):
        raise UserInputError(f"activation must be 'sigmoid' or 'linear', not {activation!r}")
    batch_size = checked_integer("batch_size", batch_size)
    with Lockstep("rerank", shardings_of(model)) as together, releasing():
        check_module(model, "rerank")
        check_is_tokenizer(tokenizer)
        if not hasattr(model, "family"):
            raise UserInputError(f"{type(model).__name__} is not a model that can rerank texts")
        check_loaded(model)
        if tokenizer is None:
            raise UserInputError("texts cannot be reranked without a tokenizer")
        documents = checked_texts(documents, "documents")
        activation = _default_activation(model) if activation is None else activation
        settings = getattr(model, "pooling", None) or Pooling()
        limit = text_limit(model, tokenizer, settings)
        by_answer = isinstance(model, LanguageModel) and model.score is None
        if template is None and isinstance(model, LanguageModel) and not by_answer:
            template = _template_of(tokenizer)
        options = _answer_ids(model, tokenizer, answers) if by_answer else {}
        modes = ("lasttoken",) if by_answer else (_head_pooling(model),)
        if answers is not None and not by_answer:
            raise UserInputError("answers are for decoders without a classification head")
        if by_answer or (template is not None and isinstance(model, LanguageModel)):
            rows = _in_template(model, tokenizer, query, documents, template)
        else:
            if template is not None:
                raise UserInputError("template is for decoders: this is an encoder")
            if settings.unsupported == CHAT_TEMPLATE:
                raise UnsupportedModelError(
                    f"the model's scores need {CHAT_TEMPLATE}, which is not supported yet: pass template="
                )
            asked = settings.cased(settings.before(None) + query)
            pairs = [(asked, settings.cased(document)) for document in documents]
            rows = tokenizer.pairs(pairs, max_length=limit if truncate else None)
        hint = "shorten it" + ("" if by_answer or template else ", or pass truncate=True")
        check_lengths(rows, limit, hint, "the query with documents")
        found = pooled_rows(
            model, tokenizer, rows, together, ("reranking {:,} texts", " texts"),
            batch_size=batch_size, limit=limit, pooling=Pooling(modes), head=True, **options,
        )  # fmt: skip
        together.finish()
    return ACTIVATIONS[activation](found[:, 0]).astype(np.float32)


def _head_pooling(model: Any) -> str:
    """The pooling of the states that the model's head of one label takes."""
    is_scored = isinstance(model, LanguageModel)
    if model.task != "classify":
        raise UserInputError(
            f"{type(model).__name__} has no classification head: rerank needs a model of a class "
            "'…ForSequenceClassification', or a decoder with template= and answers="
        )
    labels = int(model.score.weight.shape[0]) if is_scored else model.config.num_labels
    if labels != 1:
        raise UserInputError(
            f"the model's classification head has {labels} labels: rerank needs one label"
        )
    return "lasttoken" if is_scored else model.head_pooling


def _default_activation(model: Any) -> str:
    """The activation function that the files name; sentence-transformers' own without one.

    Raises:
        UnsupportedModelError: the files name another function.
    """
    pooling = getattr(model, "pooling", None)
    config = model.hf_config or {}
    newer = config.get("sentence_transformers")
    name = newer.get("activation_fn") if isinstance(newer, dict) else None
    name = config.get("sbert_ce_default_activation_function") if name is None else name
    name = name if pooling is None or pooling.activation is None else pooling.activation
    kind = name.rpartition(".")[2] if isinstance(name, str) else None
    if kind in ("Identity", "Sigmoid"):
        return "linear" if kind == "Identity" else "sigmoid"
    if isinstance(name, str):
        raise UnsupportedModelError(
            f"the model's scores need the activation function {shown(name)}, which is not supported: pass "
            "activation='sigmoid' or 'linear'"
        )
    return "linear" if isinstance(model, LanguageModel) and model.score is None else "sigmoid"


# --- decoders -------------------------------------------------------------------------------


def _answer_ids(
    model: LanguageModel, tokenizer: Tokenizer, answers: tuple[str, str] | None
) -> dict[str, Any]:
    """The token ids of the two answers, for ``pooled_rows``."""
    if answers is not None and not (
        isinstance(answers, (tuple, list)) and all(isinstance(answer, str) for answer in answers)
    ):
        raise TypeError(f"answers is a tuple of two str, not {shown(answers)}")
    if answers is None or len(answers) != 2:
        raise UserInputError(
            f"{type(model).__name__} is a decoder: pass answers=, two texts of one token each, such as "
            "('yes', 'no'), and template="
        )
    ids = [tokenizer.encode(answer, special=False) for answer in answers]
    for answer, found in zip(answers, ids, strict=True):
        if len(found) != 1:
            raise UserInputError(
                f"the answer {shown(answer)} is {len(found)} tokens, and must be one"
            )
    return {"answers": (ids[0][0], ids[1][0])}


def _template_of(tokenizer: Tokenizer) -> str | None:
    """The tokenizer's template "rerank", as GGUF files have it, as a format string; None for none or one of Jinja."""
    text = tokenizer.chat_templates.get("rerank")
    if text is None or "{{" in text or not all(name in text for name in _PLACES):
        return None
    text = text.replace("{", "{{").replace("}", "}}")
    for name in _PLACES:
        text = text.replace(f"{{{name}}}", name)
    return text


def _in_template(
    model: LanguageModel,
    tokenizer: Tokenizer,
    query: str,
    documents: list[str],
    template: str | None,
) -> list[Encoding]:
    """The tokens of each document in the template."""
    try:
        parts = list(string.Formatter().parse(template or ""))
    except ValueError as error:
        raise UserInputError(f"template is not a format string: {error}") from None
    if template is None or {name for _, name, *_ in parts if name is not None} != {
        "query",
        "document",
    }:
        raise UserInputError(
            f"{type(model).__name__} is a decoder: pass template=, the text that it reads, with "
            "{query} and {document} in it"
        )
    try:
        texts = [template.format(query=query, document=document) for document in documents]
    except (ValueError, LookupError) as error:
        # A text has no such format, or the template has another field.
        raise UserInputError(f"template is not a format string of two texts: {error}") from None
    return tokenizer.tokens(texts, special=False)
