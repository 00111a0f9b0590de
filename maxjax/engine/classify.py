"""``classify``: the labels of a text, of a text pair or of an image, with their probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..elsewhere import unknown_argument
from ..errors import UserInputError, checked_integer, one_of, releasing
from ..images import ImageProcessor, is_image
from ..lockstep import Lockstep
from ..models import LanguageModel
from ..models.parts.vision import VisionModel
from ..models.pooling import Pooling
from ..models.weights import shardings_of
from ..text.tokenizer.arguments import checked_texts_or_pairs, items_of
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .embed import pooled_rows
from .heads import check_head, softmax
from .images import image_logits
from .rerank import ACTIVATIONS
from .rows import check_lengths, text_limit

_FUNCTIONS = {**ACTIVATIONS, "softmax": softmax}
# The function for each "problem_type" of a config.json.
_OF_PROBLEMS = {
    "regression": "linear",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}


class LabelScore(NamedTuple):
    """A label and its probability."""

    label: str
    score: float


def classify(
    model: Any,
    tokenizer: Tokenizer | ImageProcessor | None,
    texts: str | tuple[str, str] | Iterable[Any],
    *,
    top: int | None = None,
    batch_size: int = 32,
    truncate: bool = False,
    activation: str | None = None,
    **unknown: Any,
) -> Any:
    """Computes the probability of each label, as transformers' "text-classification" and "image-classification".

    As in ``embed``, short texts are packed into rows, and all processes that share the model's mesh must make
    the call.

    Args:
        model: an encoder or decoder with a classification head (``…ForSequenceClassification``,
            ``…ForImageClassification``), as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer, or its image processor: what ``maxjax.load`` returned beside the model.
        texts: a text, a pair of texts as a tuple, or a list of texts and of pairs. A pair whose second text is
            empty is read as one text, as in the pipeline. For a model of images an image or a list of images: paths,
            images of Pillow, arrays ``uint8[H, W, 3]``.
        top: the number of labels to return; None for all.
        batch_size: the maximum number of rows in one batch.
        truncate: whether to truncate texts longer than the model's limit; otherwise they are an error.
        activation: the function from the head's output to scores: "softmax", "sigmoid" or "linear". None follows
            "problem_type" in the model's files ("linear" for a regression, "sigmoid" for several labels of a
            text), and without it is "sigmoid" for a single label, else "softmax".

    Returns:
        A list of :class:`LabelScore`, the most probable first; for a list of texts or images, a list of these.

    Raises:
        TypeError: a text is neither a str nor a pair of them; or an argument is unknown, and the message suggests
            the right name if it can.
        UserInputError: the model has no such head or no weights; there is no tokenizer or image processor; a text is
            too long, or an image cannot be decoded.
        ProgramMismatchError: the model or a text is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.
    """
    for name in unknown:
        raise unknown_argument(classify, name)
    if activation is not None:
        one_of("activation", activation, _FUNCTIONS)
    batch_size = checked_integer("batch_size", batch_size)
    top = None if top is None else checked_integer("top", top)
    with Lockstep("classify", shardings_of(model)) as together, releasing():
        if isinstance(model, VisionModel):
            return _of_images(model, tokenizer, texts, together, top, batch_size, activation)
        check_head(model, tokenizer, "classify")
        assert isinstance(tokenizer, Tokenizer)
        is_single = isinstance(texts, (str, tuple))
        listed = checked_texts_or_pairs([texts] if is_single else texts)
        limit = text_limit(model, tokenizer, Pooling())
        rows = _rows(tokenizer, listed, limit if truncate else None)
        check_lengths(rows, limit, "shorten it, or pass truncate=True")
        pooling = "lasttoken" if isinstance(model, LanguageModel) else model.head_pooling
        logits = pooled_rows(
            model, tokenizer, rows, together, ("classifying {:,} texts", " texts"),
            batch_size=batch_size, limit=limit, pooling=Pooling((pooling,)), head=True,
        )  # fmt: skip
        together.finish()
    found = _scores(model, logits, top, activation)
    return found[0] if is_single else found


def _of_images(
    model: VisionModel, processor: Any, images: Any, together: Lockstep,
    top: int | None, batch_size: int, activation: str | None,
) -> Any:  # fmt: skip
    """:func:`classify` of images."""
    if model.task != "classify":
        raise UserInputError(f"{type(model).__name__} has no head for labels: use maxjax.embed")
    is_single = isinstance(images, str) or is_image(images)
    listed = [images] if is_single else items_of(images, "images", "an image or a list of images")
    logits = np.zeros((0, len(model.id2label)), np.float32)
    if listed:
        logits = image_logits(model, processor, listed, together, batch_size=batch_size)
    together.finish()
    found = _scores(model, logits, top, activation)
    return found[0] if is_single else found


def _scores(
    model: Any, logits: np.ndarray, top: int | None, activation: str | None
) -> list[list[LabelScore]]:
    """The labels of each row of logits, the most probable first."""
    names = model.id2label
    if activation is None:
        usual = "sigmoid" if len(names) == 1 else "softmax"
        activation = _OF_PROBLEMS.get(model.problem_type or "", usual)
    assert activation is not None
    found = []
    for scores in _FUNCTIONS[activation](logits):
        best = np.argsort(-scores, kind="stable")[:top]
        found.append([LabelScore(names[int(i)], float(scores[i])) for i in best])
    return found


def _rows(
    tokenizer: Tokenizer, listed: list[str | tuple[str, str]], max_length: int | None
) -> list[Encoding]:
    """The tokens of each text or pair."""
    given = [item if isinstance(item, str) or item[1] else item[0] for item in listed]
    texts = [item for item in given if isinstance(item, str)]
    pairs = [item for item in given if not isinstance(item, str)]
    of_texts = iter(tokenizer.tokens(texts, max_length=max_length))
    of_pairs = iter(tokenizer.pairs(pairs, max_length=max_length))
    return [next(of_texts if isinstance(item, str) else of_pairs) for item in given]
