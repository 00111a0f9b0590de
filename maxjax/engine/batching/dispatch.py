"""DispatchTokens: what one call of a program that writes has written."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..sampling.draw import Sampled

MAX_STEPS = 32
"""The largest number of tokens of a text that one dispatch writes."""


class DispatchTokens(NamedTuple):
    """The tokens of one dispatch, on the devices (possibly not computed yet) or on the host.

    Attributes:
        tokens: token ids ``[B, MAX_STEPS]``; the first ``counts`` of each row are valid.
        counts: the number of new tokens of each row ``[B]``.
        done: whether each row has ended, bool ``[B]``.
        bad: whether the logits of each row were NaN or infinite, bool ``[B]``.
        sampled: the samples with their log-probabilities; axis 1 is the step.
    """

    tokens: Any
    counts: Any
    done: Any
    bad: Any
    sampled: Sampled
