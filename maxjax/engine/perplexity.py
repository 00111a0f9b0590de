"""``perplexity``: how well a language model predicts a text.

The text is cut into overlapping windows of one length, which one compiled program scores batch by
batch. Logits are computed for a few tokens at a time, so that all of them are never in memory at once.

Shapes: B windows, T tokens of a window, V tokens of the vocabulary, E values of a hidden state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import UserInputError, checked_integer
from ..graph.placement.arrays import put, with_sharding
from ..graph.placement.specs import batch_axes, mesh_of
from ..lockstep import Lockstep
from ..models import LanguageModel
from ..models.weights import check_loaded, model_facts, shardings_of
from ..nn.layer.observe.programs import ProgramObserver, tapped
from ..nn.layer.walk import check_module
from ..progress import compiling, task
from ..text.tokenizer.arguments import check_is_tokenizer, check_unicode
from ..text.tokenizer.tokenizer import Tokenizer
from .isolation import isolated

# The default context: that of llama.cpp's llama-perplexity.
_CONTEXT = 512
# The largest size in bytes of the logits that are computed at a time.
_LOGITS = 64 << 20


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
    _check_model(model)
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
    mesh = mesh_of(list(shardings_of(model)))
    split = mesh and NamedSharding(mesh, PartitionSpec(batch_axes(mesh, count)))
    settings = {
        "chunk": _chunk(count, width, model.config.vocab_size),
        "gathered": NamedSharding(mesh, PartitionSpec()) if mesh else None,
    }
    start = _start_id(tokenizer, ids)
    losses: list[np.ndarray] = []
    observer = ProgramObserver(model)
    pending: list[tuple[list[Window], Any]] = []
    with task("scoring the text", len(found), unit=" windows") as shown:
        for i in range(0, len(found), count):
            part = found[i : i + count]
            batch = _batch(ids, part, count, width, start)
            if split:
                batch = jax.tree.map(partial(put, where=split), batch)
            if together.is_shared:
                together.decide()  # a barrier: every process has this batch
            # The devices compute this batch while the host takes the one before.
            with compiling("perplexity"):
                blanks = [-1] * (count - len(part))
                values = observer.run(
                    together, _losses, *batch, rows=[*range(i, i + len(part)), *blanks],
                    counts=lambda _, n=batch.counts: n, width=width, **settings,
                )  # fmt: skip
                pending.append((part, values))
            if together.is_shared or len(pending) > 1:
                part, values = pending.pop(0)
                losses += _scored(part, values, together)
                shown.add(len(part))
    for part, values in pending:
        losses += _scored(part, values, together)
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


class _Batch(NamedTuple):
    """Windows as arrays.

    Attributes:
        ids: token ids int32 ``[B, T]``, padded at the right.
        targets: the token after each, int32 ``[B, T]``.
        counts: the number of tokens of each window, int32 ``[B]``.
    """

    ids: Any
    targets: Any
    counts: Any


@partial(jax.jit, static_argnames=("chunk", "gathered"))
def _losses(
    model: Any,
    ids: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
    *,
    chunk: int,
    gathered: NamedSharding | None,
    patches: Any = (),
) -> Any:
    """The negative log-likelihood of each target, float32 ``[B, T]``, and what captures of the model have recorded.

    Logits are computed for ``chunk`` tokens of every window at a time.
    """
    run = lambda: model.states(ids, lengths=counts)
    states, taps = tapped(model, patches, run)  # [B, T, E]
    length = ids.shape[1]
    rest = -length % chunk
    states = jnp.pad(states, ((0, 0), (0, rest), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, rest)))

    def chunks(array: jax.Array) -> jax.Array:  # [B, n · chunk, …] → [n, B, chunk, …]
        shape = (array.shape[0], -1, chunk, *array.shape[2:])
        return jnp.moveaxis(array.reshape(shape), 1, 0)

    def losses(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        states, targets = part
        logits = model.logits(states)  # [B, chunk, V] in float32
        # A sum, and not a gather, so that logits split over the vocabulary stay where they are.
        tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        chosen = jnp.sum(jnp.where(tokens == targets[..., None], logits, 0.0), axis=-1)
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    found = jax.lax.map(losses, (chunks(states), chunks(targets)))  # [n, B, chunk]
    found = jnp.moveaxis(found, 0, 1).reshape(ids.shape[0], -1)[:, :length]
    found = found if gathered is None else with_sharding(found, gathered)
    return found, taps


def _chunk(batch: int, length: int, vocab_size: int) -> int:
    """The number of tokens of each window whose logits are computed at a time: a power of two."""
    fits = max(1, _LOGITS // (4 * batch * vocab_size))
    return min(1 << (fits.bit_length() - 1), 1 << (length - 1).bit_length())


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


def _batch(
    ids: np.ndarray, part: list[Window], count: int, width: int, start: int | None
) -> _Batch:
    """Windows as arrays of ``count`` rows; rows beyond them hold one token of padding."""
    rows = np.zeros((count, width), np.int32)
    targets = np.zeros((count, width), np.int32)
    counts = np.ones(count, np.int32)
    for i, (begin, _, end) in enumerate(part):
        counts[i] = end - begin
        rows[i, : end - begin] = ids[begin:end]
        targets[i, : end - begin - 1] = ids[begin + 1 : end]
        if start is not None:
            rows[i, 0] = start
    return _Batch(rows, targets, counts)


def _scored(part: list[Window], losses: Any, together: Lockstep) -> list[np.ndarray]:
    """The losses of the tokens that each window scores."""
    found = np.asarray(together.fetch(losses))
    return [
        found[i, first - 1 - begin : end - 1 - begin] for i, (begin, first, end) in enumerate(part)
    ]


# --- checks ---------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    check_module(model, "perplexity")
    if not isinstance(model, LanguageModel):
        raise UserInputError(
            f"{type(model).__name__} is not a language model: its perplexity is not defined. Load a decoder"
        )
    check_loaded(model)


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
