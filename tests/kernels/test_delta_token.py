"""One token of the gated delta rule on every level, against its definition, and where the kernel runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.kernels import native
from maxjax.kernels.delta_token import Delta
from maxjax.models import Qwen35, Qwen35Config
from maxjax.models.parts.cache import ForwardContext, LayerCache
from maxjax.nn.kv_cache.recurrent import Recurrent
from maxjax.nn.layer import layer_hook
from maxjax.nn.ssm.convolution import CausalConv
from maxjax.nn.ssm.delta import delta_net_in_place, delta_net_in_stack
from maxjax.nn.ssm.gated_norm import GatedNorm

STACKS = (8, 9)


def operands(batch, keys, each, key_dim, value_dim, taps=4, dtype="float32", layers=2, seed=0):
    """Those of the operation, of the last of some layers; of several rows the last but one is not used."""
    rng = np.random.default_rng(seed)
    heads = keys * each
    channels = 2 * keys * key_dim + heads * value_dim
    shapes = [(batch, channels), (batch, heads, value_dim), (batch, heads), (batch, heads),
              (channels, taps), (heads,), (heads,), (value_dim,)]  # fmt: skip
    found = [jnp.asarray(rng.normal(size=shape) * 2, dtype) for shape in shapes]
    last, state = (taps - 1, channels), (heads, key_dim, value_dim)
    for shape, kept in (
        (last, dtype),
        (state, "float32"),
    ):  # the last inputs have the inputs' dtype
        stack = jnp.asarray(rng.normal(size=(layers, batch, *shape)), kept)
        found.append(stack.astype(jnp.float32))
    used = np.ones(batch, np.int32)
    used[:-1][-1:] = 0
    return [*found, jnp.int32(layers - 1), jnp.asarray(used)]


def run(static, *operands):
    return delta_net_in_place(operands, static)


def close(got, expected, dtype):
    for a, b, atol in zip(got, expected, ({"float32": 3e-5}.get(dtype, 0.1), 0, 3e-5), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        rounds = 0 if dtype == "float32" else 2.0**-7
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rounds, atol=atol)


SIZES = {  # batch, heads of keys, of values for each, widths
    "as in a model": (1, 2, 2, 64, 64),
    "several, odd": (3, 2, 3, 5, 37),
    "one": (1, 1, 1, 1, 1),
    "two taps": (2, 3, 1, 33, 17, 2),
    "bfloat16": (2, 1, 2, 16, 24, 4, "bfloat16"),
    "float16": (2, 1, 2, 7, 9, 3, "float16"),
}


@pytest.mark.parametrize("which", SIZES)
def test_on_every_level(which):
    given = operands(*SIZES[which])
    static = Delta(SIZES[which][1], 1e-6)
    dtype = given[0].dtype.name
    expected = jax.jit(delta_net_in_stack, static_argnums=0)(static, *given)
    program = jax.jit(run, static_argnums=0).lower(static, *given).compile()
    assert 'custom_call_target="maxjax_delta"' in str(program.as_text())
    for level in native.levels():
        with native.level(level):
            close(program(*given), expected, dtype)


def test_large_numbers_and_nan():
    """The logits' exponentials do not overflow, and a NaN stays in its own row."""
    given = operands(3, 1, 2, 8, 16)
    given[2], given[3] = given[2] * 100, given[3].at[0].set(200.0).at[2].set(-200.0)
    given[1] = given[1] * 60
    static = Delta(1, 1e-6)
    program = jax.jit(run, static_argnums=0)
    expected = jax.jit(delta_net_in_stack, static_argnums=0)(static, *given)
    for level in native.levels():
        with native.level(level):
            found = program(static, *given)
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(found[2], expected[2], rtol=1e-4, atol=1e-4)
            bad = [given[0].at[0, 10].set(jnp.nan), *given[1:]]
            y, _, state = program(static, *bad)
            assert np.isnan(y[0]).all() and np.isnan(state[1, 0]).any()
            np.testing.assert_array_equal(y[1:], found[0][1:])


def test_other_layers_and_rows_without_a_token_keep_their_state():
    given = operands(3, 1, 2, 4, 8, layers=3)
    given[10] = jnp.int32(1)
    y, *after = jax.jit(run, static_argnums=0)(Delta(1, 1e-6), *given)
    assert not np.asarray(y[1]).any() and np.asarray(y[0]).any()
    for i, new in zip(STACKS, after, strict=True):
        changed = np.asarray(new != given[i]).any(axis=tuple(range(2, new.ndim)))
        np.testing.assert_array_equal(changed, [[False] * 3, [True, False, True], [False] * 3])


def test_exports_derivatives_and_batches_are_those_of_the_definition():
    static, given = Delta(1, 1e-6), operands(2, 1, 2, 4, 6)
    define = lambda *a: delta_net_in_stack(static, *a)
    ours = lambda *a: run(static, *a)
    exported = jax.export.export(jax.jit(ours))(*given)
    assert "custom_call @maxjax_delta" not in str(exported.mlir_module())
    close(exported.call(*given), jax.jit(define)(*given), "float32")
    total = lambda f: lambda x, state: jnp.sum(jnp.sin(f(x, *given[1:9], state, *given[10:])[0]))
    found, wanted = (
        jax.jit(jax.grad(total(f), (0, 1)))(given[0], given[9]) for f in (ours, define)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    both = np.stack([given[0], 2 * np.asarray(given[0])])
    many = lambda f: jax.jit(jax.vmap(lambda x: f(x, *given[1:])[0]))(both)
    np.testing.assert_allclose(many(ours), many(define), atol=1e-5)


def test_a_divided_batch_is_not_gathered():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    given = operands(4, 1, 2, 4, 8)
    spec = jax.sharding.PartitionSpec
    put = lambda a, *axes: jax.device_put(a, jax.sharding.NamedSharding(mesh, spec(*axes)))
    there = [put(a, "data") if i < 4 or i == 11 else put(a, None, "data") if i in STACKS else put(a)
             for i, a in enumerate(given)]  # fmt: skip
    static, program = Delta(1, 1e-6), jax.jit(run, static_argnums=0)
    text = str(program.lower(static, *there).compile().as_text())
    assert "maxjax_delta" in text and "all-gather" not in text
    close(program(static, *there), program(static, *given), "float32")


@pytest.fixture(scope="module")
def layer():
    config = Qwen35Config(
        16, 8, 8, num_hidden_layers=1, num_attention_heads=1, layer_types=("linear_attention",), linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=6,
    )  # fmt: skip
    return maxjax.init(Qwen35(config), jax.random.key(0)).unstack().model.layers[0].linear_attn


@pytest.mark.parametrize("length", [1, 3])
def test_a_layer_has_it_for_one_token_and_where_nobody_looks_at_its_parts(length, layer):
    rng = np.random.default_rng(0)
    arrays = {"conv": (1, 2, 3, 20), "delta": (1, 2, 2, 4, 6)}
    before = Recurrent({n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in arrays.items()})
    x = jnp.asarray(rng.normal(size=(2, length, 8)), jnp.float32)
    counts = jnp.asarray(np.array([1, 0], np.int32))

    def call(layer, x):
        starts = jnp.zeros(2, jnp.int32)
        context = ForwardContext(
            starts, counts, starts + counts, starts, None, length, length == 1, 8, None, ()
        )
        y, cache = layer(x[:, 0] if length == 1 else x, LayerCache(context, {"linear": before}))
        return y.reshape(x.shape), cache.states

    lowered = jax.jit(call).lower(layer, x)
    assert ("maxjax_delta" in lowered.as_text()) == (length == 1)
    y, after = lowered.compile()(layer, x)
    seen = []
    with layer_hook(lambda of, *_: seen.append(type(of))):
        apart, other = jax.jit(lambda *a: call(*a))(layer, x)
    assert {CausalConv, GatedNorm} <= set(seen)
    np.testing.assert_allclose(y[0, 0], apart[0, 0], atol=2e-5)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
