"""MoEGate: the layer that chooses the experts of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.kind import on_arrays
from ...graph.placement.strategy import ShardingStrategy
from ..layer import Module
from ..layer.sharded import ReplicatedLayer
from ..linear import Linear
from .routing import Routing


def refuse_no_features(shared_experts_dim: int) -> None:
    """Raises ValueError for a shared expert without inner features, which would compute nothing."""
    if shared_experts_dim < 1:
        raise ValueError(
            f"shared_experts_dim is {shared_experts_dim}: with has_shared_experts it must be positive"
        )


class MoEGate(ReplicatedLayer, Module):
    """Chooses the k experts with the highest scores ``gate_score(x)``. Arguments in MAX's order.

    Args:
        devices: devices; the weights are declared on the first.
        hidden_dim: length of the last axis of the input.
        num_experts, num_experts_per_token: number X of experts, and number k that are chosen for a token.
        dtype: dtype of the weight.
        is_sharding: whether to create no weights; the code that shards this layer assigns them.
        linear_cls: constructor of the linear layer that computes the scores.
        shares: name of the function, computed in float32, that gives the factors of the experts' results: the
            "scores" themselves (MAX), their "softmax" over all experts (Qwen2-MoE), the "softmax of chosen"
            (Mixtral), their "sigmoid" (Llama 4), or another key of ``SHARES``.

    Attributes:
        gate_score: Linear with weight ``[X, hidden_dim]``.

    Example:
        >>> import jax.numpy as jnp
        >>> gate = MoEGate([DeviceRef.CPU()], 2, 3, 2, "float32")
        >>> _ = gate.load_state_dict({"gate_score.weight": jnp.array([[1.0, 0], [0, 1], [1, 1]])})
        >>> [print(a) for a in gate(jnp.array([[1.0, 2.0]]))]
        [[2 1]]
        [[3. 2.]]
        [None, None]
    """

    def __init__(
        self,
        devices: Sequence[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        dtype: Any,
        is_sharding: bool = False,
        linear_cls: Callable[..., Any] = Linear,
        *,
        shares: str = "scores",
    ):
        super().__init__()
        self.shares = shares
        Routing(num_experts_per_token, shares)  # raises ValueError for other shares
        if not 0 < num_experts_per_token <= num_experts:
            raise ValueError(
                f"num_experts_per_token is {num_experts_per_token}: it must be from 1 to "
                f"num_experts, which is {num_experts}"
            )
        self.devices, self.hidden_dim, self.dtype = list(devices), hidden_dim, DType.of(dtype)
        self.num_experts, self.num_experts_per_token = num_experts, num_experts_per_token
        self._sharding_strategy: ShardingStrategy | None = None
        if not is_sharding:
            self.gate_score = linear_cls(
                in_dim=hidden_dim, out_dim=num_experts, dtype=dtype,
                device=self.devices[0] if self.devices else DeviceRef.CPU(),
            )  # fmt: skip

    @on_arrays
    def __call__(self, hidden_state: Any) -> tuple[Any, Any]:
        """``[..., hidden_dim]`` → indices of experts, and their factors (shares), ``[..., k]`` each.

        The highest score comes first; of equal scores, the one with the lower index.
        """
        scores = self.gate_score(hidden_state)
        chosen, shares = Routing(self.num_experts_per_token, self.shares)(scores)
        shares = shares.astype(scores.dtype)
        return chosen.astype(jax.dtypes.canonicalize_dtype(jnp.int64)), shares

    def _set_sharding_strategy(self, strategy: ShardingStrategy) -> None:
        self._sharding_strategy = strategy  # the shard methods of derived classes read it
        super()._set_sharding_strategy(strategy)

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one gate for each device, with that device in ``devices``."""
        devices = list(devices)
        found = super().shard(devices)
        for part, device in zip(found, devices, strict=True):
            part.devices = [device]
        return found
