"""Fine-tune with LoRA on a text, merge, and save a checkpoint that other libraries open."""

import tempfile

import jax
import jax.numpy as jnp
import optax

import maxjax

model, tokenizer = maxjax.load("tiny", dtype="float32")
model = maxjax.lora.add(model, rank=8, alpha=16, key=jax.random.key(0))
trained, frozen = maxjax.partition(model, "*.lora_*")  # the rest is not differentiated
optimizer = optax.adam(1e-2)
state = optimizer.init(trained)
ids = jnp.asarray([tokenizer.encode("What is one and one? It is two.")])


@jax.jit
def step(trained, frozen, state, ids):
    def loss(trained):
        logits = maxjax.merge(trained, frozen)(ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    value, gradient = jax.value_and_grad(loss)(trained)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(trained, updates), state, value


losses = []
for _ in range(20):
    trained, state, value = step(trained, frozen, state, ids)
    losses.append(float(value))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]

folder = tempfile.mkdtemp()
maxjax.save_pretrained(maxjax.lora.merge(maxjax.merge(trained, frozen)), folder)
print("saved in", folder)
