"""A Module of your own, trained with optax: a Module is a pytree of its weights."""

import jax
import jax.numpy as jnp
import optax

import maxjax
from maxjax import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 32, has_bias=True), nn.Linear(32, 2, has_bias=True)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


model = maxjax.init(Classifier(), jax.random.key(0))
optimizer = optax.adam(1e-2)
state = optimizer.init(model)
x = jax.random.normal(jax.random.key(1), (256, 2))
y = jnp.int32(jnp.linalg.norm(x, axis=1) > 1)  # inside or outside of a circle


@jax.jit
def step(model, state):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    updates, state = optimizer.update(jax.grad(loss)(model), state)
    return optax.apply_updates(model, updates), state


for _ in range(200):
    model, state = step(model, state)
right = float((model(x).argmax(-1) == y).mean())
print(f"{right:.0%} right; weights: {', '.join(model.state_dict())}")
assert right > 0.9
