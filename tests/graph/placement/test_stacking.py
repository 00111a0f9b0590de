"""Stacking and unstacking of arrays: bit for bit, placed as asked, with nothing beside the result."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax import make_mesh
from maxjax.graph.placement import stacking
from maxjax.graph.placement.stacking import stack, unstack

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
DTYPES = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int8 uint8 int32 bool".split()


def layers(dtype, n=3, shape=(8, 16)):
    """Arrays with every bit pattern a dtype has, NaNs that signal among them."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return [rng.integers(0, 2, shape).astype(bool) for _ in range(n)]
    word = WIDTHS[kind.itemsize]
    made = [rng.integers(0, np.iinfo(word).max, shape, word, endpoint=True) for _ in range(n)]
    if dtype == "bfloat16":
        made[0][0, :2] = 0x7F81, 0xFF81  # quiet only once they were float32
    if dtype == "float16":
        made[0][0, :2] = 0x7C01, 0xFC01
    if dtype == "float32":
        made[0][0, :2] = 0x7F800001, 0xFF800001
    return [one.view(kind) for one in made]


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_for_bit(dtype):
    parts = layers(dtype)
    made = stack([jnp.asarray(part) for part in parts], None)
    assert made.shape == (3, 8, 16) and made.dtype == parts[0].dtype
    assert bits(made) == bits(np.stack(parts))
    assert [bits(part) for part in unstack(made, None)] == [bits(part) for part in parts]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, ("a", "b")), P("b", "a")], ids=str)
def test_on_a_mesh(kind, spec):
    mesh = make_mesh(a=2, b=4, axis_types=kind)
    one, all_of_them = NamedSharding(mesh, spec), NamedSharding(mesh, P(None, *spec))
    parts = layers("bfloat16")
    made = stack([jax.device_put(part, one) for part in parts], all_of_them)
    assert made.sharding.is_equivalent_to(all_of_them, 3) and bits(made) == bits(np.stack(parts))
    for part, want in zip(unstack(made, one), parts, strict=True):
        assert part.sharding.is_equivalent_to(one, 2) and bits(part) == bits(want)


def test_from_elsewhere():
    """Values that lie elsewhere than is asked for, as after ``jax.tree.map``."""
    where = NamedSharding(make_mesh(model=4), P(None, "model"))
    parts = [jnp.full(4, i) for i in range(2)]
    made = stack(parts, where)
    assert made.sharding == where and made.tolist() == [[0] * 4, [1] * 4]
    there = NamedSharding(make_mesh(model=2), P("model"))
    assert [part.sharding for part in unstack(made, there)] == [there] * 2


def test_an_uncommitted_array_stays_so():
    made = stack([jnp.ones(2), jnp.ones(2)], None)
    assert not made.committed and not unstack(made, None)[0].committed


def test_under_a_trace_it_has_a_derivative():
    gradient = jax.grad(lambda x: (stack([x, 2 * x], None) ** 2).sum() + unstack(x, None)[0])
    np.testing.assert_allclose(gradient(jnp.array([1.0, 3.0])), [11.0, 30.0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_needed_beside_operands_and_result(dtype):
    where = NamedSharding(make_mesh(model=4), P("model"))
    one = jax.ShapeDtypeStruct((64, 64), dtype, sharding=where)
    every = NamedSharding(where.mesh, P(None, "model"))
    stacked = jax.ShapeDtypeStruct((5, 64, 64), dtype, sharding=every)
    size = 5 * 64 * 64 * np.dtype(stacked.dtype).itemsize // 4
    for program, operands in (
        (stacking._stack_program(every), [one] * 5),
        (stacking._unstack_program(where, 5), [stacked]),
    ):
        memory = program.lower(*operands).compile().memory_analysis()
        assert memory.argument_size_in_bytes == size and memory.temp_size_in_bytes == 0
        assert size <= memory.output_size_in_bytes < size + 1024  # and a table of results
