"""A mixture of experts that replaces a decoder's MLP, as in Mixtral and Qwen 3.

Files hold each expert's linear layers as separate tensors, or those of all experts of a layer as
one tensor (GGUF; transformers 5 in memory). The latter is sliced lazily, before anything is read.

Shapes: N tokens, hidden size E, X experts with F inner features, k experts for each token.

Sources: arXiv:2401.04088, arXiv:2505.09388; transformers' ``MixtralSparseMoeBlock`` and
``Qwen3MoeSparseMoeBlock``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...errors import CheckpointFormatError
from ...graph.device import DeviceRef
from ...graph.placement.arrays import is_manual
from ...graph.placement.specs import EXPERTS, mesh_of
from ...graph.placement.strategy import ShardingStrategy
from ...graph.weights import WeightData
from ...kernels import explicit
from ...nn.activation import activation
from ...nn.layer import ExpertStack, Module
from ...nn.linear import Linear, linear_rules, linears
from ...nn.moe import SHARES
from ...nn.moe.algorithms import ExpertWeights, one_by_one
from ...nn.moe.experts import Split, mixture, mixture_on_mesh, split_of
from ...nn.quantized import QuantizedLinear
from ..config import setting
from ..gguf.layouts import Expert as ExpertLayout
from ..gguf.names import Source
from ..gguf.sources import Relaid
from .block import DecoderLayer
from .config import DecoderConfig, own
from .model import DecoderFamily

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
        sparse: whether each layer has experts; by default all have.
        maps: the checkpoint's names of an expert's gate, up and down projections.
    """

    num_experts: int = setting(default=8, held="axis", also=("num_local_experts",))
    num_experts_per_tok: int = setting(default=2, minimum=1, held="axis")
    moe_intermediate_size: int | None = setting(default=None, minimum=1, held="axis")
    norm_topk_prob: bool = setting(default=True)
    sparse: tuple = own(())
    maps: tuple = own(MAPS_PROJ)

    def __post_init__(self) -> None:
        sparse = self.sparse or (self.num_experts > 0,) * self.num_layers
        object.__setattr__(self, "sparse", tuple(sparse))
        super().__post_init__()
        if any(self.sparse) and self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"'num_experts_per_tok' {self.num_experts_per_tok} is more than the "
                f"{self.num_experts} experts"
            )

    @property
    def expert_size(self) -> int:
        """F, the inner features of an expert."""
        return self.moe_intermediate_size or self.intermediate_size


def expert_count(raw: Mapping[str, Any], name: str, default: int) -> Any:
    """The number of experts, under either of the two keys that transformers accepts."""
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[name]
    found = raw.get(name)
    found = raw.get(other) if found is None else found
    return default if found is None else found


class ExpertMLP(Module):
    """One gated feed-forward network, whose linear layers have the checkpoint's names.

    Args:
        maps: names of the gate, up and down projections.
        size, inner: E and F.
        act: name of the activation function.
        dtype: dtype of the weights.
    """

    def __init__(self, maps: tuple, size: int, inner: int, act: str, dtype: DType):
        super().__init__()
        self.maps, self.act = maps, act
        for name, (in_dim, out_dim) in zip(
            maps, ((size, inner), (size, inner), (inner, size)), strict=True
        ):
            setattr(self, name, Linear(in_dim, out_dim, dtype, DeviceRef.CPU()))

    @property
    def linears(self) -> list[Linear]:
        """The gate, up and down projections."""
        return [getattr(self, name) for name in self.maps]

    def __call__(
        self, x: Any, *, number: Any = None, chosen: Any = None, shares: Any = None
    ) -> Any:
        """``[..., E]`` → the same shape; one of a stack that is scanned, (tokens, total) → the same.

        Args:
            x: tokens; in a scan ``(tokens [N, E], total [N, E])``, to which its share is added.
            number: index of the expert in a scan.
            chosen, shares: in a scan, experts and shares of the tokens, ``[N, k]``.
        """
        if number is None:
            gate, up, down = self.linears
            g, u = linears([gate, up], x)
            return down(activation(self.act)(g) * u.astype(g.dtype))
        tokens, total = x
        is_chosen = jnp.any(chosen == number)
        # Another expert is not even dequantised.
        run = lambda x: one_by_one(x, chosen - number, shares, [self])
        return tokens, total + jax.lax.cond(is_chosen, run, lambda x: jnp.zeros_like(total), tokens)


class SparseMLP(Module):
    """A mixture of experts that replaces an MLP: ``Σ share · expert(x)`` over the k chosen experts.

    Args:
        config: settings of the decoder.
        dtype: dtype of the weights.

    Attributes:
        gate: the router, a Linear of weight ``[X, E]``; the k experts with the highest scores are
            chosen.
        experts: ExpertStack of X :class:`ExpertMLP`: one array for each projection. If a file holds
            experts of one layer in different dtypes, it is a LayerList of them.

    Example:
        >>> config = MoEConfig(100, 8, 16, num_layers=2, num_heads=2)
        >>> mlp = SparseMLP(config, DType.float32)
        >>> sorted(mlp.raw_state_dict())[:2]
        ['experts.0.down_proj.weight', 'experts.0.gate_proj.weight']
        >>> [leaf.shape for leaf in jax.tree.leaves(mlp)]
        [(8, 8), (8, 16, 8), (8, 16, 8), (8, 8, 16)]
    """

    def __init__(self, config: MoEConfig, dtype: DType):
        super().__init__()
        size = config.hidden_size
        self.chosen, self.normalised, self.act = (
            config.num_experts_per_tok, config.norm_topk_prob, config.hidden_act
        )  # fmt: skip
        self.gate = Linear(size, config.num_experts, dtype, DeviceRef.CPU())
        first = ExpertMLP(config.maps, size, config.expert_size, config.hidden_act, dtype)
        self.maps = config.maps
        self.experts: Any = ExpertStack(first, config.num_experts)

    def sharding_rules(self) -> dict[str, Any]:
        """Deals whole experts over the mesh axis ``expert``, and splits their inner features over ``model``.

        If X does not divide, inner features are split over both axes together.
        """
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        rules = linear_rules("gate", ShardingStrategy.replicate(1))
        whole = () if self._stacked_experts is None else ("expert",)
        for i in self.experts._mx_children:  # one that stands for all, or each
            for name, strategy in zip(self.maps, (rows, rows, columns), strict=True):
                rules |= linear_rules(f"experts.{i}.{name}", strategy, EXPERTS, whole)
        return rules

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape and dtype."""
        mesh = explicit.mesh_of(x, *jax.tree.leaves(self))
        if mesh is None:
            return self._mixed(x)
        place = explicit.entries(x)
        return explicit.automatic(lambda m, a: m._mixed(a), mesh, place)(self, x)

    def _mixed(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])  # [N, E]
        chosen, shares = self.choose(tokens)
        if self._is_quantised:
            y = self._one_by_one(tokens, chosen, shares)
            return y.astype(x.dtype).reshape(x.shape)
        mesh, split = self._split()
        if mesh is None:
            y = mixture(tokens, chosen, shares, self._weights(), self.act)
        elif split is None:
            y = one_by_one(tokens, chosen, shares, list(self.experts))
        else:
            y = mixture_on_mesh(tokens, chosen, shares, self._weights(), self.act, mesh, split)
        return y.astype(x.dtype).reshape(x.shape)

    def choose(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``[N, E]`` → indices of the chosen experts and their shares in float32, ``[N, k]`` each.

        The highest score comes first; of equal scores, the lower index.
        """
        scores = self.gate(tokens).astype(jnp.float32)  # [N, X]
        best, chosen = jax.lax.top_k(scores, self.chosen)
        kind = "softmax of chosen" if self.normalised else "softmax"
        return chosen, SHARES[kind](scores, best)

    @property
    def _is_quantised(self) -> bool:
        """Whether weights of experts are stored as several tensors."""
        each = self.experts._mx_children.values()  # one that stands for all, or each
        return any(type(m) is QuantizedLinear for expert in each for m in expert.linears)

    def _one_by_one(self, tokens: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        """``one_by_one``, of which experts that no token chose are left out."""
        if self._stacked_experts is None:
            return one_by_one(tokens, chosen, shares, self.experts)
        carry = (tokens, jnp.zeros(tokens.shape, jnp.float32))
        carry = self.experts.scan(carry, index="number", chosen=chosen, shares=shares)
        return carry[1]

    @property
    def _stacked_experts(self) -> ExpertStack | None:
        experts = self.experts
        return experts if isinstance(experts, ExpertStack) and experts.is_stacked else None

    @property
    def _stacks(self) -> list[Any] | None:
        """The holders of the experts' weights: gates, ups and downs; None if they are apart."""
        if (experts := self._stacked_experts) is None:
            return None
        return [experts.holder(f"{name}.weight").stored for name in self.maps]

    def _weights(self) -> Any:
        if (stacks := self._stacks) is not None:
            return ExpertWeights(*(stack.operand() for stack in stacks))
        return [
            ExpertWeights(*(m.weight.stored.operand() for m in e.linears)) for e in self.experts
        ]

    def _split(self) -> tuple[Any, Split | None]:
        """The experts' mesh (or None) and how they are split over it.

        The latter is None if each is split in another way, or they are apart and quantised.
        """
        stacks = self._stacks
        weights = (
            [[m.weight for m in e.linears] for e in self.experts] if stacks is None else [stacks]
        )
        mesh = mesh_of([w.sharding for expert in weights for w in expert])
        if mesh is None or any(map(is_manual, mesh.axis_names)):
            return None, None
        packed = stacks is None and any(w.stored.encoding is not None for e in weights for w in e)
        return mesh, None if packed else split_of(weights, mesh)


class MoELayer(DecoderLayer):
    """A decoder layer whose MLP is a mixture of experts if ``config.sparse`` says so."""

    def make_mlp(self, config: Any, number: int, dtype: DType) -> Any:
        """The layer's MLP or mixture of experts, which maps ``[..., E]`` to the same shape."""
        if config.sparse[number]:
            return SparseMLP(config, dtype)
        return super().make_mlp(config, number, dtype)


# --- tensors of all experts of a layer -----------------------------------------------------------

_FUSED = re.compile(
    r"(.*\.)?(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)(?:\.weight)?", re.DOTALL
)


@dataclass(frozen=True)
class MoEFamily(DecoderFamily):
    """A Family whose files may hold the experts of a layer as one tensor.

    Attributes:
        experts: name of an expert's weight, with ``#`` for its index and ``*`` for the linear layer.
        maps: the checkpoint's names of an expert's gate, up and down projections.
    """

    experts: str = "mlp.experts.#.*.weight"
    maps: tuple[str, str, str] = MAPS_PROJ

    def adapt(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`Family.adapt`, which also splits ``experts.gate_up_proj`` ``[X, 2 F, E]`` and
        ``experts.down_proj`` ``[X, E, F]`` into weights of single experts; nothing is read.

        Raises:
            CheckpointFormatError: two tensors have the same name in the model, or a tensor of
                stacked experts has another shape.
        """
        split: dict[str, Any] = {}
        for name, value in checkpoint.items():
            match = _FUSED.fullmatch(name)
            parts = [(name, value)] if match is None else self._parts(match, name, value)
            for part, data in parts:
                if part in split:
                    raise CheckpointFormatError(
                        f"'{name}' and another tensor are both the weight '{part}'"
                    )
                split[part] = data
        return super().adapt(split)

    def _parts(self, match: re.Match[str], name: str, value: Any) -> Iterator[tuple[str, Any]]:
        shape = tuple(int(n) for n in value.shape)
        maps = self.maps[:2] if match[2] == "gate_up_proj" else self.maps[2:]
        if len(shape) != 3 or not shape[0] or shape[1] % len(maps):
            raise CheckpointFormatError(
                "not a stack of experts", tensor=name, expected="[experts, out, in]", found=shape
            )
        for number in range(shape[0]):
            for k, kind in enumerate(maps):
                layout = ExpertLayout(number, shape[0], k, len(maps))
                place = self.experts.replace("#", str(number)).replace("*", kind)
                yield (match[1] or "") + place, _part(name, value, layout)


def _part(name: str, value: Any, layout: ExpertLayout) -> Any:
    """One expert's slice of a stack; it stays lazy if the stack is lazy."""
    if not isinstance(value, WeightData):
        return layout.apply(value)
    source = Relaid({name: value}, {name: Source(name, layout)})
    dtype, shape = source.stored(name)
    return WeightData.lazy(source, name, DType.of(dtype), shape, value.quantization_encoding)
