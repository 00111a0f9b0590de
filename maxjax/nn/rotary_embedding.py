"""Rotary position embedding (J. Su et al., RoFormer, arXiv:2104.09864).

Each pair of features is rotated by an angle proportional to the position, so that the dot product
of a query and a key depends on their positions only by the distance. There are no weights, and compiled programs
hold no table: cos and sin are computed for the positions of each call.

Shapes: batch B, T tokens, H heads, head dimension D.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..absent import hides, refuse_arguments
from ..graph.kind import as_array, for_caller, for_max, on_arrays
from . import rope_scaling
from .layer import Module
from .rope_scaling import DeepseekYarnRopeScalingParams as DeepseekYarnRopeScalingParams
from .rope_scaling import DynamicScalingParams as DynamicScalingParams
from .rope_scaling import LinearScalingParams as LinearScalingParams
from .rope_scaling import Llama3RopeScalingParams as Llama3RopeScalingParams
from .rope_scaling import LongRoPEScalingParams as LongRoPEScalingParams
from .rope_scaling import YarnScalingParams as YarnScalingParams


def rotate(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> jax.Array:
    """Rotates each pair of features of ``x`` by the angle of ``cos`` and ``sin``.

    Args:
        x: queries or keys ``[..., T, H, D]``.
        cos, sin: arrays ``[T, D/2]`` or ``[..., T, D/2]``, the same for all heads.
        interleaved: whether pairs are neighbours (0,1), (2,3), … (MAX's default, Meta's files).
            Otherwise feature i is paired with i + D/2 (Hugging Face's files).

    Returns:
        An array of the shape and dtype of ``x``, computed in float32 and rounded once.

    Raises:
        ValueError: ``D`` is not twice the number of angles, or ``x`` holds integers.
    """
    x, cos, sin = map(as_array, (x, cos, sin))
    half = cos.shape[-1]
    if x.ndim < 3 or x.shape[-1] != 2 * half:
        raise ValueError(
            f"rope over {2 * half} features takes [..., tokens, heads, {2 * half}], not {x.shape}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"rope takes floats, not {x.dtype}: cast the input to a float first")
    wide = x.astype(jnp.float32)
    # An axis for the heads and leading axes of length 1 make the broadcast explicit.
    cos, sin = (a.reshape((1,) * (x.ndim - a.ndim - 1) + (*a.shape[:-1], 1, half))
                for a in (cos.astype(jnp.float32), sin.astype(jnp.float32)))  # fmt: skip
    if interleaved:
        pairs = wide.reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = wide[..., :half], wide[..., half:]
        y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return y.astype(x.dtype)


def dynamic_multipliers(lengths: jax.Array, width: int, scaling: DynamicScalingParams) -> jax.Array:
    """The factor of each frequency for sequences of these lengths, ``[..., 1]`` → ``[..., width / 2]``."""
    longer = jnp.maximum(lengths / scaling.max_position_embeddings, 1.0)
    growth = scaling.factor * longer - (scaling.factor - 1)
    # (theta · growth^(D / (D - 2)))^(-2i / D) is the plain frequency times growth^(-2i / (D - 2)).
    power = jnp.asarray(-np.arange(0, width, 2) / (width - 2), jnp.float32)
    return growth ** power.reshape((1,) * (lengths.ndim - 1) + (-1,))


class RotaryEmbedding(Module):
    """Rotates queries or keys by their positions; has no weights. Arguments in MAX's order.

    Args:
        dim: number of features of all heads together (MAX's ``dim``).
        n_heads: number of heads; ``head_dim`` defaults to ``dim // n_heads``.
        theta: base of the frequencies (10 000 in RoFormer).
        max_seq_len: half the number of rows of MAX's table. A call with a ``start_pos`` that is a number
            raises ValueError if the last token is beyond the table.
        head_dim: number of features of a head, all of which are rotated.
        interleaved: how features are paired; see :func:`rotate`.

    Example:
        >>> rope = RotaryEmbedding(dim=4, n_heads=1, theta=100.0, max_seq_len=8)
        >>> x = jnp.array([[[1.0, 0.0, 1.0, 0.0]]] * 2)
        >>> print(rope(x).round(1)[:, 0])
        [[1.  0.  1.  0. ]
         [0.5 0.8 1.  0.1]]
        >>> print(rope(x, start_pos=1).round(1)[0, 0])
        [0.5 0.8 1.  0.1]
    """

    # Whether positions beyond the table raise an error, if they are known while tracing.
    _bounded = True

    @hides("_freqs_cis")
    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: Any = None,
        interleaved: bool = True,
    ):
        super().__init__()
        refuse_arguments(self, _freqs_cis=_freqs_cis)
        self.dim, self.n_heads, self.theta = dim, n_heads, float(theta)
        self.max_seq_len, self.interleaved = max_seq_len, interleaved
        self.head_dim = dim // n_heads if head_dim is None else head_dim
        self.scaling_params: Any = None

    @property
    def _width(self) -> int:
        """The number of rotated features."""
        return self.head_dim

    @property
    def _rows(self) -> int:
        """The number of rows of MAX's table."""
        return 2 * self.max_seq_len

    def _angles(self, positions: jax.Array) -> jax.Array:
        """Positions ``[...]`` in float32 → angles ``[..., D/2]`` in radians."""
        return _outer(positions, self._inv_freqs())

    def _inv_freqs(self) -> jax.Array:
        with for_caller():  # a derived class may have its own
            return as_array(self._compute_inv_freqs())

    @for_max
    def _compute_inv_freqs(self) -> Any:
        """The frequency of each pair in radians per position, ``[D/2]``; a subclass may override it."""
        return jnp.asarray(rope_scaling.inv_freqs(self._width, self.theta, self.scaling_params))

    def cos_sin(self, positions: Any) -> tuple[jax.Array, jax.Array]:
        """cos and sin of each pair's angle: positions ``[...]`` → two arrays ``[..., D/2]`` in float32."""
        angles = self._angles(jnp.asarray(positions).astype(jnp.float32))
        size = self._magnitude()
        return jnp.cos(angles) * size, jnp.sin(angles) * size

    def _magnitude(self) -> float:
        """The factor of cos and sin."""
        return 1.0

    @for_max
    def freqs_cis_base(self) -> Any:
        """MAX's table: cos and sin by position and pair, ``[rows, D/2, 2]``."""
        return jnp.stack(self.cos_sin(jnp.arange(self._rows)), axis=-1)

    @property
    @for_max
    def freqs_cis(self) -> Any:
        """The table ``[rows, D]``, with cos and sin of a pair next to each other; it is computed at each access."""
        with for_caller():  # a derived class may have its own
            table = as_array(self.freqs_cis_base())
        return table.reshape(table.shape[0], -1)

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The factor of attention scores: ``user_scale``, or 1/√head_dim."""
        return 1 / math.sqrt(self.head_dim) if user_scale is None else user_scale

    @on_arrays
    def __call__(
        self, x: Any, start_pos: Any = None, seq_len: Any = None, *, positions: Any = None
    ) -> Any:
        """``x [..., T, H, D]``, rotated, in the same shape and dtype.

        Args:
            start_pos: position of the first token, a number or a scalar array; 0 by default.
            seq_len: argument of MAX, ignored; T is the length of an axis of ``x``.
            positions: position of each token, instead of ``start_pos``: integers ``[T]`` or ``[B, T]``, unchecked.

        Raises:
            ValueError: the number of features is wrong, or ``start_pos`` is a number and tokens lie beyond the table.
        """
        if x.ndim < 3:
            raise ValueError(f"rope takes [..., tokens, heads, features], not {x.shape}")
        if positions is None:
            positions = self._positions(x.shape[-3], start_pos)
        return rotate(x, *self.cos_sin(positions), interleaved=self.interleaved)

    def _positions(self, length: int, start: Any) -> jax.Array:
        start = 0 if start is None else start
        known = isinstance(start, (int, np.integer)) and isinstance(
            length, int
        )  # not a symbolic size
        if self._bounded and known and start + length > self._rows:
            raise ValueError(
                f"positions {start} to {start + length - 1} are beyond the {self._rows} rows of "
                f"this rope's table (max_seq_len={self.max_seq_len})"
            )
        return jnp.arange(length, dtype=jnp.int32) + jnp.asarray(start, jnp.int32)


class _Scaled(RotaryEmbedding):
    """A RotaryEmbedding with MAX's further argument ``scaling_params``; None means no scaling.

    Raises:
        TypeError: they are for another class.
    """

    _takes: ClassVar[tuple[type, ...]] = ()

    @hides("_freqs_cis")
    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: Any = None,
        interleaved: bool = True,
        scaling_params: Any = None,
    ):
        super().__init__(dim, n_heads, theta, max_seq_len, head_dim, _freqs_cis, interleaved)
        if scaling_params is not None and not isinstance(scaling_params, self._takes):
            known = " or ".join(one.__name__ for one in self._takes)
            raise TypeError(
                f"{type(self).__name__} takes scaling_params of type {known}, not {type(scaling_params).__name__}"
            )
        self.scaling_params = scaling_params
        rope_scaling.inv_freqs(self._width, self.theta, scaling_params)  # raises if they do not fit


class Llama3RotaryEmbedding(_Scaled):
    """RoPE with ``Llama3RopeScalingParams`` or ``LinearScalingParams``."""

    _takes = (rope_scaling.Llama3RopeScalingParams, rope_scaling.LinearScalingParams)


class DynamicRotaryEmbedding(_Scaled):
    """RoPE without a limit on the length of sequences.

    MAX's class grows its table with the positions; here a call needs no table, and ``freqs_cis`` always has
    2 · ``max_seq_len`` rows: use ``cos_sin(positions)`` for positions beyond. With
    ``DynamicScalingParams``, which MAX does not have, theta grows with the largest
    position of a call, as in Hugging Face's "dynamic".
    """

    _bounded = False
    _takes = (rope_scaling.DynamicScalingParams,)

    def maybe_update_freqs(self, position_ids: Any) -> None:
        """Does nothing; code written for MAX calls it before it reads the table."""

    @property
    @for_max
    def inv_freq(self) -> Any:
        """The frequency of each pair in radians per position, ``[D/2]``, before any scaling."""
        return self._inv_freqs()

    original_inv_freq = inv_freq

    def _angles(self, positions: jax.Array) -> jax.Array:
        scaling, width = self.scaling_params, self._width
        angles = super()._angles(positions)
        if scaling is None or width <= 2:
            return angles
        length = jnp.max(positions, initial=0.0) + 1
        return angles * dynamic_multipliers(length.reshape((1,) * angles.ndim), width, scaling)


class YarnRotaryEmbedding(_Scaled):
    """RoPE with ``YarnScalingParams``: cos and sin are multiplied by 0.1 · log(factor) + 1 for factors above 1."""

    _takes = (rope_scaling.YarnScalingParams,)

    @property
    def _rows(self) -> int:
        return self.max_seq_len if self.scaling_params else super()._rows

    def _magnitude(self) -> float:
        return rope_scaling.attention_factor(self.scaling_params)


class DeepseekYarnRotaryEmbedding(YarnRotaryEmbedding):
    """RoPE with ``DeepseekYarnRopeScalingParams`` over all ``dim`` features, as in MAX.

    Raises:
        ValueError: ``scaling_params`` is not given.
    """

    _takes = (rope_scaling.DeepseekYarnRopeScalingParams,)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.scaling_params is None:
            raise ValueError("DeepseekYarnRotaryEmbedding needs scaling_params")

    @property
    def _width(self) -> int:
        return self.dim

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The base class's factor of attention scores, times the square of YaRN's correction with ``mscale``."""
        scaling = self.scaling_params
        correction = rope_scaling.yarn_mscale(scaling.scaling_factor, scaling.mscale)
        return super().compute_scale(user_scale) * correction**2


class LongRoPERotaryEmbedding(_Scaled):
    """RoPE with ``LongRoPEScalingParams``.

    As in MAX, positions below ``original_max_position`` use the short factors and later ones the
    long factors, and the correction for length multiplies the attention scale. Hugging Face uses one
    list for the whole sequence and multiplies cos and sin by the correction, so that scores get its
    square; ``inv_freqs`` and ``attention_factor`` of ``rope_scaling`` give these values.
    """

    _takes = (rope_scaling.LongRoPEScalingParams,)

    @for_max
    def _compute_inv_freqs(self) -> Any:
        """The frequencies before they are divided by the factors, ``[D/2]``."""
        return jnp.asarray(rope_scaling.inv_freqs(self._width, self.theta))

    def _angles(self, positions: jax.Array) -> jax.Array:
        scaling = self.scaling_params
        if scaling is None:
            return super()._angles(positions)
        if type(self)._compute_inv_freqs is LongRoPERotaryEmbedding._compute_inv_freqs:
            lengths = 0, scaling.original_max_position + 1
            freqs = [  # divided in float64
                rope_scaling.inv_freqs(self._width, self.theta, scaling, length=length)
                for length in lengths
            ]
        else:
            plain = self._inv_freqs()
            freqs = [
                plain / jnp.asarray(factors[: plain.shape[0]])
                for factors in (scaling.short_factor, scaling.long_factor)
            ]
        short, long = (_outer(positions, one) for one in freqs)
        return jnp.where(positions[..., None] < scaling.original_max_position, short, long)

    def compute_scale(self, user_scale: float | None = None) -> float:
        """``user_scale`` unchanged, or the default scale times the correction for length."""
        if user_scale is not None:
            return user_scale
        return super().compute_scale() * rope_scaling.attention_factor(self.scaling_params)


def _outer(positions: jax.Array, freqs: Any) -> jax.Array:
    """The outer product: ``[...]`` and ``[n]`` → ``[..., n]``."""
    freqs = jnp.asarray(freqs).reshape((1,) * positions.ndim + (-1,))
    return positions[..., None] * freqs
