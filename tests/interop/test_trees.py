"""equinox modules and other pytrees: filled from checkpoints, back, and with Modules inside of them."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.errors import CheckpointMismatchError, UserInputError
from maxjax.interop import trees

eqx = pytest.importorskip("equinox")


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_an_equinox_module_from_a_checkpoint_and_back(tmp_path):
    """The weights of a maxjax model: by its names, from it and from its file; and back."""
    ours = maxjax.init(
        nn.Sequential([nn.Linear(4, 8, has_bias=True) for _ in range(1)]), jax.random.key(0)
    )
    theirs = eqx.nn.MLP(4, 8, 1, 0, key=jax.random.key(1))
    filled = trees.load(theirs, ours, rename={"*.*": "layers.*.*"})
    x = draw(4)
    np.testing.assert_allclose(filled(x), ours(x[None])[0], atol=1e-6)
    path = maxjax.save_pretrained(ours, tmp_path)
    again = trees.load(theirs, path, rename={"*.*": "layers.*.*"})
    assert eqx.tree_equal(again, filled)
    assert again.activation is theirs.activation
    back = trees.tensors(filled, rename={"*.*": "layers.*.*"})
    assert list(back) == ["0.weight", "0.bias"]
    ours.load_state_dict(back)
    # A bias of [O, 1, 1], a layout and its inverse, another width, placeholders.
    conv = eqx.filter_eval_shape(eqx.nn.Conv2d, 3, 8, 2, key=jax.random.key(0))
    values = {"w": draw(2, 2, 3, 8), "bias": draw(8).astype(np.float16)}
    table = {"w": ("weight", "h w i o -> o i h w")}
    conv = trees.load(conv, values, rename=table, cast=True)
    assert (conv.weight.shape, conv.bias.shape, conv.bias.dtype) == (
        (8, 3, 2, 2),
        (8, 1, 1),
        np.float32,
    )
    np.testing.assert_array_equal(trees.tensors(conv, rename=table)["w"], values["w"])


@pytest.mark.parametrize(
    ("values", "options", "says"),
    [
        ({"a": draw(2, 3)}, {}, "1 missing: b"),
        ({"a": draw(2, 3), "b": draw(2), "c": draw(1)}, {}, "1 unexpected: c"),
        ({"a": draw(3, 2), "b": draw(2)}, {}, r"'a' has shape \(2, 3\), and the tensor \(3, 2\)"),
        (
            {"a": draw(2, 3).astype(np.float16), "b": draw(2)},
            {},
            "'a' is float32, and the tensor float16",
        ),
        ({"a": draw(2, 3)}, {"rename": {"a": ("a", "x -> x")}}, "layout 'x -> x' does not fit"),
        *(
            (
                {"a": draw(*sizes), "b": draw(2)},
                {"rename": {"a": ("a", "o i -> i o")}},
                r"'a' does not fit: the layout 'o i -> i o' takes a tensor of shape \(3, 2\), not",
            )
            for sizes in ((4, 2), (2, 2), (2, 3), (6,))
        ),
        (
            {"a": draw(2, 3), "b": draw(2), "c": draw(2)},
            {"rename": {"c": "b"}},
            "'b' is filled by both 'b' and 'c'",
        ),
    ],
)
def test_what_does_not_fit_is_named(values, options, says):
    tree = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    with pytest.raises(CheckpointMismatchError, match=says):
        trees.load(tree, values, **options)
    found = trees.load(tree, {"a": draw(2, 3), "c": draw(1)}, strict=False)
    np.testing.assert_array_equal(found["b"], tree["b"])


def test_two_arrays_of_one_name_must_be_equal():
    table = {"x": ["a", "b"]}
    assert list(trees.tensors({"a": jnp.zeros(2), "b": jnp.zeros(2)}, rename=table)) == ["x"]
    with pytest.raises(
        UserInputError, match="'a' and 'b' are both 'x' in the checkpoint, and differ"
    ):
        trees.tensors({"a": jnp.zeros(2), "b": jnp.ones(2)}, rename=table)


def test_stacks_of_layers_are_for_nnx():
    table = {"layers.*.w": ("layers.w", "o i -> * i o")}
    values = {f"layers.{i}.w": draw(2, 3) for i in range(2)}
    with pytest.raises(NotImplementedError, match="only maxjax.interop.nnx.load makes stacks"):
        trees.load({"layers": {"w": jnp.zeros((2, 3, 2))}}, values, rename=table)


def test_a_function_without_inverse_is_refused_on_the_way_back():
    with pytest.raises(UserInputError, match="no inverse"):
        trees.tensors({"a": jnp.zeros(2)}, rename={"b": ("a", jnp.sin)})


class Classifier(eqx.Module):
    body: maxjax.Module
    out: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.out)(self.body(x))


def test_a_module_inside_of_equinox():
    body = maxjax.init(nn.MLP("float32", None, 4, 8), jax.random.key(0))
    model = Classifier(body, eqx.nn.Linear(4, 2, key=jax.random.key(1)))
    x = draw(3, 4)
    y = eqx.filter_jit(model)(x)
    np.testing.assert_allclose(y, x_through(model, x), atol=1e-6)
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: (m(x) ** 2).sum()))(model)
    assert type(grads.body) is nn.MLP
    plain = jax.jit(jax.grad(lambda b: (jax.vmap(model.out)(b(x)) ** 2).sum()))(body)
    for one, other in zip(jax.tree.leaves(grads.body), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    empty = jax.tree.map(jnp.zeros_like, model)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, empty), model)
    arrays, rest = eqx.partition(model, eqx.is_array)
    np.testing.assert_array_equal(eqx.combine(arrays, rest)(x), model(x))
    moved = eqx.apply_updates(model, grads)
    assert float(jnp.abs(moved.body.up_proj.weight.value - body.up_proj.weight.value).max()) > 0


def x_through(model, x):
    return model.body(x) @ model.out.weight.T + model.out.bias[None]


def test_two_arrays_of_one_path_are_refused():
    tree = {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    for call in (trees.tensors, lambda tree: trees.load(tree, {"a.b": draw(2)})):
        with pytest.raises(UserInputError, match=r"two arrays are both 'a\.b'"):
            call(tree)


@pytest.mark.parametrize("value", [np.array([1 << 40, 2]), np.array([1e300, 2.0])])
def test_values_of_64_bits_are_kept(value):
    assert not jax.config.jax_enable_x64
    filled = trees.load({"a": np.zeros_like(value)}, {"a": value})["a"]
    assert filled.dtype == value.dtype and np.array_equal(filled, value)


def test_the_result_of_a_function_has_the_dtype_of_the_array():
    rename = {"a": ("a", lambda x: x.astype(np.float64) * 2)}
    filled = trees.load({"a": jnp.zeros(2)}, {"a": np.ones(2, np.float32)}, rename=rename)["a"]
    assert isinstance(filled, jax.Array) and filled.dtype == np.float32 and filled[0] == 2
