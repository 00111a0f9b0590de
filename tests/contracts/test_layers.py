"""The contracts of a layer, each over every row of ``layers.py``.

A contract compares a layer with its float64 reference, or with itself run in another way. It uses what a user
can: it holds however Modules and Weights are made inside.
"""

import copy
import fnmatch
import pickle

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax import nn
from maxjax.engine import InferenceSession
from maxjax.graph import Graph, TensorType, TensorValue
from tests.contracts.layers import LAYERS, STACKS, Holder
from tests.nn.layers import CPU

TRACES = []


@jax.jit
def compiled(layer, *inputs):
    """The layer's result; notes in ``TRACES`` that it is traced."""
    TRACES.append(type(layer).__name__)
    return layer(*inputs)


def each_layer(test, rows=LAYERS):
    """Runs a contract over all rows. It must fail for rows that say that it does not apply."""
    contract = test.__name__.removeprefix("test_")

    def case(row):
        why = row.without.get(contract)
        marks = [] if why is None else [pytest.mark.xfail(reason=why)]
        if (row in STACKS and not row.is_typical) or (row.is_variant and contract != "forward"):
            marks.append(pytest.mark.extra)
        return pytest.param(row, id=row.name, marks=marks)

    return pytest.mark.parametrize("row", [case(row) for row in rows])(test)


def each_layer_and_stack(test):
    """Runs a contract over all rows, and over a stack of each layer."""
    return each_layer(test, LAYERS + STACKS)


def test_rows_say_what_there_is():
    contracts = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    for row in LAYERS:
        assert contracts >= row.without.keys(), row.name
    names = [row.name for row in LAYERS]
    assert len(names) == len(set(names))


# --- helpers --------------------------------------------------------------------------------------


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def wide(tree):
    """Floats as float64."""
    return jax.tree.map(lambda a: np.asarray(a, np.float64 if is_float(a) else None), tree)


def expected(row, weights, inputs=None):
    return row.reference(weights, *wide(list(row.inputs if inputs is None else inputs)))


def close(found, wanted, tolerance=1e-5):
    """Checks that two pytrees have the same shapes, and differ little beside their largest value."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        worst = np.abs(a - b).max() / max(1.0, np.abs(b).max())
        assert worst <= tolerance, f"differs by {worst:.1e}"


def same(found, wanted):
    """Checks that two state dicts have the same names in the same order, and the same bytes."""
    assert list(found) == list(wanted)
    for name in found:
        a, b = np.asarray(found[name]), np.asarray(wanted[name])
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


def as_declared(row, weights):
    """The weights as arrays of the dtypes that the layer declares, as a file holds them."""
    kinds = {name: weight.dtype.np for name, weight in row.make().raw_state_dict().items()}
    return {name: np.asarray(weights[name], kind) for name, kind in kinds.items()}


def other_inputs(row, seed):
    """Inputs like the row's, in another order of the batch and, if they are floats, with other values."""

    def change(a):
        noise = np.random.default_rng(seed).standard_normal(a.shape)
        return (a + noise).astype(a.dtype) if is_float(a) else np.roll(a, seed, 0)

    return jax.tree.map(change, list(row.inputs))


def stacked(*trees):
    return jax.tree.map(lambda *arrays: np.stack(arrays), *trees)


# --- contracts ------------------------------------------------------------------------------------


@each_layer_and_stack
def test_forward(row):
    """The layer computes its reference, in the types of its inputs."""
    layer, weights = row.filled()
    found = layer(*jax.tree.map(jnp.asarray, list(row.inputs)))
    close(found, expected(row, weights))
    for leaf in jax.tree.leaves(found):
        assert isinstance(leaf, jax.Array) and leaf.dtype in (jnp.float32, jnp.int32)


@jax.jit
def gradients(layer, inputs, factors):
    """The gradients of ``Σ factor · result`` by the layer and its inputs."""

    def loss(layer, inputs):
        results = [leaf for leaf in jax.tree.leaves(layer(*inputs)) if is_float(leaf)]
        return sum(jnp.sum(a * b) for a, b in zip(results, factors, strict=True))

    return jax.grad(loss, (0, 1), allow_int=True)(layer, inputs)


@each_layer_and_stack
def test_grad(row):
    """Gradients by each weight and input are the slopes of the reference in random directions.

    Weights that ``maxjax.partition`` does not train, such as running statistics, get none.
    """
    layer, weights = row.filled()
    inputs, rng = wide(list(row.inputs)), np.random.default_rng(0)
    results = [leaf for leaf in jax.tree.leaves(expected(row, weights)) if is_float(leaf)]
    factors = [rng.standard_normal(leaf.shape) for leaf in results]
    by_layer, by_inputs = gradients(
        layer, list(row.inputs), [a.astype(np.float32) for a in factors]
    )

    def loss(weights, inputs):
        results = jax.tree.leaves(row.reference(weights, *inputs))
        results = [leaf for leaf in results if is_float(leaf)]
        return sum(np.sum(a * b) for a, b in zip(results, factors, strict=True))

    def check(gradient, value, of, name):
        gradient = np.asarray(gradient, np.float64)
        for _ in range(3):
            step = 1e-5 * rng.choice([-1.0, 1.0], value.shape)
            slope = (of(value + step) - of(value - step)) / 2e-5
            found = np.sum(gradient * step) / 1e-5
            scale = max(1.0, np.linalg.norm(gradient))
            assert abs(found - slope) <= 1e-4 * scale, f"{name}: {found} is not {slope}"

    trained = maxjax.partition(layer)[0].raw_state_dict()
    for name, gradient in by_layer.raw_state_dict().items():
        if trained[name].value is not None:
            check(gradient, weights[name], lambda v, n=name: loss({**weights, n: v}, inputs), name)
        elif gradient.value.dtype != jax.dtypes.float0:
            assert not np.asarray(gradient.value).any(), name
    leaves, tree = jax.tree.flatten(inputs)
    for i, gradient in enumerate(jax.tree.leaves(by_inputs)):
        if is_float(leaves[i]):

            def of(value, i=i):
                return loss(weights, tree.unflatten([*leaves[:i], value, *leaves[i + 1 :]]))

            check(gradient, leaves[i], of, f"input {i}")


@each_layer_and_stack
def test_vmap(row):
    """A layer is mapped over inputs, and a batch of layers over a batch of inputs."""
    layers, inputs = [row.filled(seed) for seed in (0, 1)], [other_inputs(row, i) for i in (1, 2)]
    batch, both = stacked(*inputs), jax.tree.map(lambda *a: jnp.stack(a), *(m for m, _ in layers))
    run = lambda layer, inputs: layer(*inputs)

    @jax.jit
    def mapped(both, one, batch):
        return jax.vmap(run)(both, batch), jax.vmap(run, (None, 0))(one, batch)

    of_both, of_one = mapped(both, layers[0][0], batch)
    pairs = zip(layers, inputs, strict=True)
    close(of_both, stacked(*(expected(row, weights, x) for (_, weights), x in pairs)))
    close(of_one, stacked(*(expected(row, layers[0][1], x) for x in inputs)))


@each_layer_and_stack
def test_jit(row):
    """Layers of equal structure share a program; one with another attribute has its own."""
    (first, of_first), (layer, of_layer) = row.filled(0), row.filled(1)
    assert jax.tree.structure(first) == jax.tree.structure(layer)
    close(compiled(first, *row.inputs), expected(row, of_first))
    count = len(TRACES)
    found = compiled(layer, *row.inputs)
    assert len(TRACES) == count
    close(found, expected(row, of_layer))
    close(found, layer(*row.inputs))
    for value, is_new in ((1, True), (2, True), (1, False)):
        layer.attribute_of_a_user = value
        compiled.trace(layer, *row.inputs)
        count += is_new
        assert len(TRACES) == count
    del layer.attribute_of_a_user
    compiled.trace(layer, *row.inputs)
    assert len(TRACES) == count


def run_and_keep(layer, carry, *inputs):
    return carry, layer(*inputs)


@pytest.mark.sampled(20)
@each_layer
def test_stack(row):
    """Stacked layers give the results and gradients of each alone; names and values stay, there and back."""
    layers, weights = zip(*(row.filled(seed) for seed in range(3)), strict=True)
    inputs, names = [other_inputs(row, seed) for seed in range(3)], list(layers[0].raw_state_dict())
    results = [expected(row, w, x) for w, x in zip(weights, inputs, strict=True)]
    ones = [np.ones(a.shape, np.float32) for a in jax.tree.leaves(results[0]) if is_float(a)]
    alone = [gradients(m, x, ones)[0] for m, x in zip(layers, inputs, strict=True)]
    plain = nn.LayerList(map(Holder, layers))
    in_holder = list(plain[0].raw_state_dict())
    before, leaves = dict(plain.state_dict()), len(jax.tree.leaves(layers[0]))
    stack = plain.stack()
    same(stack.state_dict(), before)
    assert len(jax.tree.leaves(stack)) == leaves

    @jax.jit
    def run(stack, inputs):
        def loss(stack):
            _, found = stack.scan(jnp.zeros(()), *inputs, call=run_and_keep)
            results = [leaf for leaf in jax.tree.leaves(found) if is_float(leaf)]
            return sum(jnp.sum(a) for a in results), found

        return jax.grad(loss, has_aux=True, allow_int=True)(stack)

    by_stack, found = run(stack, stacked(*inputs))
    close(found, stacked(*results))
    for i, one in enumerate(alone):
        for name, full in zip(names, in_holder, strict=True):
            gradient = by_stack.raw_state_dict()[f"{i}.{full}"].value
            if gradient.dtype != jax.dtypes.float0:
                close(gradient, one.raw_state_dict()[name].value)
    same(stack.unstack().state_dict(), before)


@each_layer_and_stack
def test_lora(row):
    """A new adapter changes nothing; one with values adds ``scale · B @ A`` to a weight, also once it is merged."""
    layer, weights = row.filled()
    holder = Holder(layer)
    tuned = maxjax.lora.add(holder, "*", rank=2, alpha=6.0, key=jax.random.key(0))
    close(compiled(tuned, *row.inputs), expected(row, weights))
    rng, update = np.random.default_rng(0), {}
    for name, weight in tuned.raw_state_dict().items():
        if "lora_" in name:
            update[name] = rng.standard_normal(list(map(int, weight.shape))).astype(np.float32) / 4
    tuned.load_state_dict(update, strict=False)
    for name, a in update.items():
        if "_A" in name:
            base = name.replace("lora_embedding_A", "weight").replace("lora_A.weight", "weight")
            base = base.removeprefix("layer.")
            product = 3 * (wide(update[name.replace("_A", "_B")]) @ wide(a))
            is_turned = product.shape != weights[base].shape  # the weight is [in, out]
            weights[base] = weights[base] + (product.T if is_turned else product)
    for model in (tuned, maxjax.lora.merge(tuned)):
        close(compiled(model, *row.inputs), expected(row, weights))


@each_layer_and_stack
def test_quantised(row):
    """A layer with weights in blocks of 8 bits computes with the values that the gguf library reads in them.

    Activations that kernels may round to 8 bits have another program.
    """
    holder = Holder(row.filled()[0])
    model, report = maxjax.quantize(holder, "q8_0", activations="float")
    assert report.rows
    rounded, _ = maxjax.quantize(holder, "q8_0", activations="int8")
    assert jax.tree.structure(rounded) != jax.tree.structure(model)
    weights = {}
    for name, value in model.state_dict().items():
        value = np.asarray(value)
        if value.dtype == np.uint8:
            value = gguf.quants.dequantize(value, gguf.GGMLQuantizationType.Q8_0)
        weights[name.removeprefix("layer.")] = wide(value)
    close(compiled(model, *row.inputs), expected(row, weights))


@each_layer_and_stack
def test_mesh(row):
    check_mesh(row, AxisType.Auto)


@each_layer_and_stack
def test_explicit_mesh(row):
    check_mesh(row, AxisType.Explicit)


def check_mesh(row, kind):
    """A split layer gives the same results and values, and each device holds its parts of ``row.split``."""
    layer, weights = row.filled()
    before = layer.state_dict()
    mesh = maxjax.make_mesh(data=2, model=4, axis_types=kind)
    assert layer.to(mesh) is layer
    batch = NamedSharding(mesh, P("data"))
    found = compiled(layer, *jax.tree.map(lambda a: jax.device_put(a, batch), list(row.inputs)))
    close(found, expected(row, weights))
    same(layer.state_dict(), before)
    for path, leaf in jax.tree.leaves_with_path(layer):
        name = jax.tree_util.keystr(path, simple=True)
        parts = 4 if any(fnmatch.fnmatch(name, pattern) for pattern in row.split) else 1
        sizes = {shard.data.nbytes for shard in leaf.addressable_shards}
        assert sizes == {leaf.nbytes // parts}, name


def specs(inputs):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), list(inputs))


@each_layer_and_stack
def test_lazy(row, tmp_path):
    """A program that is compiled from placeholders runs the weights that are loaded later."""
    weights, path = row.filled()[1], tmp_path / "model.safetensors"
    save_file(as_declared(row, weights), path)
    layer = row.make()
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(layer))
    program = layer.compile(*specs(row.inputs))
    structure = jax.tree.structure(layer)
    if weights:
        layer.load_state_dict(maxjax.load_weights(path))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer))
    assert jax.tree.structure(layer) == structure
    close(program(*row.inputs), expected(row, weights))


@each_layer_and_stack
def test_save(row, tmp_path):
    """The safetensors library reads the names and the bytes that the layer had."""
    layer, weights = row.filled()
    maxjax.save_pretrained(layer, tmp_path)
    found, wanted = load_file(tmp_path / "model.safetensors"), as_declared(row, weights)
    same(dict(sorted(found.items())), dict(sorted(wanted.items())))


def wrapped(inputs):
    return jax.tree.map(lambda a: TensorValue(jnp.asarray(a)), list(inputs))


def is_value(x):
    return isinstance(x, TensorValue)


@each_layer_and_stack
def test_tensor_value(row):
    """TensorValues give TensorValues, of the same numbers as arrays."""
    layer, _ = row.filled()
    found = jax.tree.leaves(layer(*wrapped(row.inputs)), is_leaf=is_value)
    assert all(map(is_value, found))
    for a, b in zip(found, jax.tree.leaves(layer(*row.inputs)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@each_layer_and_stack
def test_graph(row):
    """A graph of the layer runs with weights from a registry."""
    layer, weights = row.filled()
    leaves, tree = jax.tree.flatten(list(row.inputs))
    types = [TensorType(a.dtype, a.shape, CPU) for a in leaves]
    with Graph("layer", input_types=types) as graph:
        results = layer(*tree.unflatten(one.tensor for one in graph.inputs))
        graph.output(*jax.tree.leaves(results, is_leaf=is_value))
    model = InferenceSession().load(graph, weights_registry=layer.state_dict())
    found = [one.to_numpy() for one in model.execute(*leaves)]
    close(found, jax.tree.leaves(expected(row, weights)))


@each_layer_and_stack
def test_copy(row):
    """A copy, and a pickled layer, have the values and programs of the layer, and weights of their own."""
    layer, before = row.filled()[0], row.filled()[0].state_dict()
    other, values = row.filled(1)[0].state_dict(), as_declared(row, row.filled(1)[1])
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert jax.tree.structure(twin) == jax.tree.structure(layer)
        same(twin.state_dict(), before)
        twin.load_state_dict(values)
        same(layer.state_dict(), before)
        same(twin.state_dict(), other)
