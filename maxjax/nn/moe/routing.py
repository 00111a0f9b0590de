"""Routing: chooses the experts of a token, and the factors of their results (shares), from a router's scores.

Sources: Mixtral (arXiv:2401.04088); DeepSeek-V3 (arXiv:2412.19437) for groups of experts and for the bias
that balances experts and affects only the choice; transformers' routers.

Shapes: N tokens, X experts, k experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import one_of
from ...kernels import explicit

# "softmax of near" counts scores whose distance from a score is at most this share of the larger magnitude.
_NEAR = 0.02


def _of_near(scores: jax.Array, best: jax.Array) -> jax.Array:
    """For each of the k highest scores, its softmax among the scores that are near it and not above it."""
    count, experts = best.shape[-1], scores.shape[-1]
    ordered = jax.lax.top_k(scores, experts)[0][..., None, :]  # [..., 1, X]
    one = best[..., :, None]  # [..., k, 1]
    is_near = (one - ordered) <= _NEAR * jnp.maximum(jnp.abs(ordered), one)
    places = jnp.arange(experts)[None, :] >= jnp.arange(count)[:, None]  # orders equal scores too
    is_near = is_near & places.reshape((1,) * (scores.ndim - 1) + places.shape)
    return 1 / jnp.sum(jnp.where(is_near, jnp.exp(ordered - one), 0), axis=-1)


SHARES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "scores": lambda scores, best: best,
    "softmax": lambda scores, best: jnp.exp(
        best - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    ),
    "softmax of chosen": lambda scores, best: jax.nn.softmax(best, axis=-1),
    "softmax of near": _of_near,
    "sigmoid": lambda scores, best: jax.nn.sigmoid(best),
}
"""Names of functions from all scores ``[..., X]`` and the k highest ones to the shares of the k chosen experts."""


@dataclass(frozen=True)
class Routing:
    """The settings by which experts are chosen, and the factors of their results (shares) computed.

    Attributes:
        count: number k of experts of each token.
        shares: key of ``SHARES``, the function from scores to shares: the "softmax" over all experts, the
            "softmax of chosen" ones, for each the softmax among lower scores near it ("softmax of near",
            arXiv:2409.12136), the "sigmoid", or the "scores" themselves.
        normalised: whether the shares of a token are divided by their sum.
        least: lower bound of that divisor.
        more: number added to that sum.
        factor: factor of all shares, applied last.
        groups, chosen_groups: number of equal groups of consecutive experts, and number of groups from
            which a token chooses its experts: those in which the sum of the ``best_of_group`` highest
            scores is largest.
        best_of_group: number of scores that are summed for a group: 2 in DeepSeek-V3, 1 in DeepSeek-V2.

    Example:
        >>> route, scores = Routing(2, "sigmoid", normalised=True), jnp.array([[0.0, 1.0, 2.0, -1.0]])
        >>> chosen, shares = route(scores)
        >>> chosen.tolist(), [f"{share:.3f}" for share in shares[0]]
        ([[2, 1]], ['0.546', '0.454'])
        >>> route(scores, bias=jnp.array([9.0, 0.0, 0.0, 0.0]))[0].tolist()
        [[0, 2]]
    """

    count: int
    shares: str = "softmax"
    normalised: bool = False
    least: float = 1e-20
    more: float = 0.0
    factor: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 2

    def __post_init__(self) -> None:
        one_of("shares", self.shares, SHARES)
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(
                f"a token chooses from {self.chosen_groups} of {self.groups} groups of experts: it must "
                "be from 1 to all of them"
            )

    def check(self, experts: int) -> None:
        """Checks that the settings fit a number X of experts.

        Raises:
            ValueError: the settings do not fit.
        """
        size, rest = divmod(experts, self.groups)
        if rest:
            raise ValueError(f"{experts} experts do not form {self.groups} equal groups")
        if self.groups > 1 and size < self.best_of_group:
            raise ValueError(
                f"groups of {size} experts are chosen by the {self.best_of_group} best of each"
            )
        if not 0 < self.count <= self.chosen_groups * size:
            raise ValueError(
                f"{self.count} experts for each token: it must be from 1 to "
                f"{self.chosen_groups * size}, the number of experts that it chooses from"
            )

    def __call__(
        self, scores: jax.Array, bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Scores ``[..., X]`` → indices of the chosen experts, and their shares in float32, ``[..., k]`` each.

        The best expert comes first; of equal ones, the one with the lower index.

        Args:
            scores: results of the router.
            bias: numbers ``[X]`` that are added for the choice only, not to the returned shares; or None.

        Raises:
            ValueError: ``shares`` is "softmax of near", and there are groups or a bias.
        """
        if bias is None and self.groups == 1:
            best, chosen = jax.lax.top_k(scores, self.count)
            shares = SHARES[self.shares](scores.astype(jnp.float32), best.astype(jnp.float32))
        else:
            if self.shares == "softmax of near":
                raise ValueError("the softmax of near scores has no groups of experts and no bias")
            scores = scores.astype(jnp.float32)
            of_all = self.shares.removesuffix(" of chosen")  # what experts are chosen by
            every = SHARES[of_all](scores, scores)
            wanted = every if bias is None else every + _along(bias, every)
            chosen = jax.lax.top_k(self._in_groups(wanted), self.count)[1]
            if of_all == self.shares:
                shares = jnp.take_along_axis(every, chosen, axis=-1)
            else:
                shares = SHARES[self.shares](scores, jnp.take_along_axis(scores, chosen, axis=-1))
        if self.normalised:
            total = jnp.sum(shares, axis=-1, keepdims=True)
            total = total + self.more if self.more else total
            shares = shares / jnp.maximum(total, self.least)
        return chosen, shares if self.factor == 1.0 else shares * self.factor

    def _in_groups(self, wanted: jax.Array) -> jax.Array:
        """``wanted``, with -inf for the experts of groups that are not chosen."""
        if self.groups == 1:
            return wanted
        apart = wanted.reshape(*wanted.shape[:-1], self.groups, -1)
        value = jnp.sum(jax.lax.top_k(apart, self.best_of_group)[0], axis=-1)  # [..., groups]
        chosen = jax.lax.top_k(value, self.chosen_groups)[1]
        numbers = jnp.arange(self.groups, dtype=chosen.dtype)
        numbers = numbers.reshape((1,) * (chosen.ndim - 1) + (-1, 1))
        is_chosen = jnp.any(chosen[..., None, :] == numbers, axis=-1)
        return jnp.where(is_chosen[..., None], apart, -jnp.inf).reshape(wanted.shape)


def _along(bias: jax.Array, scores: jax.Array) -> jax.Array:
    bias = jnp.asarray(bias).astype(scores.dtype)
    return bias.reshape((1,) * (scores.ndim - 1) + (-1,))


def route(
    scores: jax.Array,
    top_k: int,
    shares: str = "softmax",
    *,
    normalised: bool = False,
    bias: jax.Array | None = None,
    factor: Any = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
    least: float = 1e-20,
    more: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Choose the ``top_k`` experts of each token with the highest scores, and compute their shares.

    Args:
        scores: results of the router, ``[..., X]``.
        top_k: number k of experts of each token.
        shares: how the shares of the chosen experts follow from the scores, as a key of ``SHARES``: "softmax"
            over all experts, "softmax of chosen", "sigmoid", or the others there.
        normalised: whether the shares of a token are divided by their sum.
        bias: numbers ``[X]`` that are added to the softmax or sigmoid for the choice only, not for the shares;
            they balance how often experts are chosen (DeepSeek-V3, arXiv:2412.19437).
        factor: factor of all shares, a number, or factors ``[X]`` of the experts' shares; applied last.
        groups, top_groups: number of equal groups of consecutive experts, and number of groups from which a
            token chooses its experts.
        best_of_group: number of a group's highest scores whose sum is the score of the group.
        least, more: lower bound of the sum of shares that ``normalised`` divides by, and number added to it.

    Returns:
        Indices of the chosen experts, best first, and their shares in float32, ``[..., k]`` each.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> chosen, shares = route(jnp.array([[0.0, 1.0, 2.0, -1.0]]), 2, "softmax of chosen")
        >>> chosen.tolist(), [f"{share:.3f}" for share in shares[0]]
        ([[2, 1]], ['0.731', '0.269'])
    """
    of_experts = None if isinstance(factor, (int, float)) else jnp.asarray(factor)
    routing = Routing(
        top_k, shares, normalised=normalised, least=least, more=more, groups=groups,
        factor=factor if of_experts is None else 1.0,
        chosen_groups=top_groups, best_of_group=best_of_group,
    )  # fmt: skip

    def choose(scores: jax.Array, bias: Any, factors: Any) -> tuple[jax.Array, jax.Array]:
        chosen, found = routing(scores, bias)
        return chosen, found if factors is None else found * factors.astype(found.dtype)[chosen]

    mesh, place = explicit.mesh_of(scores), explicit.entries(scores)
    run = explicit.automatic(choose, mesh, ([*place[:-1], ()],) * 2)
    bias = None if bias is None else jnp.asarray(bias)
    return run(scores.astype(jnp.float32), bias, of_experts)


def check_experts(
    count: int, top_k: int, groups: int = 1, top_groups: int = 1, best_of_group: int = 2
) -> None:
    """Raise ValueError unless :func:`route` can choose ``top_k`` of ``count`` experts with these arguments.

    Example:
        >>> check_experts(8, 2, groups=3)
        Traceback (most recent call last):
        ...
        ValueError: 8 experts do not form 3 equal groups
    """
    routing = Routing(top_k, groups=groups, chosen_groups=top_groups, best_of_group=best_of_group)
    routing.check(count)
