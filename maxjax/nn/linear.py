"""Linear, ``x @ weight.T + bias``, and layers built from it: ColumnParallelLinear, MLP and FusedMLP."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..absent import absent as _absent
from ..absent import hides, refuse_arguments
from ..dtype import DType
from ..elsewhere import either
from ..graph.device import DeviceRef
from ..graph.kind import on_float_arrays
from ..graph.placement.arrays import beside, replicate_last_axis
from ..graph.placement.fsdp import can_be_in_place, in_place
from ..graph.placement.mesh import TENSOR
from ..graph.placement.split import COLUMNS, ROWS, TABLE, Split
from ..graph.placement.strategy import ShardingStrategy
from ..graph.quantization import QuantizationEncoding
from ..graph.weight.weight import Weight
from ..kernels import matmul
from .activation import activation, clipped
from .layer import Module, hooks
from .layer.observe.frames import is_wanted
from .layer.sharded import sharded, split_layers, strategy_by
from .low_rank import LowRank, all_updated
from .product import add_bias
from .product import linear as linear

# A weight is [out, in]: its last axis is the fan-in.
_LECUN_NORMAL = jax.nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)


class Linear(LowRank):
    """A linear layer over the last axis. Arguments in MAX's order.

    Args:
        in_dim, out_dim: length of the last axis of the input and of the result.
        dtype: dtype of weight and bias.
        device: device that the weights are declared on; None means the CPU.
        has_bias, bias: two names of one argument: whether to add a bias. By default there is none.
        quantization_encoding: block format of a quantised weight, or None. The weight is then uint8
            ``[out_dim, bytes]``, and the bias is float32 unless ``dtype`` is a float.
        name: prefix of the weights' names: ``"<name>.weight"``, ``"<name>.bias"``.
        clip_weight: bound of the weight (not the bias), which is clipped to ``±clip_weight``; 0 and None mean no bound.
        is_sharding: whether to create no weights; the code that shards a layer assigns them to its parts.

    Attributes:
        weight: Weight ``[out_dim, in_dim]``.
        bias: Weight ``[out_dim]``, or None.
        input_scale, weight_scale, weight_scale_2: always None; MAX's files read them.

    The result has the wider float dtype of ``x`` and ``weight``. A bias of another dtype is
    added in float32 or wider, and the sum is rounded once.

    Example:
        >>> import maxjax
        >>> layer = Linear(3, 2, bias=True)
        >>> layer.weight, layer.bias
        (Weight(weight, DType.float32, [Dim(2), Dim(3)], cpu:0),
         Weight(bias, DType.float32, [Dim(2)], cpu:0))
        >>> layer = maxjax.init(layer, jax.random.key(0))
        >>> layer(jnp.ones((5, 3))).shape
        (5, 2)
    """

    input_scale = weight_scale = weight_scale_2 = None

    @hides("quant_config")
    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: Any = DType.float32,
        device: DeviceRef | None = None,
        has_bias: bool | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        quant_config: Any = None,
        name: str | None = None,
        clip_weight: float | None = None,
        is_sharding: bool = False,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        refuse_arguments(self, quant_config=quant_config)
        has_bias = either(False, has_bias=has_bias, bias=bias)
        self.device = device = device or DeviceRef.CPU()
        self.clip_weight = clip_weight or None  # MAX's files write False and 0 too
        self.quant_config = None
        self.bias = None
        if is_sharding:
            return
        prefix = f"{name}." if name else ""
        shape, of_bias = (out_dim, in_dim), dtype
        if quantization_encoding is not None and quantization_encoding.is_gguf:
            shape = quantization_encoding.packed_shape(shape)
            of_bias = dtype if DType.of(dtype).is_float() else DType.float32
            dtype = DType.uint8
        self.weight = Weight(f"{prefix}weight", dtype, shape, device, quantization_encoding)
        if has_bias:
            self.bias = Weight(f"{prefix}bias", of_bias, (out_dim,), device)

    @on_float_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., in_dim]`` → ``[..., out_dim]``.

        Raises:
            ValueError: the last axis of ``x`` is not ``in_dim`` long, or ``x`` is a TensorValue of integers.
        """
        limit = self.clip_weight
        weight = self.weight if limit is None else self._clipped(limit)
        return self._with_bias(matmul(x, weight), x)

    def _with_bias(self, y: jax.Array, x: Any) -> jax.Array:
        """The product of ``x`` and the weight, with the update of LoRA and the bias."""
        if self.lora is not None:
            y = self.updated(y, x)
        return y if self.bias is None else add_bias(y, self.bias)

    def _clipped(self, limit: float) -> jax.Array:
        return jnp.clip(jnp.asarray(self.weight.operand()), -limit, limit)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy of the weight; setting it also sets that of the bias."""
        return self.weight.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        self.weight.sharding_strategy = strategy
        if self.bias is not None:
            self.bias.sharding_strategy = bias_strategy(strategy)

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one Linear for each device, each with its shards of the weights.

        With a split by columns the results must be summed, so only the first Linear has the bias.

        Raises:
            ValueError: ``sharding_strategy`` is not set.

        Example:
            >>> from maxjax.graph import ShardingStrategy
            >>> layer = Linear(4, 3, "float32", DeviceRef.CPU(), has_bias=True)
            >>> layer.sharding_strategy = ShardingStrategy.columnwise(2)
            >>> [list(part.raw_state_dict()) for part in layer.shard([DeviceRef.CPU()] * 2)]
            [['weight[0]', 'bias[0]'], ['weight[1]']]
        """
        self.refuse_update("shard()")
        return sharded(self, devices)

    def initializer(self, name: str) -> Any:
        """Normal weights with variance 1/in_dim; a zero bias."""
        own = jax.nn.initializers.zeros if name.endswith("bias") else _LECUN_NORMAL
        return super().initializer(name) or own


def linears(layers: Sequence[Any], x: Any) -> list[jax.Array]:
    """The results of several layers for one input; plain Linears run as one matmul.

    A single matmul saves the cost of starting several. It needs no concatenated copy of the
    weights: each Linear keeps its own weights, names and shardings.

    Args:
        layers: Linears, or other callables that take ``x``.
        x: ``[..., in_dim]``.

    Returns:
        One array ``[..., out_dim]`` for each layer.
    """
    # A hook must see every call, and a capture the call of each layer that it names.
    watched = hooks.token() or any(isinstance(a, Linear) and is_wanted(a) for a in layers)
    if watched or any(type(a) is not Linear or a.clip_weight is not None for a in layers):
        return [layer(x) for layer in layers]
    results = all_updated(layers, x, matmul(x, [layer.weight for layer in layers]))
    return [add_bias(y, layer.bias) for y, layer in zip(results, layers, strict=True)]


def bias_strategy(strategy: ShardingStrategy) -> ShardingStrategy:
    """The strategy of the bias of a Linear whose weight has ``strategy``."""
    rule, n = strategy.shard, strategy.num_devices
    if isinstance(rule, Split):
        return ShardingStrategy(n, rule.of_bias)
    return ShardingStrategy.replicate(n)


class ColumnParallelLinear(Linear):
    """A Linear whose outputs are split over the devices: the head of a language model.

    Called with a list of tensors and signal buffers, as in MAX, it returns a list with the result for each device.
    For few tokens a weight that is split over ``fsdp`` is used shard by shard, without gathering it.

    Args (in MAX's order):
        in_dim, out_dim: length of the last axis of the input and of the result.
        dtype: dtype of weight and bias.
        devices: devices; the weights are declared on the first.
        tied_weight: weight of another layer, such as an Embedding, that this layer uses; None creates a new one.
        kwargs: further arguments of Linear.

    Example:
        >>> import maxjax
        >>> head = ColumnParallelLinear(4, 6, "float32", [DeviceRef.CPU()])
        >>> tuple(head.to(maxjax.make_mesh(model=1)).weight.sharding.spec)
        (None, None)
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: Any = DType.float32,
        devices: Sequence[DeviceRef] = (),
        tied_weight: Weight | None = None,
        **kwargs: Any,
    ):
        device = devices[0] if devices else DeviceRef.CPU()
        super().__init__(in_dim, out_dim, dtype, device, **kwargs)
        self.devices = list(devices)
        self.num_devices = len(self.devices)
        if tied_weight is not None:
            self.set_shared_weight("weight", tied_weight)
        if self.num_devices > 1:
            self.sharding_strategy = ShardingStrategy.rowwise(self.num_devices)
            self.distributed_linear_layers = self.shard(self.devices)

    @on_float_arrays
    def __call__(self, x: Any, signal_buffers: Iterable[Any] | None = None) -> Any:
        """The result for ``x``, as from Linear; for a list with one tensor for each device, a list of results.

        Raises:
            ValueError: the list does not have one tensor for each device, or there is not one signal buffer for each.
            NotImplementedError: the layer has LoRA weights, which its parts on several devices do not have.
        """
        if not isinstance(x, list | tuple):
            return self._result(x)
        if len(x) == 1:
            return [self._result(x[0])]
        self.refuse_update("a call with one tensor for each device")
        if len(x) != len(self.devices):
            raise ValueError(f"{len(x)} tensors for the {len(self.devices)} devices of a layer")
        if signal_buffers is not None and (count := len(list(signal_buffers))) != len(x):
            raise ValueError(f"{count} signal buffers for the {len(x)} devices of a layer")
        # Linear.__call__, as in MAX: a derived class may require signal buffers in its own __call__.
        found = [
            Linear.__call__(part, one)
            for part, one in zip(self.distributed_linear_layers, x, strict=True)
        ]
        joined = jnp.concatenate([beside(y, found[0]) for y in found], axis=-1)
        return [beside(joined, y) for y in found]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits rows, or columns where the rows do not divide evenly."""
        return {"weight": TABLE, "bias": ROWS, **super().sharding_rules()}

    def _result(self, x: Any) -> jax.Array:
        limit = self.clip_weight
        weight = self.weight if limit is None else self._clipped(limit)
        return self._with_bias(self._product(x, weight), x)

    def _product(self, x: Any, weight: Any) -> Any:
        # Otherwise, if the weight is split by columns, XLA would also split the features of the layers before.
        x = replicate_last_axis(jnp.asarray(x), self.weight, 1)
        if weight is not self.weight or x.ndim < 2 or not can_be_in_place(weight, x):
            return matmul(x, weight)
        rows, columns = map(int, weight.logical_shape)
        # The factor 4: activations may have twice the bytes of weights, and in-place use must halve what is moved.
        if 4 * math.prod(x.shape[:-1]) * (rows + columns) > rows * columns:
            return matmul(x, weight)
        return in_place(lambda operand, x: matmul(x, operand), weight, x, features=0, whole=False)


class MLP(Module):
    """``down_proj(activation(gate_proj(x)) · up_proj(x))`` (N. Shazeer, arXiv:2002.05202).

    Args (in MAX's order; the two sizes are required):
        dtype: dtype of the weights.
        quantization_encoding: block format of quantised weights, or None.
        hidden_dim: length of the last axis of the input and of the result.
        feed_forward_length: length of the last axis between the linear layers.
        devices: devices; the weights are declared on the first.
        linear_cls: constructor of the three linear layers: Linear, or a callable with its keyword arguments.
        has_bias, bias: two names of one argument: whether each linear layer has a bias. By default none has.
        activation_function: name of the activation function, as ``nn.activation`` takes it.
        swiglu_limit: if positive, ``activation(gate_proj(x))`` is at most this, and ``up_proj(x)`` within ± it.
        is_sharding: whether to create no linear layers; the code that shards an MLP assigns them to its parts.

    Attributes:
        gate_proj, down_proj, up_proj: linear layers, registered in this order, as in MAX.

    Raises:
        TypeError: a size is missing.
        ValueError: there is no activation function of that name.

    Example:
        >>> mlp = MLP(hidden_dim=3, feed_forward_length=8)
        >>> list(mlp.raw_state_dict())
        ['gate_proj.weight', 'down_proj.weight', 'up_proj.weight']
    """

    @hides("quant_config")
    def __init__(
        self,
        dtype: Any = DType.float32,
        quantization_encoding: QuantizationEncoding | None = None,
        hidden_dim: int | None = None,
        feed_forward_length: int | None = None,
        devices: Sequence[DeviceRef] = (),
        linear_cls: Callable[..., Any] = Linear,
        has_bias: bool | None = None,
        activation_function: str = "silu",
        quant_config: Any = None,
        swiglu_limit: float = 0.0,
        is_sharding: bool = False,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        if hidden_dim is None or feed_forward_length is None:
            raise TypeError(
                f"{type(self).__name__}() needs two sizes, by name: hidden_dim=…, feed_forward_length=…"
            )
        has_bias = either(False, has_bias=has_bias, bias=bias)
        activation(activation_function)
        self.devices = list(devices)
        self.hidden_dim, self.feed_forward_length = hidden_dim, feed_forward_length
        self.activation_function, self.swiglu_limit = activation_function, swiglu_limit
        self.quantization_encoding, self.quant_config = quantization_encoding, quant_config
        if is_sharding:
            return

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
        """Splits gate and up by rows and down by columns, so that one all-reduce at the end is enough."""
        return mlp_rules("", TENSOR)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """How the MLP is split: tensor_parallel or replicate; None if it was not set.

        Raises:
            ValueError: another strategy is assigned.
        """
        return strategy_by(self.down_proj)

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        split_layers(self, strategy, MLP.sharding_rules(self))

    def shard(self, devices: Iterable[DeviceRef]) -> list[Module]:
        """Returns one MLP for each device, with its shards of the weights; the results must be summed.

        Raises:
            ValueError: ``sharding_strategy`` is not set.
        """
        return sharded(self, devices)

    @on_float_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., hidden_dim]`` → the same shape."""
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [..., feed_forward_length]
        h = gated(gate, up, self.activation_function, self.swiglu_limit)
        return self.down_proj(h)


class FusedMLP(Module):
    """``down_proj(activation(gate) · up)``, with gate and up in one fused weight. Arguments in MAX's order.

    Args:
        dtype: dtype of the weights.
        hidden_dim: length of the last axis of the input and of the result.
        feed_forward_length: number F of gates, and of up projections.
        devices: sequence of exactly one device.
        activation_function: name of the activation function.
        swiglu_limit: if positive, activated gates are clipped to at most this limit, and up to ±limit.
        is_sharding: whether to create no weights; the code that shards this layer assigns them.

    Attributes:
        gate_up_proj_fused: Weight ``[2 F, hidden_dim]``, gates before up.
        down_proj: Linear.

    Raises:
        ValueError: ``devices`` is not one device, or there is no activation function of that name.

    Example:
        >>> mlp = FusedMLP("float32", 3, 8, [DeviceRef.CPU()])
        >>> {name: weight.shape for name, weight in mlp.raw_state_dict().items()}
        {'gate_up_proj_fused': [Dim(16), Dim(3)], 'down_proj.weight': [Dim(3), Dim(8)]}
    """

    def __init__(
        self,
        dtype: Any,
        hidden_dim: int,
        feed_forward_length: int,
        devices: Sequence[DeviceRef],
        activation_function: str = "silu",
        swiglu_limit: float = 0.0,
        is_sharding: bool = False,
    ):
        super().__init__()
        if len(devices) != 1:
            raise ValueError(f"FusedMLP takes one device, not {len(devices)}")
        activation(activation_function)
        self.devices = list(devices)
        self.hidden_dim, self.feed_forward_length = hidden_dim, feed_forward_length
        self.activation_function, self.swiglu_limit = activation_function, swiglu_limit
        if not is_sharding:
            self.gate_up_proj_fused = Weight(
                "gate_up_proj_fused", dtype, (2 * feed_forward_length, hidden_dim), devices[0]
            )
            self.down_proj = Linear(feed_forward_length, hidden_dim, dtype, devices[0])

    @on_float_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., hidden_dim]`` → the same shape."""
        gate_up = matmul(jnp.asarray(x), self.gate_up_proj_fused)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        y = gated(gate, up, self.activation_function, self.swiglu_limit)
        return self.down_proj(y)

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy: replicate, or tensor_parallel over one device; None if it was not set.

        Raises:
            ValueError: another strategy is assigned.
        """
        return strategy_by(self.down_proj)

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        if strategy.is_tensor_parallel and strategy.num_devices != 1:
            raise ValueError(
                f"FusedMLP is not split over {strategy.num_devices} devices: gates and up are one weight"
            )
        split_layers(self, strategy, {"gate_up_proj_fused": ROWS, "down_proj": COLUMNS})

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one FusedMLP for each device.

        Raises:
            ValueError: ``sharding_strategy`` is not set.
        """
        return sharded(self, devices)


def mlp_rules(path: str, over: Sequence[str]) -> dict[str, Any]:
    """The sharding rules of the MLP at an attribute path, over some kinds of mesh axes."""
    rows, columns = (dataclasses.replace(split, over=tuple(over)) for split in (ROWS, COLUMNS))
    return {f"{path}gate_proj": rows, f"{path}up_proj": rows, f"{path}down_proj": columns}


def gated(gate: jax.Array, up: jax.Array, activation_function: str, limit: float) -> jax.Array:
    """``activation(gate) · up``; a positive ``limit`` clips the first factor to at most it, the second to ±it."""
    gate, up = clipped(activation(activation_function)(gate), up, limit)
    return gate * up


__getattr__ = _absent(__name__)
