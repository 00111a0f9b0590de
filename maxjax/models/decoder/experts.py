"""A mixture of experts that replaces a decoder's MLP: what the families with experts share.

A family defines how experts are chosen (``SparseMLP.routes``, a ``Routing``), what they compute
(``SparseMLP.kind``), which MLP all tokens go through (``SparseMLP.shared``), and the checkpoint's names.
Files hold each expert's linear layers as separate tensors, or those of all experts of a layer as
one tensor (``fused_experts``).

Shapes: N tokens, hidden size E, X experts with F inner features, k experts for each token.

Sources: arXiv:2401.04088, arXiv:2505.09388; transformers' ``MixtralSparseMoeBlock`` and
``Qwen3MoeSparseMoeBlock``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.weight.weight import Weight
from ...nn.layer import Module
from ...nn.linear import MLP, Linear
from ...nn.moe import Experts, Routing, route
from ...nn.moe.algorithms import Kind
from ..config import setting
from ..parts import replicate_over_mesh
from ..parts.aliases import alias
from .block import DecoderLayer
from .config import DecoderConfig, count_of, kinds_of, layers_of, own

# Names of an expert's linear layers, in the order gate, up, down.
MAPS_W = ("w1", "w3", "w2")
MAPS_PROJ = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MoEConfig(DecoderConfig):
    """The settings of a decoder with experts.

    Attributes:
        num_experts, num_experts_per_tok: X and k.
        moe_intermediate_size: F; ``intermediate_size`` by default.
        norm_topk_prob: whether the shares of the chosen experts are normalised to sum to 1.
        shared_size: inner features of the MLP that every token goes through; None: no such MLP.
        sparse: whether each layer has experts; by default all have.
        maps: the checkpoint's names of an expert's gate, up and down projections.
    """

    num_experts: int = setting(default=8, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=2, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=None, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=True)
    shared_size: int | None = own(None)
    sparse: tuple = own(())
    maps: tuple = own(MAPS_PROJ)

    def __post_init__(self) -> None:
        sparse = self.sparse or (self.num_experts > 0,) * self.num_hidden_layers
        object.__setattr__(self, "sparse", tuple(sparse))
        super().__post_init__()
        if any(self.sparse) and self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"'num_experts_per_tok' {self.num_experts_per_tok} is more than "
                f"'{self.key_of('num_experts')}' {self.num_experts}"
            )

    @property
    def expert_size(self) -> int:
        """F, the inner features of an expert."""
        return self.moe_intermediate_size or self.intermediate_size


@dataclass(frozen=True)
class GroupedMoEConfig(MoEConfig):
    """The settings of a decoder whose experts are in groups, of which a token chooses the best.

    Attributes:
        n_group, topk_group: number of groups of experts, and of those that a token chooses from.
        routed_scaling_factor: factor of the shares of the chosen experts.
        scoring, best_of_group: the attributes ``shares`` and ``best_of_group`` of the ``Routing``.
    """

    scoring: ClassVar[str] = "sigmoid"

    n_group: int = setting(default=1, minimum=1, held="axis")
    topk_group: int = setting(default=1, minimum=1, held="axis")
    routed_scaling_factor: float = setting(default=1.0)
    best_of_group: int = own(2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_routing(self.routing(), self.num_experts, self.key_of("num_experts"))

    def routing(self) -> Routing:
        """How experts are chosen, and how their shares are computed."""
        return Routing(
            self.num_experts_per_tok, self.scoring, normalised=self.norm_topk_prob,
            factor=self.routed_scaling_factor, groups=self.n_group, chosen_groups=self.topk_group,
            best_of_group=self.best_of_group, wide=True,
        )  # fmt: skip


def check_routing(routing: Routing, experts: int, key: str) -> None:
    """Checks that a routing fits a number of experts, which the configuration has under ``key``.

    Raises:
        ValueError: it does not fit; the message names the keys.
    """
    try:
        routing.check(experts)
    except ValueError as error:
        raise ValueError(
            f"{key!r}, 'num_experts_per_tok', 'n_group' and 'topk_group' do not fit together: {error}"
        ) from None


def after_dense(
    raw: Mapping[str, Any], layers: int, default: int = 0, key: str = "first_k_dense_replace"
) -> tuple[bool, ...]:
    """Whether each layer has experts: all but the first layers, whose number is under ``key``.

    Raises:
        ValueError: the setting is not a number of layers.
    """
    dense = raw.get(key)
    dense = default if dense is None else dense
    if type(dense) is not int or dense < 0:
        raise ValueError(f"'{key}' is {str(dense)[:60]}, not a number of layers")
    return tuple(i >= dense for i in range(layers))


def sparse_of(raw: Mapping[str, Any], default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Whether each layer has experts: as ``mlp_layer_types`` says, or the default without it.

    Raises:
        ValueError, UnsupportedModelError: as for ``kinds_of``.
    """
    return kinds_of(raw, {"dense": False, "sparse": True}, default, "mlp_layer_types")


class BalancedRouter(Linear):
    """A router with a bias ``e_score_correction_bias`` ``[X]`` that affects which experts are chosen, not their shares.

    It balances how often experts are chosen (DeepSeek-V3, arXiv:2412.19437).
    """

    def __init__(self, size: int, count: int, dtype: DType):
        super().__init__(size, count, dtype, DeviceRef.CPU())
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (count,), DeviceRef.CPU()
        )


class WrappedRouter(Module):
    """A router that holds its linear layer under an attribute name, as in files of some families."""

    def __init__(self, name: str, layer: Linear):
        super().__init__()
        self.name = name
        setattr(self, name, layer)

    def __call__(self, x: jax.Array) -> Any:
        """``[..., E]`` → ``[..., X]``."""
        return getattr(self, self.name)(x)


class SparseMLP(Module):
    """A mixture of experts that replaces an MLP: ``Σ share · expert(x)`` over the k chosen experts.

    A family that differs overrides ``route`` or :meth:`routes`, :meth:`kind`, :meth:`make_router`,
    :meth:`make_shared` or :meth:`shared`, and the names.

    Args:
        config: settings of the decoder.
        dtype: dtype of the weights.

    Attributes:
        routing: how experts are chosen and weighed.
        experts: the experts.
        router_name, shared_name: attribute names of the router, a Linear with weight ``[X, E]``, and of
            the MLP that every token goes through, if there is one.
        experts_have_biases: whether the linear layers of experts have biases.
        inner_router: attribute name of the router's linear layer, if the router is a module that holds it.
        route: how experts are chosen, if that is the same in every model of a family: arguments of
            ``Routing`` after the number of a token's experts.

    Example:
        >>> config = MoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> mlp = SparseMLP(config, DType.float32)
        >>> sorted(mlp.raw_state_dict())[:2]
        ['experts.0.down_proj.weight', 'experts.0.gate_proj.weight']
        >>> [leaf.shape for leaf in jax.tree.leaves(mlp)]
        [(8, 8), (8, 16, 8), (8, 16, 8), (8, 8, 16)]
    """

    router_name: ClassVar[str] = "gate"
    shared_name: ClassVar[str] = "shared_expert"
    experts_have_biases: ClassVar[bool] = False
    inner_router: ClassVar[str] = ""
    route: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: MoEConfig, dtype: DType):
        super().__init__()
        self.routing, kind = self.routes(config), self.kind(config)
        self.routing.check(config.num_experts)
        setattr(self, self.router_name, self.make_router(config, dtype))
        self.experts = Experts(
            config.hidden_size, config.expert_size, config.num_experts, dtype, config.maps, kind,
            self.experts_have_biases,
        )  # fmt: skip
        if (shared := self.make_shared(config, dtype)) is not None:
            setattr(self, self.shared_name, shared)

    def routes(self, config: Any) -> Routing:
        """How experts are chosen and weighed."""
        count = config.num_experts_per_tok
        if self.route:
            return Routing(count, **self.route)
        return Routing(count, "softmax of chosen" if config.norm_topk_prob else "softmax")

    def kind(self, config: Any) -> Kind:
        """What an expert computes between its projections."""
        return config.hidden_act

    def make_router(self, config: Any, dtype: DType) -> Module:
        """The linear layer that gives each expert a score."""
        layer = Linear(config.hidden_size, config.num_experts, dtype, DeviceRef.CPU())
        return WrappedRouter(self.inner_router, layer) if self.inner_router else layer

    def make_shared(self, config: Any, dtype: DType) -> Module | None:
        """The MLP that every token goes through, if ``config.shared_size`` is a number."""
        if not config.shared_size:
            return None
        return MLP(
            dtype, None, config.hidden_size, config.shared_size, [DeviceRef.CPU()],
            has_bias=config.mlp_bias, activation_function=config.hidden_act,
        )  # fmt: skip

    def correction(self) -> Any:
        """The bias ``[X]`` that affects only which experts are chosen; None: there is none."""
        return getattr(self.router_layer, "e_score_correction_bias", None)

    def shared(self, x: jax.Array) -> jax.Array | None:
        """The result ``[..., E]`` of the MLP that every token goes through; None: there is none."""
        layer = getattr(self, self.shared_name, None)
        return None if layer is None else layer(x)

    @property
    def router_layer(self) -> Any:
        """The layer that gives each expert a score."""
        return getattr(self, self.router_name)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh(self.router_name)

    def __call__(self, x: jax.Array, scored: jax.Array | None = None) -> jax.Array:
        """``[..., E]`` → the same shape and dtype.

        Args:
            x: inputs of the experts.
            scored: inputs of the router, ``[..., E]``; ``x`` by default.
        """
        chosen, shares = self.choose(x if scored is None else scored)
        if self.routing.on_inputs:  # each choice is a token of its own
            tokens = x[..., None, :] * shares[..., None].astype(x.dtype)
            y = self.experts(tokens, chosen[..., None], jnp.ones_like(shares)[..., None])
            y = jnp.sum(y, axis=-2)
        else:
            y = self.experts(x, chosen, shares)
        shared = self.shared(x)
        return y if shared is None else y + shared.astype(x.dtype)

    def choose(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``[..., E]`` → indices of the chosen experts and their shares in float32, ``[..., k]`` each.

        The highest score comes first; of equal scores, the lower index.
        """
        tokens = tokens.astype(jnp.float32) if self.routing.wide else tokens
        r = self.routing
        return route(
            self.router_layer(tokens), r.count, r.shares, normalised=r.normalised, least=r.least,
            more=r.more, factor=r.factor, groups=r.groups, top_groups=r.chosen_groups,
            best_of_group=r.best_of_group, bias=self.correction(),
        )  # fmt: skip


class GroupedMLP(SparseMLP):
    """Experts that are chosen by ``config.routing()``, and an MLP that every token goes through."""

    shared_name: ClassVar[str] = "shared_experts"

    def routes(self, config: Any) -> Routing:
        """``config.routing()``."""
        return config.routing()


class BalancedMLP(GroupedMLP):
    """A :class:`GroupedMLP` whose router is a :class:`BalancedRouter`."""

    def make_router(self, config: Any, dtype: DType) -> BalancedRouter:
        """The linear layer that gives each expert a score, with its balancing bias."""
        return BalancedRouter(config.hidden_size, config.num_experts, dtype)


class MoELayer(DecoderLayer):
    """A decoder layer whose MLP is a mixture of experts if ``config.sparse`` says so.

    Attributes:
        sparse_class: the class of mixtures of experts.
    """

    sparse_class: ClassVar[Any] = SparseMLP

    def make_mlp(self, config: Any, number: int, dtype: DType) -> Any:
        """The layer's MLP or mixture of experts, which maps ``[..., E]`` to the same shape."""
        if config.sparse[number]:
            return self.sparse_class(config, dtype)
        return super().make_mlp(config, number, dtype)


class MixtralLayer(MoELayer):
    """A layer in whose checkpoints the mixture of experts is called ``block_sparse_moe``."""

    mlp = alias("block_sparse_moe")


def sparse_layers(raw: Mapping[str, Any], experts: Any) -> tuple[bool, ...]:
    """Whether each layer has experts: every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not list.

    Raises:
        ValueError: a setting is of the wrong type.
    """
    layers, step = layers_of(raw), count_of(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError("'mlp_only_layers' is not a list of integers")
    if not layers or type(experts) is not int:
        return ()  # the checks of these fields raise later
    listed = set(dense)
    return tuple(i not in listed and experts > 0 and (i + 1) % step == 0 for i in range(layers))


@dataclass(frozen=True)
class QwenMoEConfig(MoEConfig):
    """The settings of a Qwen with experts in all or some layers."""

    unsaid: ClassVar[Mapping[str, Any]] = {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 4,
    }

    max_position_embeddings: int = setting(default=32768, minimum=1)
    num_experts: int = setting(default=128, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=8, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=768, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=False)
    qk_norm: bool = own(True)

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`, without ``intermediate_size`` if every layer has experts."""
        try:
            sparse = sparse_layers(raw, cls.value(raw, "num_experts"))
        except ValueError:
            sparse = ()
        if sparse and all(sparse):
            return {key: raw[key] for key in raw if key != "intermediate_size"}
        return raw

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers that have experts, and the sliding window, if it is used."""
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        sparse = sparse_layers(raw, cls.value(raw, "num_experts"))
        return {"sliding_window": window, "mlp_bias": False, "sparse": sparse}


class GatedSharedMLP(SparseMLP):
    """The experts, and a shared expert whose result is multiplied by a gate for each token."""

    def __init__(self, config: Any, dtype: DType):
        super().__init__(config, dtype)
        self.shared_expert_gate = Linear(config.hidden_size, 1, dtype, DeviceRef.CPU())

    def shared(self, x: jax.Array) -> Any:
        """``σ(gate(x)) · shared_expert(x)``."""
        y = super().shared(x)
        assert y is not None
        return jax.nn.sigmoid(self.shared_expert_gate(x)) * y


class GatedSharedLayer(MoELayer):
    """A layer whose experts are a GatedSharedMLP."""

    sparse_class: ClassVar[Any] = GatedSharedMLP
