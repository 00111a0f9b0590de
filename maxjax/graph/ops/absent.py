"""The names of ``max.graph.ops`` that maxjax does not have, and why."""

from __future__ import annotations

from typing import NoReturn

_MESH = "arrays are sharded over a jax.sharding.Mesh, and XLA inserts the communication"
_KERNEL = "there are no Mojo kernels; write it with jnp, jax.experimental.pallas or jax.ffi"
_BUFFER = "arrays are immutable; return the new array (jax.jit can donate buffers)"
_RANDOM = "randomness takes a key: use jax.random, as in jax.random.normal(key, shape)"
_STREAM = "XLA schedules the work itself; call the function directly"

REASONS: dict[str, str] = {
    **dict.fromkeys(
        "allgather allgather_rms_norm allgather_rms_norm_quant_mxfp6 allgather_rms_norm_quant_mxfp8 "
        "allreduce broadcast bundled_allreduce distributed_broadcast distributed_ep "
        "distributed_scatter reduce_scatter_rms_norm reducescatter shard_and_stack".split(),
        _MESH,
    ),
    **dict.fromkeys("custom inplace_custom".split(), _KERNEL),
    **dict.fromkeys(
        "buffer buffer_create buffer_load buffer_store buffer_store_slice".split(), _BUFFER
    ),
    **dict.fromkeys("parallel side_stream".split(), _STREAM),
    "random": _RANDOM,
    "constant_external": "a constant with a name is a Weight: maxjax.graph.Weight",
    "non_maximum_suppression": "the shape of its result depends on values; use NumPy",
    "roi_align": "it is not implemented",
}


def missing(name: str) -> NoReturn:
    """Raises the error for a name that ``ops`` does not have.

    Raises:
        NotImplementedError: MAX has an op of this name.
        AttributeError: MAX does not have it either.
    """
    if name in REASONS:
        raise NotImplementedError(f"MAX's ops.{name} does not exist in maxjax: {REASONS[name]}")
    raise AttributeError(f"module 'maxjax.graph.ops' has no attribute {name!r}")
