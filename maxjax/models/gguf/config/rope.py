"""How a GGUF file says that rope is stretched → ``rope_scaling`` as Hugging Face has it.

Sources: ``TextModel.set_gguf_parameters`` and ``LlamaModel.generate_extra_tensors`` of llama.cpp's
converter; for keys that only old files have, its reader of hyperparameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....errors import CheckpointFormatError, UserInputError
from ...config import ModelConfig, setting
from ..metadata import Settings, short, unsupported

# What Llama 3.1 and 3.2 were made with. The file holds divisors only, not these.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_scaling(
    given: Settings, head_dim: int, theta: float, factors: np.ndarray | None
) -> dict[str, Any] | None:
    """The content of ``rope_scaling``, None where rope is not stretched.

    Args:
        given: The settings of the file's architecture.
        head_dim: Width of a head.
        theta: The base of rope.
        factors: The values of ``rope_freqs.weight``, None where there is no such tensor.
    """
    kind = given.text("rope.scaling.type", "linear")
    old = given.number("rope.scale_linear", 1.0, positive=False)
    factor = given.number("rope.scaling.factor", old, positive=False) or 1.0
    if factors is not None:
        if factor != 1.0:
            raise given.unsupported("rope that both a factor and rope_freqs.weight stretch")
        return _divided(given, head_dim, theta, _checked(factors, head_dim, given))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(given, factor)
    raise given.unsupported(f"rope scaling of type {kind[:80]!r}")


def _yarn(given: Settings, factor: float) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    found["original_max_position_embeddings"] = given.count("rope.scaling.original_context_length")
    for key, suffix in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        value = given.number(f"rope.scaling.{suffix}", None)
        if value is not None:
            found[key] = value
    return found


def _checked(factors: Any, head_dim: int, given: Settings) -> np.ndarray:
    factors = np.asarray(factors, np.float64)
    if factors.shape != (head_dim // 2,):
        raise CheckpointFormatError(
            "not one divisor for each pair of features",
            path=given.path,
            tensor="rope_freqs.weight",
            expected=f"shape [{head_dim // 2}]",
            found=f"shape {list(factors.shape)}",
        )
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointFormatError(
            "a divisor is not a positive number", path=given.path, tensor="rope_freqs.weight"
        )
    return factors


def _divided(
    given: Settings, head_dim: int, theta: float, factors: np.ndarray
) -> dict[str, Any] | None:
    """Rope whose frequencies have a divisor each: Llama 3's if they are those, else as they are."""
    if (factors == 1).all():
        return None
    largest = round(float(factors.max()), 4)
    if np.allclose(factors, llama3_factors(head_dim, theta, largest), rtol=1e-4, atol=0):
        return {"rope_type": "llama3", "factor": largest, **LLAMA3}
    # LongRoPE is the one kind that lists divisors. With both lists equal and no factor on cos and
    # sin, nothing of it depends on the length.
    listed = [float(factor) for factor in factors]
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "original_max_position_embeddings": given.count("context_length"),
        "attention_factor": 1.0,
    }


def llama3_factors(
    head_dim: int,
    theta: float,
    factor: float,
    low: float = LLAMA3["low_freq_factor"],
    high: float = LLAMA3["high_freq_factor"],
    length: float = LLAMA3["original_max_position_embeddings"],
) -> np.ndarray:
    """The divisor of each frequency in Llama 3.1 and 3.2 (arXiv:2407.21783): float64 [head_dim // 2].

    Example:
        >>> llama3_factors(8, 500000.0, 8.0).round(3)
        array([1.   , 1.   , 2.695, 8.   ])
    """
    speeds = theta ** -(np.arange(0, head_dim - 1, 2) / head_dim)
    turns = length * speeds / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def required(factors: np.ndarray | None, tensors: Any) -> np.ndarray | None:
    """The factors, which the caller must have read if the file has them.

    Raises:
        UserInputError: It has, and they were not passed.
    """
    if "rope_freqs.weight" not in tensors:
        return None
    if factors is None:
        raise UserInputError("the file stretches rope: pass the values of its 'rope_freqs.weight'")
    return factors


@dataclass(frozen=True)
class Rope(ModelConfig):
    """How rope is stretched; ``short`` and ``long`` are the divisors that LongRoPE lists."""

    kind: str = setting("rope_type", default="default")
    factor: float | None = setting(default=None, minimum=1e-3)
    low: float = setting("low_freq_factor", default=LLAMA3["low_freq_factor"])
    high: float = setting("high_freq_factor", default=LLAMA3["high_freq_factor"])
    length: int | None = setting("original_max_position_embeddings", default=None, minimum=1)
    attention_factor: float | None = setting(default=None)
    beta_fast: float | None = setting(default=None, minimum=1e-3)
    beta_slow: float | None = setting(default=None, minimum=1e-3)
    mscale: float | None = setting(default=None)
    mscale_all_dim: float | None = setting(default=None)
    truncate: bool | None = setting(default=None)
    short: tuple[float, ...] | None = dataclasses.field(default=None, metadata={"key": "-"})
    long: tuple[float, ...] | None = dataclasses.field(default=None, metadata={"key": "-"})

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(
                f"'low_freq_factor' {self.low} is not less than 'high_freq_factor' {self.high}"
            )


def one_rope(said: dict[str, Any], path: Any) -> tuple[dict[str, Any], Rope | None]:
    """The settings with rope said as before transformers 5, and how rope is stretched.

    Raises:
        UnsupportedModelError: Rope is as no GGUF file can say.
        CheckpointFormatError: A setting is wrong; names it.
    """
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointFormatError(
            "'rope_scaling' has the wrong type", path=path, expected="{…}", found=short(rope)
        )
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    if isinstance(local, Mapping) and "rope_theta" in local:
        said["rope_local_base_freq"] = local["rope_theta"]
    if isinstance(local, Mapping) and local.get("rope_type") not in (None, "default"):
        kind = short(local["rope_type"])
        raise unsupported(
            f"rope that is stretched in layers with a window ({kind}), in a GGUF file,", path
        )
    for part in (local, rope):
        turned = part.get("partial_rotary_factor") if isinstance(part, Mapping) else None
        if turned is not None and turned != 1:
            raise unsupported(f"'partial_rotary_factor' {short(turned)} in a GGUF file", path)
    if not isinstance(rope, Mapping):
        raise CheckpointFormatError(
            "'full_attention' has the wrong type", path=path, expected="{…}", found=short(rope)
        )
    if "rope_theta" in rope:
        said["rope_theta"] = rope["rope_theta"]
    found = Rope.from_dict({"rope_type": rope.get("type"), **rope}, path=path)
    lists = {key: _divisors(key, rope.get(key), path) for key in ("short_factor", "long_factor")}
    found = replace(found, short=lists["short_factor"], long=lists["long_factor"])
    return said, found if found.kind != "default" else None


def _divisors(key: str, given: Any, path: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(
        type(value) in (int, float) and 0 < value < 1e30 for value in given
    ):
        raise CheckpointFormatError(
            f"'{key}' is wrong",
            path=path,
            expected="a list of positive numbers",
            found=short(given),
        )
    return tuple(map(float, given))


def rope_divisors(
    rope: Rope | None, head_dim: int, theta: float, *, path: Any = None
) -> np.ndarray | None:
    """The values of ``rope_freqs.weight``: float32 [head_dim // 2]; None where rope needs none.

    Raises:
        UnsupportedModelError: Rope is stretched as no GGUF file can say.
    """
    if rope is None:
        return None
    if rope.kind == "llama3":
        factor = 8.0 if rope.factor is None else rope.factor
        constants = rope.low, rope.high, rope.length or LLAMA3["original_max_position_embeddings"]
        return llama3_factors(head_dim, theta, factor, *constants).astype(np.float32)
    if rope.kind != "longrope":
        return None
    if rope.short != rope.long or rope.attention_factor != 1.0 or rope.short is None:
        raise unsupported("rope whose divisors depend on the length ('longrope')", path)
    if len(rope.short) != head_dim // 2:
        raise CheckpointFormatError(
            "'short_factor' is not one divisor for each pair of features",
            path=path, expected=head_dim // 2, found=len(rope.short),
        )  # fmt: skip
    return np.asarray(rope.short, np.float32)


def rope_keys(rope: Rope | None, context: int, *, path: Any = None) -> dict[str, Any]:
    """The metadata that says how rope is stretched, without the prefix of the architecture.

    Raises:
        UnsupportedModelError: Rope is stretched as no GGUF file can say.
    """
    if rope is None or rope.kind in ("llama3", "longrope"):
        return {}
    factor = 1.0 if rope.factor is None else rope.factor
    found: dict[str, Any] = {"rope.scaling.type": rope.kind, "rope.scaling.factor": factor}
    if rope.kind == "linear":
        return found
    if rope.kind != "yarn":
        raise unsupported(f"rope scaling of type {rope.kind[:80]!r} in a GGUF file", path)
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    # llama.cpp multiplies by the usual factor whatever the file says.
    if not math.isclose(usual if rope.attention_factor is None else rope.attention_factor, usual,
                        rel_tol=1e-6):  # fmt: skip
        raise unsupported("yarn with an 'attention_factor' of its own in a GGUF file", path)
    if rope.mscale or rope.mscale_all_dim or rope.truncate is False:
        raise unsupported("yarn with 'mscale' or without 'truncate' in a GGUF file", path)
    found["rope.scaling.original_context_length"] = rope.length or context
    for key, value in (("beta_fast", rope.beta_fast), ("beta_slow", rope.beta_slow)):
        if value is not None:
            found[f"rope.scaling.yarn_{key}"] = value
    return found
