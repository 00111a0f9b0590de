"""BatchNorm: normalises each channel by the statistics of a batch, or by running statistics."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.kind import on_arrays
from ...graph.weight.weight import Weight
from ..layer import Module
from .norms import check_floats


class BatchNorm(Module):
    """``(x - mean) / √(variance + eps) · weight + bias`` for each channel, the second axis.

    A call uses the running statistics. For training, :meth:`update` uses the statistics of the batch, and returns new
    running statistics beside the result. Running statistics are Weights, so that checkpoints hold them. They get
    no gradient, and ``maxjax.partition`` puts them with the weights that are not trained.

    Args:
        num_features: number C of channels.
        eps: number added to the variance.
        momentum: share of the batch in new running statistics; None means the mean of all batches so far.
        affine: whether there are a weight and a bias.
        dtype: dtype of the weights.
        device: device that the weights are declared on; None means the CPU.

    Attributes:
        weight, bias: Weights ``[C]``, or None.
        running_mean, running_var: Weights ``[C]``.
        num_batches_tracked: Weight ``[]``, the number of batches in the running statistics.

    The names are torch's. Sums are computed in float32. On a mesh, the mean and variance are those of the whole
    batch, also if it is split over devices.

    Source: S. Ioffe and C. Szegedy, arXiv:1502.03167.

    Example:
        >>> import maxjax
        >>> norm = maxjax.init(BatchNorm(2), jax.random.key(0))
        >>> y, statistics = norm.update(jnp.array([[1.0, 10.0], [3.0, 10.0]]))
        >>> print(y[:, 0], statistics["running_mean"])
        [-0.99999... 0.99999...] [0.2 1. ]
        >>> norm = norm.with_statistics(statistics)
        >>> int(norm.num_batches_tracked.value)
        1
    """

    # The numbers of axes that an input may have; None allows any number from 2 on.
    ranks: ClassVar[tuple[int, ...] | None] = None
    untrained: ClassVar[tuple[str, ...]] = ("running_mean", "running_var", "num_batches_tracked")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        dtype: Any = DType.float32,
        device: DeviceRef | None = None,
    ):
        super().__init__()
        device = device or DeviceRef.CPU()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum

        def vector(name: str) -> Weight:
            return Weight(name, dtype, (num_features,), device)

        self.weight, self.bias = (vector("weight"), vector("bias")) if affine else (None, None)
        self.running_mean, self.running_var = vector("running_mean"), vector("running_var")
        self.num_batches_tracked = Weight("num_batches_tracked", DType.int64, (), device)

    @on_arrays
    def __call__(self, x: Any) -> Any:
        """``[B, C, ...]`` → the same shape and dtype, normalised by the running statistics.

        Raises:
            ValueError: the second axis is not C long, or there are too few or too many axes.
        """
        array = self._checked(x)
        mean, variance = (
            jax.lax.stop_gradient(jnp.asarray(w).astype(jnp.float32))
            for w in (self.running_mean, self.running_var)
        )
        y = self._normalised(array, mean, variance)
        return y

    @on_arrays
    def update(self, x: Any) -> tuple[Any, dict[str, jax.Array]]:
        """``x`` normalised by its own statistics, and the new running statistics by name.

        The running variance is the sample variance, divided by n - 1, as in torch.

        Raises:
            ValueError: as for a call, or there is only one value for each channel.
        """
        array = self._checked(x)
        axes = (0, *range(2, array.ndim))
        count = array.size // self.num_features
        if count < 2:
            raise ValueError(
                f"the variance of a batch of shape {array.shape} needs more than one value per channel"
            )
        wide = array.astype(jnp.float32)
        mean, variance = wide.mean(axes), wide.var(axes)
        y = self._normalised(array, mean, variance)
        number = jnp.asarray(self.num_batches_tracked) + 1
        share = (
            1 / number.astype(jnp.float32) if self.momentum is None else jnp.float32(self.momentum)
        )
        new = {"running_mean": mean, "running_var": variance * jnp.float32(count / (count - 1))}
        found = {"num_batches_tracked": number}
        for name, value in new.items():
            old = jnp.asarray(getattr(self, name))
            moved = (1 - share) * old.astype(jnp.float32) + share * jax.lax.stop_gradient(value)
            found[name] = moved.astype(old.dtype)
        return y, found

    def with_statistics(self, statistics: dict[str, jax.Array]) -> BatchNorm:
        """Returns a copy of this layer with the running statistics that :meth:`update` returned."""
        new = jax.tree.map(lambda leaf: leaf, self)
        for name in self.untrained:
            getattr(new, name).value = statistics[name]
        return new

    def _normalised(self, x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        shape = (1, self.num_features, *[1] * (x.ndim - 2))
        y = (x.astype(jnp.float32) - mean.reshape(shape)) * jax.lax.rsqrt(
            variance.reshape(shape) + self.eps
        )
        if self.weight is not None and self.bias is not None:
            weight, bias = (
                jnp.asarray(w).astype(jnp.float32).reshape(shape) for w in (self.weight, self.bias)
            )
            y = y * weight + bias
        return y.astype(x.dtype)

    def _checked(self, x: Any) -> jax.Array:
        array = jnp.asarray(x)
        fits = array.ndim >= 2 if self.ranks is None else array.ndim in self.ranks
        if not fits or array.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__} takes [B, {self.num_features}, ...]"
                + ("" if self.ranks is None else f" of {' or '.join(map(str, self.ranks))} axes")
                + f", not {array.shape}"
            )
        check_floats(self, array)
        return array

    def initializer(self, name: str) -> Any:
        """The identity: means and biases are zero, variances and weights one, and no batch is counted."""
        ones = name in ("weight", "running_var")
        return jax.nn.initializers.ones if ones else jax.nn.initializers.zeros


class BatchNorm1d(BatchNorm):
    """A BatchNorm for ``[B, C]`` and ``[B, C, L]``."""

    ranks = (2, 3)


class BatchNorm2d(BatchNorm):
    """A BatchNorm for ``[B, C, H, W]``."""

    ranks = (4,)


class BatchNorm3d(BatchNorm):
    """A BatchNorm for ``[B, C, D, H, W]``."""

    ranks = (5,)
