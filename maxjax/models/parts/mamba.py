"""Settings of Mamba 1 and 2 that several architectures read alike, and the states that their layers keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...nn.kv_cache.kinds import State, States
from .config import positive_integer


def mamba_states(
    *, taps: int, channels: int, heads: int, head_dim: int, state_size: int
) -> Mapping[str, States]:
    """Return what the cache holds for a layer of Mamba 2, as ``config.states(layer)`` does.

    Args:
        taps, channels: number of taps and of channels of the convolution, whose last inputs are kept.
        heads, head_dim, state_size: number and width of the heads, and features of their states.

    Example:
        >>> kept = mamba_states(taps=4, channels=20, heads=2, head_dim=4, state_size=6)
        >>> [(one.name, one.shape) for one in kept["mamba"].each]
        [('conv', (3, 20)), ('ssm', (2, 4, 6))]
    """
    conv = State("conv", (taps - 1, channels), axis=1)
    return {"mamba": States((conv, State("ssm", (heads, head_dim, state_size), axis=0)))}


def selective_states(*, taps: int, channels: int, state_size: int) -> Mapping[str, States]:
    """Return what the cache holds for a layer of Mamba 1, as ``config.states(layer)`` does.

    Args:
        taps: number of taps of the convolution, whose last inputs are kept.
        channels, state_size: number of channels, and features of the state of each.

    Example:
        >>> kept = selective_states(taps=4, channels=20, state_size=6)
        >>> [(one.name, one.shape) for one in kept["mamba"].each]
        [('conv', (3, 20)), ('ssm', (20, 6))]
    """
    conv = State("conv", (taps - 1, channels), axis=1)
    return {"mamba": States((conv, State("ssm", (channels, state_size), axis=0)))}


def read_time_step_rank(raw: Mapping[str, Any], key: str) -> Any:
    """Return the rank of the time steps of Mamba 1 in a ``config.json``; hidden size / 16 if missing or "auto".

    Args:
        raw: content of the file.
        key: the rank's key.

    Example:
        >>> read_time_step_rank({"hidden_size": 40, "time_step_rank": "auto"}, "time_step_rank")
        3
    """
    rank, hidden = raw.get(key), raw.get("hidden_size")
    if rank not in (None, "auto"):
        return rank
    return -(-hidden // 16) if type(hidden) is int and hidden > 0 else None


def check_mamba(heads: int, groups: int, limit: tuple[float, ...] = (0.0, math.inf)) -> None:
    """Raise ValueError unless the groups divide the heads evenly, and the limits of a time step are a range."""
    if heads % groups:
        raise ValueError(f"{heads} heads of Mamba 2 do not divide into {groups} groups")
    if not 0 <= limit[0] <= limit[1]:
        raise ValueError(f"'time_step_limit' must be a range from 0 on, got {limit}")


def read_time_step_limit(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Return the minimum and maximum length of a time step in a ``config.json``; 0 and infinity by default.

    Raises:
        ValueError: the value is not a list of two numbers.

    Example:
        >>> read_time_step_limit({"time_step_limit": [0.1, "inf"]}), read_time_step_limit({})
        ((0.1, inf), (0.0, inf))
    """
    given = raw.get("time_step_limit")
    if given is None:
        return (0.0, math.inf)
    # JSON has no number for infinity: transformers writes {"__float__": "Infinity"}, others a string.
    most = ({"__float__": "Infinity"}, "inf", "Infinity")
    found = [math.inf if one in most else one for one in given] if isinstance(given, list) else []
    if len(found) != 2 or not all(type(one) in (int, float) for one in found):
        raise ValueError("'time_step_limit' is not a list of two numbers")
    return (float(found[0]), float(found[1]))


def write_time_step_limit(limit: tuple[float, ...]) -> dict[str, Any]:
    """Return the key of a ``config.json`` with these limits, the inverse of :func:`read_time_step_limit`.

    Example:
        >>> write_time_step_limit((0.1, math.inf)), write_time_step_limit((0.0, math.inf))
        ({'time_step_limit': [0.1, 'inf']}, {})
    """
    if limit == (0.0, math.inf):
        return {}
    return {"time_step_limit": ["inf" if one == math.inf else one for one in limit]}


def read_mamba_head_dim(raw: Mapping[str, Any], heads: int, inner: int | None = None) -> Any:
    """Return ``mamba_d_head`` of a ``config.json``; computed if it is missing or "auto".

    Args:
        raw: content of the file.
        heads: number of heads, for a file without ``mamba_n_heads``.
        inner: number of features of all heads; ``mamba_expand`` times the hidden size by default.

    Raises:
        ValueError: a number is not a positive integer, or the heads do not divide the features evenly.

    Example:
        >>> read_mamba_head_dim({"hidden_size": 16, "mamba_n_heads": 4, "mamba_d_head": "auto"}, 128)
        8
    """
    raw.get("mamba_expand")  # read in any case, so that no warning names it
    given = raw.get("mamba_d_head")
    if given not in (None, "auto"):
        return given
    expand, count = (
        positive_integer(raw, "mamba_expand", 2),
        positive_integer(raw, "mamba_n_heads", heads),
    )
    size = positive_integer(raw, "hidden_size")
    inner = expand * size if inner is None else inner
    if inner % count:
        raise ValueError(f"'mamba_n_heads' {count} does not divide {inner} features")
    return inner // count
