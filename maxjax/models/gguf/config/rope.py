"""Conversion of RoPE scaling between a GGUF file's metadata and Hugging Face's ``rope_scaling``.

Sources: ``TextModel.set_gguf_parameters`` and ``LlamaModel.generate_extra_tensors`` of llama.cpp's
converter; for keys that only old files have, its reader of hyperparameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import CheckpointFormatError, UserInputError, shown
from ....nn.rope_scaling import (
    LinearScalingParams,
    Llama3RopeScalingParams,
    LongRoPEScalingParams,
    YarnScalingParams,
    llama3_multipliers,
    yarn_mscale,
)
from ...parts.rotary import Proportional, Rope
from ..metadata import Settings, unsupported
from ..names import DIVISORS

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
# LongRoPE's factor of cos and sin.
ATTENTION_FACTOR = "rope.scaling.attn_factor"
FREQS, SHORT, LONG = DIVISORS
# ``high_freq_factor`` of Llama 3.1 and 3.2, and of Llama 4.
_HIGH = (4.0, 1.0)


def rope_scaling(
    given: Settings,
    head_dim: int,
    theta: float,
    divisors: Mapping[str, np.ndarray],
    *,
    log_multiplier: float = 0.0,
) -> dict[str, Any] | None:
    """The content of ``rope_scaling``; None if RoPE is not scaled.

    Args:
        given: settings of the file's architecture.
        head_dim: number of rotated features of a head.
        theta: base of RoPE.
        divisors: values of those tensors of ``DIVISORS`` that the file has, by name.
        log_multiplier: ratio of the number that files of the architecture hold for YaRN to its
            ``mscale_all_dim``; 0: files do not hold it.
    """
    kind = given.text("rope.scaling.type", "linear")
    old = given.number("rope.scale_linear", 1.0, positive=False)
    factor = given.number("rope.scaling.factor", old, positive=False) or 1.0
    if divisors:
        names = " and ".join(divisors)
        if factor != 1.0:
            raise given.unsupported(f"rope scaling by both a factor and {names}")
        checked = {
            name: _checked(values, name, head_dim, given) for name, values in divisors.items()
        }
        if [*checked] == [FREQS]:
            return _divided(given, head_dim, theta, checked[FREQS])
        if {*checked} != {SHORT, LONG}:
            raise CheckpointFormatError(
                "the divisors of rope are incomplete", path=given.path,
                expected=f"{FREQS}, or {SHORT} and {LONG}", found=names,
            )  # fmt: skip
        return _longrope(given, checked[SHORT], checked[LONG])
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(given, factor) | (_mscale(given, log_multiplier) if log_multiplier else {})
    raise given.unsupported(f"rope scaling of type {shown(kind)}")


def _yarn(given: Settings, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    found["original_max_position_embeddings"] = _original(given)
    for key, suffix in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        value = given.number(f"rope.scaling.{suffix}", None)
        if value is not None:
            found[key] = value
    return found


def _original(given: Settings) -> int:
    """The context length before scaling, which is that of the model if the file has no other."""
    return given.count("rope.scaling.original_context_length", given.count("context_length"))


def _mscale(given: Settings, log_multiplier: float) -> dict[str, float]:
    """``mscale`` and ``mscale_all_dim``, which are equal, computed from the number in the file."""
    if not given.number(LOG_MULTIPLIER, 0.0, positive=False):
        raise given.unsupported(f"yarn without '{given.prefix}{LOG_MULTIPLIER}'")
    value = float(np.float32(given.number(LOG_MULTIPLIER) / log_multiplier))
    value = round(value, 6)  # the digits that a float32 has
    return {"mscale": value, "mscale_all_dim": value}


def _longrope(given: Settings, short: np.ndarray, long: np.ndarray) -> dict[str, Any]:
    """LongRoPE, whose divisors depend on the length."""
    return {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "original_max_position_embeddings": _original(given),
        "attention_factor": given.number(ATTENTION_FACTOR, 1.0),
    }


def _checked(factors: Any, tensor: str, head_dim: int, given: Settings) -> np.ndarray:
    factors = np.asarray(factors, np.float64)
    if factors.shape != (head_dim // 2,):
        raise CheckpointFormatError(
            "not one divisor for each pair of features",
            path=given.path,
            tensor=tensor,
            expected=f"shape [{head_dim // 2}]",
            found=f"shape {list(factors.shape)}",
        )
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointFormatError(
            "a divisor is not a positive number", path=given.path, tensor=tensor
        )
    return factors


def _divided(
    given: Settings, head_dim: int, theta: float, factors: np.ndarray
) -> dict[str, Any] | None:
    """The scaling with a divisor for each frequency: "llama3" if they match it, else "longrope"."""
    if (factors == 1).all():
        return None
    # Published settings are tried, since a file holds only the resulting divisors.
    largest = round(float(factors.max()), 4)
    for high in _HIGH:
        scaling = Llama3RopeScalingParams(largest, 1.0, high, 8192)
        if np.allclose(factors, _llama3_divisors(head_dim, theta, scaling), rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.orig_max_position,
            }
    # LongRoPE is the only kind of scaling with a list of divisors in a configuration. If both lists are equal and
    # cos and sin have no factor, it does not depend on the length.
    listed = [float(factor) for factor in factors]
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "original_max_position_embeddings": given.count("context_length"),
        "attention_factor": 1.0,
    }


def _llama3_divisors(head_dim: int, theta: float, scaling: Llama3RopeScalingParams) -> np.ndarray:
    # An odd width, which other checks refuse, would give one frequency more than pairs.
    return 1 / llama3_multipliers(head_dim, theta, scaling)[: head_dim // 2]


def required(divisors: Mapping[str, np.ndarray] | None, tensors: Any) -> dict[str, np.ndarray]:
    """The values of those tensors of ``DIVISORS`` that a file has, by name.

    Raises:
        UserInputError: the file has such a tensor whose values were not passed.
    """
    found = {}
    for name in DIVISORS:
        if name in tensors:
            if divisors is None or name not in divisors:
                raise UserInputError(f"the file scales rope: pass the values of its '{name}'")
            found[name] = divisors[name]
    return found


def rope_divisors(
    rope: Rope, head_dim: int, *, is_long: bool = False, path: Any = None
) -> dict[str, np.ndarray]:
    """The tensors of divisors in a file, by name: float32 ``[head_dim // 2]``; empty if the scaling has none.

    Args:
        rope: the RoPE.
        head_dim: number of rotated features of a head.
        is_long: whether files of the architecture have divisors that depend on the length.
        path: path of the checkpoint, for messages.

    Raises:
        UnsupportedModelError: a GGUF file cannot represent the scaling.
        CheckpointFormatError: ``low_freq_factor`` is more than ``high_freq_factor``.
    """
    scaling = rope.scaling
    if isinstance(scaling, Llama3RopeScalingParams):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low > high:
            raise CheckpointFormatError(
                f"'low_freq_factor' {low} is more than 'high_freq_factor' {high}", path=path
            )
        return {FREQS: _llama3_divisors(head_dim, rope.theta, scaling).astype(np.float32)}
    if isinstance(scaling, Proportional):
        # The frequency of pairs that are not rotated becomes practically 0.
        freqs = scaling.freqs(head_dim, rope.theta)
        return {FREQS: np.where(freqs == 0, 1e30, scaling.factor).astype(np.float32)}
    if not isinstance(scaling, LongRoPEScalingParams):
        return {}
    if is_long:
        listed = {SHORT: scaling.short_factor, LONG: scaling.long_factor}
        return {name: np.asarray(factors, np.float32) for name, factors in listed.items()}
    if scaling.short_factor != scaling.long_factor or rope.magnitude != 1.0:
        raise unsupported("rope whose divisors depend on the length ('longrope')", path)
    return {FREQS: np.asarray(scaling.short_factor, np.float32)}


def rope_keys(
    rope: Rope,
    given: Mapping[str, Any],
    *,
    path: Any = None,
    truncates: bool = True,
    is_long: bool = False,
    log_multiplier: float = 0.0,
) -> dict[str, Any]:
    """The metadata of RoPE scaling, without the architecture's prefix.

    Args:
        rope: the RoPE.
        given: RoPE settings of the configuration, from which ``rope`` was read.
        path: path of the checkpoint, for messages.
        truncates: whether llama.cpp computes YaRN with ``truncate`` for the architecture.
        is_long: whether files of the architecture have divisors that depend on the length.
        log_multiplier: ratio of the number that files of the architecture hold for YaRN to its
            ``mscale_all_dim``; 0: files do not hold it.

    Raises:
        UnsupportedModelError: a GGUF file cannot represent the scaling.
    """
    scaling = rope.scaling
    if is_long and isinstance(scaling, LongRoPEScalingParams):
        length = {"rope.scaling.original_context_length": scaling.original_max_position}
        return {**length, ATTENTION_FACTOR: rope.magnitude}
    divides = (Llama3RopeScalingParams, LongRoPEScalingParams, Proportional)
    if scaling is None or isinstance(scaling, divides):
        return {}
    if isinstance(scaling, LinearScalingParams):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    if not isinstance(scaling, YarnScalingParams):
        raise unsupported("rope scaling of type 'dynamic' in a GGUF file", path)
    how = "without" if truncates else "with"
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    more = {}
    if log_multiplier:
        if not mscale or mscale != all_dim or scaling.truncate != truncates:
            what = f"yarn with 'mscale' that is not 'mscale_all_dim', or {how} 'truncate',"
            raise unsupported(f"{what} in a GGUF file", path)
        more[LOG_MULTIPLIER] = log_multiplier * mscale
    elif scaling.truncate != truncates:
        raise unsupported(f"yarn {how} 'truncate' in a GGUF file", path)
    # llama.cpp multiplies by the default factor, whatever the file says.
    usual = 1.0 if log_multiplier else yarn_mscale(scaling.factor)
    if not math.isclose(rope.magnitude, usual, rel_tol=1e-6):
        what = "yarn with 'mscale' and 'mscale_all_dim', or with a custom 'attention_factor',"
        raise unsupported(f"{what} in a GGUF file", path)
    betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling.factor,
        "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
        **more,
        **{f"rope.scaling.yarn_{k}": beta for k, beta in betas.items() if given.get(k) is not None},
    }
