"""Look at the inner values of a model by name, and patch one."""

import jax.numpy as jnp

import maxjax

model, tokenizer = maxjax.load("tiny")
ids = jnp.asarray([tokenizer.encode("What is 37 + 48?")])

with maxjax.capture(model, "layers.1.**", "layers.1.self_attn:weights") as found:
    model(ids)
for name, value in found.items():
    print(f"{name:32} {value.dtype} {value.shape}")

# What the second layer's MLP adds is taken away.
with maxjax.patch(model, {"layers.1.mlp": 0.0}):
    without = maxjax.generate(model, tokenizer, "What is 37 + 48?")
print("with:", maxjax.generate(model, tokenizer, "What is 37 + 48?"), " without:", without)
