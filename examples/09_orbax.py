"""Save on one mesh, restore on another: an orbax checkpoint that orbax itself reads."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile
from pathlib import Path

import numpy as np

import maxjax

folder = Path(tempfile.mkdtemp()) / "run"
name = "model.layers.0.mlp.up_proj.weight"

model, _ = maxjax.load("tiny", mesh=maxjax.make_mesh(data=1, model=8))
maxjax.checkpoint.save(folder, model)

other, tokenizer = maxjax.load(folder, mesh=maxjax.make_mesh(data=4, model=2))
ours, theirs = model.state_dict()[name], other.state_dict()[name]
print(ours.sharding.spec, "->", theirs.sharding.spec)
np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
