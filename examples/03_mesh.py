"""A model over eight devices. On a CPU they are simulated; on GPUs and TPUs leave the first lines out."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import maxjax

mesh = maxjax.make_mesh(data=2, model=4)
print(maxjax.plan("tiny", mesh=mesh))  # bytes for each device, before anything is read

model, tokenizer = maxjax.load("tiny", mesh=mesh)  # each device's part is read by itself
weight = model.state_dict()["model.layers.0.mlp.up_proj.weight"]
print(weight.shape, weight.sharding.spec, "on", len(weight.sharding.device_set), "devices")
print(maxjax.generate(model, tokenizer, ["What is 37 + 48?", "What is 5 + 6?"]))
assert len(jax.devices()) == 8
