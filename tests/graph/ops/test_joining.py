"""Putting together, taking apart and repeating, against torch and NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from tests.graph.ops.oracle import check, check_numpy, normal
from tests.oracles.recorded import torch

CPU = DeviceRef.CPU()

X, Y = normal(2, 3), normal(2, 3, seed=1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_and_stack(axis):
    check(lambda x, y: ops.concat([x, y], axis), lambda x, y: torch.cat([x, y], axis), X, Y)
    check(lambda x, y: ops.stack((x, y), axis=axis), lambda x, y: torch.stack((x, y), axis), X, Y)


def test_along_the_first_axis_by_default():
    check(lambda x, y: ops.concat([x, y]), lambda x, y: torch.cat([x, y]), X, normal(1, 3))
    check(lambda x: ops.stack([x]), lambda x: x[None], X)
    check(lambda x: ops.split(x, [1, 1]), lambda x: x.split([1, 1]), X)
    check(lambda x: ops.chunk(x, 2), lambda x: x.chunk(2), X)


def test_split_and_chunk():
    check(lambda x: ops.split(x, [1, 2], axis=1), lambda x: x.split([1, 2], 1), X)
    check(lambda x: ops.split(x, [Dim(3), 0], -1), lambda x: x.split([3, 0], -1), X)
    check(lambda x: ops.chunk(x, 3, axis=-1), lambda x: x.chunk(3, -1), X)
    assert isinstance(ops.split(X, [2]), list)


def test_tile_and_repeat():
    check(lambda x: ops.tile(x, [2, 1]), lambda x: x.tile(2, 1), X)
    check(lambda x: ops.tile(x, (1, Dim(3))), lambda x: x.tile(1, 3), X)
    check(lambda x: ops.repeat_interleave(x, 2, axis=1), lambda x: x.repeat_interleave(2, 1), X)
    check(lambda x: ops.repeat_interleave(x, 2, -2), lambda x: x.repeat_interleave(2, 0), X)
    check(lambda x: ops.repeat_interleave(x, 3), lambda x: x.repeat_interleave(3), X)


@pytest.mark.parametrize("out_dim", [3, "repeated"])
def test_repeats_in_a_tensor(out_dim):
    counts = np.array([1, 2])
    got = ops.repeat_interleave(X, counts, axis=0, out_dim=out_dim)
    np.testing.assert_array_equal(got, np.repeat(X, counts, 0))
    got = ops.repeat_interleave(X, [1, 2], axis=0, out_dim=out_dim)
    np.testing.assert_array_equal(got, np.repeat(X, counts, 0))
    got = ops.repeat_interleave(X, Dim(2), axis=0)
    np.testing.assert_array_equal(got, np.repeat(X, 2, 0))
    if out_dim == 3:
        got = jax.jit(lambda x, n: ops.repeat_interleave(x, n, 0, 3))(X, counts)
        np.testing.assert_array_equal(got, np.repeat(X, counts, 0))


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_pad_with_what_is_there(mode):
    check_numpy(
        lambda x: ops.pad(x, [1, 0, 2, 1], mode=mode),
        lambda x: np.pad(x, ((1, 0), (2, 1)), mode),
        X,
    )


def test_pad_with_a_value():
    F = torch.nn.functional
    check(lambda x: ops.pad(x, [1, 0, 0, 2]), lambda x: F.pad(x, (0, 2, 1, 0)), X)
    check(lambda x: ops.pad(x, [1, 0, 0, 2], value=7), lambda x: F.pad(x, (0, 2, 1, 0), value=7), X)
    check_numpy(
        lambda x: ops.pad(x, [0, 1], value=3), lambda x: np.append(x, np.int32(3)), np.int32([1, 2])
    )


@pytest.mark.parametrize(
    ("indices", "key"),
    [
        ([slice(None), 1], np.s_[:, 1]),
        ([..., slice(0, 2)], np.s_[..., 0:2]),
        ([(slice(0, 1), 1), slice(None)], np.s_[0:1]),
        ([None, slice(None), slice(0, 3, 2)], np.s_[None, :, 0:3:2]),
        ([-1, slice(-2, None)], np.s_[-1, -2:]),
        ([slice(0, Dim(1))], np.s_[0:1]),
    ],
)
def test_slice_tensor(indices, key):
    check(lambda x: ops.slice_tensor(x, indices), lambda x: x[key], X)


def test_slice_at_a_tensor():
    np.testing.assert_array_equal(jax.jit(lambda x, i: ops.slice_tensor(x, [i]))(X, 1), X[1])


@pytest.mark.parametrize(
    ("op", "error", "says"),
    [
        (lambda x: ops.concat([]), ValueError, "at least one"),
        (lambda x: ops.concat([x, x[:, :2]]), ValueError, r"\(2, 3\), \(2, 2\)"),
        (lambda x: ops.concat([x, x[0]]), ValueError, "same rank"),
        (lambda x: ops.concat([x, x.astype("float16")]), ValueError, "float32, float16"),
        (lambda x: ops.concat([x, x], 2), IndexError, "axis 2"),
        (lambda x: ops.stack([]), ValueError, "at least one"),
        (lambda x: ops.stack([x, x[:, :2]]), ValueError, r"\(2, 3\), \(2, 2\)"),
        (lambda x: ops.stack([x, x.astype("float16")]), ValueError, "one dtype"),
        (lambda x: ops.stack([x, x], 3), IndexError, "axis 3"),
        (lambda x: ops.split(x, [1, 1], 1), ValueError, r"\[1, 1\] must add up to the 3"),
        (lambda x: ops.split(x, [4, -1], 1), ValueError, "negative"),
        (lambda x: ops.split(x, [3], 2), IndexError, "axis 2"),
        (lambda x: ops.chunk(x, 2, 1), ValueError, "not divisible by 2"),
        (lambda x: ops.chunk(x, 0), ValueError, "not divisible by 0"),
        (lambda x: ops.chunk(x, 1, 4), IndexError, "axis 4"),
        (lambda x: ops.tile(x, [2]), ValueError, "need 2 numbers"),
        (lambda x: ops.tile(x, [0, 1]), ValueError, "positive"),
        (lambda x: ops.repeat_interleave(x, 0, 0), ValueError, "positive"),
        (lambda x: ops.repeat_interleave(x, 2, 3), ValueError, "axis 3"),
        (lambda x: ops.repeat_interleave(x, jnp.array([1, 2]), 0), ValueError, "out_dim"),
        (lambda x: ops.pad(x, [1, 0]), ValueError, "two numbers"),
        (lambda x: ops.pad(x, [-1, 0, 0, 0]), ValueError, "negative"),
        (lambda x: ops.pad(x, [1, 0, 0, 0], "wrap"), ValueError, "'wrap'"),
        (lambda x: ops.slice_tensor(x, [slice(None, None, -1)]), ValueError, "step"),
        (lambda x: ops.slice_tensor(x, [5]), ValueError, "5 is outside axis 0"),
        (lambda x: ops.slice_tensor(x, [..., 3]), ValueError, "3 is outside axis 1"),
        (lambda x: ops.slice_tensor(x, [slice(0, 5)]), ValueError, "5 is outside axis 0"),
        (lambda x: ops.slice_tensor(x, [slice(0, Dim(5))]), ValueError, "5 is outside axis 0"),
        (lambda x: ops.slice_tensor(x, [..., Dim(3)]), ValueError, "3 is outside axis 1"),
        (lambda x: ops.slice_tensor(x, [0, 0, 0]), ValueError, "3 indices"),
        (lambda x: ops.slice_tensor(x, [jnp.array([1, 0])]), ValueError, "scalar"),
    ],
)
def test_what_does_not_go(op, error, says):
    for function in (op, jax.jit(op)):
        with pytest.raises(error, match=says):
            function(jnp.asarray(X))


def test_a_value_in_a_list_is_enough():
    assert isinstance(ops.concat([X, TensorValue(jnp.asarray(Y))]), TensorValue)
    assert not isinstance(ops.concat([X, Y]), TensorValue)
    for many in (iter([TensorValue(jnp.asarray(X))]), {0: TensorValue(jnp.asarray(X))}.values()):
        assert isinstance(ops.concat(many), TensorValue)


def test_repeats_of_sequences_in_a_ragged_batch():
    """As in MAX's Llama 4: one number for each sequence, for all of its tokens, whose count is a named size."""

    def positions(x, offsets, cached):
        total = x.shape[0]
        offsets = offsets.cast(DType.int64)
        starts = offsets[:-1]
        lengths = offsets[1:] - starts
        delta = cached.cast(DType.int64).rebind(starts.shape) - starts
        repeated = ops.repeat_interleave(delta, lengths, axis=0, out_dim=total)
        stop = ops.shape_to_tensor([total])[0]
        return ops.range(0, stop, 1, out_dim=total, dtype=DType.int64, device=CPU) + repeated

    types = [
        TensorType("float32", ["total_seq_len", 2], CPU),
        TensorType("uint32", ["input_row_offsets_len"], CPU),
        TensorType("uint32", ["batch"], CPU),
    ]
    program = InferenceSession().load(Graph("positions", positions, types))
    for lengths, cached in (([2, 3], [0, 4]), ([1, 0, 4], [7, 1, 2]), ([3], [5])):
        offsets = np.cumsum([0, *lengths]).astype(np.uint32)
        x = np.ones((sum(lengths), 2), np.float32)
        (found,) = program.execute(x, offsets, np.array(cached, np.uint32))
        wanted = [c + i for n, c in zip(lengths, cached, strict=True) for i in range(n)]
        assert found.to_numpy().tolist() == wanted
