"""Detection of gradients: JAX creates them with the treedef of the model, so only the calling function tells."""

from __future__ import annotations

import inspect


def is_made_by_vjp() -> bool:
    """Whether the tree that JAX is creating is the result of a function from ``jax.vjp``.

    ``jax.grad`` and ``jax.value_and_grad`` call such a function too. Only the unflatten function of a pytree
    class may call this one. JAX does not say what a tree is for, so the name of the function that called
    ``tree_unflatten`` is compared. If a version of JAX uses another name, gradients are displayed as models.
    """
    frame = inspect.currentframe()
    for _ in range(3):  # this function, unflatten, tree_unflatten
        frame = frame and frame.f_back
    name = frame.f_code.co_name if frame else ""
    return name.startswith("_vjp") and name.endswith("bwd")
