"""State dicts: what fits, what is refused, all or nothing."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax.training.train_state import TrainState

import maxjax
from maxjax.driver import Buffer
from maxjax.dtype import DType
from maxjax.errors import CheckpointMismatchError
from maxjax.graph import DeviceRef, Graph, Shape, TensorType, Weight
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.graph.weights import WeightData, load_weights
from maxjax.nn import LayerList, Linear, Module
from tests.oracles.recorded import torch

CPU = DeviceRef.CPU()


class Hold(Module):
    def __init__(self, **attrs):
        super().__init__()
        for name, value in attrs.items():
            setattr(self, name, value)

    def __call__(self, *args):
        return args


def weight(shape=(2, 3), dtype="float32", name="w", **options):
    return Weight(name, dtype, shape, CPU, **options)


def model():
    return Hold(a=Hold(w=weight()), b=Hold(w=weight()))


ONES = np.ones((2, 3), np.float32)
GOOD = {"a.w": ONES, "b.w": 2 * ONES}


class OnlyDLPack:
    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize(
    "make",
    [lambda a: a, jnp.asarray, OnlyDLPack, lambda a: WeightData.from_numpy(a, "x"), Buffer.from_numpy,
     lambda a: np.asfortranarray(a), lambda a: a.view(),
     pytest.param(lambda a: torch.tensor(a), marks=pytest.mark.oracle)],
    ids=["numpy", "jax", "dlpack", "WeightData", "Buffer", "fortran", "view", "torch"],
)  # fmt: skip
def test_kinds_of_values(make):
    m, value = model(), np.arange(6, dtype=np.float32).reshape(2, 3)
    assert m.load_state_dict({"a.w": make(value), "b.w": make(value)}) == ((), ())
    np.testing.assert_array_equal(m.state_dict()["b.w"], value)
    assert isinstance(m.b.w.value, jax.Array)


def test_numpy_values_are_copied():
    m, value = model(), np.ones((2, 3), np.float32)
    m.load_state_dict({"a.w": value, "b.w": WeightData.from_numpy(value, "x")})
    value[:] = 9
    assert float(m.a.w[0, 0]) == 1 and float(m.b.w[0, 0]) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    "make",
    [lambda a: a, jnp.asarray,
     pytest.param(lambda a: torch.tensor(a.astype(np.float32)).to(getattr(torch, a.dtype.name)),
                  marks=pytest.mark.oracle)],
    ids=["numpy", "jax", "torch"],
)  # fmt: skip
def test_narrow_floats(dtype, make):
    kind = DType.of(dtype)
    value = np.array([[0.5, 1, 2], [3, 4, -0.5]], np.float32).astype(kind.np)
    m = Hold(w=weight(dtype=kind))
    m.load_state_dict({"w": make(value)})
    np.testing.assert_array_equal(np.asarray(m.w.value), value)


def test_integers_are_no_narrow_floats():
    with pytest.raises(ValueError, match="uint8"):
        Hold(w=weight(dtype="float8_e4m3fn")).load_state_dict({"w": np.ones((2, 3), np.uint8)})


@pytest.mark.oracle
def test_torch_scalars_of_narrow_floats():
    m = Hold(w=weight(shape=(), dtype="bfloat16"))
    m.load_state_dict({"w": torch.tensor(1.5, dtype=torch.bfloat16)})
    assert float(m.w.value) == 1.5


def test_all_problems_in_one_error_and_nothing_is_loaded():
    m = model()
    with pytest.raises(ValueError) as caught:
        m.load_state_dict({"a.w": np.ones((3, 3)), "bw": ONES, "zz": ONES})
    text = str(caught.value)
    for fact in (
        "'a.w'",
        "(2, 3)",
        "(3, 3)",
        "float64",
        "Missing required weights: b.w",
        "did you mean 'bw'",
        "bw, zz",
    ):
        assert fact in text, fact
    assert m.a.w.value is None and m.a.w.name == "w"
    with pytest.raises(ValueError):
        m.load_state_dict({"a.w": ONES, "b.w": [1, 2]})
    assert m.a.w.value is None


def test_what_is_no_state_dict():
    m = model()
    for given in ("m.safetensors", None, [("w", ONES)], m):
        with pytest.raises(TypeError, match=rf"load_weights\(path\).* not {type(given).__name__}"):
            m.load_state_dict(given)


def test_keys_that_are_no_strings_are_unexpected():
    with pytest.raises(ValueError, match=r"weights: b\.w; .*did you mean 'a\.w'.* state_dict: 3$"):
        model().load_state_dict({"a.w": ONES, 3: ONES})


def test_lenient_loading_reports():
    m = model()
    with pytest.raises(ValueError, match="The value of 'b.w' is None"):
        m.load_state_dict({"a.w": ONES, "b.w": None})
    assert m.load_state_dict({"a.w": ONES, "zz": ONES, "b.w": None}, strict=False) == (
        ("b.w",),
        ("zz", "b.w"),
    )
    with pytest.raises(ValueError, match="shape"):
        m.load_state_dict({"a.w": ONES[:1]}, strict=False)
    assert m.b.w.value is None


def test_a_lazy_mapping_is_enough_and_gives_each_value_once():
    asked = []

    class Lazy(dict):
        def get(self, key, default=None):
            asked.append(key)
            return GOOD.get(key, default)

        def keys(self):
            return GOOD.keys()

    m = model()
    m.load_state_dict(Lazy())
    assert float(m.b.w[0, 0]) == 2
    assert sorted(asked) == sorted(GOOD)


# -- dtypes


def test_dtypes_are_exact_unless_a_cast_is_asked_for():
    m = Hold(w=weight(dtype="bfloat16"))
    with pytest.raises(
        ValueError, match=r"expected=DType.bfloat16, actual=DType.float32.*cast=True"
    ):
        m.load_state_dict({"w": ONES})
    m.load_state_dict({"w": ONES * 1.01171875}, cast=True)
    assert m.w.value.dtype == jnp.bfloat16 and float(m.w[0, 0]) == 1.015625
    with pytest.raises(ValueError, match="dtype"):
        m.load_state_dict({"w": ONES.astype(np.int32)}, cast=True)


def test_64_bits_are_never_narrowed_in_silence():
    ints = Hold(w=weight((2,), "int64"))
    ints.load_state_dict({"w": np.array([1, -5])})
    assert ints.w.value.dtype == jnp.int32
    with pytest.raises(ValueError, match=r"'w'.*do not fit.*jax_enable_x64"):
        ints.load_state_dict({"w": np.array([1, 2**40])})
    assert ints.w.value.tolist() == [1, -5]
    for wide, narrow in (("float64", "float32"), ("complex128", "complex64")):
        one = Hold(w=weight((2,), wide))
        with pytest.raises(ValueError, match=rf"cast=True.* {narrow}, .*jax_enable_x64"):
            one.load_state_dict({"w": np.ones(2, wide)})
        one.load_state_dict({"w": np.ones(2, wide)}, cast=True)
        assert one.w.value.dtype == narrow
    with jax.enable_x64(True):
        wide = Hold(w=weight((2,), "float64"), i=weight((1,), "int64", "i"))
        wide.load_state_dict({"w": np.ones(2), "i": np.array([2**40])})
        assert wide.w.value.dtype == jnp.float64 and int(wide.i.value[0]) == 2**40


# -- alignment, encodings, shapes (more in tests/conformance)


def test_alignment_zero_means_the_weights_own():
    raw = np.zeros(64, np.uint8)
    start = (-raw.ctypes.data) % 4 + 1
    crooked = raw[start : start + 24].view(np.float32).reshape(2, 3)
    with pytest.raises(ValueError, match="alignment=4.*weight_alignment=1"):
        Hold(w=weight()).load_state_dict({"w": crooked})
    m = Hold(w=weight())
    m.load_state_dict({"w": crooked}, weight_alignment=1)
    assert m.w.align == 1


@pytest.mark.parametrize(
    "make",
    [OnlyDLPack, lambda a: WeightData(OnlyDLPack(a), "x", "float32", (2, 3)),
     pytest.param(lambda a: torch.from_numpy(a), marks=pytest.mark.oracle)],
    ids=["dlpack", "WeightData", "torch"],
)  # fmt: skip
def test_alignment_of_arrays_of_other_libraries(make):
    raw = np.zeros(64, np.float32)
    start = (-raw.ctypes.data) % 64 // 4 + 1
    value = make(raw[start : start + 6].reshape(2, 3))
    with pytest.raises(ValueError, match="'w' .*alignment=64"):
        Hold(w=weight()).load_state_dict({"w": value}, weight_alignment=64)
    Hold(w=weight()).load_state_dict({"w": value})


def test_a_loaded_shape_is_given_back():
    m = Hold(w=weight(shape=()))
    m.load_state_dict({"w": WeightData.from_numpy(np.ones(1, np.float32), "x")})
    assert m.w.value.shape == () and m.state_dict()["w"].shape == (1,)
    assert jax.jit(lambda m: m.w + 1)(m).shape == ()


def test_the_array_of_a_weight_data_has_another_shape_than_its_metadata():
    data = WeightData.from_numpy(np.ones(1, np.float32), "x")
    for _ in range(2):  # the first load makes the shape of the metadata ()
        m = Hold(w=weight(shape=()))
        m.load_state_dict({"w": data})
        assert m.w.shape == [] and m.w.value.shape == () and m.state_dict()["w"].shape == (1,)
    flat = WeightData(np.arange(6, dtype=np.float32), "x", "float32", (2, 3))
    m = Hold(w=weight())
    m.load_state_dict({"w": flat})
    assert m.w.shape == [2, 3] and m.w.value.tolist() == [[0, 1, 2], [3, 4, 5]]
    wrong = WeightData(np.ones(4, np.float32), "x", "float32", (2, 3))
    with pytest.raises(
        ValueError, match=r"'w' says float32 and shape \(2, 3\), but .* shape \(4,\)"
    ):
        m.load_state_dict({"w": wrong})


def test_gptq_and_packed_shapes_change_the_structure():
    m = Hold(w=weight((4, 8), "uint8"))
    before = jax.tree.structure(m)
    m.load_state_dict({"w": WeightData.from_numpy(np.zeros((4, 3), np.uint8), "x")})
    assert m.w.shape == [4, 3] and jax.tree.structure(m) != before


def test_gptq_bytes_of_a_scalar_do_not_fit():
    m = Hold(w=weight((4, 8), "uint8", quantization_encoding=QuantizationEncoding.GPTQ))
    with pytest.raises(ValueError, match=r"'w' had different shape rank"):
        m.load_state_dict({"w": WeightData.from_numpy(np.array(3, np.int32), "w")})


def test_masked_arrays_are_refused():
    m, masked = Hold(w=weight()), np.ma.masked_array(ONES, mask=ONES)
    for value in (masked, WeightData.from_numpy(masked, "w")):
        with pytest.raises(ValueError, match=r"weight 'w' is a masked array: value\.filled"):
            m.load_state_dict({"w": value})
    with pytest.raises(ValueError, match=r"use x\.filled"):
        m.w.value = masked
    assert m.w.value is None


def test_a_state_dict_inside_a_graph_or_jit_has_arrays_and_leaves_arrays():
    class Scale(Module):
        def __init__(self):
            super().__init__()
            self.w, self.s = weight(), weight((), name="s")

        def __call__(self, x):
            return x * self.w * self.s

    one = WeightData.from_numpy(np.ones(1, np.float32), "x")
    lists = [LayerList(Scale() for _ in range(2)) for _ in range(4)]
    models = [m.stack() if i < 2 else m for i, m in enumerate(lists)]
    for model in models[::2]:
        model.load_state_dict({f"{i}.{n}": {"w": ONES, "s": one}[n] for i in (0, 1) for n in "ws"})
    values = []
    for model in models:
        with Graph("g", input_types=[TensorType("float32", (2, 3), CPU)]) as graph:
            values.extend(model.state_dict().values())
            graph.output(model(graph.inputs[0].tensor))
            values.extend(model.state_dict().values())
        assert len(graph.entries) in (2, 4)  # the weights of the Graph, not constants
        jax.jit(lambda model=model: values.extend(model.state_dict().values()))()
        values.extend(model.state_dict().values())
    assert not any(isinstance(value, jax.core.Tracer) for value in values)


def test_state_dict_zeros():
    m = Hold(a=weight((2, 2), "bfloat16", "a"), s=weight((), name="s"), e=weight((0, 3), name="e"))
    first = m.state_dict()
    assert {k: v.shape for k, v in first.items()} == {"a": (2, 2), "s": (), "e": (0, 3)}
    assert m.state_dict()["a"] is first["a"] and m.a.value is first["a"]
    with pytest.raises(ValueError, match="'w' was not initialized"):
        Hold(w=weight()).state_dict(auto_initialize=False)
    with pytest.raises(ValueError, match="symbolic"):
        Hold(w=weight(("n", 3))).state_dict()


# -- from files


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"a.w": ONES, "b.w": 2 * ONES, "n": np.arange(3)}, file)
    return file


def test_loading_from_a_file(path):
    m = Hold(a=Hold(w=weight()), b=Hold(w=weight()), n=weight((3,), "int64", "n"))
    assert m.load_state_dict(load_weights(path)) == ((), ())
    np.testing.assert_array_equal(m.b.w.value, 2 * ONES)
    assert m.n.value.tolist() == [0, 1, 2] and m.b.w.name == "b.w"


def test_a_cursor_gives_names_from_where_it_stands(path):
    m = Hold(w=weight())
    m.load_state_dict(load_weights(path).b)
    renamed = {name.removeprefix("b."): at for name, at in load_weights(path).b.items()}
    assert m.load_state_dict(renamed) == ((), ())
    assert float(m.w[0, 0]) == 2


def test_what_does_not_fit_names_the_file(path):
    with pytest.raises(
        CheckpointMismatchError, match=r"m\.safetensors: .*Unexpected keys in state_dict: n"
    ):
        model().load_state_dict(load_weights(path))


def test_a_cast_on_the_way_from_disk(path):
    m = Hold(w=weight(dtype="bfloat16"))
    m.load_state_dict(load_weights(path).b, cast=True)
    assert m.w.value.dtype == jnp.bfloat16
    data = {"w": load_weights(path)["b.w"].data().astype("float16")}
    n = Hold(w=weight(dtype="float16"))
    n.load_state_dict(data)
    assert n.w.value.dtype == jnp.float16 and float(n.w[0, 0]) == 2


def test_every_cast_on_the_way_rounds(tmp_path):
    file = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"w": np.full((2, 3), 1.001, np.float32)}, file)
    m = Hold(w=weight())
    m.load_state_dict({"w": load_weights(file).w.data().astype("bfloat16").astype("float32")})
    np.testing.assert_array_equal(m.w.value, ONES)


def test_a_file_that_changes_leaves_the_model_alone(path):
    m = Hold(a=Hold(w=weight()), b=Hold(w=weight()), n=weight((3,), "int64", "n"))
    m.load_state_dict(load_weights(path))
    path.write_bytes(b"\0" * path.stat().st_size)
    np.testing.assert_array_equal(m.b.w.value, 2 * ONES)


def test_looking_at_data_and_writing_to_it_leaves_the_model_alone(path):
    weights = load_weights(path)
    data = {"w": weights["b.w"].data()}
    array = data["w"].data
    m = Hold(w=weight())
    m.load_state_dict(data)
    array[:] = 9
    assert float(m.w[0, 0]) == 2


def test_shape_class_of_a_weight_data():
    data = WeightData(np.zeros((2, 3), ml_dtypes.bfloat16), "x", DType.bfloat16, Shape((2, 3)))
    m = Hold(w=weight(dtype="bfloat16"))
    m.load_state_dict({"w": data})
    assert m.w.shape == [2, 3]


def test_the_metadata_of_a_weight_data_counts(path):
    m = Hold(w=weight((3, 2)))
    values = np.arange(6, dtype=np.float32)
    for array in (values.reshape(2, 3), jnp.asarray(values), values.view(np.uint8)):
        m.load_state_dict({"w": WeightData(array, "w", DType.float32, (3, 2))})
        assert m.w.value.shape == (3, 2) and m.w.value.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"'w' says .* shape \(3, 2\), but its data is .* \(4,\)"):
        m.load_state_dict({"w": WeightData(values[:4], "w", DType.float32, (3, 2))})
    # The same where the metadata of a tensor in a file is changed.
    for dtype, shape in ((DType.float32, (3, 2)), (DType.int32, (2, 3))):
        data = load_weights(path)["a.w"].data()
        assert not data.is_loaded
        data.dtype, data.shape = dtype, shape
        n = Hold(w=weight(shape, dtype))
        n.load_state_dict({"w": data})
        want = GOOD["a.w"].view(dtype.np).reshape(shape)
        np.testing.assert_array_equal(n.w.value, want, strict=True)


def test_a_model_is_the_params_of_flax_s_train_state():
    model = maxjax.init(Linear(3, 2, "float32"), jax.random.key(0))
    assert "weight" in model and "bias" not in model and 1 not in model
    state = TrainState.create(apply_fn=None, params=model, tx=optax.sgd(0.5))
    x = jnp.ones((4, 3))
    gradients = jax.grad(lambda m: m(x).sum())(state.params)
    moved = state.apply_gradients(grads=gradients)
    want = np.asarray(model.weight.value) - 0.5 * np.asarray(gradients.weight.value)
    np.testing.assert_allclose(moved.params.weight.value, want)
    assert moved.step == 1


def test_a_module_with_items_contains_them():
    class Blocks(Module):
        def __init__(self):
            super().__init__()
            self.blocks = LayerList([Linear(2, 2, "float32")])

        def __iter__(self):
            return iter(self.blocks)

        def __call__(self, x):
            return x

    model = Blocks()
    assert model.blocks[0] in model and Linear(2, 2, "float32") not in model
    assert "blocks.0.weight" in model and "0.weight" not in model and [1] not in model
