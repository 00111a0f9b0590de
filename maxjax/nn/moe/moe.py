"""MoE: a mixture of experts, of which each token uses only a few.

Sources: GShard (arXiv:2006.16668), Mixtral (arXiv:2401.04088).

Shapes: N tokens, E features, X experts with F inner features, k experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.arrays import is_manual, on_mesh
from ...graph.placement.specs import EXPERTS, batch_axes, mesh_of
from ...graph.placement.strategy import ShardingStrategy
from ...graph.value import TensorValue, unwrap, wraps
from ...kernels import explicit, matmul
from ..layer import LayerList, Module
from ..layer.definition import rebuild
from ..layer.sharded import Replicated
from ..linear import MLP, Linear, gated, linear_rules, mlp_rules
from .algorithms import ExpertWeights, one_by_one
from .experts import ExpertSplit, mixture, split_of
from .routing import Routing


class MoEGate(Replicated, Module):
    """Chooses the k experts with the highest scores ``gate_score(x)``. Arguments in MAX's order.

    Args:
        devices: devices; the weights are declared on the first.
        hidden_dim: length of the last axis.
        num_experts, num_experts_per_token: numbers X and k.
        dtype: dtype of the weight.
        is_sharding: whether to create no weights; whoever shards this layer assigns them.
        linear_cls: constructor of the linear layer that computes the scores.
        shares: factors of the experts' results: the "scores" themselves (MAX),
            their "softmax" over all experts (Qwen2-MoE), the "softmax of chosen" (Mixtral), or
            their "sigmoid" (Llama 4); computed in float32.

    Attributes:
        gate_score: Linear with weight ``[X, hidden_dim]``.

    Example:
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
        Routing(num_experts_per_token, shares)  # refuses other shares
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

    def __call__(self, hidden_state: Any) -> tuple[Any, Any]:
        """``[..., hidden_dim]`` → indices of experts and their shares, ``[..., k]`` each.

        The highest score comes first; of equal scores, the lower index.
        """
        scores = unwrap(self.gate_score(hidden_state))
        chosen, shares = Routing(self.num_experts_per_token, self.shares)(scores)
        shares = shares.astype(scores.dtype)
        if wraps(hidden_state):
            return TensorValue(chosen), TensorValue(shares)
        return chosen, shares

    def _set_sharding_strategy(self, strategy: ShardingStrategy) -> None:
        self._sharding_strategy = strategy  # which the shard methods of derived classes read
        super()._set_sharding_strategy(strategy)


class MoE(Module):
    """A mixture of experts: ``Σ share · expert(x)`` over those the gate chooses for a token.

    Args (in MAX's order):
        devices: devices; the weights are declared on the first.
        hidden_dim: length E of the last axis of the input and of the result.
        num_experts, num_experts_per_token: numbers X and k.
        moe_dim: number F of inner features of each expert.
        num_logical_experts: must equal ``num_experts``; copies of experts are not supported.
        gate_cls: constructor of the gate, with MoEGate's keyword arguments.
        mlp_cls, shared_mlp_cls: constructors of the experts and the shared expert, with MLP's
            keyword arguments.
        has_shared_experts, shared_experts_dim: whether there is a shared expert, an MLP that
            every token goes through, and its number of inner features.
        ep_size: must be 1.
        dtype: dtype of the weights.
        activation: name of the experts' activation function; "silu" by default.

    Attributes:
        gate: layer that chooses experts; its weight has ``dtype``, or bfloat16 if ``dtype`` is narrower.
        experts: LayerList of X MLPs: ``experts.3.up_proj.weight`` and so on.
        shared_experts: MLP, if ``has_shared_experts``.

    Experts that are plain MLPs run together (``experts.mixture``); others run one after the other
    over all tokens, with the same results. No token is dropped, however many choose the same expert.
    """

    def __init__(
        self,
        devices: Sequence[DeviceRef],
        hidden_dim: int,
        num_experts: int,
        num_experts_per_token: int,
        moe_dim: int,
        num_logical_experts: int | None = None,
        gate_cls: Callable[..., Any] = MoEGate,
        mlp_cls: Callable[..., Any] = MLP,
        shared_mlp_cls: Callable[..., Any] | None = None,
        has_shared_experts: bool = False,
        shared_experts_dim: int = 0,
        ep_size: int = 1,
        dtype: Any = DType.bfloat16,
        activation: str | None = None,
    ):
        super().__init__()
        if ep_size != 1 or num_logical_experts not in (None, num_experts):
            raise NotImplementedError("MoE with ep_size or copies of experts is not supported")
        self.devices, self.hidden_dim, self.moe_dim = list(devices), hidden_dim, moe_dim
        self.num_experts, self.num_experts_per_token = num_experts, num_experts_per_token
        self.has_shared_experts, self.dtype = has_shared_experts, DType.of(dtype)
        wide = self.dtype.is_float() and self.dtype.np.itemsize >= 2
        self.gate = gate_cls(
            devices=self.devices, hidden_dim=hidden_dim, num_experts=num_experts,
            num_experts_per_token=num_experts_per_token, dtype=dtype if wide else DType.bfloat16,
        )  # fmt: skip
        named = {} if activation is None else {"activation_function": activation}

        def mlp(cls: Callable[..., Any], length: int) -> Any:
            return cls(dtype=dtype, quantization_encoding=None, hidden_dim=hidden_dim,
                       feed_forward_length=length, devices=self.devices, **named)  # fmt: skip

        if has_shared_experts:
            self.shared_experts = mlp(shared_mlp_cls or mlp_cls, shared_experts_dim)
        self._strategy: ShardingStrategy | None = None
        self.experts = LayerList([mlp(mlp_cls, moe_dim) for _ in range(num_experts)])

    @property
    def gate_up_proj(self) -> TensorValue:
        """The gate and up weights of all experts, ``[X, 2 F, E]``."""
        pairs = [(unwrap(e.gate_proj.weight), unwrap(e.up_proj.weight)) for e in self.experts]
        return TensorValue(jnp.stack([jnp.concatenate(pair) for pair in pairs]))

    @property
    def down_proj(self) -> TensorValue:
        """The down weights of all experts, ``[X, E, F]``."""
        return TensorValue(jnp.stack([unwrap(e.down_proj.weight) for e in self.experts]))

    def __call__(self, x: Any) -> Any:
        """``[..., E]`` → the same shape and dtype; a TensorValue for a TensorValue."""
        array = unwrap(x)
        mesh = explicit.mesh_of(array, *jax.tree.leaves(self))
        if mesh is None:
            y = self._mixed(array)
        else:
            place = explicit.entries(array)
            y = explicit.automatic(lambda m, a: m._mixed(a), mesh, place)(self, array)
        return TensorValue(y) if wraps(x) else y

    def _mixed(self, array: jax.Array) -> jax.Array:
        tokens = array.reshape(-1, array.shape[-1])  # [N, E]
        mesh, axes = self._split() if _are_plain(self.experts) else (None, ())
        if mesh is not None:
            y = self._on_mesh(tokens, mesh, axes)
        else:
            chosen, shares = map(unwrap, self.gate(tokens))
            shares = shares.astype(jnp.float32)
            if _are_plain(self.experts):
                expert_weights = [
                    ExpertWeights(*(w.stored.operand() for w in _weights(e))) for e in self.experts
                ]
                y = mixture(tokens, chosen, shares, expert_weights, self._activation)
            else:
                each = [lambda x, e=e: unwrap(e(x)) for e in self.experts]
                y = one_by_one(tokens, chosen, shares, each)
            if self.has_shared_experts:
                y = y + unwrap(self.shared_experts(tokens)).astype(jnp.float32)
        return y.astype(array.dtype).reshape(array.shape)

    def _stacked(self) -> ExpertWeights:
        """The weights of all experts, stacked."""
        each = zip(*map(_weights, self.experts), strict=True)
        gate, up, down = (jnp.stack([unwrap(w) for w in weights]) for weights in each)
        return ExpertWeights(gate, up, down)

    @property
    def _activation(self) -> str:
        return self.experts[0].activation_function

    def _on_mesh(self, tokens: jax.Array, mesh: Any, axes: tuple[str, ...]) -> jax.Array:
        """Each device runs the gate for its tokens, and its part of every expert.

        The parts of all devices are summed once, including the shared expert's.
        """
        definition, holders = self.gate._mx_definition()
        gate = [holder.stored.used() for holder in holders]
        shared = [self.shared_experts] if self.has_shared_experts else []
        fused = (
            shared
            and _are_plain(shared)
            and split_of(map(_weights, shared), mesh) == ExpertSplit(axes)
        )
        weights = [unwrap(w) for e in shared if fused for w in _weights(e)]

        def local(gate: Any, x: Any, stacked: Any, weights: Any) -> jax.Array:
            chosen, shares = map(unwrap, rebuild(definition, gate)(x))
            y = mixture(x, chosen, shares.astype(jnp.float32), stacked, self._activation)
            if fused:
                kind = shared[0].activation_function
                h = gated(matmul(x, weights[0]), matmul(x, weights[1]), kind, 0.0)
                y = y + jnp.einsum("nf,ef->ne", h, weights[2].astype(h.dtype),
                                   preferred_element_type=jnp.float32)  # fmt: skip
            return jax.lax.psum(y, axes) if axes else y

        rows = batch_axes(mesh, tokens.shape[0], ("data", "fsdp", "seq"))
        one = [P(axes), P(axes), P(None, axes)] if fused else []
        inner = ExpertWeights(P(None, axes), P(None, axes), P(None, None, axes))
        specs = ([P()] * len(gate), P(rows), inner, one)
        y = on_mesh(local, mesh, specs, P(rows))(gate, tokens, self._stacked(), weights)
        if shared and not fused:
            y = y + unwrap(shared[0](tokens)).astype(jnp.float32)
        return y

    def _split(self) -> tuple[Any, tuple[str, ...]]:
        """The mesh of the experts, and the mesh axes that split their inner features."""
        mesh = mesh_of([w.sharding for e in self.experts for w in _weights(e)])
        if mesh is None or any(map(is_manual, mesh.axis_names)):
            return None, ()
        found = split_of(map(_weights, self.experts), mesh)
        return (None, ()) if found is None else (mesh, found.inner)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits every expert's inner features over the axes ``expert`` and ``model`` together.

        So the load is balanced over the devices, whatever experts the tokens choose.
        """
        rules = linear_rules("gate.gate_score", ShardingStrategy.replicate(1))
        for i in range(len(self.experts)):
            rules |= mlp_rules(f"experts.{i}.", EXPERTS)
        if self.has_shared_experts:
            rules |= mlp_rules("shared_experts.", EXPERTS)
        return rules

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy that was set: expert_parallel, tensor_parallel or replicate."""
        return self._strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        n = strategy.num_devices
        inner = ShardingStrategy.tensor_parallel(n) if strategy.is_expert_parallel else strategy
        for expert in self.experts:
            expert.sharding_strategy = inner
        if self.has_shared_experts:
            self.shared_experts.sharding_strategy = inner
        self.gate.sharding_strategy = ShardingStrategy.replicate(n)
        self._strategy = strategy


def _weights(mlp: Any) -> tuple[Any, Any, Any]:
    return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight


def _are_plain(experts: Any) -> bool:
    """Whether the experts are MLPs of equal structure, each with three bare Linears."""
    kinds = {(e.feed_forward_length, e.activation_function) if type(e) is MLP else None for e in experts}  # fmt: skip
    return len(kinds) == 1 and all(
        type(e) is MLP
        and e.swiglu_limit == 0
        and all(_is_bare(m) for m in (e.gate_proj, e.up_proj, e.down_proj))
        for e in experts
    )


def _is_bare(linear: Any) -> bool:
    """Whether ``linear`` is a Linear that only multiplies by its weight."""
    return (
        type(linear) is Linear
        and linear.bias is None
        and linear.clip_weight is None
        and linear.weight.quantization_encoding is None
    )
