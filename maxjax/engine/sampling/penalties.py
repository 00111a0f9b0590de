"""Penalties on the logits of tokens that were there before.

They are computed from the count of each token of the vocabulary, not from the tokens: a step adds one number to each
row, and a penalty is elementwise, whatever the length of the text.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...errors import UserInputError
from .settings import Sampling


def penalised(
    values: jax.Array,
    prompt: jax.Array,
    counts: jax.Array,
    repetition: Any,
    frequency: Any,
    presence: Any,
) -> jax.Array:
    """Logits ``[B, V]`` with the three penalties, numbers or arrays ``[B, 1]``.

    Args:
        values: the logits.
        prompt, counts: whether each token is in the prompt, and how often it is in the answer, ``[B, V]``.
        repetition, frequency, presence: the penalties; 1, 0 and 0 are off.

    Example:
        >>> seen, counts = jnp.array([[True, False]]), jnp.array([[0, 2]])
        >>> penalised(jnp.ones((1, 2)), seen, counts, 2.0, 0.25, 0.0).tolist()
        [[0.5, 0.0]]
    """
    seen = prompt | (counts > 0)
    scaled = jnp.where(values < 0, values * repetition, values / repetition)
    values = jnp.where(seen, scaled, values)
    values = values - frequency * counts.astype(jnp.float32)
    return jnp.where(counts > 0, values - presence, values)


def check_tokens(settings: Sampling, vocab_size: int) -> None:
    """Raises UserInputError if the bias or the bans are of a token outside the vocabulary."""
    for name, tokens in (("logit_bias", dict(settings.logit_bias)), ("banned", settings.banned)):
        wrong = max(tokens, default=0)
        if wrong >= vocab_size:
            raise UserInputError(
                f"{name} names token {wrong}: the vocabulary has {vocab_size} tokens"
            )
