"""LowRank: the base class of linear layers and embedding tables, which may have a low-rank update (LoRA).

The update of ``y = x @ W.T`` is ``scale · (x @ A.T) @ B.T`` with A ``[r, in]`` and B ``[out, r]``; for an
embedding table ``x @ A.T`` is a lookup in ``A.T``. ``maxjax.lora`` adds updates to the layers of a model. The
base weight, of floats or quantised blocks, does not change, and neither does the result of a layer without
an update. With DoRA each output is also scaled, so that the norm of its row of ``W + scale · B @ A`` becomes
a trained number.

A and B may be those of several adapters side by side (``lora/side_by_side.py``): then each row of the input uses
one of them, or none, as ``lora_rows`` says.

Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685; the scale
of rsLoRA is D. Kalajdzievski's, arXiv:2312.03732; DoRA is S. Liu et al.'s, arXiv:2402.09353.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType, promote
from ..errors import UserInputError
from ..graph.placement.specs import PartOf
from ..graph.weight.weight import Weight
from ..kernels import explicit, matmul
from .layer import Module
from .layer.stack.rearranged import set_static
from .layer.walk import Walk


@dataclass(frozen=True)
class Adapter:
    """The settings of a layer's low-rank update.

    Attributes:
        rank: r, the number of rows of A and of columns of B.
        alpha: numerator of the scale.
        rslora: whether the scale is ``alpha / √r`` instead of ``alpha / r``.
        dora: whether the norms of the rows of ``W + scale · B @ A`` are trained too.
        merged: whether the update has been added to the base weight already.
        bias: biases of the model that are trained too, and saved with the update: those of layers with an
            update ("lora_only"), "all", or "none".
        adapters: number of adapters that lie side by side in A and B; ``rank`` is that of all together.

    Example:
        >>> Adapter(16, 32.0).scale, Adapter(16, 32.0, rslora=True).scale
        (2.0, 8.0)
    """

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    merged: bool = False
    bias: str = "none"
    adapters: int = 1

    @property
    def scale(self) -> float:
        """The factor by which the update is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def note_trained(model: Module, names: Collection[str]) -> None:
    """Records in a model with LoRA weights which of its other weights are trained too, in place.

    ``maxjax.lora.save`` writes these. Weights that were recorded before stay so; without LoRA weights nothing is
    recorded. In a LayerStack the names must be those of all its layers.

    Args:
        names: full names of the weights; those of LoRA weights are ignored.
    """
    walk = Walk(model, stacked=True)
    if not any(isinstance(one, LowRank) and one.lora is not None for one in walk.modules):
        return
    names = frozenset(names)
    for module, prefix in zip(walk.modules, walk.prefixes, strict=True):
        updates = module.update_names if isinstance(module, LowRank) else {}
        found = {
            local
            for attr, local in module._mx_locals.items()
            if attr not in updates
            and not names.isdisjoint(_full_names(walk, module, prefix, local))
        }
        if not found.issubset(module._mx_trained):
            set_static(module, "_mx_trained", tuple(sorted(found.union(module._mx_trained))))


def trained_names(model: Module) -> list[str]:
    """The full names of the weights that :func:`note_trained` recorded."""
    walk = Walk(model, stacked=True)
    return [
        name
        for module, prefix in zip(walk.modules, walk.prefixes, strict=True)
        for local in module._mx_trained
        if local in module._mx_weights
        for name in _full_names(walk, module, prefix, local)
    ]


def forget_trained(model: Module) -> None:
    """Removes what :func:`note_trained` recorded, in place."""
    for module in Walk(model, stacked=True).modules:
        if module._mx_trained:
            set_static(module, "_mx_trained", None)


def _full_names(walk: Walk, module: Module, prefix: str, local: str) -> list[str]:
    return walk.holder(module._mx_weights[local]).spec.names(prefix + local)


class LowRank(Module):
    """A linear layer or an embedding table that may have a low-rank update.

    Attributes:
        lora: settings of the update, or None.
        lora_A, lora_B: Weights ``[r, in]`` and ``[out, r]``, or None.
        lora_magnitude_vector: Weight ``[out]`` of DoRA, or None.
        lora_rows: Weight ``[rows]`` with the index of the adapter that each row of the input uses, -1 for none; None
            if A and B are those of one adapter.

    The names of the Weights have the same endings as in PEFT's files: ``lora_A.weight``, for example.
    """

    weight: Any
    lora: Adapter | None = None
    lora_A: Weight | None = None
    lora_B: Weight | None = None
    lora_magnitude_vector: Weight | None = None
    lora_rows: Weight | None = None
    # Attributes of the Weights of an update, with their names in PEFT's files.
    update_names: ClassVar[Mapping[str, str]] = {
        "lora_A": "lora_A.weight",
        "lora_B": "lora_B.weight",
        "lora_magnitude_vector": "lora_magnitude_vector",
    }
    # The axis of the outputs in the base weight.
    out_axis: ClassVar[int] = 0

    def updated(self, y: jax.Array, x: Any) -> jax.Array:
        """The layer's result with its update, if it has one.

        Args:
            y: result of the matmul with the base weight, before the bias is added, ``[..., out]``.
            x: input of the layer, ``[..., in]``.
        """
        return all_updated([self], x, [y])[0]

    def initializer(self, name: str) -> Any:
        """As in PEFT: uniform in ±1/√in for A and zeros for B, so that a new update changes nothing.

        Raises:
            UserInputError: the weight is DoRA's magnitudes, which are norms of the base weight.
        """
        if name.endswith("lora_magnitude_vector"):
            raise UserInputError(
                "the magnitudes of DoRA are norms of the base weights, and are not drawn: "
                "maxjax.lora.add(model, dora=True, key=key) of a model that has values"
            )
        if name.endswith("lora_A.weight"):
            return _uniform
        return jax.nn.initializers.zeros if name.endswith("lora_B.weight") else None

    def sharding_rules(self) -> Mapping[str, Any]:
        """Splits the axes of inputs and outputs of the update like those of the base weight."""
        if self.lora is None:
            return {}
        shape = self.base_shape
        return {
            attr: PartOf("weight", shape, axes)
            for attr, axes in self.update_axes(self.lora).items()
        }

    def update_axes(self, lora: Adapter) -> dict[str, tuple[int | None, ...]]:
        """For each Weight of an update, the base weight's axes to which its axes correspond; None for the rank."""
        inputs, outputs = 1 - self.out_axis, self.out_axis
        axes: dict[str, tuple[int | None, ...]] = {
            "lora_A": (None, inputs),
            "lora_B": (outputs, None),
        }
        return axes | ({"lora_magnitude_vector": (outputs,)} if lora.dora else {})

    def magnitudes(self) -> jax.Array:
        """The norms of the rows of ``W + scale · B @ A``, ``[out]``, in float32 or wider.

        Gradients treat them as constants, as in the paper (section 4.3).
        """
        weight = self.weight
        base = jnp.asarray(weight.operand() if isinstance(weight, Weight) else weight)
        # stop_gradient of the operands: of the result alone, JAX would store residuals of the sum for no use.
        rows = jax.lax.stop_gradient(base)
        if self.lora is not None:
            a, b = (jax.lax.stop_gradient(jnp.asarray(w)) for w in (self.lora_A, self.lora_B))
            rows = summed(rows, a, b, self.lora.scale, self.out_axis)
        return norms(rows, self.out_axis)

    @property
    def base_shape(self) -> tuple[int, int]:
        """The logical shape of the base weight, also if it is quantised."""
        rows, columns = map(int, getattr(self.weight, "logical_shape", self.weight.shape))
        return rows, columns

    def scaled(self, h: jax.Array) -> jax.Array:
        """What B multiplies: the products of an input and A, times the scale, and only those of the row's own adapter.

        Args:
            h: ``[..., r]``, whose elements are in the order of the rows, as many for each.
        """
        assert self.lora is not None
        h = h * self.lora.scale
        if self.lora_rows is None:
            return h
        rows, each = jnp.asarray(self.lora_rows), self.lora.rank // self.lora.adapters

        def run(h: jax.Array, rows: jax.Array) -> jax.Array:
            is_own = rows[:, None] == jnp.arange(h.shape[-1])[None] // each  # [rows, r]
            by_row = h.reshape(rows.shape[0], -1, h.shape[-1])
            # The others may be infinite, so they are not multiplied by zero.
            return jnp.where(is_own[:, None], by_row, 0).reshape(h.shape)

        return explicit.automatic(run, explicit.mesh_of(h), explicit.entries(h))(h, rows)

    def refuse_update(self, what: str) -> None:
        """Checks that the layer has no update, for operations that do not support updates.

        Raises:
            NotImplementedError: the layer has an update.
        """
        if self.lora_A is not None:
            raise NotImplementedError(
                f"{what} of a {type(self).__name__} with LoRA weights is not supported: maxjax.lora.merge(model) first"
            )


def all_updated(layers: Sequence[Any], x: Any, results: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of LowRank layers for one input, each with the layer's update if it has one.

    One matmul multiplies the input by A of all layers.
    """
    chosen = [i for i, a in enumerate(layers) if a.lora_A is not None and not a.lora.merged]
    found = list(results)
    if chosen:
        inner = matmul(x, [layers[i].lora_A for i in chosen])  # [..., r]
        for i, h in zip(chosen, inner, strict=True):
            found[i] = added(layers[i], found[i], h)
    return found


def added(layer: LowRank, y: jax.Array, h: jax.Array) -> jax.Array:
    """``y + scale · h @ B.T`` in the wider of the two dtypes, times DoRA's factors, rounded to the dtype of ``y``.

    Args:
        y: the layer's result without its update, ``[..., out]``.
        h: product of the input and A, ``[..., r]``.
    """
    assert layer.lora_B is not None
    update = matmul(layer.scaled(h), layer.lora_B)
    wide = promote(y.dtype, update.dtype).np
    found = y.astype(wide) + update.astype(wide)
    if layer.lora_magnitude_vector is not None:
        factors = ratios(jnp.asarray(layer.lora_magnitude_vector), layer.magnitudes())
        found = found * factors.astype(wide).reshape((1,) * (y.ndim - 1) + factors.shape)
    return found.astype(y.dtype)


def _wide(dtype: Any) -> Any:
    """float32, or a wider dtype; JAX's own function refuses it with ``jax_numpy_dtype_promotion="strict"``."""
    return promote(dtype, DType.float32).np


def summed(base: jax.Array, a: jax.Array, b: jax.Array, scale: float, out_axis: int) -> jax.Array:
    """``base + scale · b @ a`` in float32 or wider; leading axes are those of stacked layers.

    Args:
        out_axis: axis of the outputs in ``base``, not counting leading axes.
    """
    wide = _wide(base.dtype)
    equation = "...or,...ri->...oi" if out_axis == 0 else "...or,...ri->...io"
    precision = jax.lax.Precision.HIGHEST
    update = jnp.einsum(equation, b.astype(wide), a.astype(wide), precision=precision)
    return base.astype(wide) + jnp.asarray(scale, wide) * update


def norms(weight: jax.Array, out_axis: int) -> jax.Array:
    """For each output, the norm of its row (or column) of a weight, in float32 or wider."""
    wide = weight.astype(_wide(weight.dtype))
    return jnp.sqrt(jnp.sum(wide * wide, axis=-1 if out_axis == 0 else -2))


def ratios(magnitudes: jax.Array, found: jax.Array) -> jax.Array:
    """DoRA's factors: the trained magnitudes divided by the norms ``found``; the magnitude itself for a norm of 0."""
    return magnitudes.astype(found.dtype) / jnp.where(found == 0, jnp.ones_like(found), found)


def _uniform(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)
