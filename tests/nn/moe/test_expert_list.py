"""Experts against their definition in float64: for any axes of tokens, with biases, and unstacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init
from maxjax.dtype import DType
from maxjax.nn.layer import LayerList, LayerStack, Module
from maxjax.nn.moe import Experts, check_experts, route

E, F, X, K = 6, 10, 5, 2
NAMES = ("w1", "w3", "w2")


def made(act="silu", has_bias=False):
    return init(Experts(E, F, X, DType.float32, NAMES, act, has_bias), jax.random.key(0))


def tokens(*shape, seed=0):
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(X)[:K] for _ in range(int(np.prod(shape)))])
    shares = rng.uniform(0.1, 1, (*shape, K)).astype("f")
    chosen = chosen.reshape(*shape, K).astype(np.int32)
    return rng.normal(size=(*shape, E)).astype("f"), chosen, shares


def defined(experts, x, chosen, shares, act):
    """``Σ share · w2(act(w1(x), w3(x)))``."""
    y = np.zeros(x.shape)
    for place in np.ndindex(*x.shape[:-1]):
        for expert, share in zip(chosen[place], shares[place], strict=True):
            w = {n: np.asarray(getattr(experts[int(expert)], n).weight.value, "d") for n in NAMES}
            b = {n: getattr(experts[int(expert)], n).bias for n in NAMES}
            b = {n: 0 if bias is None else np.asarray(bias.value, "d") for n, bias in b.items()}
            gate, up = (w[n] @ x[place] + b[n] for n in NAMES[:2])
            y[place] += share * (w["w2"] @ act(gate, up) + b["w2"])
    return y


def silu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def difference(gate, up):
    return gate - 2 * up


@pytest.mark.parametrize("shape", [(4, 3), (7,), (1, 1), (3, 2, 2)])
def test_tokens_of_any_axes(shape):
    experts, given = made(), tokens(*shape)
    found = jax.jit(lambda experts, *a: experts(*a))(experts, *given)
    np.testing.assert_allclose(found, defined(experts, *given, silu), rtol=1e-5, atol=1e-5)


def test_biases_and_another_function_between_the_projections():
    experts, given = made(difference, has_bias=True), tokens(9)
    for i, (name, weight) in enumerate(experts.raw_state_dict().items()):
        if name.endswith("bias"):
            weight.value = jnp.full(weight.value.shape, 0.1 * (i + 1), jnp.float32)
    expected = defined(experts, *given, difference)
    np.testing.assert_allclose(experts(*given), expected, rtol=1e-5, atol=1e-5)


def test_unstacked_experts_stay_callable():
    experts, given = made(), tokens(8)
    expected, names = experts(*given), list(experts.raw_state_dict())
    assert experts.unstack() is experts and not experts.is_stacked
    assert list(experts.raw_state_dict()) == names and len(experts) == X
    np.testing.assert_allclose(experts(*given), expected, rtol=1e-5, atol=1e-6)
    experts[1].w1.weight.value = experts[1].w1.weight.value * 2
    assert np.abs(experts(*given) - expected).max() > 1e-3


class Mixture(Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts(E, F, X, DType.float32, NAMES)

    def __call__(self, x, chosen, shares):
        return x + self.experts(x, chosen, shares)


def test_layers_with_experts_are_stacked():
    layers, (x, chosen, shares) = LayerList(Mixture() for _ in range(3)), tokens(4, 3)
    layers = init(layers, jax.random.key(1))
    expected = x
    for layer in layers:
        expected = layer(expected, chosen, shares)
    stack = layers.stack()
    assert isinstance(stack, LayerStack) and jax.tree.leaves(stack)[0].shape[:2] == (3, X)
    found = stack.scan(jnp.asarray(x), chosen=jnp.asarray(chosen), shares=jnp.asarray(shares))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_what_a_route_refuses():
    scores = jnp.zeros((2, X))
    with pytest.raises(ValueError, match="shares must be one of"):
        route(scores, 2, "other")
    with pytest.raises(ValueError, match="2 of 1 groups"):
        route(scores, 2, top_groups=2)
    for given, says in (
        ((X, 0), "from 1 to 5"),
        ((X, 6), "from 1 to 5"),
        ((X, 2, 2), "2 equal groups"),
    ):
        with pytest.raises(ValueError, match=says):
            check_experts(*given)


def test_shares_and_bias_of_a_route():
    scores = np.random.default_rng(0).normal(size=(3, 4, X)).astype("f")
    sigmoid = 1 / (1 + np.exp(-scores.astype("d")))
    bias = np.array([0, 0, 5, 0, 0.0], "f")
    chosen, shares = route(
        jnp.asarray(scores), K, "sigmoid", bias=jnp.asarray(bias), normalised=True, factor=2.5
    )
    expected = np.argsort(-(sigmoid + bias), axis=-1)[..., :K]
    np.testing.assert_array_equal(chosen, expected)
    assert (np.asarray(chosen)[..., 0] == 2).all()
    picked = np.take_along_axis(sigmoid, expected, -1)
    np.testing.assert_allclose(shares, 2.5 * picked / picked.sum(-1, keepdims=True), rtol=1e-5)
    low = jnp.asarray(scores, jnp.bfloat16)
    assert route(low, K)[1].dtype == jnp.float32
