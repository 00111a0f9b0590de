"""LowRank: what a linear layer shares with others that may have a low-rank update (LoRA).

The update of ``y = x @ W.T`` is ``scale · (x @ A.T) @ B.T`` with A ``[r, in]`` and B ``[out, r]``.
``maxjax.lora`` adds it to the layers of a model, so that the base weight, whether it holds floats or
quantised blocks, stays as it is; a layer without it computes what it did.

Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685; the scale
of rsLoRA is D. Kalajdzievski's, arXiv:2312.03732.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..dtype import DType, promote
from ..graph.placement.specs import PartOf
from ..graph.value import unwrap
from ..graph.weight.weight import Weight
from ..kernels import matmul
from .layer import Module


@dataclass(frozen=True)
class Adapter:
    """The settings of a layer's low-rank update.

    Attributes:
        rank: r, the number of rows of A and of columns of B.
        alpha: numerator of the scale.
        rslora: whether the scale is ``alpha / √r`` in place of ``alpha / r``.
        merged: whether the base weight has the update in it already.

    Example:
        >>> Adapter(16, 32.0).scale, Adapter(16, 32.0, rslora=True).scale
        (2.0, 8.0)
    """

    rank: int
    alpha: float
    rslora: bool = False
    merged: bool = False

    @property
    def scale(self) -> float:
        """The factor of the update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LowRank(Module):
    """A linear layer that may have a low-rank update.

    Attributes:
        lora: settings of the update, or None.
        lora_A, lora_B: Weights ``[r, in]`` and ``[out, r]``, or None. Their names end in ``lora_A.weight``
            and ``lora_B.weight``, as in PEFT's files.
    """

    weight: Any
    lora: Adapter | None = None
    lora_A: Weight | None = None
    lora_B: Weight | None = None
    # The axis of the outputs in the base weight.
    out_axis: ClassVar[int] = 0

    def updated(self, y: jax.Array, x: Any) -> jax.Array:
        """The layer's result with its update, if it has one.

        Args:
            y: ``[..., out]``, the result without it.
            x: ``[..., in]``, what the layer was called with.
        """
        return all_updated([self], x, [y])[0]

    def initializer(self, name: str) -> Any:
        """As PEFT: uniform of ±1/√in for A, and zeros for B, so that a new update changes nothing."""
        if name.endswith("lora_A.weight"):
            return _uniform
        return jax.nn.initializers.zeros if name.endswith("lora_B.weight") else None

    def sharding_rules(self) -> Mapping[str, Any]:
        """Splits the inputs of A and the outputs of B as those of the base weight."""
        if self.lora_A is None:
            return {}
        shape = self.base_shape
        inputs, outputs = 1 - self.out_axis, self.out_axis
        return {
            "lora_A": PartOf("weight", shape, (None, inputs)),
            "lora_B": PartOf("weight", shape, (outputs, None)),
        }

    @property
    def base_shape(self) -> tuple[int, int]:
        """The shape of the base weight, counted in weights."""
        rows, columns = map(int, getattr(self.weight, "logical_shape", self.weight.shape))
        return rows, columns

    def refuse_update(self, what: str) -> None:
        """Checks that the layer has no update, for what does not support one.

        Raises:
            NotImplementedError: it has one.
        """
        if self.lora_A is not None:
            raise NotImplementedError(
                f"{what} of a {type(self).__name__} with LoRA weights is not supported: maxjax.lora.merge(model) first"
            )


def all_updated(layers: Sequence[Any], x: Any, results: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of LowRank layers for one input, each with the layer's update if it has one.

    The products with A of all layers are one operation.
    """
    chosen = [i for i, a in enumerate(layers) if a.lora_A is not None and not a.lora.merged]
    found = list(results)
    if chosen:
        inner = matmul(unwrap(x), [layers[i].lora_A for i in chosen])  # [..., r]
        for i, h in zip(chosen, inner, strict=True):
            found[i] = _sum(found[i], matmul(h * layers[i].lora.scale, layers[i].lora_B))
    return found


def _sum(y: jax.Array, update: jax.Array) -> jax.Array:
    """``y + update`` in the wider of the two types, rounded to that of ``y``."""
    wide = promote(DType.of(y.dtype), DType.of(update.dtype)).np
    return (y.astype(wide) + update.astype(wide)).astype(y.dtype)


def _uniform(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)
