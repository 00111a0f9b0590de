"""Written for files of Modular MAX: ``forward_moe_sharded_layers``, for mixtures of experts on several devices.

maxjax itself does not import it: it calls one layer with one tensor for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ...graph import ops
from ...graph.value import TensorValue, unwrap, wraps
from ..transformer.sequence import forward_sharded_layers


def forward_moe_sharded_layers(
    shards: Sequence[Callable[[Any], Any]],
    xs: Sequence[Any],
    eplb_counter_buffers: Sequence[Any] | None = None,
    layer_idx_per_device: Sequence[Any] | None = None,
) -> list[Any]:
    """The result of each layer for the tensor of its device.

    Shards of a MoE with an ``ep_batch_manager`` exchange tokens: each shard chooses experts for its
    tokens; the manager sends the tokens to the devices of these experts, which compute the results,
    and sends the results back. With ``use_allreduce``, every device has the same tokens, and the
    caller must sum the results over devices. Layers of other classes can exchange tokens if they have
    the attributes of such shards; otherwise they are only called (:func:`forward_sharded_layers`).

    Args:
        shards: layers, one for each device.
        xs: tensors ``[N, E]``, one for each device; N may differ between devices, and be 0.
        eplb_counter_buffers: BufferValues ``[X]``, one for each device, to which the number of choices
            of each expert is added if the layers exchange tokens.
        layer_idx_per_device: argument of MAX's load balancing of experts, ignored.

    Raises:
        ValueError: the numbers of layers and tensors differ.

    Example:
        >>> forward_moe_sharded_layers([lambda x: x + 1, lambda x: x * 2], [1, 5])
        [2, 10]
    """
    if getattr(shards[0], "_ep_batch_manager", None) is None:
        return forward_sharded_layers(shards, xs)
    return _exchanged(shards, xs, eplb_counter_buffers)


def _exchanged(
    shards: Sequence[Any], xs: Sequence[Any], counters: Sequence[Any] | None
) -> list[Any]:
    manager = shards[0].ep_batch_manager
    config, devices = manager.config, [shard.devices[0].id for shard in shards]
    routed = forward_sharded_layers([shard.gate for shard in shards], xs)
    ids, shares = map(list, zip(*routed, strict=True))
    for buffer, shard, chosen in zip(counters or (), shards, ids, strict=bool(counters)):
        _count(buffer, chosen, shard.num_experts)
    norms = [getattr(shard, "pre_expert_norm", None) for shard in shards]
    xs_in = [x if norm is None else norm(x) for norm, x in zip(norms, xs, strict=True)]
    scales = [shard._ep_dispatch_input_scales() for shard in shards]
    if config.use_allreduce:
        found = [manager.ep_dispatch(*one) for one in zip(xs_in, ids, devices, scales, strict=True)]
    else:
        given = None if scales[0] is None else scales
        found = manager.ep_dispatch_all(xs_in, ids, devices, given)
    results = [
        shard._local_ep_compute(rows, x, _estimated(shard, xs, config))
        for shard, rows, x in zip(shards, found, xs_in, strict=True)
    ]
    if config.use_allreduce:
        ys = [manager.ep_combine(*one) for one in zip(results, shares, devices, ids, strict=True)]
    else:
        ys = manager.ep_combine_all(results, shares, devices)
    if shards[0].has_shared_experts and not config.fused_shared_expert:
        # With replicated tokens, only one device adds the shared expert to the sum over devices.
        last = 1 if config.use_allreduce else len(shards)
        for i in range(last):
            ys[i] = ys[i] + shards[i].shared_experts(xs_in[i])
    return [_cast(y, x) for y, x in zip(ys, xs, strict=True)]


def _estimated(shard: Any, xs: Sequence[Any], config: Any) -> TensorValue:
    """The mean number of rows of a device, an argument of MAX's kernels."""
    total = sum(jnp.asarray(unwrap(x)).shape[0] for x in xs)
    mean = total * shard.num_experts_per_token // config.n_gpus_per_node
    return TensorValue(jnp.asarray(mean, jnp.uint32))


def _count(buffer: Any, ids: Any, experts: int) -> None:
    numbers = jnp.asarray(unwrap(ids)).astype(jnp.int32).reshape(-1)
    numbers = jnp.where(numbers < 0, experts, numbers)  # no expert
    found = jnp.zeros(experts, jnp.int32).at[numbers].add(1, mode="drop")
    before = ops.buffer_load(buffer)
    ops.buffer_store(buffer, before + TensorValue(found).cast(before.dtype))


def _cast(y: Any, x: Any) -> Any:
    array = jnp.asarray(unwrap(y)).astype(jnp.asarray(unwrap(x)).dtype)
    return TensorValue(array) if wraps(x) else array
