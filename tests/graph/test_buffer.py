"""BufferValue: stores in a Graph are outputs of its program; elsewhere the array in it is replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Graph,
    ProfileScopeColor,
    TensorType,
    Type,
    Value,
    ops,
)

CPU = DeviceRef.CPU()


def test_a_program_takes_a_cache_and_gives_the_next_one_back():
    kinds = [
        TensorType(DType.float32, ("n",), CPU), BufferType(DType.float32, (4,), CPU),
        TensorType(DType.int32, (), CPU), BufferType(DType.int32, (2,), CPU),
    ]  # fmt: skip
    with Graph("step", input_types=kinds) as graph:
        x, cache, at, unused = graph.inputs
        before = ops.buffer_load(cache)
        cache[at] = ops.sum(x)[0]
        ops.buffer_store_slice(cache, cache.load()[:2] * 2, [slice(0, 2)])
        graph.output(before)
        assert unused.buffer.type == kinds[3] and x.tensor.type == kinds[0]
    assert graph.output_types == [kind.as_tensor() for kind in (kinds[1], kinds[1], kinds[3])]
    model = InferenceSession().load(graph)
    rows, cache = np.ones(3, np.float32), np.arange(4, dtype=np.float32)
    for step in (1, 3):
        old, new, last = model.execute(rows, cache, np.int32(step), np.array([5, 6], np.int32))
        np.testing.assert_array_equal(old.to_numpy(), cache)
        want = np.asarray(cache).copy()
        want[step] = 3
        want[:2] *= 2
        np.testing.assert_array_equal(new.to_numpy(), want)
        assert last.to_numpy().tolist() == [5, 6]
        cache = new.value


def test_stores_outside_of_a_graph():
    buffer = ops.buffer_create(BufferType("float32", (2, 2), CPU))
    first = buffer.load()
    ops.buffer_store(buffer, jnp.ones((2, 2)))
    buffer[0, 1] = 3
    assert first.to_numpy().tolist() == [[0, 0], [0, 0]]
    assert buffer[...].to_numpy().tolist() == [[1, 3], [1, 1]] and buffer.rank == 2

    @jax.jit
    def step(x):
        inner = BufferValue(x)
        inner[0] = x[1]
        return inner.value

    assert step(jnp.arange(2.0)).tolist() == [1, 1]


def test_what_a_buffer_does_not_store():
    buffer = BufferValue(jnp.zeros(3))
    with pytest.raises(ValueError, match="float32.*int32"):
        buffer.store(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"\[2\].*\[3\]"):
        buffer.store(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"shape \[3\] where it has \[2\]"):
        buffer[:2] = jnp.zeros(3)
    for inside in (jax.jit, lambda f: lambda x: ops.cond(x[0] > 0, None, f, lambda: None)):
        with pytest.raises(NotImplementedError, match="return the new value"):
            jax.jit(inside(lambda *_: buffer.store(jnp.ones(3) + 1)))(jnp.ones(1))
    assert buffer.load().to_numpy().tolist() == [0, 0, 0]


def test_the_types_of_buffers_are_others_than_those_of_tensors():
    tensor, buffer = TensorType("int8", ("n", 2), CPU), BufferType("int8", ("n", 2), CPU)
    assert tensor != buffer and tensor.as_buffer() == buffer and buffer.as_tensor() == tensor
    assert isinstance(buffer, Type) and not isinstance(buffer, TensorType)
    assert buffer.cast("int32") == BufferType("int32", ("n", 2), CPU)
    assert len({tensor, buffer, tensor.as_buffer()}) == 2


def test_sizes_of_a_type():
    assert TensorType("int8", (2, 0), CPU).num_elements() == 0
    with pytest.raises(RuntimeError, match="symbolic"):
        TensorType("int8", (2, "n"), CPU).num_elements()
    with pytest.raises(TypeError, match="negative"):
        TensorType("int8", (2, -1), CPU)


def test_scopes_are_named_in_the_program():
    with Graph("scopes", input_types=[TensorType(DType.float32, (2,), CPU)]) as graph:
        with graph.profile_scope("outer", color=ProfileScopeColor.ORANGE):
            y = ops.exp(graph.inputs[0])
        graph.output(y)
    assert graph.jaxpr is not None
    stacks = [str(eqn.source_info.name_stack) for eqn in graph.jaxpr.jaxpr.eqns]
    assert stacks == ["outer"]


def test_a_value_is_a_tensor_or_a_buffer():
    """As in MAX, whose functions take ``Sequence[Value[Any]]`` and narrow each to what they expect."""
    types = [TensorType("float32", (2,), CPU), BufferType("float32", (2,), CPU)]
    with Graph("g", input_types=types) as g:
        tensor, buffer = g.inputs
        assert tensor.tensor is tensor and buffer.buffer is buffer
        with pytest.raises(TypeError, match="not a BufferValue, was 'TensorValue'"):
            _ = tensor.buffer
        with pytest.raises(TypeError, match="not a TensorValue, was 'BufferValue'"):
            _ = buffer.tensor
        g.output()
    assert all(isinstance(value, Value) for value in (tensor, buffer))
    assert (Value[TensorType] | None) != Value
