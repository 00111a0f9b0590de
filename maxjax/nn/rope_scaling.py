"""RoPE's frequencies (the rotation of each pair of features per position), and ways to scale them.

The frequencies are computed with NumPy in float64 and rounded to float32 once. The parameters are those of
Hugging Face's configurations.

Sources: RoFormer (arXiv:2104.09864), position interpolation (arXiv:2306.15595), YaRN
(arXiv:2309.00071), LongRoPE (arXiv:2402.13753), Llama 3 (arXiv:2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LinearScalingParams:
    """Divides all positions by ``factor``."""

    factor: float


@dataclass(frozen=True)
class DynamicScalingParams:
    """Increases theta with the length of the sequence ("dynamic NTK"). MAX does not have this variant.

    Attributes:
        factor: strength of the growth.
        max_position_embeddings: length up to which theta stays the same.
    """

    factor: float
    max_position_embeddings: int


@dataclass(frozen=True)
class Llama3RopeScalingParams:
    """Divides low frequencies by ``factor``, keeps high ones, and interpolates between.

    Attributes:
        factor: divisor of low frequencies.
        low_freq_factor, high_freq_factor: number of rotations over ``orig_max_position`` positions up to
            which a frequency is low, and from which it is high.
        orig_max_position: context length of the original training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    orig_max_position: int


@dataclass(frozen=True)
class YarnScalingParams:
    """YaRN: interpolates as Llama 3 does, but along the index of the pair, and increases attention scores.

    Attributes:
        factor: divisor of low frequencies.
        beta_fast, beta_slow: number of rotations over ``original_max_position_embeddings`` positions from
            which a frequency is high, and up to which it is low.
        original_max_position_embeddings: context length of the original training.
        truncate: whether the pair indices found for the betas are rounded to integers.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    truncate: bool


@dataclass(frozen=True)
class DeepseekYarnRopeScalingParams:
    """DeepSeek's variant of YaRN.

    Attributes:
        scaling_factor, original_max_position_embeddings, beta_fast, beta_slow: as in YaRN.
        mscale, mscale_all_dim: coefficients of log(scaling_factor) in the factor of cos and sin:
            (0.1 · mscale · log + 1) / (0.1 · mscale_all_dim · log + 1).
    """

    scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: int
    beta_slow: int
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class LongRoPEScalingParams:
    """A divisor for each frequency: one list for short sequences and one for long ones.

    Attributes:
        short_factor, long_factor: divisors, one for each frequency.
        original_max_position: length up to which a sequence is short.
        max_position_embeddings: context length to which the model was extended.
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_position: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(float(f) for f in getattr(self, name)))


def inv_freqs(dim: int, theta: float, scaling: Any = None, *, length: int = 0) -> np.ndarray:
    """The frequency of each pair of features in radians per position, ``[dim // 2]`` in float32.

    Args:
        dim: number of rotated features; even.
        theta: base of the frequencies: pair i is rotated by ``theta^(-2i / dim)`` per position.
        scaling: one of this module's ``…Params``, or None.
        length: length of the sequence; only the dynamic variant and LongRoPE depend on it.

    Raises:
        ValueError: ``dim`` is odd, or LongRoPE's list does not have one number for each pair.
        TypeError: ``scaling`` is of an unknown class.

    Example:
        >>> inv_freqs(4, 100.0), inv_freqs(4, 100.0, LinearScalingParams(2.0))
        (array([1. , 0.1], dtype=float32), array([0.5 , 0.05], dtype=float32))
    """
    if dim % 2:
        raise ValueError(f"RoPE rotates pairs of features, so dim must be even, not {dim}")
    variant = next((fn for kind, fn in _VARIANTS.items() if isinstance(scaling, kind)), None)
    if variant is None:
        known = ", ".join(kind.__name__ for kind in _VARIANTS if kind is not type(None))
        raise TypeError(f"unknown rope scaling {type(scaling).__name__}: it must be None, {known}")
    return variant(dim, theta, scaling, length).astype(np.float32)


def attention_factor(scaling: Any) -> float:
    """The factor by which Hugging Face's models multiply cos and sin; 1 for most variants.

    Example:
        >>> attention_factor(LongRoPEScalingParams([1.0], [2.0], 4, 16)) ** 2
        2.0000000000000004
    """
    if isinstance(scaling, YarnScalingParams):
        return yarn_mscale(scaling.factor)
    if isinstance(scaling, DeepseekYarnRopeScalingParams):
        above = yarn_mscale(scaling.scaling_factor, scaling.mscale)
        return above / yarn_mscale(scaling.scaling_factor, scaling.mscale_all_dim)
    if isinstance(scaling, LongRoPEScalingParams):
        original = scaling.original_max_position
        stretched = scaling.max_position_embeddings / original
        if stretched > 1:
            return math.sqrt(1 + math.log(stretched) / math.log(original))
    return 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """``0.1 · mscale · log(factor) + 1``: YaRN's correction of attention scores for longer sequences."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def llama3_multipliers(dim: int, theta: float, scaling: Llama3RopeScalingParams) -> np.ndarray:
    """The factor of each frequency in Llama 3.1 and 3.2, float64 ``[dim // 2]``.

    Example:
        >>> llama3_multipliers(8, 500000.0, Llama3RopeScalingParams(8.0, 1.0, 4.0, 8192)).round(3)
        array([1.   , 1.   , 0.371, 0.125])
    """
    rotations = scaling.orig_max_position * _plain(dim, theta) / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low == high:
        kept = (rotations >= high).astype(np.float64)
    else:
        kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return kept + (1 - kept) / scaling.factor


# --- the variants: (dim, theta, scaling, length) → float64 [dim // 2] -----------------------


def _plain(dim: int, theta: float, scaling: Any = None, length: int = 0) -> np.ndarray:
    return float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)


def _linear(dim: int, theta: float, scaling: LinearScalingParams, length: int) -> np.ndarray:
    return _plain(dim, theta) / scaling.factor


def _dynamic(dim: int, theta: float, scaling: DynamicScalingParams, length: int) -> np.ndarray:
    longer = max(length / scaling.max_position_embeddings, 1.0)
    growth = scaling.factor * longer - (scaling.factor - 1)
    return _plain(dim, theta * growth ** (dim / (dim - 2)) if dim > 2 else theta)


def _llama3(dim: int, theta: float, scaling: Llama3RopeScalingParams, length: int) -> np.ndarray:
    return _plain(dim, theta) * llama3_multipliers(dim, theta, scaling)


def _yarn(
    dim: int, theta: float, scaling: YarnScalingParams | DeepseekYarnRopeScalingParams, length: int
) -> np.ndarray:
    deepseek = isinstance(scaling, DeepseekYarnRopeScalingParams)
    factor = scaling.scaling_factor if deepseek else scaling.factor
    original = scaling.original_max_position_embeddings

    def pair(rotations: float) -> float:
        """The index of the pair with that many rotations over the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if deepseek or scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    slow = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return _plain(dim, theta) * (1 - slow + slow / factor)


def _longrope(dim: int, theta: float, scaling: LongRoPEScalingParams, length: int) -> np.ndarray:
    long = length > scaling.original_max_position
    factors = np.asarray(scaling.long_factor if long else scaling.short_factor, np.float64)
    if factors.shape != (dim // 2,):
        raise ValueError(
            f"LongRoPE over {dim} features needs {dim // 2} factors, not {factors.size}"
        )
    return _plain(dim, theta) / factors


_VARIANTS: dict[type, Callable[[int, float, Any, int], np.ndarray]] = {
    type(None): _plain,
    LinearScalingParams: _linear,
    DynamicScalingParams: _dynamic,
    Llama3RopeScalingParams: _llama3,
    YarnScalingParams: _yarn,
    DeepseekYarnRopeScalingParams: _yarn,
    LongRoPEScalingParams: _longrope,
}
