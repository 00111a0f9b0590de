"""maxjax.look against NumPy, on one device, meshes, stacks and quantised weights; and drawings of shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import maxjax
from maxjax import nn
from maxjax.engine.statistics import SIDE, from_bytes, summed_bytes
from maxjax.graph import DeviceRef, Segment, ShardingStrategy, Weight
from maxjax.graph.placement.split import Split
from maxjax.graph.weights import WeightData
from maxjax.kernels import QuantArray
from maxjax.models import Llama, LlamaConfig
from tests.fill import filled

CPU = DeviceRef.CPU()


def noise(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    values.flat[:3] = 0, np.nan, -np.inf
    return values


def agrees(found, values, rtol=1e-5):
    """Statistics and NumPy's of the same values."""
    values = np.asarray(values).astype(np.float64)
    finite = values[np.isfinite(values)]
    np.testing.assert_allclose([found.min, found.max], [finite.min(), finite.max()], rtol=1e-6)
    np.testing.assert_allclose(
        [found.mean, found.std], [finite.mean(), finite.std()], rtol=rtol, atol=1e-6
    )
    counts = np.isnan(values).sum(), np.isinf(values).sum(), (values == 0).sum()
    assert (found.nan, found.inf, found.zeros, found.size) == (*counts, values.size)
    assert found.counts.sum() == finite.size
    assert abs(found.counts - np.histogram(finite, 32)[0]).max() <= 2  # an edge is rounded


def test_more_elements_than_32_bits_can_count():
    rows = np.random.default_rng(0).integers(0, 1 << 32, (70, 1000), np.uint32)
    assert from_bytes(np.asarray(summed_bytes(jnp.asarray(rows)))) == rows.astype(np.int64).sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "bool"])
def test_statistics_are_numpys(dtype):
    values = noise(200, 30)
    if dtype not in ("float32", "bfloat16"):
        values = np.round(4 * np.nan_to_num(values, neginf=0))
    array = jnp.asarray(values).astype(dtype)
    agrees(maxjax.look(array).statistics, np.asarray(array), 1e-4)


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
def test_images_and_meshes(kind):
    values = noise(256, 200)
    array = jnp.asarray(values)
    if kind is not None:
        mesh = maxjax.make_mesh(data=2, model=4, axis_types=kind)
        array = jax.device_put(values, NamedSharding(mesh, PartitionSpec("data", "model")))
    found = maxjax.look(array).statistics
    agrees(found, values)
    rows, columns = -(-256 // SIDE), -(-200 // SIDE)
    want = np.abs(values)
    want[~np.isfinite(values)] = np.nan  # a block with such a value has no mean
    blocks = [
        [want[r : r + rows, c : c + columns].mean() for c in range(0, 200, columns)]
        for r in range(0, 256, rows)
    ]
    np.testing.assert_allclose(found.image, blocks, rtol=1e-4)
    assert not found.signed and np.isnan(found.image[0, 0])
    small = maxjax.look(array[:8, :8] if kind is None else jnp.asarray(values[:8, :8])).statistics
    np.testing.assert_array_equal(small.image, values[:8, :8])
    assert small.signed


@pytest.fixture
def small():
    """A language model whose matrices have few shapes."""
    config = LlamaConfig(
        64,
        16,
        16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return filled(Llama(config))


def test_a_model_is_a_table_with_each_layer(small):
    model = small.to(maxjax.make_mesh(data=2, model=4))
    found = maxjax.look(model)
    state = model.raw_state_dict()
    names = [line[0] for line in found._lines()]
    assert sorted(names) == sorted(state) and len(found) == 11
    stack = found["model.layers.*.mlp.up_proj.weight"]
    for i in range(2):
        want = np.asarray(state[f"model.layers.{i}.mlp.up_proj.weight"].value)
        numbers = {
            name: getattr(stack.statistics, name)[i] for name in ("min", "max", "mean", "std")
        }
        got = [numbers[name] for name in ("min", "max", "mean", "std")]
        np.testing.assert_allclose(
            got, [want.min(), want.max(), want.mean(), want.std()], rtol=1e-3, atol=1e-6
        )
    text, page = repr(found), found._repr_html_()
    assert (
        text.splitlines()[0] == "Llama: 11 arrays"
        and page.count("<tr") == 21
        and page.count("<svg") == 20
    )
    broken = jax.tree.map(lambda a: a.at[(0,) * a.ndim].set(jnp.nan) if a.ndim == 1 else a, model)
    found = maxjax.look(broken)
    assert "NaN in model.norm.weight" in repr(found) and "NaN in" in found._repr_html_()
    agrees(maxjax.look(model.model.layers[1].mlp.up_proj.weight).statistics, want, 1e-3)


def test_quantised_weights_are_looked_at_dequantised():
    blocks = np.zeros((3, 2 * 34), np.uint8)
    blocks[:, 34:36] = np.array([0x3C00], np.uint16).view(np.uint8)  # scales of 1
    blocks[1, 40] = 7
    packed = QuantArray(jnp.asarray(blocks), "Q8_0")
    found = maxjax.look(packed)
    agrees(found.statistics, np.asarray(jnp.asarray(packed)))
    assert found.type == "Q8_0[3, 64]" and found.statistics.max == 7


def test_everything_that_has_values_is_looked_at(tmp_path):
    data = WeightData.from_numpy(noise(4, 4), "w")
    agrees(maxjax.look(data).statistics, noise(4, 4))
    weight = Weight("w", "float32", (4, 4), CPU)
    assert (
        "no value yet" in repr(maxjax.look(weight))
        and "no value yet" in maxjax.look(weight)._repr_html_()
    )
    weight.value = jnp.asarray(noise(4, 4))
    assert maxjax.look(weight).name == "w"
    assert "no value yet" in repr(maxjax.look(nn.Linear(2, 2, "float32", CPU)))
    tree = {"a": jnp.ones(3), "b": [np.zeros((2, 2)), None, "text"]}
    assert list(maxjax.look(tree)) == ["a", "b.0"]
    assert (
        "no values" in repr(maxjax.look(jnp.zeros((0, 3))))
        and maxjax.look(jnp.float32(2)).statistics.max == 2
    )
    nothing = maxjax.look(jnp.full((2, 2), jnp.nan))
    assert np.isnan(nothing.statistics.mean) and nothing.statistics.nan == 4
    assert "NaN 4" in repr(nothing) and "<img" in nothing._repr_html_()
    assert "mask" not in repr(
        maxjax.look(jax.tree.map(lambda _: True, nn.Linear(2, 2, "float32", CPU)))
    )


def test_trees_of_other_shapes_and_types_are_looked_at_as_they_are():
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LayerList(nn.RMSNorm(16, "float32") for _ in range(2)).stack()
            self.last = nn.RMSNorm(16, "float32")

        def __call__(self, x):
            return self.last(self.layers.scan(x))

    model, values = Norms(), np.random.default_rng(0).standard_normal((3, 16), np.float32)
    names = ["layers.0.weight", "layers.1.weight", "last.weight"]
    model.load_state_dict(dict(zip(names, values, strict=True)))
    each = lambda f: jax.jit(functools.partial(jax.tree.map, f))(model)
    wide = maxjax.look(each(lambda a: jnp.stack([a, 2 * a, 3 * a])))
    name = "layers.*.weight"
    whole = next(leaf for n, leaf in _leaves(model) if n == name)
    assert wide[name].layers == () and wide[name].type == "float32[3, 2, 16]"
    agrees(wide[name].statistics, jnp.stack([whole, 2 * whole, 3 * whole]), 1e-4)
    sums = maxjax.look(each(jnp.sum))[name]
    assert sums.type == "float32[]" and sums.statistics.mean == pytest.approx(float(jnp.sum(whole)))
    other = maxjax.look(each(lambda a: a.astype(jnp.bfloat16)))
    assert {one.type.split("[")[0] for one in other.values()} == {"bfloat16"}
    mixed = maxjax.look({"key": jax.random.key(0), "w": jnp.ones(2)})
    assert mixed["key"].note.endswith("no statistics") and mixed["w"].statistics.mean == 1


def _leaves(model):
    definition, holders = model._mx_definition()
    return [(n, h.leaf) for n, h in zip(definition.names, holders, strict=True)]


def test_what_cannot_be_looked_at_says_so():
    for wrong in ("x", 3, {}, None, [1, 2], print):
        with pytest.raises(TypeError):
            maxjax.look(wrong)
    with pytest.raises(ValueError, match=r"look\(\).*jax.jit"):
        jax.jit(lambda x: maxjax.look(x))(jnp.ones(2))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ValueError, match="donated"):
        maxjax.look(gone)
    with pytest.raises(ValueError, match="no statistics"):
        maxjax.look(jax.random.key(0))


# --- drawings


def test_a_drawing_agrees_with_jax():
    mesh = maxjax.make_mesh(data=2, model=4)
    specs = [
        (),
        ("data",),
        (None, "model"),
        ("model", "data"),
        (("data", "model"),),
        (None, ("model", "data")),
    ]
    for spec in specs:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        (division,) = maxjax.draw_sharding(sharding, (16, 8)).divisions.values()
        want = {}
        for device, index in sharding.devices_indices_map((16, 8)).items():
            box = tuple(one.indices(size)[:2] for one, size in zip(index, (16, 8), strict=True))
            want.setdefault(box, set()).add(device.id)
        assert {box: set(held) for box, held in division.parts} == want
        array = jax.device_put(jnp.zeros((16, 8)), sharding)
        assert maxjax.draw_sharding(array).divisions[""].parts == division.parts
        # An abstract mesh counts its devices in the same order.
        abstract = NamedSharding(AbstractMesh((2, 4), ("data", "model")), PartitionSpec(*spec))
        assert maxjax.draw_sharding(abstract, (16, 8)).divisions[""].parts == division.parts


def test_tables_of_several_arrays(small):
    mesh = maxjax.make_mesh(data=2, model=4)
    model = small.to(mesh)
    shown = maxjax.draw_sharding(
        {"<embed>": model.model.embed_tokens.weight, "cache": model.cache(8, 16).keys}
    )
    page = shown._repr_html_()
    assert page.count("<svg") == 16 and "model 3" in page and "&lt;embed&gt;" in page
    assert "0,4 / 1,5 / 2,6 / 3,7" in repr(shown) and "0 | 1 | 2 | 3 / 4 | 5 | 6 | 7" in repr(shown)
    assert "model.layers.*.mlp.up_proj.weight" in repr(maxjax.draw_sharding(model))
    assert maxjax.look(mesh).divisions[""].counts == (2, 4)
    assert maxjax.look(ShardingStrategy.gate_up(2, axis=0)).divisions[""].line() == "0 / 1 / 0 / 1"


def test_rows_in_the_order_of_devices_are_drawn_as_they_are():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.StackedLinear(8, [8, 4, 4], ["q", "k", "v"], "float32", CPU, stacked=True)

        def sharding_rules(self):
            parts = [Segment.even(8), Segment.even(4), Segment.even(4)]
            return {"qkv.weight": Split(0, tuple(parts), by_device=True)}

        def __call__(self, x):
            return self.qkv(x)

    model = Model().to(maxjax.make_mesh(model=4))
    (division,) = maxjax.draw_sharding(model.qkv.weight).divisions.values()
    assert division.line() == " / ".join("012301230123") and division.size_on(2) == 4 * 8
    assert "128 bytes on each" in repr(model)


def test_what_cannot_be_drawn_says_so():
    for wrong, kind in (
        (3, TypeError),
        ({}, ValueError),
        (Weight("w", "float32", (2,), CPU), ValueError),
    ):
        with pytest.raises(kind):
            maxjax.draw_sharding(wrong)
    with pytest.raises(ValueError, match="outside of jax.jit"):
        jax.jit(maxjax.draw_sharding)(jnp.ones(2))
    with pytest.raises(ValueError, match="single array"):
        maxjax.draw_sharding(ShardingStrategy.tensor_parallel(2))
    rows = NamedSharding(AbstractMesh((2,), ("data",)), PartitionSpec("data"))
    for shape in (8, (-4, 8), ("n",)):
        with pytest.raises(ValueError, match="shape is a tuple of sizes"):
            maxjax.draw_sharding(rows, shape)


def test_arrays_of_numpy_that_jax_does_not_have():
    """The other byte order is read; texts, times, objects and records are named instead of an error of JAX."""
    numbers = np.array([1, 2, 3])
    found = maxjax.look(numbers.astype(">f4"))
    assert (found.statistics.mean, found.statistics.max) == (2, 3)
    others = {"text": np.array(["a"]), "time": np.array(["2020"], "M8[D]"), "object": np.array([{}]),
              "record": np.zeros(2, [("a", "f4")])}  # fmt: skip
    for one in others.values():
        assert "its values are no numbers" in repr(maxjax.look(one))
    table = repr(maxjax.look({**others, "numbers": numbers.astype(">i4")}))
    assert table.count("its values are no numbers") == 4 and "int32[3]" in table


@pytest.mark.parametrize(
    "values",
    [
        np.array([1e-300, -1.0, 1e150]),
        np.array([2**40, 1, -(2**62)]),
        np.array([1e39 + 1j, 1e150]),
    ],
)
def test_numbers_of_64_bits_are_looked_at_as_they_are(values):
    found = maxjax.look(values)
    assert found.type.startswith(f"{values.dtype}[")
    agrees(found.statistics, np.abs(values) if values.dtype.kind == "c" else values)
    assert "data:image/png" in found._repr_html_()
    assert maxjax.look(np.float64(1e300)).statistics.max == 1e300


@pytest.mark.parametrize("scale", [3e38, 1e25, 1e-25, 1e-37])
def test_statistics_of_large_and_small_numbers_neither_overflow_nor_vanish(scale):
    values = np.array([1, 0.5, -1, 0.25], np.float32) * np.float32(scale)
    found = maxjax.look(jnp.asarray(values)).statistics
    wide = values.astype(np.float64)
    np.testing.assert_allclose([found.mean, found.std], [wide.mean(), wide.std()], rtol=1e-5)
