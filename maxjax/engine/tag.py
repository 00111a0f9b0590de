"""``tag``: the labels of the words in a text, such as names of people and places."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..elsewhere import unknown_argument
from ..errors import UserInputError, checked_integer, one_of, releasing, shown, some
from ..lockstep import Lockstep
from ..models.pooling import Pooling
from ..models.weights import shardings_of
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .heads import check_head, listed_texts, softmax, token_logits
from .rows import check_lengths, text_limit

_AGGREGATIONS = ("none", "simple", "first", "average", "max")


class Tag(NamedTuple):
    """A span of a text and its label.

    Attributes:
        label: the label; without "B-" and "I-" if tokens are aggregated.
        score: its probability; for several tokens or words, the mean of theirs.
        text: the span, ``given[start:end]`` of the text that was given.
        start, end: the indices of its first character, and of the one after its last.
    """

    label: str
    score: float
    text: str
    start: int
    end: int


def tag(
    model: Any,
    tokenizer: Tokenizer | None,
    texts: str | Iterable[str],
    *,
    aggregation: str = "simple",
    ignore_labels: Collection[str] = ("O",),
    stride: int | None = None,
    batch_size: int = 32,
    **unknown: Any,
) -> Any:
    """Finds the labelled spans of a text, as transformers' pipeline "token-classification".

    As in ``embed``, short texts are packed into rows, and all processes that share the model's mesh must make
    the call.

    Args:
        model: an encoder with a head for labels of tokens (``…ForTokenClassification``), as returned by
            ``maxjax.load``.
        tokenizer: the model's tokenizer.
        texts: a text or a list of texts.
        aggregation: "none": each token is a span. "simple": neighbouring tokens with the same label are one, and a
            label "B-…" begins a new one. "first", "average" and "max" give all tokens of a word one label before
            that: that of its first token, the best of the mean of their probabilities, or that of the
            most certain token. A word is what the tokenizer's "##" connects, or else ends at a space.
        ignore_labels: the labels whose spans are left out, as they are in the result: "PER", or with
            ``aggregation="none"`` "B-PER". The model may lack "O".
        stride: the number of tokens that two windows of a text share, if it is longer than the model's limit; of spans
            that overlap, the longer is returned. By default such a text is an error.
        batch_size: the maximum number of rows in one batch.

    Returns:
        A list of :class:`Tag`, in the order of the text; for a list of texts, a list of these.

    Raises:
        TypeError: a text is not a str, or ``ignore_labels`` is not a collection of str; or an argument is unknown,
            and the message suggests the right name if it can.
        UserInputError: the model has no such head or no weights; there is no tokenizer; a text is too long;
            ``aggregation`` is not one of the above, or is "none" with ``stride``; the model has no label of
            ``ignore_labels``.
        ProgramMismatchError: the model or a text is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.
    """
    for name in unknown:
        raise unknown_argument(tag, name)
    one_of("aggregation", aggregation, _AGGREGATIONS)
    if stride is not None and aggregation == "none":
        raise UserInputError("stride needs an aggregation other than 'none'")
    batch_size = checked_integer("batch_size", batch_size)
    with Lockstep("tag", shardings_of(model)) as together, releasing():
        check_head(model, tokenizer, "tag")
        assert tokenizer is not None
        ignored = _checked_labels(ignore_labels, model.id2label, aggregation)
        listed, is_single = listed_texts(texts)
        limit = text_limit(model, tokenizer, Pooling())
        if stride is None:
            whole = tokenizer.tokens(listed, offsets=True)
            check_lengths(whole, limit, "shorten it, or pass stride= to tag it in windows")
            windows = [[row] for row in whole]
        else:
            windows = tokenizer.windows(listed, max_length=limit, stride=stride)
        rows = [row for group in windows for row in group]
        logits = token_logits(
            model, tokenizer, rows, together, ("tagging {:,} texts", " texts"),
            fields=("logits",), batch_size=batch_size, limit=limit,
        )  # fmt: skip
        together.finish()
    labels, scores = model.id2label, iter(logits)
    found = []
    for text, group in zip(listed, windows, strict=True):
        spans: list[Tag] = []
        for row in group:
            tokens = _tokens(tokenizer, text, row, softmax(next(scores)[0]))
            spans += _spans(tokens, text, labels, aggregation)
        spans = [span for span in spans if span.label not in ignored]
        found.append(_without_overlaps(spans) if len(group) > 1 else spans)
    return found[0] if is_single else found


def _checked_labels(given: Any, labels: dict[int, str], aggregation: str) -> frozenset[str]:
    """Return ``ignore_labels`` as a set, after a check that the spans may have such labels."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise TypeError(
            f"ignore_labels must be a list of labels, such as ['O'], not {type(given).__name__}"
        )
    known = {
        label if aggregation == "none" else _without_prefix(label) for label in labels.values()
    }
    for label in given:
        if not isinstance(label, str):
            raise TypeError(f"ignore_labels has a {type(label).__name__}: each label must be a str")
        if label not in known and label != "O":
            raise UserInputError(
                f"ignore_labels has {shown(label)}, which no span has (labels: {some(sorted(known), 20)})"
            )
    return frozenset(given)


class _Labelled(NamedTuple):
    """A token, or a word: the probabilities of its labels, its place, and whether it continues a word."""

    scores: np.ndarray
    start: int
    end: int
    continues: bool = False


def _tokens(tokenizer: Tokenizer, text: str, row: Encoding, scores: np.ndarray) -> list[_Labelled]:
    """The tokens of a row without the added special tokens."""
    assert row.offsets is not None and row.sequence_ids is not None
    unknown, prefix = tokenizer.special_id("unk_token"), tokenizer.subword_prefix
    pieces = tokenizer.pieces(row.ids)
    found = []
    for i, (start, end) in enumerate(row.offsets):
        if row.sequence_ids[i] is None:
            continue
        if row.ids[i] == unknown:
            continues = False
        elif prefix:
            continues = len(pieces[i]) != end - start
        else:  # words are not known: they end at spaces
            continues = start > 0 and " " not in text[start - 1 : start + 1]
        found.append(_Labelled(scores[i], start, end, continues))
    return found


def _spans(
    tokens: list[_Labelled], text: str, labels: dict[int, str], aggregation: str
) -> list[Tag]:
    if aggregation not in ("none", "simple"):
        words: list[list[_Labelled]] = []
        for token in tokens:
            if token.continues and words:
                words[-1].append(token)
            else:
                words.append([token])
        tokens = [
            _Labelled(_of_word(word, aggregation), word[0].start, word[-1].end) for word in words
        ]
    found = []
    for token in tokens:
        best = int(token.scores.argmax())
        score = float(token.scores[best])
        found.append(
            Tag(labels[best], score, text[token.start : token.end], token.start, token.end)
        )
    return found if aggregation == "none" else _grouped(found, text)


def _of_word(word: Sequence[_Labelled], aggregation: str) -> np.ndarray:
    """The probabilities of the labels of a word."""
    if aggregation == "first":
        return word[0].scores
    if aggregation == "max":
        return max(word, key=lambda token: token.scores.max()).scores
    return np.mean([token.scores for token in word], axis=0)


def _grouped(spans: list[Tag], text: str) -> list[Tag]:
    """Neighbouring spans of one label as one span."""
    groups: list[list[Tag]] = []
    for span in spans:
        if groups and not span.label.startswith("B-") and _kind(span) == _kind(groups[-1][-1]):
            groups[-1].append(span)
        else:
            groups.append([span])
    found = []
    for group in groups:
        start, end = group[0].start, group[-1].end
        score = sum(span.score for span in group) / len(group)
        label = _without_prefix(group[0].label)
        found.append(Tag(label, score, text[start:end], start, end))
    return found


def _without_prefix(label: str) -> str:
    """The label of a span of several tokens, as the pipeline writes it."""
    return label.split("-", 1)[-1]


def _kind(span: Tag) -> str:
    """The label without "B-" or "I-"."""
    return span.label[2:] if span.label[:2] in ("B-", "I-") else span.label


def _without_overlaps(spans: list[Tag]) -> list[Tag]:
    """Of spans that overlap, the longest; of equally long ones, that with the largest score."""
    found: list[Tag] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start < found[-1].end:
            last = found[-1]
            if (span.end - span.start, span.score) > (last.end - last.start, last.score):
                found[-1] = span
        else:
            found.append(span)
    return found
