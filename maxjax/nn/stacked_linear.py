"""StackedLinear: several linear layers with the same input and concatenated outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..absent import hides, refuse_arguments
from ..dtype import DType
from ..elsewhere import either
from ..graph.device import DeviceRef
from ..graph.kind import as_array, for_max, on_float_arrays
from ..graph.placement.device_major import DeviceMajor
from ..graph.placement.split import Segment, Split
from ..graph.placement.strategy import ShardingStrategy
from ..graph.weight.weight import Weight, with_values
from ..kernels import explicit, matmul
from .layer import hooks
from .layer.observe.frames import is_wanted
from .layer.sharded import sharded
from .linear import Linear, bias_strategy, linears
from .low_rank import LowRank
from .product import add_bias


class StackedLinear(LowRank):
    """Linear layers with the same input and concatenated outputs. Arguments in MAX's order.

    Args:
        in_dim: length of the last axis of the input.
        out_dims: length of the last axis of the result, for each linear layer.
        names: attribute names of the linear layers.
        dtype: dtype of weights and biases.
        device: device that the weights are declared on; None means the CPU.
        stacked: whether one weight holds all linear layers, as in some checkpoints; it has this layer's
            name. Otherwise each linear layer is a child, and the names of the children's weights
            leave out this layer's name: ``self_attn.q_proj.weight``, not ``….qkv_proj.q_proj.weight``.
        has_bias, bias: two names of one argument: whether each linear layer has a bias. By default none has.
        linear_cls: constructor of the children: Linear, or a callable with its keyword arguments.
        clip_weight: bound of the weights (not the biases), clipped to ``±clip_weight``; 0 and None mean no bound.

    Attributes:
        weight, bias: Weights ``[sum(out_dims), in_dim]`` and ``[sum(out_dims)]`` if ``stacked``.

    Raises:
        ValueError: ``names`` and ``out_dims`` differ in length or are empty, or a name is repeated.

    Example:
        >>> qk = StackedLinear(3, [4, 2], ["q_proj", "k_proj"])
        >>> list(qk.raw_state_dict())
        ['q_proj.weight', 'k_proj.weight']
    """

    @hides("quant_config")
    def __init__(
        self,
        in_dim: int,
        out_dims: Sequence[int],
        names: Sequence[str],
        dtype: Any = DType.float32,
        device: DeviceRef | None = None,
        stacked: bool = False,
        has_bias: bool | None = None,
        linear_cls: Callable[..., Any] = Linear,
        quant_config: Any = None,
        clip_weight: float | None = None,
        _is_sharding: bool = False,
        *,
        bias: bool | None = None,
    ):
        super().__init__()
        refuse_arguments(self, quant_config=quant_config)
        device = device or DeviceRef.CPU()
        has_bias = either(False, has_bias=has_bias, bias=bias)
        if len(names) != len(out_dims) or len(set(names)) != len(names) or not names:
            raise ValueError(
                f"StackedLinear needs one name for each of its linear layers, all different, not "
                f"{list(names)} for out_dims {list(out_dims)}"
            )
        self.in_dim, self.out_dims, self.names = in_dim, tuple(out_dims), tuple(names)
        self.stacked, self.has_bias, self.clip_weight = stacked, has_bias, clip_weight or None
        self.bias = None
        if _is_sharding:  # the code that shards a layer assigns weights or children to its parts
            return
        if stacked:
            self.weight = Weight("weight", dtype, (sum(out_dims), in_dim), device)
            if has_bias:
                self.bias = Weight("bias", dtype, (sum(out_dims),), device)
            return
        for name, out_dim in zip(names, out_dims, strict=True):
            child = linear_cls(
                in_dim=in_dim, out_dim=out_dim, dtype=dtype, device=device, has_bias=has_bias,
                quant_config=None, clip_weight=clip_weight,
            )  # fmt: skip
            setattr(self, name, child)

    @property
    def _omit_module_attr_name(self) -> bool:
        return not self.stacked

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy of the weight, or of each linear layer."""
        return (self if self.stacked else getattr(self, self.names[0])).weight.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        if not self.stacked:
            for name in self.names:
                getattr(self, name).sharding_strategy = strategy
            return
        self.weight.sharding_strategy = strategy
        if self.bias is not None:
            self.bias.sharding_strategy = bias_strategy(strategy)

    def shard(self, devices: Iterable[DeviceRef]) -> list[StackedLinear]:
        """Returns one StackedLinear for each device, each with its shards of the weights.

        With a split by columns the results must be summed, so only the first has the biases.

        Raises:
            ValueError: ``sharding_strategy`` is not set.
        """
        self.refuse_update("shard()")
        found, strategy = sharded(self, devices), self.sharding_strategy
        assert strategy is not None  # sharded refuses a weight without one
        columns = strategy.sharded_axis in (1, -1)
        for i, part in enumerate(found):
            if not (columns or strategy.is_replicate):
                part.out_dims = self._part_dims(part, i)
            if columns and i:
                part.has_bias = False
        return found

    def _part_dims(self, part: StackedLinear, i: int) -> tuple[int, ...]:
        """The rows that part ``i`` has of each linear layer."""
        if not self.stacked:
            return tuple(int(getattr(part, name).weight.shape[0]) for name in self.names)
        strategy = self.sharding_strategy
        assert strategy is not None
        # A user's function is called with the numbers of the rows, to see which it takes.
        width = self.in_dim if strategy.sharded_axis is None else 1
        with jax.ensure_compile_time_eval():
            numbers = jnp.tile(jnp.arange(sum(self.out_dims))[:, None], width)
            rows = np.asarray(with_values(strategy)(numbers, i))[:, 0]
        layers = np.repeat(np.arange(len(self.out_dims)), self.out_dims)[rows]
        return tuple(int(n) for n in np.bincount(layers, minlength=len(self.out_dims)))

    def _child(self, name: str) -> Linear:
        """The linear layer of this name, as MAX's files take it, if the weights are not stacked."""
        return getattr(self, name)

    @property
    @for_max
    def stacked_weight(self) -> Any:
        """All weights, ``[sum(out_dims), in_dim]``, clipped if ``clip_weight`` is set."""
        weights = [self.weight] if self.stacked else [getattr(self, n).weight for n in self.names]
        array = explicit.concatenate(list(map(jnp.asarray, weights)), 0)
        if self.clip_weight is not None:
            array = jnp.clip(array, -self.clip_weight, self.clip_weight)
        return array

    @property
    @for_max
    def stacked_bias(self) -> Any:
        """All biases, ``[sum(out_dims)]``, or None."""
        if not self.has_bias:
            return None
        biases = [self.bias] if self.stacked else [getattr(self, n).bias for n in self.names]
        return explicit.concatenate(list(map(jnp.asarray, biases)), 0)

    @on_float_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., in_dim]`` → ``[..., sum(out_dims)]``, in the order of the names."""
        by_layer = not self.stacked or self.weight.spec.layout is not None
        return explicit.concatenate(self.split_projections(x), -1) if by_layer else self._matmul(x)

    def split_projections(self, x: Any) -> list[jax.Array]:
        """The result of each linear layer separately: ``[..., in_dim]`` → ``[..., out_dim]`` each."""
        x = as_array(x)
        if self.stacked:
            layout = self.weight.spec.layout
            return self.split(self._matmul(x)) if layout is None else self._by_device(x, layout)
        return linears([getattr(self, name) for name in self.names], x)

    def _by_device(self, x: Any, layout: DeviceMajor) -> list[jax.Array]:
        """The results for a weight in device-major order: no data moves between devices."""
        stored = self.weight.gathered_array()  # [n, r, in_dim]
        n, r, _ = stored.shape
        if self.clip_weight is not None:
            stored = jnp.clip(stored, -self.clip_weight, self.clip_weight)
        y = matmul(x, stored.reshape(n * r, -1))
        if self.lora_A is None:
            if self.bias is not None:
                y = add_bias(y, self.bias.gathered_array().reshape(-1))
            return layout.parts(y)
        y = self.updated(explicit.concatenate(layout.parts(y), -1), x)
        return self.split(add_bias(y, self.bias))

    def _matmul(self, x: Any) -> jax.Array:
        weight = self.weight if self.clip_weight is None else as_array(self.stacked_weight)
        return add_bias(self.updated(matmul(x, weight), x), self.bias)

    def split(self, y: Any) -> list[jax.Array]:
        """Splits the result of a call into those of the linear layers, ``[..., out_dim]`` each."""
        return _parts(y, self.out_dims)


def split_projections(layer: Any, x: Any, sizes: Sequence[int]) -> list[jax.Array]:
    """A linear layer's result in parts of these sizes: ``[..., in_dim]`` → ``[..., size]`` each.

    The layer is a :class:`StackedLinear`, or a quantised linear layer that replaces one.

    Example:
        >>> layer = StackedLinear(2, [1, 3], ["a", "b"], "float32", stacked=True)
        >>> _ = layer.load_state_dict({"weight": jnp.ones((4, 2))})
        >>> [part.shape for part in split_projections(layer, jnp.ones((5, 2)), [1, 3])]
        [(5, 1), (5, 3)]
    """
    # A hook must see every call, and a capture the call of each layer that it names.
    if isinstance(layer, StackedLinear) and not (hooks.token() or is_wanted(layer)):
        return layer.split_projections(x)
    return _parts(layer(x), sizes)


def _parts(y: Any, sizes: Sequence[int]) -> list[jax.Array]:
    """Parts of these sizes along the last axis."""
    return jnp.split(y, list(accumulate(sizes))[:-1], axis=-1)


def stacked_rules(path: str, layer: Any, segments: Sequence[Segment]) -> dict[str, Any]:
    """The sharding rules that split each part of the StackedLinear at an attribute path separately.

    Each device has its shard of every part, so that no result moves between devices. Weights that are
    quantised in blocks are split as one weight, and their results are gathered.
    """
    packed = isinstance(layer, StackedLinear) and layer.weight.spec.packing is not None
    return {path: Split(0, tuple(segments), by_device=not packed)}
