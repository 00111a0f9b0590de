"""Collectives over lists: values, devices of eager results, and what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.graph import BufferValue, DeviceRef, TensorValue, ops
from maxjax.nn.comm import Allreduce, Signals
from maxjax.nn.data_parallelism import split_batch, split_batch_replicated

N = 4
ROWS = np.arange(N * 6, dtype=np.float32).reshape(N, 6)


def spread():
    return [jax.device_put(row, device) for row, device in zip(ROWS, jax.devices(), strict=False)]


def check(results, wanted, there):
    for got, want, one in zip(results, wanted, there, strict=True):
        assert isinstance(got, TensorValue)
        np.testing.assert_array_equal(got.to_numpy(), want)
        assert got.value.devices() == one.devices()


def test_each_device_has_its_result():
    xs = spread()
    buffers = [BufferValue(x) for x in xs]
    total = ROWS.sum(axis=0)
    check(ops.allreduce.sum(xs, buffers), [total] * N, xs)
    check(Allreduce(N)(xs, buffers), [total] * N, xs)
    halves = [ROWS[:2].sum(0)] * 2 + [ROWS[2:].sum(0)] * 2
    check(ops.allreduce.sum(xs, buffers, group_size=2), halves, xs)
    check(ops.reducescatter.sum(xs, buffers), np.array_split(total, N), xs)
    check(ops.allgather(xs, buffers), [ROWS.reshape(-1)] * N, xs)
    check(ops.distributed_broadcast(xs[1], buffers), [ROWS[1]] * N, xs)


def test_shard_and_stack():
    xs, devices = [ROWS, 10 * ROWS], [DeviceRef.CPU(i) for i in range(2)]
    wanted = [np.stack([x[:, 3 * i :][:, :3] for x in xs]) for i in range(2)]
    check(ops.shard_and_stack(map(jnp.asarray, xs), devices, axis=-1), wanted, spread()[:2])
    for wrong, of, axis, error, says in (
        ([], devices, 0, ValueError, "at least one tensor"),
        (xs, [], 0, ValueError, "at least one device"),
        (xs, devices, 2, IndexError, "shard_and_stack: axis 2"),
        (xs, [*devices, devices[0]], 0, ValueError, "not divisible by 3"),
        ([ROWS, ROWS[:2]], devices, 0, ValueError, "shape"),
    ):
        with pytest.raises(error, match=says):
            ops.shard_and_stack(wrong, of, axis)


def test_in_a_program_a_list_is_as_many_copies():
    got = jax.jit(lambda xs: [x.value for x in ops.allreduce.sum(xs)])(list(ROWS))
    np.testing.assert_array_equal(np.stack(got), np.tile(ROWS.sum(0), (N, 1)))


def test_collectives_that_do_not_fit():
    xs = list(ROWS)
    with pytest.raises(ValueError, match="one signal buffer for each tensor, not 1 for 4"):
        ops.allreduce.sum(xs, [BufferValue(xs[0])])
    with pytest.raises(ValueError, match="group_size that divides .*4, not 3"):
        ops.allgather(xs, group_size=3)
    for other in (xs[1].astype(np.float16), xs[1][None]):
        with pytest.raises(ValueError, match="one size along all axes but 0"):
            ops.allgather([xs[0], other])
    with pytest.raises(ValueError, match="tensors of one dtype and shape"):
        ops.allreduce.sum([xs[0], xs[1][:2]])
    with pytest.raises(ValueError, match="at least one"):
        ops.allreduce.sum([])
    with pytest.raises(ValueError, match="axis 1 is out of range"):
        ops.reducescatter.sum(xs, axis=1)
    with pytest.raises(ValueError, match="at least one device"):
        Allreduce(0)


def test_signals_are_empty():
    signals = Signals([DeviceRef.CPU(), DeviceRef.CPU(1)])
    assert [buffer.num_elements for buffer in signals.buffers()] == [0, 0]
    assert [int(kind.shape[0]) for kind in signals.input_types()] == [0, 0]


def test_batches_are_split_by_sequences():
    tokens, offsets = jnp.arange(10), jnp.array([0, 3, 4, 8, 10])
    devices = [DeviceRef.CPU(i) for i in range(2)]
    one = split_batch(devices, tokens, offsets, jnp.array([0, 1, 4]))
    four = split_batch_replicated(
        devices * 2, [tokens] * 4, [offsets] * 4, offsets, jnp.array([0, 1, 4]), group_size=2
    )
    for inputs, parts in (one, tuple(x[::2] for x in four)):
        assert [x.to_numpy().tolist() for x in inputs] == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
        assert [x.to_numpy().tolist() for x in parts] == [[0, 3], [0, 1, 5, 7]]
    assert split_batch(devices[:1], tokens, offsets, None)[0][0].value is tokens
    with pytest.raises(NotImplementedError, match="split it before"):
        jax.jit(lambda s: split_batch(devices, tokens, offsets, s)[0][0].value)(
            jnp.array([0, 1, 4])
        )
    with pytest.raises(ValueError, match="2 parts need 3 numbers"):
        split_batch(devices, tokens, offsets, jnp.array([0, 4]))
