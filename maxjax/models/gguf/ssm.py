"""What GGUF files of several architectures with Mamba 1 or 2 share: names of the tensors, and sizes in metadata.

llama.cpp computes Mamba 2 without limits of time steps, with SiLU, with a bias in the convolution, and with the
norm, if there is one, after the gate.

Source: ``Mamba2Model`` of llama.cpp's converter, and ``build_mamba2_layer`` in its graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .config.read import Shapes
from .metadata import Settings, unsupported
from .names import NO_SUFFIX, NORM_GROUPS, Rule
from .state_layouts import Both, Flat, Logarithm, Taps

# The metadata keys that :func:`write_ssm_sizes` returns.
SSM_KEYS = tuple(
    f"ssm.{n}" for n in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)


def ssm_names(mixer: str) -> dict[str, Rule]:
    """Return the names of the tensors of Mamba 2, which is the attribute ``mixer`` of a layer."""
    return {
        ".ssm_in": Rule(f"{mixer}.in_proj"),
        ".ssm_conv1d": Rule(f"{mixer}.conv1d", Taps()),
        ".ssm_dt": Rule(f"{mixer}.dt_bias", only="bias"),
        ".ssm_a": Rule(f"{mixer}.A_log", Both(Flat(), Logarithm()), only=NO_SUFFIX),
        ".ssm_d": Rule(f"{mixer}.D", Flat(), only=NO_SUFFIX),
        ".ssm_norm": Rule(f"{mixer}.norm", NORM_GROUPS),
        ".ssm_out": Rule(f"{mixer}.out_proj"),
    }


def read_ssm_sizes(given: Settings, names: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes of Mamba 2 in a file, under the names of a configuration.

    Args:
        given: the file's metadata.
        names: kind of size → its key in the result. Kinds are "heads", "width" (of a head), "groups",
            "state" (its features), "taps", "inner" (features), and "expand", the ratio of inner features to
            the hidden size, which is left out if it is not an integer.
    """
    heads, inner = given.count("ssm.time_step_rank"), given.count("ssm.inner_size")
    if inner % heads:
        raise given.wrong("ssm.inner_size", f"a multiple of {heads}", inner, "does not fit")
    size = given.count("embedding_length")
    sizes = {
        "heads": heads, "width": inner // heads, "groups": given.count("ssm.group_count"),
        "state": given.count("ssm.state_size"), "taps": given.count("ssm.conv_kernel"), "inner": inner,
    }  # fmt: skip
    if inner % size == 0:
        sizes["expand"] = inner // size
    return {names[key]: value for key, value in sizes.items() if key in names}


def write_ssm_sizes(
    *, taps: int, state_size: int, groups: int, heads: int, inner: int, conv_bias: bool, act: str,
    limit: Sequence[float], norm_before_gate: bool = False, least: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the sizes of Mamba 2 as metadata.

    Args:
        taps, state_size, groups, heads, inner: the sizes.
        conv_bias: whether the convolution has a bias.
        act: the activation function after the convolution.
        limit: the minimum and maximum length of a time step.
        norm_before_gate: whether there is a norm before the gate.
        least: the minimum length that the models of the architecture have.

    Raises:
        UnsupportedModelError: llama.cpp would compute something else.
    """
    for what, fits in (
        (f"time steps of {limit[0]} to {limit[1]}", tuple(limit) == (least, math.inf)),
        ("a convolution without a bias", conv_bias),
        (f"{act!r} after the convolution", act == "silu"),
        ("a norm before the gate", not norm_before_gate),
    ):
        if not fits:
            raise unsupported(f"Mamba 2 with {what} in a GGUF file")
    return {
        "ssm.conv_kernel": taps, "ssm.state_size": state_size, "ssm.group_count": groups,
        "ssm.time_step_rank": heads, "ssm.inner_size": inner,
    }  # fmt: skip


# The metadata keys that :func:`write_selective_sizes` returns.
SELECTIVE_KEYS = tuple(
    f"ssm.{n}" for n in ("conv_kernel", "state_size", "time_step_rank", "inner_size")
)


def selective_names(mixer: str) -> dict[str, Rule]:
    """Return the names of the tensors of Mamba 1, which is the attribute ``mixer`` of a layer."""
    return {
        ".ssm_in": Rule(f"{mixer}.in_proj"),
        ".ssm_conv1d": Rule(f"{mixer}.conv1d", Taps()),
        ".ssm_x": Rule(f"{mixer}.x_proj"),
        ".ssm_dt": Rule(f"{mixer}.dt_proj"),
        ".ssm_a": Rule(f"{mixer}.A_log", Logarithm(), only=NO_SUFFIX),
        ".ssm_d": Rule(f"{mixer}.D", only=NO_SUFFIX),
        ".ssm_out": Rule(f"{mixer}.out_proj"),
    }


def read_selective_sizes(given: Settings, names: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes of Mamba 1 in a file, under the names of a configuration.

    Args:
        given: the file's metadata.
        names: kind of size → its key in the result. Kinds are "rank" (of the time steps), "state" (its features),
            "taps", "inner" (channels), and "expand", the ratio of channels to the hidden size.
    """
    inner, hidden = given.count("ssm.inner_size"), given.count("embedding_length")
    if inner % hidden:
        raise given.wrong("ssm.inner_size", f"a multiple of {hidden}", inner, "does not fit")
    sizes = {
        "rank": given.count("ssm.time_step_rank"), "state": given.count("ssm.state_size"),
        "taps": given.count("ssm.conv_kernel"), "inner": inner, "expand": inner // hidden,
    }  # fmt: skip
    return {names[key]: value for key, value in sizes.items() if key in names}


def write_selective_sizes(
    *, taps: int, state_size: int, rank: int, inner: int, hidden: int, conv_bias: bool, act: str
) -> dict[str, Any]:
    """Return the sizes of Mamba 1 as metadata.

    Args:
        taps, state_size, rank, inner, hidden: the sizes.
        conv_bias: whether the convolution has a bias.
        act: the activation function after the convolution.

    Raises:
        UnsupportedModelError: llama.cpp would compute something else.
    """
    for what, fits in (
        (
            f"{inner} channels, which are not two for each of {hidden} hidden features,",
            inner == 2 * hidden,
        ),
        ("a convolution without a bias", conv_bias),
        (f"{act!r} after the convolution", act == "silu"),
    ):
        if not fits:
            raise unsupported(f"Mamba 1 with {what} in a GGUF file")
    return {
        "ssm.conv_kernel": taps, "ssm.state_size": state_size, "ssm.time_step_rank": rank,
        "ssm.inner_size": inner,
    }  # fmt: skip


def has_tensor(tensor: str, tensors: Shapes) -> bool:
    """Return whether a layer of a file has a tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in tensors)


def check_both_kinds(recurs: Sequence[bool], attends: Sequence[bool]) -> None:
    """Raise UnsupportedModelError if a hybrid lacks a kind of layer, because llama.cpp aborts on an empty cache."""
    for kind, layers in (("Mamba", recurs), ("attention", attends)):
        if not any(layers):
            raise unsupported(f"a hybrid without a layer of {kind} in a GGUF file")
