"""Rotary position embedding (J. Su et al., RoFormer, arXiv:2104.09864).

Features are taken in pairs and each pair is turned by an angle that grows with the
position, so that a product of a query and a key depends on their distance alone. No
weights, and no table in compiled programs: cos and sin of the positions at hand are
computed where they are used.

Shapes: B sequences, T tokens, H heads of D features.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph.value import TensorValue, unwrap, wraps
from . import rope_scaling
from .layer import Module
from .rope_scaling import DeepseekYarnRopeScalingParams as DeepseekYarnRopeScalingParams
from .rope_scaling import DynamicScalingParams as DynamicScalingParams
from .rope_scaling import LinearScalingParams as LinearScalingParams
from .rope_scaling import Llama3RopeScalingParams as Llama3RopeScalingParams
from .rope_scaling import LongRoPEScalingParams as LongRoPEScalingParams
from .rope_scaling import YarnScalingParams as YarnScalingParams


def rotate(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> jax.Array:
    """Turns each pair of features of ``x`` by the angle of ``cos`` and ``sin``.

    Args:
        x: ``[..., T, H, D]``.
        cos, sin: ``[T, D/2]`` or ``[..., T, D/2]``: the same for all heads.
        interleaved: Pairs are neighbours (0,1), (2,3), … (MAX's default, Meta's files).
            Otherwise feature i goes with i + D/2 (Hugging Face's files).

    Returns:
        As ``x``, computed in float32 and rounded once.

    Raises:
        ValueError: ``D`` is not twice the number of angles.
    """
    x, cos, sin = unwrap(x), unwrap(cos), unwrap(sin)
    half = cos.shape[-1]
    if x.ndim < 3 or x.shape[-1] != 2 * half:
        raise ValueError(
            f"rope over {2 * half} features takes [..., tokens, heads, {2 * half}], not {x.shape}"
        )
    wide = x.astype(jnp.float32)
    # One axis for the heads, then leading ones, so that nothing is broadcast unasked.
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


class RotaryEmbedding(Module):
    """Turns queries or keys by their positions. Arguments in MAX's order; no weights.

    Args:
        dim: Features of all heads together (MAX's ``dim``).
        n_heads: ``dim // n_heads`` is the width of a head unless ``head_dim`` tells it.
        theta: Base of the frequencies (10 000 in RoFormer).
        max_seq_len: Half the rows of MAX's table, beyond which a call with known
            positions is refused.
        head_dim: Features of a head, all of which are turned.
        _freqs_cis: MAX's ready-made table; not taken.
        interleaved: How features are paired, see :func:`rotate`.

    Example:
        >>> rope = RotaryEmbedding(dim=4, n_heads=1, theta=100.0, max_seq_len=8)
        >>> x = jnp.array([[[1.0, 0.0, 1.0, 0.0]]] * 2)
        >>> print(rope(x).round(1)[:, 0])
        [[1.  0.  1.  0. ]
         [0.5 0.8 1.  0.1]]
        >>> print(rope(x, start_pos=1).round(1)[0, 0])
        [0.5 0.8 1.  0.1]
    """

    # Whether known positions beyond the table are refused.
    _bounded = True

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
        if _freqs_cis is not None:
            raise NotImplementedError(
                f"{type(self).__name__}(_freqs_cis=...) is not supported: a Module holds arrays in "
                "Weights only. rotate(x, cos, sin) turns by a table of your own"
            )
        self.dim, self.n_heads, self.theta = dim, n_heads, float(theta)
        self.max_seq_len, self.interleaved = max_seq_len, interleaved
        self.head_dim = dim // n_heads if head_dim is None else head_dim
        self.scaling_params: Any = None

    @property
    def _width(self) -> int:
        """How many features are turned."""
        return self.head_dim

    @property
    def _rows(self) -> int:
        """The length of MAX's table."""
        return 2 * self.max_seq_len

    def _angles(self, positions: jax.Array) -> jax.Array:
        """``[...]`` in float32 → ``[..., D/2]``, in radians."""
        return _outer(
            positions, rope_scaling.inv_freqs(self._width, self.theta, self.scaling_params)
        )

    def cos_sin(self, positions: Any) -> tuple[jax.Array, jax.Array]:
        """cos and sin of each pair's angle: integers ``[...]`` → two ``[..., D/2]`` in float32."""
        angles = self._angles(jnp.asarray(unwrap(positions)).astype(jnp.float32))
        size = self._magnitude()
        return jnp.cos(angles) * size, jnp.sin(angles) * size

    def _magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    def freqs_cis_base(self) -> TensorValue:
        """MAX's table: cos and sin by position and pair, ``[rows, D/2, 2]``."""
        return TensorValue(jnp.stack(self.cos_sin(jnp.arange(self._rows)), axis=-1))

    @property
    def freqs_cis(self) -> TensorValue:
        """The table with cos and sin of a pair as neighbours, ``[rows, D]``; made at each reading."""
        table = self.freqs_cis_base()
        return TensorValue(table.value.reshape(table.value.shape[0], -1))

    def compute_scale(self, user_scale: float | None = None) -> float:
        """What attention scores are multiplied by: ``user_scale``, or 1/√head_dim."""
        return 1 / math.sqrt(self.head_dim) if user_scale is None else user_scale

    def __call__(
        self, x: Any, start_pos: Any = None, seq_len: Any = None, *, positions: Any = None
    ) -> Any:
        """``[..., T, H, D]`` → the same shape and dtype (and kind: array or TensorValue).

        Args:
            start_pos: Position of the first token, a number or a scalar; 0 by default.
            seq_len: T, which MAX cannot always see; not needed here.
            positions: Of each token instead: integers ``[T]`` or ``[B, T]``.

        Raises:
            ValueError: Another number of features; known positions beyond the table.
        """
        array = unwrap(x)
        if array.ndim < 3:
            raise ValueError(f"rope takes [..., tokens, heads, features], not {array.shape}")
        if positions is None:
            positions = self._positions(array.shape[-3], unwrap(start_pos))
        y = rotate(array, *self.cos_sin(positions), interleaved=self.interleaved)
        return TensorValue(y) if wraps(x) else y

    def _positions(self, length: int, start: Any) -> jax.Array:
        start = 0 if start is None else start
        if self._bounded and isinstance(start, (int, np.integer)) and start + length > self._rows:
            raise ValueError(
                f"positions {start} to {start + length - 1} are beyond the {self._rows} rows of "
                f"this rope's table (max_seq_len={self.max_seq_len})"
            )
        return jnp.arange(length, dtype=jnp.int32) + jnp.asarray(start, jnp.int32)


class _Scaled(RotaryEmbedding):
    """With MAX's last argument, ``scaling_params``; None leaves the frequencies as they are."""

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
        self.scaling_params = scaling_params
        rope_scaling.inv_freqs(self._width, self.theta, scaling_params)  # refuses what does not fit


class Llama3RotaryEmbedding(_Scaled):
    """RoPE with ``Llama3RopeScalingParams`` or ``LinearScalingParams``."""


class DynamicRotaryEmbedding(_Scaled):
    """RoPE without a longest sequence.

    MAX's grows its table as positions come; here there is none to grow. With
    ``DynamicScalingParams``, which MAX does not have, theta grows with the longest
    position of a call: Hugging Face's "dynamic".
    """

    _bounded = False

    def maybe_update_freqs(self, position_ids: Any) -> None:
        """Nothing: MAX's code calls this before it asks for the table."""

    def _angles(self, positions: jax.Array) -> jax.Array:
        scaling, width = self.scaling_params, self._width
        angles = super()._angles(positions)
        if scaling is None or width <= 2:
            return angles
        length = jnp.max(positions, initial=0.0) + 1
        longer = jnp.maximum(length / scaling.max_position_embeddings, 1.0)
        growth = scaling.factor * longer - (scaling.factor - 1)
        # (theta · growth^(D / (D - 2)))^(-2i / D) is the plain frequency times this.
        slower = growth ** jnp.asarray(-np.arange(0, width, 2) / (width - 2), jnp.float32)
        return angles * slower.reshape((1,) * positions.ndim + (-1,))


class YarnRotaryEmbedding(_Scaled):
    """RoPE with ``YarnScalingParams``: cos and sin are 0.1 · log(factor) + 1 in size."""

    @property
    def _rows(self) -> int:
        return self.max_seq_len if self.scaling_params else super()._rows

    def _magnitude(self) -> float:
        return rope_scaling.attention_factor(self.scaling_params)


class DeepseekYarnRotaryEmbedding(YarnRotaryEmbedding):
    """RoPE with ``DeepseekYarnRopeScalingParams`` over all ``dim`` features, as MAX has it.

    Raises:
        ValueError: No ``scaling_params``.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.scaling_params is None:
            raise ValueError("DeepseekYarnRotaryEmbedding needs scaling_params")

    @property
    def _width(self) -> int:
        return self.dim

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The scale times the square of YaRN's correction with ``mscale``."""
        scaling = self.scaling_params
        correction = rope_scaling.yarn_mscale(scaling.scaling_factor, scaling.mscale)
        return super().compute_scale(user_scale) * correction**2


class LongRoPERotaryEmbedding(_Scaled):
    """RoPE with ``LongRoPEScalingParams``.

    As in MAX, positions below ``original_max_position`` turn by the short factors and those
    above by the long ones, and the correction for length is one factor of the attention's
    scale. Hugging Face turns a whole text by one list or the other, and has the factor
    in cos and sin, so in the scores squared: ``rope_scaling`` has both by themselves.
    """

    def _angles(self, positions: jax.Array) -> jax.Array:
        scaling = self.scaling_params
        if scaling is None:
            return super()._angles(positions)
        short, long = (
            _outer(
                positions,
                rope_scaling.inv_freqs(self._width, self.theta, scaling, length=length),
            )
            for length in (0, scaling.original_max_position + 1)
        )
        return jnp.where(positions[..., None] < scaling.original_max_position, short, long)

    def compute_scale(self, user_scale: float | None = None) -> float:
        """``user_scale`` as it is, or the default times the correction for length."""
        if user_scale is not None:
            return user_scale
        return super().compute_scale() * rope_scaling.attention_factor(self.scaling_params)


def _outer(positions: jax.Array, freqs: Any) -> jax.Array:
    """``[...]`` and ``[n]`` → ``[..., n]``."""
    freqs = jnp.asarray(freqs).reshape((1,) * positions.ndim + (-1,))
    return positions[..., None] * freqs
