"""Filters that few requests use: top-n-sigma, typical, epsilon, eta and XTC.

Unlike top-k, top-p and min-p they are not all a threshold on logits, so they look at the whole vocabulary. They are
applied to logits that are divided by the temperature.

Sources: typical, epsilon and eta are defined as in transformers' ``generation/logits_process.py``, top-n-sigma and XTC
as in llama.cpp's ``src/llama-sampler.cpp``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The bits of infinity in float32; bisection over the bits of positive floats takes 31 steps.
_INFINITY, _BISECTIONS = 0x7F800000, 31


class RareFilters(NamedTuple):
    """The settings of these filters, as numbers or as arrays ``[B, 1]``; as in Sampling.

    Example:
        >>> RareFilters(typical_p=0.9).xtc_probability
        0.0
    """

    top_n_sigma: Any = 0.0
    typical_p: Any = 1.0
    epsilon_cutoff: Any = 0.0
    eta_cutoff: Any = 0.0
    xtc_probability: Any = 0.0
    xtc_threshold: Any = 0.1

    @property
    def is_used(self) -> jax.Array:
        """Whether a row uses one of them, a bool array like the settings."""
        used = (
            self.top_n_sigma,
            1 - self.typical_p,
            self.epsilon_cutoff,
            self.eta_cutoff,
            self.xtc_probability,
        )
        found = jnp.asarray(used[0]) > 0
        for one in used[1:]:
            found |= jnp.asarray(one) > 0
        return found


def near_the_top(values: jax.Array, top_n_sigma: Any) -> jax.Array:
    """Logits ``[B, V]`` with -inf below the largest minus ``top_n_sigma`` standard deviations of the finite ones.

    Example:
        >>> near_the_top(jnp.array([[0.0, -1.0, -9.0]]), 0.5).tolist()
        [[0.0, -1.0, -inf]]
    """
    finite = values > -jnp.inf
    count = jnp.maximum(jnp.sum(finite.astype(jnp.float32), axis=1, keepdims=True), 1.0)
    numbers = jnp.where(finite, values, 0.0)
    mean = jnp.sum(numbers, axis=1, keepdims=True) / count
    variance = jnp.sum(jnp.where(finite, (values - mean) ** 2, 0.0), axis=1, keepdims=True) / count
    least = jnp.max(values, axis=1, keepdims=True) - top_n_sigma * jnp.sqrt(variance)
    return _only(values, (values >= least) | (jnp.asarray(top_n_sigma) <= 0))


def rarely_kept(values: jax.Array, filters: RareFilters, chance: Any) -> jax.Array:
    """Logits ``[B, V]`` after typical, epsilon, eta and XTC: -inf for what they exclude.

    Args:
        values: logits divided by the temperature, with -inf for what other filters exclude.
        filters: the settings.
        chance: a random number from 0 to 1 for each row, ``[B, 1]``: XTC is applied if it is at most
            ``xtc_probability``.

    Example:
        >>> values, filters = jnp.log(jnp.array([[0.5, 0.3, 0.2]])), RareFilters(xtc_probability=0.5)
        >>> [rarely_kept(values, filters, chance).round(1).tolist() for chance in (0.4, 0.6)]
        [[[-inf, -inf, -1.6...]], [[-0.69..., -1.2..., -1.6...]]]
    """
    values = _typical(values, filters.typical_p)
    probabilities, top = _probabilities(values), jnp.max(values, axis=1, keepdims=True)
    values = _only(values, (probabilities >= filters.epsilon_cutoff) | (values >= top))
    eta, entropy = jnp.asarray(filters.eta_cutoff), _entropy(values)
    least = jnp.minimum(eta, jnp.sqrt(eta) * jnp.exp(-entropy))
    values = _only(values, (_probabilities(values) >= least) | (values >= top))
    return _without_top_choices(values, filters, chance)


def _typical(values: jax.Array, typical_p: Any) -> jax.Array:
    """The tokens whose information is nearest to the mean information, until they have the mass ``typical_p``."""
    distance = jnp.abs(-jax.nn.log_softmax(values, axis=1) - _entropy(values))
    limit = jnp.broadcast_to(jnp.asarray(typical_p, jnp.float32), (values.shape[0], 1))
    least = bisected(-distance, _probabilities(values), limit)
    return _only(values, (-distance >= least) | (limit >= 1))


def _without_top_choices(values: jax.Array, filters: RareFilters, chance: Any) -> jax.Array:
    """XTC: of the tokens with at least the probability ``xtc_threshold`` only the least probable stays."""
    probabilities = _probabilities(values)
    above = (probabilities >= filters.xtc_threshold) & (values > -jnp.inf)
    least = jnp.min(jnp.where(above, values, jnp.inf), axis=1, keepdims=True)
    probability = jnp.asarray(filters.xtc_probability)
    is_applied = (chance <= probability) & (probability > 0)
    return _only(values, ~(above & (values > least) & is_applied))


def bisected(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """The smallest number for which the weights of all larger values sum to less than ``limit``.

    Args:
        values: numbers ``[B, V]`` of at most 0.
        weights: the weight of each, ``[B, V]``.
        limit: ``[B, 1]``.

    Returns:
        The numbers, ``[B, 1]``.

    Example:
        >>> values = jnp.array([[0.0, -1.0, -2.0]])
        >>> bisected(values, jnp.ones((1, 3)), jnp.array([[2.0]])).tolist()
        [[-1.0]]
    """

    # Every value is at most 0, and floats of one sign are in the order of their bits.
    def number(bits: jax.Array) -> jax.Array:
        return -jax.lax.bitcast_convert_type(bits, jnp.float32)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        above = jnp.sum(jnp.where(values > number(middle), weights, 0.0), axis=1, keepdims=True)
        light = above < limit
        return jnp.where(light, middle, low), jnp.where(light, high, middle - 1)

    # The largest value has nothing above it, so it is always kept.
    bounds = jnp.zeros(limit.shape, jnp.int32), jnp.full(limit.shape, _INFINITY, jnp.int32)
    low, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, bounds)
    return number(low)


def _only(values: jax.Array, kept: jax.Array) -> jax.Array:
    return jnp.where(kept, values, -jnp.inf)


def _probabilities(values: jax.Array) -> jax.Array:
    return jax.nn.softmax(values, axis=1)


def _entropy(values: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(values, axis=1)
    return -jnp.sum(jnp.where(values > -jnp.inf, logs * jnp.exp(logs), 0.0), axis=1, keepdims=True)
