"""``answer``: the part of a text that answers a question."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..elsewhere import unknown_argument
from ..errors import UserInputError, checked_integer, releasing
from ..lockstep import Lockstep
from ..models.pooling import Pooling
from ..models.weights import shardings_of
from ..text.tokenizer.arguments import checked_texts
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .heads import check_head, softmax, token_logits
from .rows import text_limit

# The length of a window, and how many tokens two windows share, as in the pipeline.
_LENGTH, _STRIDE = 384, 128
# The number of spans of a window whose probabilities are added up by the text of their words.
_CANDIDATES = 12


class Answer(NamedTuple):
    """An answer that is a part of a text.

    Attributes:
        text: the answer, ``context[start:end]``.
        score: its probability.
        start, end: the indices of its first character, and of the one after its last.
    """

    text: str
    score: float
    start: int
    end: int


_NO_ANSWER = Answer("", 0.0, 0, 0)


def answer(
    model: Any,
    tokenizer: Tokenizer | None,
    question: str | Iterable[str],
    context: str | Iterable[str],
    *,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 32,
    **unknown: Any,
) -> Any:
    """Finds the part of a text that answers a question, as the pipeline "question-answering" of transformers 4.

    The score of a span is the product of the probabilities of its first and its last token, and spans of the same
    words count together. As in ``embed``, short texts are packed into rows, and all processes that share the
    model's mesh must make the call.

    Args:
        model: an encoder with a head for answers (``…ForQuestionAnswering``), as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer.
        question: a question, or a list of questions.
        context: the text with the answer, or a list of as many texts as questions. A text without a token, such as
            an empty one, has no answer: the result is "" from 0 to 0, of score 0 unless there may be none.
        max_answer_len: the largest number of tokens of an answer.
        handle_impossible_answer: whether the answer may be that there is none: the text "" from 0 to 0.
        max_length: the largest number of tokens of question and context together; a longer context is split into
            windows. By default 384, or the model's limit if that is less.
        stride: the number of tokens that two windows share. By default 128, or half of ``max_length`` if that is less.
        batch_size: the maximum number of rows in one batch.

    Returns:
        An :class:`Answer`; for a list of questions, a list of them.

    Raises:
        TypeError: a text is not a str; or an argument is unknown, and the message suggests the right name if it can.
        UserInputError: the model has no such head or no weights; there is no tokenizer; a question is empty or
            too long; ``max_length`` exceeds the model's limit.
        ProgramMismatchError: the model or a text is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.
    """
    for name in unknown:
        raise unknown_argument(answer, name)
    batch_size, most = (
        checked_integer("batch_size", batch_size),
        checked_integer("max_answer_len", max_answer_len),
    )
    with Lockstep("answer", shardings_of(model)) as together, releasing():
        check_head(model, tokenizer, "answer")
        assert tokenizer is not None
        is_single = isinstance(question, str) and isinstance(context, str)
        pairs = _pairs(question, context)
        limit = text_limit(model, tokenizer, Pooling())
        length = (
            min(limit, _LENGTH) if max_length is None else checked_integer("max_length", max_length)
        )
        if length > limit:
            raise UserInputError(f"max_length={length}, and the model takes {limit} tokens")
        shared = min(_STRIDE, length // 2) if stride is None else stride
        windows = tokenizer.windows(pairs, max_length=length, stride=shared)
        rows = [row for group in windows for row in group]
        logits = token_logits(
            model, tokenizer, rows, together, ("answering {:,} questions", " questions"),
            fields=("start_logits", "end_logits"), batch_size=batch_size, limit=limit,
        )  # fmt: skip
        together.finish()
    scores = iter(logits)
    first = tokenizer.special_id("cls_token")
    found = []
    for (_, text), group in zip(pairs, windows, strict=True):
        spans: dict[str, Answer] = {}
        none = 1.0
        for row in group:
            starts, ends = next(scores)
            starts, ends, allowed = _probabilities(row, starts, ends, first)
            none = min(none, float(starts[0] * ends[0]))
            starts[0] = ends[0] = 0.0
            for start, end, score in _best(starts, ends, allowed, most):
                start, end = _characters(row, start, end)
                known = spans.setdefault(
                    text[start:end].lower(), Answer(text[start:end], 0.0, start, end)
                )
                spans[known.text.lower()] = known._replace(score=known.score + score)
        listed = [*spans.values(), *[Answer("", none, 0, 0)] * handle_impossible_answer]
        found.append(max(listed, key=lambda one: one.score, default=_NO_ANSWER))
    return found[0] if is_single else found


def _pairs(question: Any, context: Any) -> list[tuple[str, str]]:
    questions = checked_texts([question] if isinstance(question, str) else question, "question")
    contexts = checked_texts([context] if isinstance(context, str) else context, "context")
    if len(questions) != len(contexts):
        raise UserInputError(
            f"expected as many contexts as questions, got {len(questions)} questions and {len(contexts)} contexts"
        )
    if "" in questions:
        where = "" if isinstance(question, str) else f"[{questions.index('')}]"
        raise UserInputError(f"question{where} is empty")
    return list(zip(questions, contexts, strict=True))


def _probabilities(
    row: Encoding, starts: np.ndarray, ends: np.ndarray, first: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The probabilities of each token to be the first and the last of the answer, and which tokens may be.

    Tokens of the context may be, and "[CLS]", which stands for no answer.
    """
    assert row.sequence_ids is not None
    allowed = np.array(
        [s == 1 or i == first for s, i in zip(row.sequence_ids, row.ids, strict=True)]
    )
    starts, ends = (
        softmax(np.where(allowed, logits, np.float32(-10000))) for logits in (starts, ends)
    )
    return starts, ends, allowed


def _best(
    starts: np.ndarray, ends: np.ndarray, allowed: np.ndarray, most: int
) -> list[tuple[int, int, float]]:
    """The first and the last token of the most probable spans of at most ``most`` tokens, and their scores."""
    scores = np.tril(np.triu(np.outer(starts, ends)), most - 1)
    flat = scores.ravel()
    best = (
        np.argpartition(-flat, _CANDIDATES)[:_CANDIDATES]
        if flat.size > _CANDIDATES
        else np.arange(flat.size)
    )
    best = best[np.argsort(-flat[best], kind="stable")]
    spans = zip(*np.unravel_index(best, scores.shape), strict=True)
    return [(int(a), int(b), float(scores[a, b])) for a, b in spans if allowed[a] and allowed[b]]


def _characters(row: Encoding, start: int, end: int) -> tuple[int, int]:
    """The place of a span in its text, from the beginning of its first word to the end of its last."""
    assert row.offsets is not None and row.word_ids is not None and row.sequence_ids is not None
    words = row.word_ids[start], row.word_ids[end]
    if None in words:
        return row.offsets[start][0], row.offsets[end][1]
    own = [i for i, sequence in enumerate(row.sequence_ids) if sequence == 1]
    first = next(i for i in own if row.word_ids[i] == words[0])
    last = next(i for i in reversed(own) if row.word_ids[i] == words[1])
    return row.offsets[first][0], row.offsets[last][1]
