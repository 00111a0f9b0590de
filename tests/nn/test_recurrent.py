"""LSTM and GRU against torch, by torch's names: steps, sequences, directions, carried state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from tests.nn.layers import call, random
from tests.oracles.recorded import recorded, torch

INPUTS, H = 3, 5
CASES = {
    "LSTMCell": (nn.LSTMCell, {}),
    "GRUCell": (nn.GRUCell, {"has_bias": False}),
    "LSTM": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "GRU": (nn.GRU, {"num_layers": 2}),
}


def drawn(layer, seed=0):
    rng = np.random.default_rng(seed)
    return {
        n: rng.normal(0, 0.5, tuple(map(int, w.shape))).astype(np.float32)
        for n, w in layer.raw_state_dict().items()
    }


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name):
    kind, options = CASES[name]
    layer = kind(INPUTS, H, **options)
    weights = drawn(layer)
    layer.load_state_dict(weights)
    rng = np.random.default_rng(1)
    is_cell = name.endswith("Cell")
    x = rng.normal(size=(2, INPUTS) if is_cell else (2, 4, INPUTS)).astype(np.float32)
    lead = (
        ()
        if is_cell
        else (options.get("num_layers", 1) * (1 + options.get("bidirectional", False)),)
    )
    count = 2 if "LSTM" in name else 1
    state = [rng.normal(size=(*lead, 2, H)).astype(np.float32) for _ in range(count)]
    expected = recorded(lambda: of_torch(name, options, weights, x, state))
    given = tuple(state) if count > 1 else state[0]
    found = jax.tree.leaves(jax.jit(lambda m, *a: m(*a))(layer, x, given))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    with pytest.raises(ValueError, match="takes"):
        layer(x[..., :-1])
    with pytest.raises(ValueError, match="the state of"):
        layer(x, jax.tree.map(lambda a: a[..., :-1], given))


def of_torch(name, options, weights, x, state):
    options = {"bias" if k == "has_bias" else k: v for k, v in options.items()}
    if not name.endswith("Cell"):
        options["batch_first"] = True
    layer = getattr(torch.nn, name)(INPUTS, H, **options)
    layer.load_state_dict({n: torch.tensor(v) for n, v in weights.items()})
    tensors = [torch.tensor(one) for one in state]
    return flat(layer(torch.tensor(x), tuple(tensors) if len(tensors) > 1 else tensors[0]))


def flat(found):
    """The arrays in nested tuples of tensors."""
    if isinstance(found, (tuple, list)):
        return [array for one in found for array in flat(one)]
    return [found.detach().numpy()]


def test_a_sequence_is_its_steps_and_can_be_cut():
    lstm = maxjax.init(nn.LSTM(INPUTS, H), jax.random.key(0))
    cell = nn.LSTMCell(INPUTS, H)
    cell.load_state_dict({n.removesuffix("_l0"): w.value for n, w in lstm.raw_state_dict().items()})
    x = random(2, 6, INPUTS)
    y, (h, c) = lstm(x)
    first, middle = call(lstm, x[:, :2])
    rest, (h2, c2) = call(lstm, x[:, 2:], middle)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), y, atol=1e-6)
    np.testing.assert_allclose(c2, c, atol=1e-6)
    np.testing.assert_allclose(h2[0], y[:, -1], atol=1e-6)
    state = None
    for t in range(6):
        state = call(cell, x[:, t], state)
        np.testing.assert_allclose(state[0], y[:, t], atol=1e-6)
    bound = H**-0.5
    assert all(float(jnp.abs(w.value).max()) <= bound for w in lstm.raw_state_dict().values())
    grads = jax.jit(jax.grad(lambda m: (m(x)[0] ** 2).sum()))(lstm)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_a_cell_state_wider_than_the_hidden_state():
    lstm = maxjax.init(nn.LSTM(INPUTS, H, dtype="bfloat16"), jax.random.key(0))
    x, h = jnp.ones((2, 3, INPUTS), jnp.bfloat16), jnp.zeros((1, 2, H), jnp.bfloat16)
    y, (last, c) = lstm(x, (h, h.astype(jnp.float32)))
    assert y.dtype == last.dtype == c.dtype == jnp.float32
    np.testing.assert_allclose(y, lstm(x)[0].astype(jnp.float32), atol=0.02)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_narrow_state_under_strict_promotion(kind):
    cell = maxjax.init(kind(INPUTS, H), jax.random.key(0))
    h = jnp.ones((2, H), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        new = cell(jnp.ones((2, INPUTS)), (h, h) if kind is nn.LSTMCell else h)
    assert all(one.dtype == jnp.float32 for one in jax.tree.leaves(new))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_no_layers(kind):
    with pytest.raises(ValueError, match="num_layers.*0"):
        kind(3, 4, num_layers=0)
