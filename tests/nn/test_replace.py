"""``replace``: new values of some weights, against ``load_state_dict`` on a copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.models import Llama, LlamaConfig

IDS = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.*.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        96, 32, 64, num_hidden_layers=3, num_attention_heads=4, tie_word_embeddings=True
    )
    return maxjax.init(Llama(config), jax.random.key(0))


def state(model):
    return {name: np.asarray(value) for name, value in model.state_dict().items()}


def loaded(model, values):
    copy = jax.tree.map(lambda a: a, model)
    copy.load_state_dict({**state(model), **values})
    return copy


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["stacked", "separate", "mesh", "explicit"])
def test_a_layer_a_tie_and_all_layers(model, form):
    start = jax.tree.map(lambda a: a, model)
    if form == "separate":
        start.unstack()
    if form == "mesh":
        start.to(maxjax.make_mesh(data=2, model=4))
    if form == "explicit":
        start.to(maxjax.make_mesh(data=2, model=4, axis_types=jax.sharding.AxisType.Explicit))
    rng = np.random.default_rng(0)
    down = rng.normal(size=(32, 64)).astype(np.float32)
    head = rng.normal(size=(96, 32)).astype(np.float32)
    ups = rng.normal(size=(3, 64, 32)).astype(np.float32)
    each = {UP.replace("*", str(i)): up for i, up in enumerate(ups)}
    before = state(start)
    new = {DOWN: jnp.asarray(down), "lm_head.weight": head}
    made = maxjax.replace(start, {**new, **(each if form == "separate" else {UP: ups})})
    expected = before | {DOWN: down, "model.embed_tokens.weight": head} | each
    jax.tree.map(np.testing.assert_array_equal, state(made), expected)
    jax.tree.map(np.testing.assert_array_equal, state(start), before)
    assert jax.tree.structure(made) == jax.tree.structure(start)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(start), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_traced_values_and_gradients(model):
    value = jnp.ones((32, 64))

    def slope(f, at):
        def loss(x):
            logits = f(x)(IDS)
            return jnp.sum(logits**2), logits

        return jax.jit(jax.grad(loss, has_aux=True))(at)

    grad, found = slope(lambda v: maxjax.replace(model, {DOWN: v}), value)
    whole, expected = slope(lambda m: m, loaded(model, {DOWN: value}))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad, whole.state_dict()[DOWN], rtol=1e-3, atol=1e-3)


def test_quantised_weights(model):
    packed = maxjax.quantize(model, "q8_0")
    packed = packed[0] if isinstance(packed, tuple) else packed
    other = DOWN.replace("1", "0")
    bytes_ = state(packed)[other]
    made = maxjax.replace(packed, {DOWN: bytes_})
    np.testing.assert_array_equal(state(made)[DOWN], bytes_)
    array = maxjax.kernels.QuantArray(bytes_, "Q8_0")
    np.testing.assert_array_equal(state(maxjax.replace(packed, {DOWN: array}))[DOWN], bytes_)
    with pytest.raises(
        UserInputError, match=r"is uint8\[32, 68\] \(blocks of Q8_0\), and the value float32"
    ):
        maxjax.replace(packed, {DOWN: jnp.ones((32, 64))})
    with pytest.raises(UserInputError, match="packed as Q4_0"):
        maxjax.replace(
            packed, {DOWN: maxjax.kernels.QuantArray(np.zeros((32, 36), np.uint8), "Q4_0")}
        )


def test_placeholders():
    model = Llama(LlamaConfig(96, 32, 64, num_hidden_layers=3, num_attention_heads=4))
    made = maxjax.replace(model, {"model.norm.weight": jnp.ones(32), UP: jnp.ones((3, 64, 32))})
    found = {n: w for n, w in made.raw_state_dict().items() if w.value is not None}
    assert set(found) == {"model.norm.weight", *(UP.replace("*", str(i)) for i in range(3))}
    with pytest.raises(UserInputError, match="is in a stack that has no values yet"):
        maxjax.replace(model, {DOWN: jnp.ones((32, 64))})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({DOWN: jnp.ones((3, 3))}, f"'{DOWN}' is float32[32, 64], and the value float32[3, 3]"),
        ({DOWN: jnp.ones((32, 64), jnp.bfloat16)}, "and the value bfloat16[32, 64]"),
        ({UP: jnp.ones((64, 32))}, f"'{UP}' is float32[3, 64, 32]"),
        ({"model.layers.1.mlp.down_proj.wieght": 1}, f"did you mean '{DOWN}'?"),
        ({DOWN: 3}, "is a int, not an array"),
        (dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight"], jnp.ones((96, 32))), "are the same weight"),
        ({UP: jnp.ones((3, 64, 32)), UP.replace("*", "1"): jnp.ones((64, 32))}, "are the same weight"),
        ([DOWN], "takes a mapping from names to arrays, not list"),
    ],
)  # fmt: skip
def test_bad_values(model, values, says):
    with pytest.raises(UserInputError) as error:
        maxjax.replace(model, values)
    assert says in str(error.value)


def test_a_replaced_model_uses_the_compiled_programs_of_the_old(model):
    traces = []

    @jax.jit
    def run(m, ids):
        traces.append(ids)
        return m(ids)

    run(model, IDS)
    old = model.state_dict()
    for given in (
        {DOWN: 0.5 * old[DOWN], "model.norm.weight": 2 * old["model.norm.weight"]},
        {UP: jnp.zeros((3, 64, 32)), "model.norm.weight": np.ones(32, np.float32)},
    ):
        other = maxjax.replace(model, given)
        assert not any(leaf.committed for leaf in jax.tree.leaves(other))
        run(other, IDS)
    assert len(traces) == 1
