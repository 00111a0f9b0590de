"""Written for files of Modular MAX: ``MultiheadAttention``, without RoPE, and the number of heads for each device.

maxjax itself does not import it. For other code there is ``maxjax.nn.MultiHeadAttention``, which has torch's names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...dtype import DType
from ...graph import ops
from ...graph.device import DeviceRef
from ...graph.placement.split import even_range
from ...graph.placement.strategy import ShardingStrategy
from ..comm import Allreduce
from ..kernels import flash_attention_gpu
from ..layer import Module
from ..linear import Linear
from ..stacked_linear import StackedLinear
from .mask_config import MHAMaskVariant


def num_heads_for_device(*, num_heads: int, device_idx: int, num_devices: int) -> int:
    """The number of heads of a device; if the heads do not divide evenly, the first devices have one more.

    Example:
        >>> [num_heads_for_device(num_heads=7, device_idx=i, num_devices=3) for i in range(3)]
        [3, 2, 2]
    """
    start, stop = even_range(num_heads, device_idx, num_devices)
    return stop - start


class MultiheadAttention(Module):
    """Self-attention without RoPE. Arguments in MAX's order.

    Args:
        num_attention_heads: number H of heads.
        hidden_size: number E of features, a multiple of H.
        devices: devices, by default one CPU. Over several, weights are split by heads; inputs and results are lists.
        dtype: dtype of the weights.
        scale: factor of the scores; 1/√(E / H) by default.
        qkv_has_bias, o_proj_has_bias: whether the projections have biases.
        stacked_qkv: whether queries, keys and values share one weight; several devices raise NotImplementedError.

    Attributes:
        qkv_proj: StackedLinear of ``q_proj``, ``k_proj`` and ``v_proj``.
        o_proj: Linear.

    Raises:
        ValueError: E is not a multiple of H, H is not a multiple of the number of devices, or there is no device.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> layer = maxjax.init(MultiheadAttention(2, 8), jax.random.key(0))
        >>> layer(jnp.ones((1, 3, 8))).shape, list(layer.raw_state_dict())
        ((1, 3, 8), ['o_proj.weight', 'q_proj.weight', 'k_proj.weight', 'v_proj.weight'])
    """

    def __init__(
        self,
        num_attention_heads: int,
        hidden_size: int,
        devices: Sequence[DeviceRef] | None = None,
        dtype: Any = DType.float32,
        scale: float | None = None,
        qkv_has_bias: bool = False,
        o_proj_has_bias: bool = False,
        stacked_qkv: bool = False,
    ):
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size {hidden_size} is not a multiple of {num_attention_heads} heads"
            )
        if devices is not None and not devices:
            raise ValueError("MultiheadAttention needs at least one device")
        self.devices = list(devices) if devices is not None else [DeviceRef.CPU()]
        self.num_heads, self.embed_dim = num_attention_heads, hidden_size
        self.qkv_has_bias, self.o_proj_has_bias = qkv_has_bias, o_proj_has_bias
        self.stacked_qkv = stacked_qkv
        self.head_dim = hidden_size // num_attention_heads
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.qkv_proj = StackedLinear(
            hidden_size, [hidden_size] * 3, ["q_proj", "k_proj", "v_proj"], dtype,
            self.devices[0], stacked_qkv, qkv_has_bias,
        )  # fmt: skip
        self.o_proj = Linear(
            hidden_size, hidden_size, dtype, self.devices[0], has_bias=o_proj_has_bias
        )
        self.is_distributed = len(self.devices) > 1
        if not self.is_distributed:
            return
        count = len(self.devices)
        if num_attention_heads % count:
            raise ValueError(
                f"{num_attention_heads} heads are not split evenly over {count} devices"
            )
        if stacked_qkv:
            raise NotImplementedError(
                "MultiheadAttention(stacked_qkv=True) over several devices is not supported: rows of the one "
                "weight are not split by heads"
            )
        self.qkv_proj.sharding_strategy = ShardingStrategy.rowwise(count)
        self.o_proj.sharding_strategy = ShardingStrategy.columnwise(count)
        self.allreduce = Allreduce(count)

    def _compute_qkv(self, x: Any, qkv_proj: Any = None) -> tuple[Any, Any, Any]:
        """``[B, T, E]`` → queries, keys and values ``[B, T, H, D]``; a subclass may override it."""
        y = (qkv_proj or self.qkv_proj)(x)
        y = ops.reshape(y, [*y.shape[:2], 3, y.shape[2] // (3 * self.head_dim), self.head_dim])
        return y[:, :, 0], y[:, :, 1], y[:, :, 2]

    def _apply_attention(self, q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        """The result of attention, ``[B, T, H D]``; a subclass may override it."""
        mask = kwargs.get("mask_variant", MHAMaskVariant.NULL_MASK)
        y = flash_attention_gpu(q, k, v, mask, self.scale)
        return ops.reshape(y, [*y.shape[:2], y.shape[2] * y.shape[3]])

    def __call__(self, x: Any, signal_buffers: Any = None, **kwargs: Any) -> Any:
        """``[B, T, E]`` → the same shape; a TensorValue for a TensorValue.

        Args:
            x: hidden states; over several devices, a list with one array for each.
            signal_buffers: buffers for ``ops.allreduce.sum``, over several devices.
            kwargs: the option ``mask_variant``, an MHAMaskVariant; by default every token attends to all tokens.

        Raises:
            ValueError: there is not one tensor for each device.
        """
        xs = x if isinstance(x, list) else [x]
        if len(xs) != len(self.devices) or (self.is_distributed and not isinstance(x, list)):
            raise ValueError(
                f"MultiheadAttention takes a list of {len(self.devices)} inputs, one for each device, not {len(xs)}"
            )
        if not self.is_distributed:
            return self.o_proj(self._apply_attention(*self._compute_qkv(xs[0]), **kwargs))
        parts = zip(
            xs, self.qkv_proj.shard(self.devices), self.o_proj.shard(self.devices), strict=True
        )
        found = [
            o_proj(self._apply_attention(*self._compute_qkv(one, qkv_proj), **kwargs))
            for one, qkv_proj, o_proj in parts
        ]
        return self.allreduce(found, signal_buffers)
