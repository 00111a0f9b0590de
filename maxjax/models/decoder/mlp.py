"""MLPs of decoders other than ``nn.MLP``: with other names, with one weight for gate and up, without a gate.

Shapes: hidden size E, inner features F.
"""

from __future__ import annotations

from typing import Any

import jax

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.activation import activation
from ...nn.layer import Module
from ...nn.linear import Linear, gated, linear_rules, linears
from ...nn.stacked_linear import StackedLinear, apart, stacked_rules


class FusedMLP(Module):
    """``down_proj(activation(gate) · up)``, where ``gate_up_proj`` computes gate and up (Phi-3, GLM-4).

    Args:
        hidden_dim, feed_forward_length: E and F.
        dtype: dtype of the weights.
        activation_function: name of the activation function.
        has_bias: whether both linear layers have a bias.

    Example:
        >>> [(name, *map(int, w.shape)) for name, w in FusedMLP(4, 6).raw_state_dict().items()]
        [('gate_up_proj.weight', 12, 4), ('down_proj.weight', 4, 6)]
    """

    def __init__(
        self, hidden_dim: int, feed_forward_length: int, dtype: Any = DType.float32,
        activation_function: str = "silu", has_bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.activation_function, self.sizes = activation_function, (feed_forward_length,) * 2
        self.gate_up_proj: Any = StackedLinear(
            hidden_dim, self.sizes, ["gate", "up"], dtype, stacked=True, has_bias=has_bias
        )
        self.down_proj = Linear(feed_forward_length, hidden_dim, dtype, has_bias=has_bias)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of gate, up and down."""
        segments = [Segment.even(size) for size in self.sizes]
        return stacked_rules("gate_up_proj", self.gate_up_proj, segments) | linear_rules(
            "down_proj", ShardingStrategy.columnwise(1)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        gate, up = apart(self.gate_up_proj, x, self.sizes)  # [..., F]
        return self.down_proj(gated(gate, up, self.activation_function, 0.0))


class GatedMLP(Module):
    """``down(activation(gate(x)) · up(x))``: an ``nn.MLP`` by other names.

    Args:
        names: attribute names of gate, up and down, as in the checkpoint.
        hidden_dim, feed_forward_length: E and F.
        dtype: dtype of the weights.
        activation_function: name of the activation function.
        has_bias: whether the linear layers have a bias.

    Example:
        >>> list(GatedMLP(("w1", "w3", "w2"), 4, 6).raw_state_dict())
        ['w1.weight', 'w3.weight', 'w2.weight']
    """

    def __init__(
        self, names: tuple[str, str, str], hidden_dim: int, feed_forward_length: int,
        dtype: Any = DType.float32, activation_function: str = "silu", has_bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.names, self.activation_function = tuple(names), activation_function
        for name in names[:2]:
            layer = Linear(hidden_dim, feed_forward_length, dtype, DeviceRef.CPU(), has_bias)
            setattr(self, name, layer)
        down = Linear(feed_forward_length, hidden_dim, dtype, DeviceRef.CPU(), has_bias)
        setattr(self, names[2], down)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        gate, up, down = self.names
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        return linear_rules(gate, rows) | linear_rules(up, rows) | linear_rules(down, columns)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        first, second, down = (getattr(self, name) for name in self.names)
        gate, up = linears([first, second], x)  # [..., F]
        return down(gated(gate, up, self.activation_function, 0.0))


class PlainMLP(Module):
    """``down(activation(up(x)))``: an MLP without a gate.

    Args:
        names: attribute names of the two linear layers, as in the checkpoint.
        hidden_dim, feed_forward_length: E and F.
        dtype: dtype of the weights.
        activation_function: name of the activation function.
        has_bias: whether both linear layers have a bias.

    Example:
        >>> list(PlainMLP(("fc1", "fc2"), 4, 6, has_bias=True).raw_state_dict())
        ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias']
    """

    def __init__(
        self, names: tuple[str, str], hidden_dim: int, feed_forward_length: int,
        dtype: Any = DType.float32, activation_function: str = "gelu", has_bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.names, self.activation_function = tuple(names), activation_function
        up, down = names
        setattr(self, up, Linear(hidden_dim, feed_forward_length, dtype, DeviceRef.CPU(), has_bias))
        setattr(
            self, down, Linear(feed_forward_length, hidden_dim, dtype, DeviceRef.CPU(), has_bias)
        )

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        up, down = self.names
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        return linear_rules(up, rows) | linear_rules(down, columns)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        up, down = (getattr(self, name) for name in self.names)
        return down(self.activated(up(x)))

    def activated(self, x: jax.Array) -> jax.Array:
        """What comes between the two linear layers, ``[..., F]`` → the same shape."""
        return activation(self.activation_function)(x)
