"""``perplexity``: how well a language model predicts a text.

The text is cut into overlapping windows of one length, which one compiled program scores batch by batch
(``token_losses``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserInputError, checked_integer
from ..lockstep import Lockstep
from ..models.weights import model_facts, shardings_of
from ..text.tokenizer.arguments import check_is_tokenizer, check_unicode
from ..text.tokenizer.tokenizer import Tokenizer
from .isolation import isolated
from .token_losses import TextTokens, check_scores, row_losses

# The default context: that of llama.cpp's llama-perplexity.
_CONTEXT = 512


@dataclass(frozen=True)
class Perplexity:
    """The result of :func:`perplexity`.

    Attributes:
        perplexity: the exponential of the mean negative log-likelihood of a token.
        standard_error: the standard error of ``perplexity``, as if tokens were independent of each
            other; NaN for a single token.
        bits_per_byte: bits that the model needs for a byte of the text in UTF-8. Unlike the
            perplexity, it can be compared between models with different tokenizers.
        tokens: the number of tokens that were scored.
        windows: the number of windows.
        context: the number of tokens in a window.
        stride: the number of tokens between the beginnings of two windows.

    Example:
        >>> print(Perplexity(5.25, 0.125, 0.75, 4000, 16, 512, 256))
        perplexity 5.2500 ± 0.1250 over 4,000 tokens, 0.7500 bits per byte
    """

    perplexity: float
    standard_error: float
    bits_per_byte: float
    tokens: int
    windows: int
    context: int
    stride: int

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:,.4f} ± {self.standard_error:.4f} over {self.tokens:,} "
            f"token{'s' * (self.tokens != 1)}, {self.bits_per_byte:.4f} bits per byte"
        )


def perplexity(
    model: Any,
    tokenizer: Tokenizer | None,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Computes the perplexity of a language model on a text: exp of the mean negative log-likelihood.

    The windows are those of Hugging Face's page "Perplexity of fixed-length models"
    (https://huggingface.co/docs/transformers/perplexity): the text is tokenised once, windows of
    ``context`` tokens begin at every ``stride``-th token, and a window scores its tokens that no
    window before it had. So every token of the text is scored once, given at least ``context -
    stride`` tokens before it; the first token of the text, which has nothing before it, is not, and
    for ``stride == context`` neither is the first of any window. Where the tokenizer begins a text
    with a special token, each window begins with it, in place of its first token, as in llama.cpp's
    ``llama-perplexity``. (That program scores the second half of windows that do not overlap: half
    as many tokens, each given at least half a window, as with the default stride here.)

    Several processes that share the model's mesh make the call together, with the same arguments,
    and all get the result.

    Args:
        model: a decoder whose weights are loaded, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer.
        text: the text, of at least two tokens.
        context: the number of tokens in a window, at least 2; by default 512, or the model's
            context length if that is shorter. A larger context gives a lower perplexity: compare
            only figures of the same context and stride.
        stride: the number of tokens between the beginnings of two windows, at most ``context``; by
            default half of ``context``. The smaller it is, the longer the computation takes.
        batch_size: the maximum number of windows that are computed at a time.

    Raises:
        TypeError: the text is not a str.
        UserInputError: the text is empty, not valid Unicode or has fewer than two tokens; a number
            is out of range; there is no tokenizer, or it belongs to another model; the model is not
            a decoder, has no head, or its weights are not loaded.
        FloatingPointError: the logits of the model are NaN.
        ProgramMismatchError: the model, the text or a number is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.

    Example:
        >>> import maxjax
        >>> model, tokenizer = maxjax.load("tiny")
        >>> found = maxjax.perplexity(model, tokenizer, "What is 2 + 3?\\n2 + 3 = 5")
        >>> found.tokens, found.perplexity > 1
        (15, True)
    """
    with Lockstep("perplexity", shardings_of(model)) as together:
        found = _perplexity(model, tokenizer, text, context, stride, batch_size, together)
        together.finish()
    return found


@isolated()
def _perplexity(
    model: Any,
    tokenizer: Tokenizer | None,
    text: str,
    context: int | None,
    stride: int | None,
    batch_size: int,
    together: Lockstep,
) -> Perplexity:
    check_scores(model, "perplexity")
    context, stride = _sizes(model, context, stride)
    batch_size = checked_integer("batch_size", batch_size)
    check_is_tokenizer(tokenizer)
    if tokenizer is None:
        raise UserInputError(
            "perplexity needs a tokenizer: the model's directory has no tokenizer.json. Put it there"
        )
    ids = _ids(model, tokenizer, text)
    found = windows(len(ids), context, stride)
    width, count = min(context, len(ids)), min(batch_size, len(found))
    if together.is_shared:
        together.agree(
            text=ids.tolist(), context=context, stride=stride, batch_size=count,
            tokenizer=tokenizer.digest, **model_facts(model),
        )  # fmt: skip
    start = _start_id(tokenizer, ids)
    rows = [_row(ids, window, start) for window in found]
    each = row_losses(
        model, rows, range(len(rows)), batch_size=count, width_of=lambda _: width, together=together,
        name="perplexity", title="scoring the text", unit=" windows",
    )  # fmt: skip
    losses = [
        one.losses[first - 1 - begin : end - 1 - begin]
        for (begin, first, end), (_, one) in zip(found, each, strict=True)
    ]
    plain = len(ids) - len(tokenizer.encode(""))
    density = max(plain, 1) / len(text.encode())  # tokens in a byte
    return _result(np.concatenate(losses), density, len(found), context, stride)


def _result(
    losses: np.ndarray, density: float, count: int, context: int, stride: int
) -> Perplexity:
    """The result for the negative log-likelihood of each scored token, ``[n]``."""
    if np.isnan(losses).any():
        raise FloatingPointError(
            "the logits of the model are NaN: maxjax.first_nan names the layer where they begin"
        )
    losses = losses.astype(np.float64)
    mean = float(losses.mean())
    value = math.exp(mean) if mean < 700 else math.inf
    n = len(losses)
    # By the delta method, as in llama.cpp: d exp(x) = exp(x) dx.
    error = value * float(losses.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Perplexity(value, error, mean / math.log(2) * density, n, count, context, stride)


# --- windows --------------------------------------------------------------------------------


class Window(NamedTuple):
    """The tokens ``[begin, end)`` of a text, of which those from ``first`` on are scored."""

    begin: int
    first: int
    end: int


def windows(length: int, context: int, stride: int) -> list[Window]:
    """The windows of a text of ``length`` tokens; each has at least one token to score.

    Example:
        >>> for window in windows(10, context=4, stride=3):
        ...     print(window)
        Window(begin=0, first=1, end=4)
        Window(begin=3, first=4, end=7)
        Window(begin=6, first=7, end=10)
    """
    found, scored = [], 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        first = max(scored, begin + 1)
        if first < end:
            found.append(Window(begin, first, end))
        if end == length:
            break
        scored = end
    return found


def _row(ids: np.ndarray, window: Window, start: int | None) -> TextTokens:
    """The tokens of a window, which begins with ``start`` if there is one, and the token after each."""
    begin, _, end = window
    found = TextTokens(ids[begin:end].copy(), np.append(ids[begin + 1 : end], 0))
    if start is not None:
        found.ids[0] = start
    return found


# --- checks ---------------------------------------------------------------------------------


def _sizes(model: Any, context: Any, stride: Any) -> tuple[int, int]:
    """The context and the stride, checked."""
    longest = model.max_length
    if context is None:
        context = min(_CONTEXT, longest)
    context = checked_integer("context", context, 2)
    if context > longest:
        raise UserInputError(
            f"context={context} is larger than the model's context of {longest} tokens"
        )
    if stride is None:
        return context, context // 2
    return context, checked_integer("stride", stride, 1, context)


def _ids(model: Any, tokenizer: Tokenizer, text: Any) -> np.ndarray:
    """The token ids of the text, int32 ``[N]``."""
    if not isinstance(text, str):
        raise TypeError(f"text is a {type(text).__name__}, not a str")
    if not text:
        raise UserInputError("the text is empty: there is nothing to predict")
    check_unicode(text, "the text")
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise UserInputError(
            f"the text has {len(ids)} token{'s' * (len(ids) != 1)}: perplexity needs at least 2, as "
            "each is predicted from those before it"
        )
    size = model.config.vocab_size
    if max(ids) >= size:
        raise UserInputError(
            f"the tokenizer gives the token id {max(ids)}, but the vocabulary of the model has {size} "
            "tokens: the tokenizer belongs to another model"
        )
    return np.asarray(ids, np.int32)


def _start_id(tokenizer: Tokenizer, ids: np.ndarray) -> int | None:
    """The id of the special token with which the tokenizer begins every text; None without one."""
    special = tokenizer.encode("")[:1]
    return special[0] if special and special[0] == ids[0] else None
