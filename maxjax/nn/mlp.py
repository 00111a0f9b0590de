"""Floor 4. MLP: the gated feed-forward network of Llama and its kin.

Below: Linear, the activations. Above: TransformerBlock, MoE, the model families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..graph.device import DeviceRef
from ..graph.placement import TENSOR
from ..graph.quantization import QuantizationEncoding
from ..graph.sharding import ShardingStrategy
from ..graph.value import TensorValue, wraps
from .activation import activation
from .layer import Module
from .layer.sharded import sharded, tensor_parallel
from .linear import Linear, linear_rules, linears


class MLP(Module):
    """``down_proj(activation(gate_proj(x)) · up_proj(x))`` (N. Shazeer, arXiv:2002.05202).

    Args (in MAX's order):
        dtype: Of the weights.
        quantization_encoding: Block format of weights of packed bytes.
        hidden_dim: Length of the last axis before and after.
        feed_forward_length: Its length between.
        devices: Where the weights are declared to live: the first of them.
        linear_cls: Makes the three maps: Linear, or whatever takes its keyword arguments.
        has_bias: Whether each map has a bias.
        activation_function: Its name; ``nn.activation`` has the list.
        quant_config: Not supported yet.
        swiglu_limit: If positive, gates are cut off above it and the rest at ±it.

    Attributes:
        gate_proj, down_proj, up_proj: The maps; registered in this order, as in MAX.

    Raises:
        ValueError: There is no activation function of that name; the message names it.

    Example:
        >>> mlp = MLP("float32", None, 3, 8, [DeviceRef.CPU()])
        >>> list(mlp.raw_state_dict())
        ['gate_proj.weight', 'down_proj.weight', 'up_proj.weight']
    """

    def __init__(
        self,
        dtype: Any,
        quantization_encoding: QuantizationEncoding | None,
        hidden_dim: int,
        feed_forward_length: int,
        devices: Sequence[DeviceRef],
        linear_cls: Callable[..., Any] = Linear,
        has_bias: bool = False,
        activation_function: str = "silu",
        quant_config: Any = None,
        swiglu_limit: float = 0.0,
    ):
        super().__init__()
        activation(activation_function)
        self.devices = list(devices)
        self.hidden_dim, self.feed_forward_length = hidden_dim, feed_forward_length
        self.activation_function, self.swiglu_limit = activation_function, swiglu_limit

        def linear(in_dim: int, out_dim: int) -> Any:
            return linear_cls(
                in_dim=in_dim, out_dim=out_dim, dtype=dtype,
                device=self.devices[0] if self.devices else DeviceRef.CPU(),
                quantization_encoding=quantization_encoding, has_bias=has_bias,
                quant_config=quant_config,
            )  # fmt: skip

        self.gate_proj = linear(hidden_dim, feed_forward_length)
        self.down_proj = linear(feed_forward_length, hidden_dim)
        self.up_proj = linear(hidden_dim, feed_forward_length)

    def sharding_rules(self) -> dict[str, Any]:
        """Gate and up by rows, down by columns: one sum over the devices at the end."""
        return mlp_rules("", TENSOR)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How it is split: tensor_parallel or replicate; None: nothing was said.

        Raises:
            ValueError: Setting any other.
        """
        down = self.down_proj.sharding_strategy
        if down is None or down.is_replicate:
            return down
        return ShardingStrategy.tensor_parallel(down.num_devices)

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        rows, columns = tensor_parallel(self, strategy)
        self.gate_proj.sharding_strategy = self.up_proj.sharding_strategy = rows
        self.down_proj.sharding_strategy = columns

    def shard(self, devices: Iterable[DeviceRef]) -> list[Module]:
        """One MLP for each device, of the shards of its weights; their results are to be summed.

        Raises:
            ValueError: There is no strategy.
        """
        return sharded(self, devices)

    def __call__(self, x: Any) -> Any:
        """``[..., hidden_dim]`` → the same shape, a TensorValue for a TensorValue."""
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [..., feed_forward_length]
        h = gated(gate, up, self.activation_function, self.swiglu_limit)
        return self.down_proj(TensorValue(h) if wraps(x) else h)


def mlp_rules(path: str, over: Sequence[str]) -> dict[str, Any]:
    """Sharding rules of the MLP below an attribute path, over some kinds of mesh axes."""
    rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
    return (
        linear_rules(f"{path}gate_proj", rows, over)
        | linear_rules(f"{path}up_proj", rows, over)
        | linear_rules(f"{path}down_proj", columns, over)
    )


def gated(gate: jax.Array, up: jax.Array, activation_function: str, limit: float) -> jax.Array:
    """``activation(gate) · up``, both cut off at ``limit`` where it is positive."""
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return activation(activation_function)(gate) * up
