"""Write a model's program to one file, and run it without the model's classes."""

import tempfile
from pathlib import Path

import jax
import numpy as np

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef, TensorType

file = Path(tempfile.mkdtemp()) / "model.jaxport"
model = maxjax.init(nn.Linear(4, 2, "float32", DeviceRef.CPU()), jax.random.key(0))
spec = TensorType("float32", ["batch", 4], DeviceRef.CPU())  # a named size: any batch
maxjax.export(model, spec, file, platforms=("cpu", "cuda", "tpu"))

program = maxjax.load_exported(file)
print(program.names, file.stat().st_size, "bytes")
bound = program.bind(model.state_dict())
x = np.ones((5, 4), np.float32)
np.testing.assert_allclose(bound(x), model(x), rtol=1e-6)
print(bound(x).shape)
