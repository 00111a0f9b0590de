"""``isolated``: maxjax's own programs run where the model is, whatever JAX is told for the caller's.

A training script sets a mesh (``jax.set_mesh``) and forbids implicit transfers (``jax_transfer_guard``) for its
own programs. ``generate`` and ``embed`` take text and give text, so they always transfer, and the model's arrays
say which devices they use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

_GUARDS = ("host_to_device", "device_to_host", "device_to_device")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Context, or decorator of a function, without the caller's mesh and transfer guards.

    A generator must not hold it while it is suspended: its caller would run in it.

    Example:
        >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))), isolated():
        ...     jax.sharding.get_abstract_mesh().axis_names
        ()
    """
    guards = [getattr(jax.config, f"jax_transfer_guard_{name}") for name in _GUARDS]
    with contextlib.ExitStack() as stack:
        if any(guard not in (None, "allow") for guard in guards):
            stack.enter_context(jax.transfer_guard("allow"))
        if not jax.sharding.get_abstract_mesh().empty:
            # JAX refuses it inside a traced function, where the function's own check says what is wrong.
            with contextlib.suppress(ValueError):
                stack.enter_context(jax.set_mesh(None))
        yield
