"""How Modules show themselves: what is said, how little of it, and what is never done for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef, Weight
from maxjax.models.llama import Llama, LlamaConfig
from tests.pages import page_of

CPU = DeviceRef.CPU()
LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA_405B = {
    "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.LayerList(layers)
        self.head = linear(3)

    def __call__(self, x):
        return x


def linear(n=2):
    return nn.Linear(n, n, "float32", CPU)


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny", dtype="float32")[0]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    "config, parameters, layers",
    [(LLAMA_8B, "8,030,261,248", "{0..31}"), (LLAMA_405B, "405,853,388,800", "{0..125}")],
)
def test_large_models_are_small_pages(config, parameters, layers, stacked):
    model = Llama(LlamaConfig.from_dict(config), "bfloat16", stacked=stacked)
    count = config["num_hidden_layers"]
    with jax.transfer_guard("disallow"):
        text, page = repr(model), page_of(model)
    lines = text.splitlines()
    assert (
        lines[0].startswith(f"Llama({count} layers, {parameters} parameters, ")
        and ", lazy)" in lines[0]
    )
    assert f"model.layers.{layers}" in text and f"{count} × LlamaBlock" in text and len(lines) < 10
    assert len(model._repr_html_()) < 6000 and page.tags.count("details") < 20
    assert page.words.count("q_proj") == 1 and layers in page.words and "bfloat16[" in page.words


def test_nothing_is_copied_from_a_device(tiny, monkeypatch):
    def refuse(*_):
        raise AssertionError("a value was read")

    kind = type(jnp.ones(1))
    for name in (
        "__array__",
        "_value",
        "__float__",
        "__int__",
        "__bool__",
        "__iter__",
        "__getitem__",
    ):
        monkeypatch.setattr(kind, name, property(refuse) if name == "_value" else refuse)
    cache = tiny.cache(2, 16)
    with jax.transfer_guard("disallow"):
        for shown in (tiny, tiny.model.layers[1], tiny.model.norm.weight, cache):
            repr(shown), shown._repr_html_()


def test_leaves_of_all_kinds_are_named(tiny):
    def first(f):
        return repr(jax.tree.map(f, tiny)).splitlines()[0]

    assert first(lambda a: a.ndim > 1).startswith(
        "Llama(2 layers, mask in place of 20 weights: 19 True and 1 False"
    )
    assert "labels in place of 20 weights: 20 'adam'" in first(lambda _: "adam")
    assert "None in place of 20 weights" in first(lambda _: None)
    assert "function leaves" in first(lambda _: print) or "builtin" in first(lambda _: print)
    assert "Sharding leaves" in first(lambda a: a.sharding)
    assert "bfloat16, on cpu:0)" in first(lambda a: a.astype("bfloat16"))
    assert "bool, a mask of 20 weights" in first(lambda a: a > 0)
    assert first(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)).endswith("float32, lazy)")
    shown = []
    jax.jit(lambda model: shown.extend([repr(model), model._repr_html_()]))(tiny)
    assert "traced)" in shown[0] and "deleted" not in shown[0]
    copied = jax.tree.map(jnp.copy, tiny)
    jax.jit(lambda m: jax.tree.map(lambda a: a + 1, m), donate_argnums=0)(copied)
    assert "deleted" in repr(copied) and "deleted" in copied._repr_html_()
    assert "derivatives of integers" in first(lambda a: np.zeros(a.shape, jax.dtypes.float0))


def test_a_gradient_is_shown_as_its_model_and_maps_with_it():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LayerStack([nn.Linear(2, 2, "float32", CPU) for _ in range(3)])
            self.gain = Weight("gain", "float32", (2,), CPU)

        def __call__(self, x):
            return self.layers(x) * self.gain[None]

    def loss(model):
        return (model(jnp.ones((1, 2))) ** 2).sum()

    model = maxjax.init(Scale(), jax.random.key(0))
    gradient = jax.grad(loss)(model)
    pulled = jax.vjp(loss, model)[1](1.0)[0]
    jitted = jax.jit(jax.value_and_grad(loss))(model)[1]
    for tree in (gradient, pulled, jitted, jax.tree.map(lambda w, g: w - g, model, gradient)):
        assert repr(tree) == repr(model) and tree._repr_html_() == model._repr_html_()
    assert repr(gradient.layers[1].weight) == repr(model.layers[1].weight)
    assert jax.tree.structure(gradient) == jax.tree.structure(model)
    assert hash(jax.tree.structure(gradient)) == hash(jax.tree.structure(model))
    program = jax.jit(loss)
    assert program(model) != program(gradient) and program._cache_size() == 1


def test_placement_and_parts_on_a_mesh(tiny):
    mesh = maxjax.make_mesh(data=2, model=4)
    model = jax.tree.map(jnp.copy, tiny).to(mesh)
    text = repr(model)
    assert "on 8 devices (data=2, model=4), 1.43 MiB on each)" in text
    each = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(model)
        for shard in leaf.addressable_shards[:1]
    )
    assert f"{each / 2**20:.2f}" == "1.43"
    page = model._repr_html_()
    assert page.count("<svg") >= 8 and "(&#x27;model&#x27;, None) on data=2, model=4" in page


def test_ties_and_shared_layers_count_once(tiny):
    page = page_of(tiny)
    assert "tied to model.embed_tokens.weight" in page.words
    total = sum(leaf.size for leaf in jax.tree.leaves(tiny))
    assert f"{total:,} parameters" in repr(tiny)
    one = linear()
    net = Net([one, one, linear()])
    assert repr(net).startswith("Net(3 layers, layers.0.weight float32[2, 2], layers.2.weight")
    assert "the same as layers.0" in page_of(net).words


@pytest.mark.parametrize(
    "kinds, names",
    [
        ("2222", ["layers.{0..3}"]),
        ("232323", ["layers.{0,2,4}", "layers.{1,3,5}"]),
        ("2233344", ["layers.{0..1}", "layers.{2..4}", "layers.{5..6}"]),
        ("322222", ["layers.0", "layers.{1..5}"]),
    ],
)
@pytest.mark.parametrize("stacked", [True, False])
def test_equal_layers_fold(kinds, names, stacked):
    net = Net([linear(int(kind)) for kind in kinds])
    if stacked and kinds not in ("2233344",):
        net.layers = net.layers.stack(first=1 if kinds[0] == "3" else 0)
    lines = repr(net).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*names, "head"]
    total = sum(int(kind) ** 2 for kind in kinds) + 9
    assert f"{total} parameters" in lines[0] and f"{len(kinds)} layers" in lines[0]


def test_settings_that_differ_say_so():
    class Layer(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.layer_id, self.heads, self.up = i, 4, linear()

        def __call__(self, x):
            return x

    page = page_of(Net([Layer(i) for i in range(5)]))
    assert "layer_id=differs" in page.words and "heads=4" in page.words


def test_incomplete_modules_have_a_repr():
    class Broken(nn.Module):
        def __init__(self):
            self.up = linear()
            raise RuntimeError(repr(self))

        def __call__(self, x):
            return x

    with pytest.raises(
        RuntimeError, match=r"^Broken\(up.weight float32\[2, 2\], 16 bytes, lazy\)$"
    ):
        Broken()
    for kind in (nn.LayerStack, nn.Linear, nn.LayerList, nn.Sequential, Net):
        assert repr(object.__new__(kind)).startswith(kind.__name__)
        assert kind.__name__ in object.__new__(kind)._repr_html_()
    half = linear()
    del vars(half)["_mx_locals"]
    vars(half)["_mx_children"] = None
    assert "Linear that cannot be shown" in repr(half) and "Linear" in half._repr_html_()


def test_names_are_escaped_and_short():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, "<script>\x1b[31m" + "x" * 300, linear())
            self.w = Weight("<b>\n", "float32", (2, "n"), CPU)

        def __call__(self, x):
            return x

    shown = Odd()
    page = page_of(shown)
    assert "\x1b" not in repr(shown) + shown._repr_html_() and "\n" not in repr(shown)
    assert max(map(len, repr(nn.LayerList([shown, shown, linear()])).splitlines())) < 200
    assert "float32[2, n]" in page.words


def test_very_many_rows_are_cut():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            for i in range(2000):
                setattr(self, f"layer_{i}", linear(1 + i % 7))

        def __call__(self, x):
            return x

    wide = Wide()
    assert len(repr(wide).splitlines()) < 12 and "… and 1,992 more" in repr(wide)
    assert len(wide._repr_html_()) < 30_000 and "1,910 more" in page_of(wide).words


def test_treescope_shows_modules_and_trees_with_them(tiny):
    treescope = pytest.importorskip("treescope")
    with jax.transfer_guard("disallow"):
        text = treescope.render_to_text({"model": tiny, "norm": tiny.model.norm.weight})
        page = treescope.render_to_html(tiny)
    assert (
        "'model': Llama(2 layers, " in text
        and "{0..1}: 2 × LlamaBlock" in text
        and len(page) > 1000
    )


def test_a_stack_that_is_partly_loaded_says_so():
    stack = nn.LayerList(linear() for _ in range(4)).stack()
    assert repr(stack).endswith("lazy)\n  {0..3}  4 × Linear  16  64 bytes")
    stack[1].weight.value = jnp.ones((2, 2))
    assert "1 of 4 layers loaded)" in repr(stack)
    assert (
        "lazy" in repr(stack[0])
        and "on cpu:0" in repr(stack[1])
        and "loaded)" in repr(stack[1].weight)
    )
    assert "on cpu:0" in repr(maxjax.init(stack, jax.random.key(0))).splitlines()[0]


def test_kinds_of_layers_are_told_apart_by_settings_that_recur():
    class Layer(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.layer_id, self.window, self.up = i, 4 if i % 3 else 0, linear()

        def __call__(self, x):
            return x

    layers = nn.LayerList(Layer(i) for i in range(9))
    names = [line.split()[0] for line in repr(layers).splitlines()[1:]]
    assert names == ["{0,3,6}", "{1..2,4..5,7..8}"]
    for layer in layers:
        layer.layer_id = 0
    stack = layers.stack()
    assert [line.split()[0] for line in repr(stack).splitlines()[1:]] == names
    assert "window=4" in page_of(stack).words


def test_leaves_of_another_shape_are_shown_as_they_are(tiny):
    each = jax.tree.map(lambda a: jnp.zeros((5, *a.shape)), tiny)
    total = sum(leaf.size for leaf in jax.tree.leaves(each))
    assert f"{total:,} parameters" in repr(each)
    assert (
        "float32[5, 704, 256]" in page_of(each).words
        and "of 2 layers together" in page_of(each).words
    )
    placed = jax.tree.map(lambda _: np.zeros(3), tiny.to(maxjax.make_mesh(data=2, model=4)))
    assert "33 parameters, 264 bytes, float64)" in repr(placed) or "float64" in repr(placed)
