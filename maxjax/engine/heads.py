"""What the calls for encoders with a head share: the check of the head, and its logits for each token."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..errors import UserInputError
from ..graph.placement.arrays import with_sharding
from ..lockstep import Lockstep
from ..models import LanguageModel
from ..models.weights import check_loaded
from ..nn.layer.walk import check_module
from ..text.tokenizer.arguments import check_is_tokenizer, checked_texts
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .rows import encoder_output, run_rows

# What a head is for, as ``model.task`` says → words for it, and the call that uses it.
_CALLS = {
    "fill-mask": ("masked words", "maxjax.fill_mask"),
    "tag": ("labels of tokens", "maxjax.tag"),
    "classify": ("labels of texts", "maxjax.classify"),
    "answer": ("answers in a text", "maxjax.answer"),
}


def check_head(model: Any, tokenizer: Any, task: str) -> None:
    """Checks the model and the tokenizer that a call for a head got.

    Args:
        model, tokenizer: the arguments of the call.
        task: what the head is for, as ``model.task`` says it.

    Raises:
        TypeError: the tokenizer is not one.
        UserInputError: the model has no such head, and the message says which call it is for; it has no
            weights; or there is no tokenizer.
    """
    check_module(model, _CALLS[task][1].removeprefix("maxjax."))
    check_is_tokenizer(tokenizer)
    name, found = type(model).__name__, getattr(model, "task", None)
    if found != task:
        if found in _CALLS:
            instead = f"its head is for {_CALLS[found][0]}: use {_CALLS[found][1]}"
        elif found == "detect":
            instead = "its head tells replaced tokens: model(ids, mask).logits are above 0 for them"
        elif isinstance(model, LanguageModel):
            instead = "it is a decoder: use maxjax.generate"
        elif hasattr(model, "family"):
            instead = "use maxjax.embed, or a checkpoint with such a head"
        else:
            instead = "pass a model of maxjax.load"
        raise UserInputError(f"{name} has no head for {_CALLS[task][0]}; {instead}")
    check_loaded(model)
    if tokenizer is None:
        raise UserInputError(
            f"{_CALLS[task][1]} needs a tokenizer: the model's directory has no tokenizer.json. Put it there"
        )


def listed_texts(texts: str | Iterable[str]) -> tuple[list[str], bool]:
    """The texts as a list, and whether there was a single one, whose result is not in a list."""
    is_single = isinstance(texts, str)
    return checked_texts([texts] if isinstance(texts, str) else texts), is_single


def token_logits(
    model: Any,
    tokenizer: Tokenizer,
    rows: list[Encoding],
    together: Lockstep,
    shown_as: tuple[str, str],
    *,
    fields: tuple[str, ...],
    batch_size: int,
    limit: int,
) -> list[tuple[np.ndarray, ...]]:
    """The logits of a head for each token of each row, float32 ``[tokens, …]``.

    Args:
        model, tokenizer, rows, together, shown_as, batch_size, limit: as for ``run_rows``.
        fields: the names of the logits in ``EncoderOutput``.
    """
    found: list[Any] = [None] * len(rows)
    for batch, arrays in run_rows(
        model, tokenizer, rows, together, shown_as, _token_logits,
        batch_size=batch_size, limit=limit, facts={}, fields=fields,
    ):  # fmt: skip
        for member, (i, start) in zip(batch.members, batch.starts, strict=True):
            end = start + len(rows[member].ids)
            found[member] = tuple(array[i, start:end] for array in arrays)
    return found


@partial(jax.jit, static_argnames=("fields", "gathered"))
def _token_logits(
    model: Any,
    tokens: Any,
    *,
    fields: tuple[str, ...],
    gathered: NamedSharding | None = None,
    patches: Any = (),
) -> Any:
    output, taps = encoder_output(model, tokens, patches)
    found = tuple(getattr(output, field).astype(jnp.float32) for field in fields)  # [B, T, …]
    if gathered is not None:
        found = tuple(with_sharding(one, gathered) for one in found)
    return found, taps


def softmax(logits: np.ndarray) -> np.ndarray:
    """The probabilities of logits, over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
