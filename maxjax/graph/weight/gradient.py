"""Which trees are gradients: JAX creates them with the treedef of the model, so only their maker differs."""

from __future__ import annotations

import inspect


def is_made_by_vjp() -> bool:
    """Whether the tree that JAX is creating is the result of a function from ``jax.vjp``.

    ``jax.grad`` and ``jax.value_and_grad`` call one too. It is for the unflatten function of a pytree
    class: JAX has no name for the purpose of a tree, so the function that called ``tree_unflatten`` is
    looked at. If a version of JAX has another one, gradients are displayed as models.
    """
    frame = inspect.currentframe()
    for _ in range(3):  # this function, unflatten, tree_unflatten
        frame = frame and frame.f_back
    name = frame.f_code.co_name if frame else ""
    return name.startswith("_vjp") and name.endswith("bwd")
