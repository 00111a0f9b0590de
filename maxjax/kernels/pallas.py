"""Helpers of the Pallas kernels for GPUs and TPUs: the device of a program, result types, limits of attention."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LOG = logging.getLogger("maxjax")
_WIDEST_HEADS = 256


def program_device() -> Any:
    """The kind of device that an ``Operation`` is being lowered for; None: the local one."""
    return jax.sharding.get_abstract_mesh().abstract_device


def refused(what: str, why: str) -> bool:
    """Whether there is a reason ``why`` a kernel does not run; it is logged, and jnp is used instead."""
    if why:
        _LOG.debug("maxjax: %s has no kernel for this, jnp is used: %s", what, why)
    return bool(why)


def result(shape: tuple[int, ...], like: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result, which varies over the same mesh axes as ``like`` inside ``shard_map``."""
    varying = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def attention_lacks(dtype: Any, q: Any, keys: Any, floats: Collection[Any]) -> str:
    """Why neither the GPU's nor the TPU's kernel computes attention of many queries; "" if one may.

    Args:
        dtype: dtype of scores and sums.
        q: queries ``[..., D]``, D is the head dimension.
        keys: keys, in one of ``floats`` or int8.
        floats: the float dtypes that the kernel supports.

    Example:
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float16)
        >>> attention_lacks(jnp.float32, shape(4, 512), shape(4, 512), [np.dtype("float16")])
        'heads are 512 wide, at most 256'
    """
    if dtype != jnp.float32:
        return f"scores are in {np.dtype(dtype)}"
    if q.shape[-1] > _WIDEST_HEADS:
        return f"heads are {q.shape[-1]} wide, at most {_WIDEST_HEADS}"
    if q.dtype not in floats or keys.dtype not in (*floats, np.dtype("int8")):
        return f"queries are {q.dtype} and keys {keys.dtype}"
    return ""
