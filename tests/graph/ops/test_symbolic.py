"""Ops under jax.export with a size that has a name: traced once, run with any."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from maxjax.graph import DeviceRef, TensorValue, ops
from maxjax.graph.symbolic import naming
from tests.graph.ops.oracle import normal

W = normal(6, 6, seed=1)
OPS = {
    "reshape": lambda x: ops.reshape(x, [x.shape[0], 3, 2]),
    "reshape to the rest": lambda x: ops.reshape(x, (-1, 2)),
    "flatten": lambda x: ops.flatten(x),
    "transpose": lambda x: ops.permute(ops.transpose(x, 0, 1), [1, 0]),
    "broadcast_to": lambda x: ops.broadcast_to(x[:1], x.shape),
    "broadcast by name": lambda x: ops.broadcast_to(ops.unsqueeze(x, 0), [2, "batch", 6]),
    "rebind": lambda x: ops.rebind(x, ["batch", 6]),
    "concat": lambda x: ops.concat([x, x * 2.0]),
    "stack": lambda x: ops.stack([x, x], axis=1),
    "split": lambda x: ops.split(ops.concat([x, x]), [x.shape[0], x.shape[0]])[1],
    "chunk": lambda x: ops.chunk(ops.concat([x, x]), 2)[0],
    "tile": lambda x: ops.tile(x, [2, 1]),
    "repeat": lambda x: ops.repeat_interleave(x, 2, axis=1),
    "pad": lambda x: ops.pad(x, [1, 0, 0, 2]),
    "pad with the mirror image": lambda x: ops.pad(x, [3, 2, 1, 0], mode="reflect"),
    "slice": lambda x: ops.slice_tensor(x, [slice(0, 1)]),
    "range": lambda x: ops.range(0, x.shape[0], 1, dtype="float32", device=DeviceRef.CPU()),
    "range by two": lambda x: ops.range(1, x.shape[0] * 2, 2, dtype="int32", device=DeviceRef.CPU()),
    "range of floats": lambda x: ops.range(
        0.0, x.shape[0], 1.0, "batch", dtype="float32", device=DeviceRef.CPU()
    ),
    "shape_to_tensor": lambda x: ops.shape_to_tensor(x.shape),
    "mean": lambda x: ops.mean(x, axis=0),
    "erf of float8": lambda x: ops.erf(x.cast("float8_e5m2")).cast("float32"),
    "softmax": lambda x: ops.softmax(x, axis=0),
    "cumsum": lambda x: ops.cumsum(x, axis=0, exclusive=True),
    "top_k": lambda x: ops.top_k(x, 2)[1],
    "argmax": lambda x: ops.argmax(x, axis=0),
    "where": lambda x: ops.where(x > 0.0, x, 0.0),
    "add": lambda x: ops.add(x, x[0]),
    "matmul": lambda x: ops.matmul(x, W),
    "square": lambda x: ops.matmul(x, ops.transpose(x, 0, 1)),
    "band_part": lambda x: ops.band_part(ops.matmul(x, ops.transpose(x, 0, 1)), None, 0),
    "gather": lambda x: ops.gather(x, jnp.array([0, 0]), axis=0),
    "scatter": lambda x: ops.scatter(x, x, ops.cast(x * 0.0, "int32"), axis=1),
    "masked_scatter": lambda x: ops.masked_scatter(x, x > 0.0, x, "n"),
    "layer_norm": lambda x: ops.layer_norm(x, W[0], W[1], 1e-5),
    "rms_norm": lambda x: ops.rms_norm(x, W[0], 1e-5),
    "conv2d": lambda x: ops.conv2d(ops.reshape(x, [x.shape[0], 2, 3, 1]), normal(2, 2, 1, 3)),
    "max_pool2d": lambda x: ops.max_pool2d(ops.reshape(x, [x.shape[0], 2, 3, 1]), (2, 2)),
}  # fmt: skip


def test_with_a_size_that_has_a_name():
    def run(x):
        return {name: TensorValue(op(TensorValue(x))).value for name, op in OPS.items()}

    sizes = export.symbolic_shape("batch, 6")
    with naming({"batch": sizes[0]}):  # as a Graph does
        program = export.export(jax.jit(run))(jax.ShapeDtypeStruct(sizes, jnp.float32))
    for size in (2, 5):
        x = normal(size, 6)
        with naming({"batch": size}):
            want = jax.jit(run)(jnp.asarray(x))
        for name, found in program.call(x).items():
            np.testing.assert_allclose(found, want[name], rtol=1e-6, atol=1e-6, err_msg=name)
