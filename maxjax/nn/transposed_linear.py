"""TransposedLinear: a linear layer whose weight is stored ``[in, out]``, as in GPT-2's files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType, promote
from ..graph.device import DeviceRef
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.specs import split_over
from ..graph.weight.weight import Weight
from ..kernels import explicit
from .low_rank import LowRank
from .product import add_bias


class TransposedLinear(LowRank):
    """A linear layer whose weight is stored ``[in, out]``: ``x @ weight + bias``.

    The weight keeps the layout of the files. On a CPU, compared with the kernel for ``[out, in]``,
    the matmul of one row takes 1.5 times as long in float32 (with a transposition at each call, 20 times
    as long) and nearly 30 times as long in bfloat16, which XLA converts first: prefer float32 there.

    Attributes:
        weight: Weight ``[in_dim, out_dim]``.
        bias: Weight ``[out_dim]``.

    Example:
        >>> layer = TransposedLinear(3, 2, DType.float32)
        >>> _ = layer.load_state_dict({"weight": jnp.ones((3, 2)), "bias": jnp.zeros(2)})
        >>> print(layer(jnp.ones((1, 3))))
        [[3. 3.]]
    """

    out_axis = 1

    def __init__(self, in_dim: int, out_dim: int, dtype: DType):
        super().__init__()
        self.weight = Weight("weight", dtype, (in_dim, out_dim), DeviceRef.CPU())
        self.bias = Weight("bias", dtype, (out_dim,), DeviceRef.CPU())

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in_dim]`` → ``[..., out_dim]``, summed in float32 and rounded to the dtype of ``x``."""
        if (layout := self.weight.spec.layout) is not None:
            return explicit.concatenate(self.split_projections(x, layout.segments), -1)
        return add_bias(self.updated(self._product(x), x), self.bias)

    def split_projections(self, x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
        """The result in parts of these sizes: ``[..., in_dim]`` → ``[..., size]`` each.

        If the weight's columns are in device-major order, no data moves between devices.
        """
        layout, ends = self.weight.spec.layout, list(accumulate(sizes))[:-1]
        if layout is None or self.bias.spec.layout is None:
            # If the caller's rules split the weight as one, the shards do not end where its parts end.
            # The result is small, so it is gathered on every device.
            y = replicate_last_axis(self(x), self.weight, 1)
            if (mesh := explicit.mesh_of(y)) is not None:
                y = jax.sharding.reshard(y, explicit.sharding(mesh, explicit.entries(y)[:-1]))
            return jnp.split(y, ends, axis=-1)
        stored = self.weight.gathered_array()  # [in_dim, n, r]
        y = _matmul(x, stored.reshape(stored.shape[0], -1))
        if self.lora_A is None:
            return layout.parts(add_bias(y, self.bias.gathered_array().reshape(-1)))
        y = self.updated(explicit.concatenate(layout.parts(y), -1), x)
        return jnp.split(add_bias(y, self.bias), ends, axis=-1)

    def _product(self, x: jax.Array) -> jax.Array:
        weight = jnp.asarray(self.weight)
        if x.dtype.itemsize != 2 or x.dtype != weight.dtype or not split_over(self.weight, 0):
            return _matmul(x, weight)
        # As in the matmul of a Linear, GPUs all-reduce partial sums in the 16 bits of the activations.
        narrow = partial(_matmul, narrow=True)
        return jax.lax.platform_dependent(x, weight, cuda=narrow, rocm=narrow, default=_matmul)

    def initializer(self, name: str) -> Any:
        """A normal distribution with standard deviation 0.02 for the weight, zeros for the bias."""
        init = jax.nn.initializers
        own = init.zeros if name == "bias" else init.normal(0.02)
        return super().initializer(name) or own


def _matmul(x: jax.Array, weight: jax.Array, narrow: bool = False) -> jax.Array:
    """``x @ weight``; devices exchange partial sums in the dtype of ``x`` if ``narrow``, otherwise in float32."""
    mesh = explicit.mesh_of(x, weight)
    spec = [*explicit.entries(x)[:-1], explicit.entries(weight)[1]]
    return explicit.automatic(partial(_product, narrow), mesh, spec)(x, weight)


def _product(narrow: bool, x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = promote(x.dtype, promote(weight.dtype, DType.float32)).np
    common = promote(x.dtype, weight.dtype).np
    contraction = (((x.ndim - 1,), (0,)), ((), ()))
    y = jax.lax.dot_general(
        x.astype(common), weight.astype(common), contraction,
        preferred_element_type=common if narrow else wide,
    )  # fmt: skip
    return y.astype(x.dtype)
