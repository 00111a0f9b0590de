"""MoE: a mixture of experts, in which each token uses only a few experts.

Sources: GShard (arXiv:2006.16668), Mixtral (arXiv:2401.04088).

Shapes: N tokens, E features, X experts with F inner features, k experts for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...absent import hides, refuse_arguments
from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.kind import as_array, for_caller, for_max, on_arrays, to_value
from ...graph.placement.arrays import is_manual, on_mesh
from ...graph.placement.mesh import EXPERTS
from ...graph.placement.specs import batch_axes, mesh_of
from ...graph.placement.split import REPLICATED, even_range
from ...graph.placement.strategy import ShardingStrategy
from ...kernels import explicit, matmul
from ..activation import GatedActivation
from ..layer import LayerList, Module
from ..layer.definition import Variant, unflatten
from ..layer.sharded import sharded
from ..linear import MLP, Linear, gated, mlp_rules
from .algorithms import ExpertWeights, Kind, between, one_by_one
from .assignments import grouped_matmul_ragged, moe_create_indices, moe_finalize
from .experts import ExpertSplit, Part, mixture, split_of
from .gate import MoEGate, refuse_no_features


class MoE(Module):
    """A mixture of experts: ``Σ share · expert(x)`` over the experts that the gate chooses for a token.

    Args (in MAX's order):
        devices: devices; the weights are declared on the first.
        hidden_dim: length E of the last axis of the input and of the result.
        num_experts, num_experts_per_token: number X of experts, and number k that are chosen for a token.
        moe_dim: number F of inner features of each expert.
        num_logical_experts: must equal ``num_experts``; replicas of experts are not supported.
        gate_cls: constructor of the gate, with MoEGate's keyword arguments.
        mlp_cls, shared_mlp_cls: constructors of the experts and the shared expert, with MLP's
            keyword arguments.
        has_shared_experts, shared_experts_dim: whether there is a shared expert, an MLP that
            is applied to every token, and its number of inner features.
        ep_size: number of devices of ``ep_batch_manager``, which divides X; 1 without a manager.
        dtype: dtype of the weights.
        activation: a GatedActivation, or the name of the experts' activation function; "silu" by
            default.
        interleaved_gate_up: whether gates and up projections alternate in the ``gate_up_proj`` of a
            derived class; otherwise all gates precede all up projections.
        pre_expert_norm_cls: constructor of a norm of the experts' input, which the gate does not use.
        ep_batch_manager: ``nn.comm.ep.EPBatchManager`` for expert parallelism; the layer's shards are then
            called by ``forward_moe_sharded_layers``.
        shared_experts_dtype: dtype of the shared expert's weights, ``dtype`` by default.
        is_sharding: whether to create no experts; the code that shards this layer assigns them.

    Attributes:
        gate: layer that chooses experts; its weight has ``dtype``, or bfloat16 if ``dtype`` is narrower.
        experts: LayerList of X MLPs: ``experts.3.up_proj.weight`` and so on; a shard of expert
            parallelism has only the experts of its device.
        shared_experts: MLP, if ``has_shared_experts``.

    Raises:
        NotImplementedError: experts have replicas, or are quantised as MAX's settings say.
        ValueError: ``ep_size`` does not fit the manager or the number of experts, or there is a shared expert
            without inner features.

    Experts that are plain MLPs run together (``experts.mixture``); others run one after the other
    over all tokens, with the same results. No token is dropped, however many choose the same
    expert. If ``activation`` is a GatedActivation with settings, or a derived class overrides ``gate_up_proj``
    or ``down_proj``, experts are computed from these two weights and the activation, as in MAX.
    """

    _ep_batch_manager: Any = None
    _sharding_strategy: ShardingStrategy | None = None
    layer_idx: int | None = None
    # Attributes of MAX's tensor_parallel shards, which hold complete experts; here each has a shard of every expert.
    shard_devices: Sequence[DeviceRef] = ()
    shard_index: int = 0

    @hides("quant_config", "shared_experts_quant_config")
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
        activation: GatedActivation | str | None = None,
        interleaved_gate_up: bool = False,
        pre_expert_norm_cls: Callable[[], Any] | None = None,
        ep_batch_manager: Any = None,
        quant_config: Any = None,
        shared_experts_dtype: Any = None,
        shared_experts_quant_config: Any = None,
        is_sharding: bool = False,
    ):
        super().__init__()
        if num_logical_experts not in (None, num_experts):
            raise NotImplementedError(
                f"MoE with {num_experts} experts that are copies of {num_logical_experts}: on a "
                "mesh with an expert axis (Module.to) each device has its part of every expert instead"
            )
        refuse_arguments(
            self, quant_config=quant_config, shared_experts_quant_config=shared_experts_quant_config
        )
        ranks = 1 if ep_batch_manager is None else ep_batch_manager.config.n_gpus_per_node
        if ep_size != ranks or num_experts % ep_size:
            raise ValueError(
                f"ep_size is {ep_size}: it must be the number of devices of ep_batch_manager ({ranks}; 1 without a "
                f"manager), and divide the {num_experts} experts"
            )
        self.devices, self.hidden_dim, self.moe_dim = list(devices), hidden_dim, moe_dim
        self.num_experts, self.num_experts_per_token = num_experts, num_experts_per_token
        self.num_logical_experts, self.num_local_experts = num_experts, num_experts // ep_size
        self.gate_cls, self.mlp_cls, self.shared_mlp_cls = gate_cls, mlp_cls, shared_mlp_cls
        self.has_shared_experts, self.shared_experts_dim = has_shared_experts, shared_experts_dim
        self.ep_size, self.dtype, self.quant_config = ep_size, DType.of(dtype), None
        self.shared_experts_dtype = DType.of(shared_experts_dtype or dtype)
        self.shared_experts_quant_config = None
        self.activation = GatedActivation() if activation is None else activation
        self.interleaved_gate_up = interleaved_gate_up
        self.pre_expert_norm_cls = pre_expert_norm_cls
        self.pre_expert_norm = pre_expert_norm_cls() if pre_expert_norm_cls is not None else None
        wide = self.dtype.is_float() and self.dtype.np.itemsize >= 2
        self.gate = gate_cls(
            devices=self.devices, hidden_dim=hidden_dim, num_experts=num_experts,
            num_experts_per_token=num_experts_per_token, dtype=dtype if wide else DType.bfloat16,
        )  # fmt: skip
        if has_shared_experts:
            refuse_no_features(shared_experts_dim)
            self.shared_experts = self._mlp(
                shared_mlp_cls or mlp_cls, self.shared_experts_dtype, shared_experts_dim
            )
        if ep_batch_manager is not None:
            self._ep_batch_manager = ep_batch_manager
        if not is_sharding:
            self._init_experts()

    def _mlp(self, cls: Callable[..., Any], dtype: Any, length: int) -> Any:
        named = {"activation_function": self.activation} if isinstance(self.activation, str) else {}
        return cls(
            dtype=dtype, quantization_encoding=None, hidden_dim=self.hidden_dim,
            feed_forward_length=length, devices=self.devices, **named,
        )  # fmt: skip

    def _init_experts(self) -> None:
        # A separate method, because classes derived from MAX's MoE override it.
        self.experts = LayerList(
            [self._mlp(self.mlp_cls, self.dtype, self.moe_dim) for _ in range(self.num_experts)]
        )

    @property
    def ep_batch_manager(self) -> Any:
        """The EPBatchManager.

        Raises:
            ValueError: the layer has no EPBatchManager.
        """
        if self._ep_batch_manager is None:
            raise ValueError(
                f"{type(self).__name__} has no ep_batch_manager; expert_parallel needs one"
            )
        return self._ep_batch_manager

    @property
    def _held(self) -> list[Any]:
        """The experts in ``gate_up_proj`` and ``down_proj``: the shared expert first, if it is fused."""
        manager = self._ep_batch_manager
        fused = manager is not None and manager.config.fused_shared_expert
        return [*([self.shared_experts] if fused else []), *self.experts]

    @property
    @for_max
    def gate_up_proj(self) -> Any:
        """The gate and up weights of all experts, ``[X, 2 F, E]``."""
        pairs = [(as_array(e.gate_proj.weight), as_array(e.up_proj.weight)) for e in self._held]
        return jnp.stack([jnp.concatenate(pair) for pair in pairs])

    @property
    @for_max
    def down_proj(self) -> Any:
        """The down weights of all experts, ``[X, E, F]``."""
        return jnp.stack([as_array(e.down_proj.weight) for e in self._held])

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[..., E]`` → the same shape and dtype.

        Raises:
            ValueError: the layer has an ``ep_batch_manager``.
        """
        if self._ep_batch_manager is not None:
            raise ValueError(
                f"{type(self).__name__} has an ep_batch_manager: shard it with "
                "ShardingStrategy.expert_parallel, and pass its parts to forward_moe_sharded_layers"
            )
        mesh = explicit.mesh_of(x, *jax.tree.leaves(self))
        return explicit.automatic(lambda m, x: m._mixed(x), mesh, explicit.entries(x))(self, x)

    def _mixed(self, array: jax.Array) -> jax.Array:
        tokens = array.reshape(-1, array.shape[-1])  # [N, E]
        plain = not self._is_derived() and _are_plain(self.experts)
        mesh, axes = self._split() if plain and self.pre_expert_norm is None else (None, ())
        if mesh is not None:
            y = self._on_mesh(tokens, mesh, axes)
        else:
            chosen, shares = self.gate(tokens)
            shares = shares.astype(jnp.float32)
            if self.pre_expert_norm is not None:
                tokens = self.pre_expert_norm(tokens)
            if plain:
                expert_weights = [
                    ExpertWeights(*(w.operand() for w in _weights(e))) for e in self.experts
                ]
                y = mixture(tokens, chosen, shares, expert_weights, self._kind)
            elif self._is_derived() or not self._is_default():
                down, places = self._expert_matmuls(tokens, chosen.reshape(-1))
                y = moe_finalize(down, places, shares, DType.float32)
            else:
                y = one_by_one(tokens, chosen, shares, list(self.experts))
            if self.has_shared_experts:
                y = y + self.shared_experts(tokens).astype(jnp.float32)
        return y.astype(array.dtype).reshape(array.shape)

    # --- experts as two stacked weights and an activation

    def _is_derived(self) -> bool:
        """Whether a derived class overrides the stacked weights, or their gates and up projections alternate."""
        names = ("gate_up_proj", "down_proj")
        changed = any(getattr(type(self), name) is not getattr(MoE, name) for name in names)
        return changed or self.interleaved_gate_up

    def _is_default(self) -> bool:
        return isinstance(self.activation, str) or self.activation == GatedActivation()

    @property
    def _kind(self) -> Kind:
        if self._is_default():
            return getattr(self.experts[0], "activation_function", "silu")
        return self.activation.of_pair  # type: ignore[union-attr]

    @on_arrays
    def _expert_matmuls(self, x: Any, router_idx: Any) -> tuple[Any, Any]:
        """The experts' results, sorted by expert, and the position of each choice among them.

        Args:
            x: tokens ``[N, E]``.
            router_idx: indices of the tokens' experts, ``[N k]``.

        Returns:
            The results ``[N k, E]`` and the positions ``[N k]``.
        """
        ids = jnp.asarray(router_idx).astype(jnp.int32)
        order, starts, places, experts, stats = moe_create_indices(ids, self.num_experts)
        rows = x[order.astype(jnp.int32) // self.num_experts_per_token]
        return self._of_rows(rows, starts, experts, stats), places

    def _of_rows(self, rows: Any, starts: Any, experts: Any, stats: Any) -> jax.Array:
        with for_caller():  # a derived class may have its own
            weights = self.gate_up_proj, self.down_proj
        given = map(as_array, (rows, starts, experts, stats, *weights))
        function = getattr(self.activation, "gated_activation_fn", None)
        how = (self.moe_dim, function is not None, self.interleaved_gate_up)
        return _by_weights(function or self._kind, *how, *map(jnp.asarray, given))

    # --- what forward_moe_sharded_layers calls

    def _ep_dispatch_input_scales(self) -> None:
        """The scales of quantised tokens: None, because quantised tokens are not supported."""

    @on_arrays
    def _local_ep_compute(
        self, expert_inputs: Sequence[Any], x: Any, estimated_total_m: Any
    ) -> Any:
        """The results of this device's experts for the rows that the device received.

        Args:
            expert_inputs: results of ``EPBatchManager.ep_dispatch_wait``.
            x: the device's own tokens; ignored.
            estimated_total_m: ignored.
        """
        return self._of_rows(*expert_inputs)

    def _stacked(self) -> ExpertWeights:
        """The weights of all experts, stacked."""
        each = zip(*map(_weights, self.experts), strict=True)
        gate, up, down = (jnp.stack([as_array(w) for w in weights]) for weights in each)
        return ExpertWeights(gate, up, down)

    def _on_mesh(self, tokens: jax.Array, mesh: Any, axes: tuple[str, ...]) -> jax.Array:
        """Runs the gate on each device for its tokens, and the device's shard of every expert.

        One all-reduce sums the results of all devices, including the shared expert's.
        """
        definition, holders = self.gate._mx_definition()
        gate = [holder.gathered_array() for holder in holders]
        shared = [self.shared_experts] if self.has_shared_experts else []
        fused = shared and _are_plain(shared) and split_of(map(_parts, shared)) == ExpertSplit(axes)
        weights = [as_array(w) for e in shared if fused for w in _weights(e)]

        def local(gate: Any, x: Any, stacked: Any, weights: Any) -> jax.Array:
            chosen, shares = unflatten(Variant(definition), gate)(x)
            y = mixture(x, chosen, shares.astype(jnp.float32), stacked, self._kind)
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
            y = y + shared[0](tokens).astype(jnp.float32)
        return y

    def _split(self) -> tuple[Any, tuple[str, ...]]:
        """The mesh of the experts, and the mesh axes that split their inner features."""
        mesh = mesh_of([w.sharding for e in self.experts for w in _weights(e)])
        if mesh is None or any(map(is_manual, mesh.axis_names)):
            return None, ()
        found = split_of(map(_parts, self.experts))
        return (None, ()) if found is None else (mesh, found.inner)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits every expert's inner features over the axes ``expert`` and ``model`` together.

        The load of the devices is then equal, whichever experts the tokens choose.
        """
        rules = {"gate.gate_score": REPLICATED}
        for i in range(len(self.experts)):
            rules |= mlp_rules(f"experts.{i}.", EXPERTS)
        if self.has_shared_experts:
            rules |= mlp_rules("shared_experts.", EXPERTS)
        return rules

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy that was set: expert_parallel, tensor_parallel or replicate.

        With an ``ep_batch_manager``, expert_parallel gives each device complete experts, and replicates all
        other layers. Without one, it is for a mesh, which splits every expert.
        """
        return self._sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        self._set_sharding_strategy(strategy)

    def _set_sharding_strategy(self, strategy: ShardingStrategy) -> None:
        # A separate method, because classes derived from MAX's MoE extend it.
        n = strategy.num_devices
        whole = ShardingStrategy.replicate(n)
        of_experts = of_shared = strategy
        if strategy.is_expert_parallel:
            of_experts = of_shared = ShardingStrategy.tensor_parallel(n)
            if self._ep_batch_manager is not None:
                of_experts, of_shared = ShardingStrategy.replicate(1), whole
        for expert in self.experts:
            expert.sharding_strategy = of_experts
        if self.has_shared_experts:
            self.shared_experts.sharding_strategy = of_shared
        if self.pre_expert_norm is not None:
            self.pre_expert_norm.sharding_strategy = whole
        self.gate.sharding_strategy = whole
        self._sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one MoE for each device.

        With tensor_parallel each has a shard of every expert, and the caller must sum the results. With
        expert_parallel each has some of the experts, and ``forward_moe_sharded_layers`` must call them.

        Raises:
            ValueError: ``sharding_strategy`` is not set, or it is expert_parallel and there is no
                ``ep_batch_manager``, or the number of devices is not that of the manager.

        Example:
            >>> from maxjax.nn.comm.ep import EPBatchManager, EPConfig
            >>> config = EPConfig(DType.float32, DType.float32, 6, 1, 4, 8, 2, 1)
            >>> both = [DeviceRef.GPU(0), DeviceRef.GPU(1)]
            >>> layer = MoE(both, 6, 4, 1, 8, dtype="float32", ep_size=2,
            ...             ep_batch_manager=EPBatchManager(config))
            >>> layer.sharding_strategy = ShardingStrategy.expert_parallel(2)
            >>> [len(part.experts) for part in layer.shard(both)]
            [2, 2]
        """
        devices, strategy = list(devices), self._sharding_strategy
        if strategy is None:
            raise ValueError(f"{type(self).__name__} cannot be sharded without a sharding_strategy")
        count = len(devices)
        if strategy.is_expert_parallel:
            self.ep_batch_manager  # noqa: B018  # raises ValueError if there is none
            if count != self.ep_size:
                raise ValueError(
                    f"the experts are dealt to {self.ep_size} devices (ep_size), not to {count}"
                )
            n = self.num_local_experts
            own = [
                [self.experts[n * i + j].shard([device])[0] for j in range(n)]
                for i, device in enumerate(devices)
            ]
        else:
            split = [expert.shard(devices) for expert in self.experts]
            own = [[parts[i] for parts in split] for i in range(count)]
        children: dict[str, Any] = self._mx_children
        others = {
            name: child.shard(devices) for name, child in children.items() if name != "experts"
        }
        found = sharded(self, devices, without=self._mx_children)
        for i, (part, device) in enumerate(zip(found, devices, strict=True)):
            part.devices = [device]
            part.experts = LayerList(own[i])
            for name, parts in others.items():
                setattr(part, name, parts[i])
            if strategy.is_tensor_parallel:
                start, stop = even_range(self.moe_dim, i, strategy.num_devices)
                part.moe_dim = stop - start
        return found


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _by_weights(
    kind: Any, moe_dim: int, is_whole: bool, interleaved: bool,
    rows: jax.Array, starts: jax.Array, experts: jax.Array, stats: jax.Array, gate_up: jax.Array,
    down: jax.Array,
) -> jax.Array:  # fmt: skip
    """The results of experts with stacked weights, for rows sorted by expert.

    Args:
        kind: Kind; if ``is_whole``, a function of gates and up projections in one tensor and of
            ``moe_dim``.
    """
    y = grouped_matmul_ragged(rows, gate_up, starts, experts, stats)
    # The result of a grouped matmul is undefined after the last group.
    inside = jnp.arange(y.shape[0]) < starts[-1].astype(jnp.int32)
    y = jnp.where(inside[:, None], y, 0)
    if is_whole:
        h = as_array(kind(to_value(y), moe_dim))
    elif interleaved:
        h = between(kind, y[:, 0::2], y[:, 1::2])
    else:
        h = between(kind, y[:, :moe_dim], y[:, moe_dim:])
    return grouped_matmul_ragged(h, down, starts, experts, stats)


def _weights(mlp: Any) -> tuple[Any, Any, Any]:
    return mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight


def _parts(mlp: Any) -> list[Part]:
    return [(weight, (0, 1)) for weight in _weights(mlp)]


def _are_plain(experts: Any) -> bool:
    """Whether the experts are MLPs of equal structure, each with three bare Linears."""
    plain = all(
        type(e) is MLP
        and e.swiglu_limit == 0
        and all(_is_bare(m) for m in (e.gate_proj, e.up_proj, e.down_proj))
        for e in experts
    )
    return plain and len({(e.feed_forward_length, e.activation_function) for e in experts}) == 1


def _is_bare(linear: Any) -> bool:
    """Whether ``linear`` is a Linear that only multiplies by its weight."""
    return (
        type(linear) is Linear
        and linear.bias is None
        and linear.clip_weight is None
        and linear.weight.quantization_encoding is None
    )
