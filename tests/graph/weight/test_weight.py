"""Weight: lazy and loaded, as an array, as a pytree."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Shape, TensorValue, Weight
from maxjax.graph.weights import WeightData

CPU = DeviceRef.CPU()
A = np.linspace(0.1, 0.9, 9, dtype=np.float32).reshape(3, 3)
B = np.linspace(0.5, 0.7, 9, dtype=np.float32).reshape(3, 3)

ONE = """abs absolute acos acosh all amax amin angle any arccos arcsin arcsinh arctan argmax argmin argsort
around asin atan atleast_1d atleast_2d atleast_3d average cbrt ceil conj copy copysign cos cosh
count_nonzero cumprod cumsum deg2rad degrees diag diagflat diagonal diff ediff1d exp exp2
expand_dims expm1 fabs fix flatnonzero flip fliplr flipud floor gradient i0 imag isfinite isinf
isnan isneginf isposinf isreal log log10 log1p log2 matrix_transpose max mean median min nan_to_num
nanmax nanmean nanmin nansum nanvar ndim negative nonzero ones_like permute_dims positive prod ptp
rad2deg radians ravel real reciprocal repeat reshape rint roll rot90 round shape sign signbit sin
sinc sinh size sort sqrt square squeeze std sum swapaxes tan tanh tile trace transpose trapezoid
tril triu trunc unique var zeros_like""".split()
TWO = """add allclose append arctan2 array_equal array_equiv atan2 column_stack concatenate convolve copysign
correlate cross divide divmod dot equal float_power floor_divide fmax fmin fmod full_like greater
greater_equal heaviside hstack hypot inner interp isclose kron less less_equal logaddexp logaddexp2
matmul maximum minimum mod multiply nextafter not_equal outer polyadd power remainder searchsorted
stack subtract tensordot true_divide vdot vecdot vstack where""".split()
# One of those that read their operand in the same way.
SOME = """abs angle argmax argsort around atleast_2d average copy copysign count_nonzero cumsum diag diff
ediff1d exp expand_dims flip gradient i0 imag isfinite isneginf matrix_transpose max mean median
nan_to_num nansum nanvar ndim nonzero ones_like permute_dims ptp ravel repeat reshape roll rot90
round shape sign sinc size sort squeeze std sum swapaxes tile trace transpose trapezoid tril
unique var zeros_like""".split()
EXTRA = {
    "expand_dims": (0,), "repeat": (2,), "reshape": ((9,),), "roll": (1,), "swapaxes": (0, 1), "tile": (2,),
    "permute_dims": ((1, 0),), "full_like": (2.0,),
}  # fmt: skip
FLAT = {"convolve", "correlate", "interp", "polyadd", "searchsorted", "ediff1d", "trapezoid"}
LISTS = {"column_stack", "concatenate", "hstack", "stack", "vstack"}


def loaded(array=A, name="w"):
    w = Weight(name, DType.of(array.dtype), array.shape, CPU)
    w.value = jnp.asarray(array)
    return w


def _same(got, want):
    jax.tree.map(
        lambda g, w: np.testing.assert_array_equal(np.asarray(g), np.asarray(w)), got, want
    )


@pytest.mark.sampled(57)
@pytest.mark.parametrize("name", [n for n in ONE if hasattr(jnp, n)])
def test_jnp_functions_of_one_array(name):
    fn, extra = getattr(jnp, name), EXTRA.get(name, ())
    array = A.ravel() if name in FLAT else A
    extra = (A,) if name == "copysign" else extra
    _same(fn(loaded(array), *extra), fn(jnp.asarray(array), *extra))


@pytest.mark.sampled(35)
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", [n for n in TWO if hasattr(jnp, n)])
def test_jnp_functions_of_two_arrays(name, side):
    fn = getattr(jnp, name)
    a, b = (A.ravel(), B.ravel()) if name in FLAT else (A, B)
    arrays = [jnp.asarray(a), jnp.asarray(b)]
    ours = [loaded(a) if side != "right" else arrays[0], loaded(b) if side != "left" else arrays[1]]
    if name == "where":
        _same(fn(arrays[0] > 0.5, *ours), fn(arrays[0] > 0.5, *arrays))
    elif name == "interp":
        _same(fn(arrays[0], *ours), fn(arrays[0], *arrays))
    elif name in LISTS:
        _same(fn(ours), fn(arrays))
    else:
        _same(fn(*ours), fn(*arrays))


def test_the_lists_of_functions_are_of_jnp():
    known = [n for n in ONE + TWO if hasattr(jnp, n)]
    assert len(known) > 150


OPERATORS = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "**": lambda a, b: a**b, "@": lambda a, b: a @ b,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip


@pytest.mark.parametrize("op", OPERATORS)
def test_operators(op):
    fn = OPERATORS[op]
    want = np.asarray(fn(jnp.asarray(A), jnp.asarray(B)))
    for got in (
        fn(loaded(), jnp.asarray(B)),
        fn(jnp.asarray(A), loaded(B)),
        fn(A, loaded(B)),
        fn(loaded(), B),
    ):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want)
    if op not in ("==", "!="):  # identity between Weights
        np.testing.assert_array_equal(fn(loaded(), loaded(B)), want)
    if op != "@":
        np.testing.assert_array_equal(fn(loaded(), 0.5), np.asarray(fn(jnp.asarray(A), 0.5)))
        np.testing.assert_array_equal(fn(0.5, loaded()), np.asarray(fn(0.5, jnp.asarray(A))))


def test_unary_operators_and_indexing():
    w = loaded()
    np.testing.assert_array_equal(-w, -A)
    np.testing.assert_array_equal(+w, A)
    np.testing.assert_array_equal(abs(-w), A)
    np.testing.assert_array_equal(w[1], A[1])
    np.testing.assert_array_equal(w[:, 1:], A[:, 1:])
    np.testing.assert_array_equal(w.at[0, 0].set(5.0)[0, 0], 5.0)
    np.testing.assert_array_equal(w.reshape(9), A.ravel())
    np.testing.assert_array_equal(np.asarray(w), A)
    assert w.astype("bfloat16").dtype == jnp.bfloat16
    assert (w.rank, w.ndim, w.size) == (2, 2, 9)
    with pytest.raises(TypeError):
        iter(w)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1,
        lambda w: 1 - w,
        lambda w: w.T,
        lambda w: w[0],
        np.asarray,
        np.sin,
        lambda w: w == 2.0,
    ],
)
def test_without_a_value_it_raises_and_names_itself(use):
    with pytest.raises(ValueError, match="'blk.w' has no value.*load_state_dict"):
        use(Weight("blk.w", "float32", (2, 3), CPU))


def test_compiled_jnp_functions_see_the_placeholder():
    """They flatten their arguments as jax.jit does, so the error is JAX's own."""
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        jnp.sin(Weight("blk.w", "float32", (2, 3), CPU))


def test_shape_dtype_and_words():
    w = Weight("w", "float32", (2, 3), CPU)
    assert w.shape == [2, 3] and isinstance(w.shape, Shape) and w.shape is not w.shape
    assert jnp.zeros(w.shape, w.dtype).shape == (
        2,
        3,
    )  # D2: a Shape and a DType go where jnp takes them
    assert w.value is None and w.dtype is DType.float32
    w.value = jnp.ones((2, 3))
    w.value = w.value * 2
    assert float(w[0, 0]) == 2
    w.value = None
    assert w.value is None and w.shape == [2, 3]


def test_value_of_another_shape_or_kind():
    w = Weight("w", "float32", (2, 3), CPU)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        w.value = jnp.ones((3, 2))
    with pytest.raises(TypeError, match="float"):
        w.value = 1.0
    assert w.value is None


def test_a_value_has_the_known_sizes_of_a_symbolic_shape():
    w = Weight("w", "float32", ("n", 3), CPU)
    for shape in ((2,), (2, 4), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"'w' must have shape \('n', 3\), not"):
            w.value = jnp.ones(shape)
    assert w.value is None
    w.value = jnp.ones((5, 3))
    assert w.value.shape == (5, 3) and w.shape == ["n", 3]


def test_value_of_another_dtype_is_its_dtype():
    w = Weight("w", "float32", (2,), CPU)
    w.value = jnp.ones(2, jnp.bfloat16)
    assert w.dtype is DType.bfloat16
    w.value = None
    assert w.dtype is DType.bfloat16


def test_a_numpy_value_is_copied():
    array = np.ones(1024, np.float32)
    w = Weight("w", "float32", (1024,), CPU)
    w.value = array
    array[:] = 7
    assert float(w[0]) == 1


def test_the_value_is_an_array_of_jax():
    """What is like an array is converted; it would fail in the next jax.jit, or keep a file open."""
    w, other = loaded(), loaded(A + 1)
    for like in (
        TensorValue(other.value),
        other,
        WeightData(np.asarray(other), "w", DType.float32, A.shape),
    ):
        w.value = like
        assert isinstance(w.value, jax.Array)
        np.testing.assert_array_equal(w.value, other.value)
    with pytest.raises(TypeError, match="load_state_dict"):
        w.value = memoryview(A)


def test_identity_and_hash():
    v, w = loaded(), loaded()
    assert v == v and v != w and w not in [v] and len({v, w, v}) == 2
    assert (v == "text") is False and bool(v)
    assert (v == A).all()


def test_copies_are_independent():
    w = loaded()
    for clone in (copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        clone.name = "other"
        clone.value = jnp.zeros((3, 3))
        assert w.name == "w" and float(w[0, 1]) > 0


def test_it_is_a_pytree_of_one_leaf():
    w = loaded()
    doubled = jax.tree.map(lambda a: 2 * a, w)
    assert isinstance(doubled, Weight) and doubled.name == "w"
    np.testing.assert_array_equal(doubled, 2 * A)
    assert jax.tree.structure(w) == jax.tree.structure(Weight("w", "float32", (3, 3), CPU))
    assert jax.tree.structure(w) != jax.tree.structure(Weight("v", "float32", (3, 3), CPU))
    grad = jax.jit(jax.grad(lambda w: (w * w).sum()))(w)
    np.testing.assert_allclose(grad, 2 * A)
    lazy = Weight("w", "float32", (3, 3), CPU)
    assert jax.eval_shape(lambda w: w.T.array() @ w, lazy).shape == (3, 3)


def test_methods_of_arrays():
    w, array = loaded(), jnp.asarray(A)
    for use in (
        lambda x: x.std(axis=0),
        lambda x: x.argmin(1),
        lambda x: x.cumsum(0),
        lambda x: x.round(1),
        lambda x: x.mT,
    ):
        _same(use(w), use(array))
    assert w.tolist() == array.tolist() and w.devices() == array.devices()
    lazy = Weight("w", "bfloat16", (4, 3), CPU)
    assert (len(lazy), lazy.itemsize, lazy.nbytes, bool(Weight("e", "int8", (0,), CPU))) == (
        4,
        2,
        24,
        True,
    )
    with pytest.raises(TypeError, match="without axes"):
        len(loaded(A[0, 0]))


def test_bad_declarations():
    with pytest.raises(ValueError, match=r"'w' has a negative size: its shape is \[3, -1\]"):
        Weight("w", "float32", (3, -1), CPU)
    with pytest.raises(TypeError, match="shape"):
        Weight("w", DType.float32)
    with pytest.raises(TypeError):
        Weight("w", DType.float32, 3, CPU)
    with pytest.raises((ValueError, KeyError, TypeError)):
        Weight("w", "no such dtype", (3,), CPU)


def test_a_value_of_either_byte_order_and_no_text_can_be_assigned():
    weight = Weight("w", DType.float32, [2], DeviceRef.CPU())
    weight.value = np.array([1, 2], ">f4")
    assert np.array_equal(weight.value, [1, 2]) and weight.value.dtype == np.float32
    with pytest.raises(ValueError, match="unsupported NumPy dtype: object"):
        weight.value = np.array([1, 2], object)


def test_models_of_equal_structure_keep_their_own_records():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    one.weight.original_dtype_and_shape = (DType.bfloat16, Shape([9]))
    jax.tree.structure(one)  # the definition that both share
    again = jax.tree.map(lambda leaf: leaf, other)
    assert again.weight.original_dtype_and_shape == (DType.float32, [3, 3])


def test_data_of_a_checkpoint_do_not_return_after_another_value():
    weight = Weight("w", "float32", (2,), CPU)
    weight.source = np.ones(2, np.float32)
    weight.value = jnp.zeros(2)
    weight.value = None
    with pytest.raises(ValueError, match="'w' has no value"):
        weight.array()


def test_a_copy_keeps_the_sharding():
    weight = nn.Linear(4, 4).to(maxjax.make_mesh(model=1)).weight
    assert copy.copy(weight).sharding == weight.sharding is not None
