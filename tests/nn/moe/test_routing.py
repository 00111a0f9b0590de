"""Routing against transformers' routers, written out in float64, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.nn.moe import Routing

N, X = 5, 12


def by_hand(scores, bias, *, count, shares, normalised, factor, groups, chosen, best):
    """Experts as a set and shares by number, of one token."""
    every = (
        1 / (1 + np.exp(-scores)) if shares == "sigmoid" else np.exp(scores) / np.exp(scores).sum()
    )
    wanted = every + bias
    apart = wanted.reshape(groups, -1)
    value = np.sort(apart, axis=1)[:, -best:].sum(1)
    kept = np.argsort(-value)[:chosen]
    wanted = np.where(np.isin(np.arange(X) // (X // groups), kept), wanted, -np.inf)
    experts = np.argsort(-wanted)[:count]
    found = every[experts]
    found = found / found.sum() if normalised else found
    return dict(zip(experts.tolist(), (found * factor).tolist(), strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("shares", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("groups", "chosen", "best"), [(1, 1, 2), (4, 2, 2), (3, 2, 1)])
def test_the_chosen_and_their_shares(shares, biased, groups, chosen, best):
    rng = np.random.default_rng(groups)
    scores = rng.normal(0, 2, (N, X))
    bias = rng.normal(0, 0.3, X) if biased else np.zeros(X)
    for normalised in (False, True):
        route = Routing(
            3, shares, normalised=normalised, factor=2.5, groups=groups, chosen_groups=chosen,
            best_of_group=best,
        )  # fmt: skip
        route.check(X)
        found, parts = route(jnp.float32(scores), jnp.float32(bias) if biased else None)
        for i in range(N):
            expected = by_hand(
                scores[i], bias, count=3, shares=shares, normalised=normalised, factor=2.5,
                groups=groups, chosen=chosen, best=best,
            )  # fmt: skip
            mine = dict(zip(np.asarray(found[i]).tolist(), np.asarray(parts[i]), strict=True))
            assert mine.keys() == expected.keys()
            for expert, share in expected.items():
                np.testing.assert_allclose(mine[expert], share, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"groups": 5}, "equal groups"),
        ({"groups": 12, "chosen_groups": 4}, "2 best"),
        ({"count": 13}, "from 1 to 12"),
        ({"count": 7, "groups": 2}, "from 1 to 6"),
        ({"groups": 2, "chosen_groups": 3}, "3 of 2 groups"),
        ({"shares": "tanh"}, "tanh"),
    ],
)
def test_what_cannot_be_is_refused(settings, what):
    with pytest.raises(ValueError, match=what):
        Routing(**{"count": 2, **settings}).check(X)


def test_softmax_of_chosen_with_a_bias_or_groups():
    scores = jnp.array([[0.0, 1.0, 2.0, -1.0]])
    for options, bias, chosen in (({}, [0, 0, 0, 0], [2, 1]), ({"groups": 2}, None, [2, 3])):
        bias = bias if bias is None else jnp.array(bias)
        found, shares = Routing(2, "softmax of chosen", **options)(scores, bias)
        best = np.exp(np.asarray(scores)[0, chosen])
        assert found.tolist() == [chosen]
        np.testing.assert_allclose(shares[0], best / best.sum(), rtol=1e-6)
    with pytest.raises(ValueError, match="softmax of near"):
        Routing(2, "softmax of near")(scores, jnp.zeros(4))
