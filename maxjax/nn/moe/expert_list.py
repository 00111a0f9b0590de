"""``Experts``: the feed-forward networks of a mixture of experts, of which each token goes through a few.

Shapes: N tokens, E features, X experts with F inner features, k experts for each token.

Sources: Mixtral (arXiv:2401.04088), GShard (arXiv:2006.16668); transformers' ``MixtralSparseMoeBlock``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.placement.arrays import is_manual
from ...graph.placement.mesh import EXPERTS
from ...graph.placement.specs import mesh_of, parts_over
from ...graph.placement.split import COLUMNS, ROWS
from ...kernels import QuantTensors, explicit
from ..layer import ExpertStack, Module
from ..linear import Linear, linears
from ..quantized import QuantizedLinear
from .algorithms import ExpertWeights, Kind, between, one_by_one
from .experts import ExpertSplit, Part, mixture, mixture_on_mesh, split_of


class ExpertMLP(Module):
    """One expert, a feed-forward network: ``down(act(gate(x)) · up(x))``, or ``down(act(up(x)))`` without a gate.

    Args:
        size, inner: E and F.
        dtype: dtype of the weights.
        names: attribute names of the gate, up and down projections, or of up and down.
        act: name of an activation function, or a hashable function of the results of gate and up.
        has_bias: whether each linear layer has a bias.
    """

    def __init__(
        self, size: int, inner: int, dtype: DType, names: tuple[str, ...], act: Kind,
        has_bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.names, self.act = names, act
        *inputs, down = names
        for name in inputs:
            setattr(self, name, Linear(size, inner, dtype, has_bias=has_bias))
        setattr(self, down, Linear(inner, size, dtype, has_bias=has_bias))

    @property
    def linears(self) -> list[Linear]:
        """The projections, the down projection last."""
        return [getattr(self, name) for name in self.names]

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        *inputs, down = self.linears
        return down(between(self.act, *linears(inputs, x)))


class Experts(ExpertStack):
    """The experts of a mixture: ``Σ share · expert(x)`` over the experts that are chosen for a token.

    The weights of all experts are one array for each projection, and names in state dicts are those of a list of
    experts. If a file holds experts of one layer in different dtypes, each expert has its own arrays.
    On a mesh, experts are distributed over the axis ``expert`` and their inner features split over ``model``;
    if X does not divide evenly, inner features are split over both axes together; if F, or its number of quantisation
    blocks, does not divide evenly, experts are distributed over both.

    Args:
        size, inner: E and F.
        count: X.
        dtype: dtype of the weights.
        names: the checkpoint's names of an expert's gate, up and down projections; of up and down for experts
            without a gate.
        act: name of an activation function, or a hashable function of the results of gate and up.
        has_bias: whether the linear layers have biases.

    Example:
        >>> experts = Experts(8, 16, 4, DType.float32, ("w1", "w3", "w2"))
        >>> [leaf.shape for leaf in jax.tree.leaves(experts)], list(experts.raw_state_dict())[0]
        ([(4, 16, 8), (4, 16, 8), (4, 8, 16)], '0.w1.weight')
        >>> _ = experts.load_state_dict({n: jnp.ones(w.shape) for n, w in experts.raw_state_dict().items()})
        >>> experts(jnp.ones((3, 8)), jnp.zeros((3, 1), int), jnp.ones((3, 1))).shape
        (3, 8)
    """

    def __init__(
        self, size: int, inner: int, count: int, dtype: DType,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        act: Kind = "silu", has_bias: bool = False,
    ):  # fmt: skip
        super().__init__(ExpertMLP(size, inner, dtype, names, act, has_bias), count)
        self.names, self.act, self.has_bias = names, act, has_bias

    def __call__(self, x: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        """Compute ``Σ share · expert(x)``; no token is dropped, and no token depends on another.

        Args:
            x: tokens ``[..., E]``.
            chosen, shares: indices of the chosen experts, and the factors of their results, ``[..., k]`` each.

        Returns:
            ``[..., E]`` in the dtype of ``x``.
        """
        operands = x, chosen, shares
        mesh = explicit.mesh_of(*operands, *jax.tree.leaves(self))
        run = explicit.automatic(
            lambda experts, *a: experts._mixture(*a), mesh, explicit.entries(x)
        )
        return run(self, *operands)

    def _mixture(self, x: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        tokens, chosen, shares = (a.reshape(-1, a.shape[-1]) for a in (x, chosen, shares))
        return self._sum(tokens, chosen, shares).astype(x.dtype).reshape(x.shape)

    def _sum(self, tokens: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        """``[N, E]`` → ``Σ share · expert(token)``, ``[N, E]`` in float32."""
        mesh, split = self._split()
        if not self._is_called:
            if mesh is None:
                return mixture(tokens, chosen, shares, self._weights(), self.act)
            if split is not None:
                weights = self._weights()
                return mixture_on_mesh(tokens, chosen, shares, weights, self.act, mesh, split)
        if not self.is_stacked:
            return one_by_one(tokens, chosen, shares, self.layers)
        carry = tokens, jnp.zeros(tokens.shape, jnp.float32)
        return self.scan(carry, index="number", call=_add, chosen=chosen, shares=shares)[1]

    def sharding_rules(self) -> dict[str, Any]:
        """Distributes experts over the mesh axis ``expert``, and splits their inner features over ``model``."""
        rules: dict[str, Any] = {}
        whole, unit = ("expert",) if self.is_stacked else (), self._unit()
        for i in self._mx_children:  # one stands for all experts where they are stacked
            for name in self.names:
                split = COLUMNS if name == self.names[-1] else ROWS
                rules[f"{i}.{name}"] = replace(split, over=EXPERTS, whole=whole, unit=unit)
        return rules

    def _unit(self) -> int:
        """The number of neighbouring inner features that stay on one device, because a quantised weight needs it."""
        units = []
        for expert in self._each:
            for name, layer in zip(self.names, expert.linears, strict=True):
                along = int(name == self.names[-1])
                if isinstance(layer, QuantizedLinear):
                    units.append(layer.layout.unit(along))
                elif along:
                    units.append(self._tensors(name, expert)["weight"][0].spec.block)
        return math.lcm(*units)

    @property
    def _each(self) -> list[ExpertMLP]:
        """The experts that hold weights: one stands for all where they are stacked."""
        return list(self._mx_children.values())  # type: ignore[arg-type]

    @property
    def _is_called(self) -> bool:
        """Whether experts are called as layers: they round their inputs, or have several tensors but no stacks."""
        quantised = [m for e in self._each for m in e.linears if isinstance(m, QuantizedLinear)]
        if not self.is_stacked:
            return bool(quantised)
        return any(m.layout.activations is not None for m in quantised)

    def _tensors(self, name: str, expert: ExpertMLP) -> dict[str, Part]:
        """The tensors of a projection's weight by name, of one expert or, where they are stacked, of all.

        The first one has the numbers.
        """
        layer = getattr(expert, name)
        found: dict[str, Part] = {"weight": (layer.weight, (0, 1))}
        if isinstance(layer, QuantizedLinear):
            tensors = layer.layout.tensors
            found = {one.name: (getattr(layer, one.attribute), one.axes) for one in tensors}
        if not self.is_stacked:
            return found
        return {key: (self.holder(f"{name}.{key}"), axes) for key, (_, axes) in found.items()}

    def _weights(self) -> Any:
        """The operands of ``mixture``."""
        found = [self._operands(expert) for expert in self._each]
        return found[0] if self.is_stacked else found

    def _operands(self, expert: ExpertMLP) -> ExpertWeights:
        matrices: list[Any] = []
        biases = []
        for name, layer in zip(self.names, expert.linears, strict=True):
            tensors = {key: w.operand() for key, (w, _) in self._tensors(name, expert).items()}
            if isinstance(layer, QuantizedLinear):
                matrices.append(QuantTensors(layer.layout, tensors))
            else:
                matrices.append(tensors["weight"])
            if self.has_bias:
                bias: Any = self.holder(f"{name}.bias") if self.is_stacked else layer.bias
                biases.append(bias.operand())
        return ExpertWeights.of(matrices, biases)

    def _split(self) -> tuple[Any, ExpertSplit | None]:
        """The experts' mesh (or None), and how experts are split over it.

        The second is None if experts are split in different ways, or are in blocks and not stacked.
        """
        experts = [
            [next(iter(self._tensors(name, expert).values())) for name in self.names]
            for expert in self._each
        ]
        tensors = [tensor for each in experts for tensor, _ in each]
        mesh = mesh_of([tensor.sharding for tensor in tensors])
        if mesh is None or any(map(is_manual, mesh.axis_names)):
            return None, None
        if not self.is_stacked and any(tensor.spec.encoding is not None for tensor in tensors):
            return mesh, None
        split = split_of(experts)
        parts = 1 if split is None else parts_over(mesh, split.inner)
        divided = all(
            layer.layout.divides(int(name == self.names[-1]), parts)
            for expert in self._each
            for name, layer in zip(self.names, expert.linears, strict=True)
            if isinstance(layer, QuantizedLinear)
        )
        return mesh, split if divided else None


def _add(expert: Any, carry: Any, *, number: Any, chosen: jax.Array, shares: jax.Array) -> Any:
    """Add an expert's part to the sum of a scan; an expert that no token chose is not even dequantised."""
    tokens, total = carry
    run = lambda x: one_by_one(x, chosen - number, shares, [expert])
    part = jax.lax.cond(jnp.any(chosen == number), run, lambda x: jnp.zeros_like(total), tokens)
    return tokens, total + part
