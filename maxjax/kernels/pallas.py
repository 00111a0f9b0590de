"""What kernels in Pallas share, for GPUs and for TPUs: the device of a program, and results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def program_device() -> Any:
    """The kind of device of the program that an ``Operation`` is lowering; None: the local one."""
    return jax.sharding.get_abstract_mesh().abstract_device


def result(shape: tuple[int, ...], like: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A result of a kernel; ``shard_map`` asks for the axes that it varies over."""
    varying = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
