"""Written for files of Modular MAX: ``StackedMoE``, whose experts' weights are one array for each projection.

maxjax itself does not import it: the mixtures of its models are ``maxjax.nn.moe.Experts``.

Shapes: N tokens, E features, X experts with F inner features, k experts for each token.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...absent import absent as _absent
from ...absent import hides, refuse_arguments
from ...dtype import DType
from ...graph import ops
from ...graph.device import DeviceRef
from ...graph.placement.split import Segment, even_range
from ...graph.placement.strategy import ShardingStrategy
from ...graph.value import TensorValue, unwrap, wraps
from ...graph.weight.weight import Weight
from ...kernels import explicit
from ..layer import Module
from ..layer.sharded import sharded
from ..linear import MLP
from .assignments import grouped_matmul_ragged, moe_create_indices, moe_finalize
from .gate import refuse_no_features


class GateUpFormat(enum.Enum):
    """How gates and up projections are stored in one weight: all gates before all up projections, or alternating."""

    CONCATENATED = "concatenated"
    INTERLEAVED = "interleaved"


def make_concatenated_gated_activation_fn(
    activation_fn: Callable[[Any], Any], limit: float | None = None
) -> Callable[[Any, int], Any]:
    """``(gate_up, n) -> activation_fn(gate_up[:, :n]) * gate_up[:, n:]``.

    Args:
        activation_fn: function of the gates.
        limit: bound to which activated gates (from above) and up projections (``±limit``) are clipped, or None.

    Raises:
        ValueError: ``limit`` is not positive.

    Example:
        >>> gated = make_concatenated_gated_activation_fn(jax.nn.relu, limit=2.0)
        >>> gated(jnp.array([[3.0, -1.0, -5.0, 4.0]]), 2).tolist()
        [[-4.0, 0.0]]
    """
    if limit is not None and limit <= 0:
        raise ValueError(f"limit is None or positive, not {limit}")

    return partial(_concatenated, activation_fn, limit)


def make_interleaved_gated_activation_fn(
    activation_fn: Callable[[Any], Any],
) -> Callable[[Any, int], Any]:
    """``(gate_up, n) -> activation_fn(gate_up[:, 0::2]) * gate_up[:, 1::2]``.

    Example:
        >>> gated = make_interleaved_gated_activation_fn(jax.nn.relu)
        >>> gated(jnp.array([[3.0, -1.0, -5.0, 4.0]]), 2).tolist()
        [[-3.0, 0.0]]
    """
    return partial(_interleaved, activation_fn)


def make_stacked_gated_activation_fn(
    activation_fn: Callable[[Any], Any],
) -> Callable[[Any, Any], Any]:
    """``(gate, up) -> activation_fn(gate) * up``.

    Example:
        >>> make_stacked_gated_activation_fn(abs)(-2, 3)
        6
    """
    return partial(_stacked, activation_fn)


# Functions of this module in a partial are equal if their activation functions are, and can be pickled: layers
# with equal ones have one compiled program, and can be stacked.


def _concatenated(activation_fn: Any, limit: float | None, gate_up: Any, moe_dim: int) -> Any:
    gate, up = activation_fn(gate_up[:, :moe_dim]), gate_up[:, moe_dim:]
    if limit is not None:
        gate, up = ops.min(gate, limit), ops.min(ops.max(up, -limit), limit)
    return gate * up


def _interleaved(activation_fn: Any, gate_up: Any, moe_dim: int) -> Any:
    return activation_fn(gate_up[:, 0::2]) * gate_up[:, 1::2]


def _stacked(activation_fn: Any, gate: Any, up: Any) -> Any:
    return activation_fn(gate) * up


def _silu(x: Any) -> Any:
    return jax.nn.silu(x)  # itself it cannot be pickled


class StackedMoE(Module):
    """A mixture of experts with stacked weights: ``Σ share · expert(x)`` over the experts that the gate chooses.

    Args (in MAX's order):
        devices: devices; the weights are declared on the first.
        hidden_dim: length E of the last axis of the input and of the result.
        num_experts, num_experts_per_token: number X of experts, and number k that are chosen for a token.
        moe_dim: number F of inner features of each expert.
        gate_cls: constructor of the gate, with MoEGate's keyword arguments.
        dtype: dtype of the weights.
        gate_up_format: format of gates and up projections in their weight.
        gated_activation_fn: function of gates and up projections ``[rows, F]``; ``silu(gate) * up`` by default.
        has_bias: whether the experts have biases.
        has_shared_experts, shared_experts_dim: whether there is a shared expert, an MLP that is applied to every
            token, and its number of inner features.
        apply_router_weight_first: whether an expert's input is multiplied by its share, instead of its result.
        router_dtype: dtype of the gate and its input; by default the gate's weights are bfloat16, as in MAX.
        is_sharding: whether to create no weights of experts; the code that shards this layer assigns them.

    Attributes:
        gate: layer that chooses experts.
        shared_experts: MLP, if ``has_shared_experts``.

    In a state dict the weights are ``experts.gate_up_proj [X, E, 2 F]`` and ``experts.down_proj [X, F, E]``, and
    the biases ``experts.gate_up_proj_bias [X, 2 F]`` and ``experts.down_proj_bias [X, E]``.

    Raises:
        NotImplementedError: the experts are quantised.

    Example:
        >>> from maxjax.nn.moe import MoEGate
        >>> layer = StackedMoE([DeviceRef.CPU()], 4, 3, 2, 6, MoEGate, "float32", router_dtype="float32")
        >>> list(layer.raw_state_dict())
        ['experts.gate_up_proj', 'experts.down_proj', 'gate.gate_score.weight']
    """

    @hides("quant_config", "mxfp8_activations")
    def __init__(
        self,
        devices: Sequence[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        moe_dim: int,
        gate_cls: Callable[..., Any],
        dtype: Any = DType.bfloat16,
        gate_up_format: GateUpFormat = GateUpFormat.CONCATENATED,
        gated_activation_fn: Callable[[Any, Any], Any] | None = None,
        has_bias: bool = False,
        has_shared_experts: bool = False,
        shared_experts_dim: int = 0,
        quant_config: Any = None,
        apply_router_weight_first: bool = False,
        router_dtype: Any = None,
        mxfp8_activations: bool = False,
        is_sharding: bool = False,
    ):
        super().__init__()
        refuse_arguments(self, quant_config=quant_config, mxfp8_activations=mxfp8_activations)
        self.devices, self.hidden_dim, self.moe_dim = list(devices), hidden_dim, moe_dim
        self.num_experts, self.num_experts_per_token = num_experts, num_experts_per_token
        self.gate_cls, self.dtype, self.quant_config = gate_cls, DType.of(dtype), None
        self.gate_up_format = GateUpFormat(gate_up_format)
        self.gated_activation_fn = gated_activation_fn or make_stacked_gated_activation_fn(_silu)
        self.has_bias, self.has_shared_experts = has_bias, has_shared_experts
        self.shared_experts_dim = shared_experts_dim
        self.apply_router_weight_first = apply_router_weight_first
        self.router_dtype = None if router_dtype is None else DType.of(router_dtype)
        self.tp_size = 1
        self._strategy: ShardingStrategy | None = None
        device = self.devices[0] if self.devices else DeviceRef.CPU()
        self.gate = gate_cls(
            devices=self.devices, hidden_dim=hidden_dim, num_experts=num_experts,
            num_experts_per_token=num_experts_per_token, dtype=router_dtype or DType.bfloat16,
        )  # fmt: skip
        if has_shared_experts:
            refuse_no_features(shared_experts_dim)
            self.shared_experts = MLP(dtype, None, hidden_dim, shared_experts_dim, self.devices)
        if is_sharding:
            return

        def weight(name: str, *shape: int) -> Weight:
            return Weight(f"experts.{name}", dtype, (num_experts, *shape), device)

        self._gate_up_weight = weight("gate_up_proj", hidden_dim, 2 * moe_dim)
        self._down_weight = weight("down_proj", moe_dim, hidden_dim)
        if has_bias:
            self._gate_up_bias = weight("gate_up_proj_bias", 2 * moe_dim)
            self._down_bias = weight("down_proj_bias", hidden_dim)

    @property
    def gate_up_proj_transposed(self) -> TensorValue:
        """The weights of gates and up projections, ``[X, 2 F, E]``."""
        return TensorValue(unwrap(self._gate_up_weight).swapaxes(1, 2))

    @property
    def down_proj_transposed(self) -> TensorValue:
        """The weights of down projections, ``[X, E, F]``."""
        return TensorValue(unwrap(self._down_weight).swapaxes(1, 2))

    def __call__(self, x: Any) -> Any:
        """``[N, E]`` → the same shape and dtype; a TensorValue for a TensorValue."""
        array = unwrap(x)
        mesh = explicit.mesh_of(array, *jax.tree.leaves(self))
        run = explicit.automatic(lambda layer, a: layer._mixed(a), mesh, explicit.entries(array))
        y = run(self, array)
        return TensorValue(y) if wraps(x) else y

    def _mixed(self, array: jax.Array) -> jax.Array:
        value = TensorValue(array)
        routed = value if self.router_dtype is None else value.cast(self.router_dtype)
        experts, shares = (TensorValue(one) for one in self.gate(routed))
        ids = experts.value.reshape(-1).astype(jnp.int32)
        order, starts, back, groups, stats = moe_create_indices(ids, self.num_experts)
        order = order.astype(jnp.int32)
        tokens = value.value[order // self.num_experts_per_token]
        if self.apply_router_weight_first:
            of_token = shares.value.reshape(-1, 1)[order]
            tokens = tokens * of_token.astype(tokens.dtype)
            shares = TensorValue(jnp.ones_like(shares.value))
        of_row = ids[order]

        def product(rows: Any, weight: Any, bias: Any, parts: int = 1) -> Any:
            y = grouped_matmul_ragged(rows, unwrap(weight), starts, groups, stats)
            if bias is None:
                return y
            # Results are summed over devices, so each device adds its share of the bias.
            return y + (unwrap(bias) / parts)[of_row].astype(y.dtype)

        first, last = (self._gate_up_bias, self._down_bias) if self.has_bias else (None, None)
        gate, up = self._gate_and_up(product(tokens, self.gate_up_proj_transposed, first))
        gated = unwrap(self.gated_activation_fn(TensorValue(gate), TensorValue(up)))
        y = product(gated, self.down_proj_transposed, last, self.tp_size)
        y = unwrap(moe_finalize(y, back, shares, value.dtype))
        if self.has_shared_experts:
            y = y + unwrap(self.shared_experts(value))
        return y

    def _gate_and_up(self, y: Any) -> tuple[Any, Any]:
        if self.gate_up_format is GateUpFormat.INTERLEAVED:
            return y[:, 0::2], y[:, 1::2]
        return y[:, : self.moe_dim], y[:, self.moe_dim :]

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy of the experts: tensor_parallel, which splits their inner features."""
        return self._strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        if not strategy.is_tensor_parallel:
            raise ValueError("StackedMoE takes ShardingStrategy.tensor_parallel")
        n = strategy.num_devices
        whole = ShardingStrategy.replicate(n)
        in_turn = self.gate_up_format is GateUpFormat.INTERLEAVED

        def both(axis: int) -> ShardingStrategy:
            pairs = [Segment.head_aware(self.moe_dim, 2)]  # a gate and its up are not separated
            segmented, halves = ShardingStrategy.segmented, ShardingStrategy.gate_up
            return segmented(n, axis, pairs) if in_turn else halves(n, axis)

        self.gate.sharding_strategy = whole
        self._gate_up_weight.sharding_strategy = both(2)
        self._down_weight.sharding_strategy = ShardingStrategy.axiswise(1, n)
        if self.has_bias:
            self._gate_up_bias.sharding_strategy = both(1)
            self._down_bias.sharding_strategy = whole
        if self.has_shared_experts:
            self.shared_experts.sharding_strategy = strategy
        self._strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[StackedMoE]:
        """Returns one StackedMoE for each device; the caller must sum their results.

        Raises:
            ValueError: ``sharding_strategy`` is not set.
        """
        found, strategy = sharded(self, devices), self._strategy
        assert strategy is not None  # sharded refuses a weight without one
        for i, part in enumerate(found):
            start, stop = even_range(self.moe_dim, i, strategy.num_devices)
            part.moe_dim, part.tp_size = stop - start, strategy.num_devices
        return found


__getattr__ = _absent(__name__)
