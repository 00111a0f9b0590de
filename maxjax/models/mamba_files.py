"""GGUF files of models with Mamba 2: names and layouts of its tensors, and its sizes in metadata.

llama.cpp computes Mamba 2 without limits of time steps, with SiLU, a bias of the convolution, and a norm, if
there is one, after the gate.

Source: ``Mamba2Model`` of llama.cpp's converter, and ``build_mamba2_layer`` in its graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .decoder.mamba2 import Mamba2Settings
from .gguf.config.read import Shapes
from .gguf.metadata import Settings, unsupported
from .gguf.names import BARE, NORM_GROUPS, Rule
from .gguf.state_layouts import Both, Flat, Logarithm, Taps

WRITTEN = tuple(
    f"ssm.{n}" for n in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)
"""The metadata keys of :func:`to_gguf`, for ``GGUFTable.written``."""


def mamba_names(mixer: str) -> dict[str, Rule]:
    """The tensors of a :class:`~maxjax.models.decoder.mamba2.Mamba2Mixer` of that name in its layer.

    Example:
        >>> mamba_names("mamba")[".ssm_d"]
        Rule(name='mamba.D', layout=Flat(rows_stored=0), only='-')
    """
    return {
        ".ssm_in": Rule(f"{mixer}.in_proj"),
        ".ssm_conv1d": Rule(f"{mixer}.conv1d", Taps()),
        ".ssm_dt": Rule(f"{mixer}.dt_bias", only="bias"),
        ".ssm_a": Rule(f"{mixer}.A_log", Both(Flat(), Logarithm()), only=BARE),
        ".ssm_d": Rule(f"{mixer}.D", Flat(), only=BARE),
        ".ssm_norm": Rule(f"{mixer}.norm", NORM_GROUPS),
        ".ssm_out": Rule(f"{mixer}.out_proj"),
    }


def of_gguf(given: Settings, names: Sequence[str]) -> dict[str, int]:
    """The sizes of Mamba 2 in a file, under the names of a configuration.

    Args:
        given: the file's metadata.
        names: keys of the number and the width of heads, of groups, features of the state, and taps.

    Raises:
        CheckpointFormatError: a size is missing or wrong.

    Example:
        >>> sizes = {"inner_size": 48, "time_step_rank": 8, "group_count": 2, "state_size": 16}
        >>> given = Settings({f"ssm.{key}": value for key, value in {**sizes, "conv_kernel": 4}.items()})
        >>> of_gguf(given, ["heads", "width", "groups", "state", "taps"])
        {'heads': 8, 'width': 6, 'groups': 2, 'state': 16, 'taps': 4}
    """
    heads, inner = given.count("ssm.time_step_rank"), given.count("ssm.inner_size")
    if inner % heads:
        raise given.wrong("ssm.inner_size", f"a multiple of {heads}", inner, "does not fit")
    groups, state = given.count("ssm.group_count"), given.count("ssm.state_size")
    sizes = (heads, inner // heads, groups, state, given.count("ssm.conv_kernel"))
    return dict(zip(names, sizes, strict=True))


def expansion(given: Settings) -> dict[str, int]:
    """How many features Mamba 2 has for each hidden one, as configurations say it; {} if not a whole number."""
    inner, size = given.count("ssm.inner_size"), given.count("embedding_length")
    return {} if inner % size else {"expand": inner // size}


def has(tensor: str, tensors: Shapes) -> bool:
    """Whether a layer of a file has a tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in tensors)


def to_gguf(config: Any) -> Mapping[str, int]:
    """The sizes of ``config.mamba`` as metadata.

    Raises:
        UnsupportedModelError: llama.cpp would compute something else.
    """
    of: Mamba2Settings = config.mamba
    for what, fits in (
        (f"'time_step_limit' {of.limits}", of.limits == (0.0, math.inf)),
        ("a convolution without a bias", of.conv_bias),
        (f"{of.act!r} after the convolution", of.act == "silu"),
        ("a norm before the gate", of.norm != "before"),
    ):
        if not fits:
            raise unsupported(f"Mamba 2 with {what} in a GGUF file", None)
    return {
        "ssm.conv_kernel": of.taps, "ssm.state_size": of.state_size, "ssm.group_count": of.groups,
        "ssm.time_step_rank": of.heads, "ssm.inner_size": of.inner,
    }  # fmt: skip
