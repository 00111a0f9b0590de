"""GGUF files of models with Mamba 2: names and layouts of its tensors, and its sizes in metadata.

llama.cpp computes Mamba 2 without limits of time steps, with SiLU, with a bias in the convolution, and with the
norm, if there is one, after the gate. Granite's checkpoints hold gate and up of the shared MLP as one tensor, GGUF
files as two. GGUF files of Falcon-H1 hold the tensors multiplied by the model's factors.

Source: ``Mamba2Model``, ``GraniteHybridModel``, ``NemotronHModel`` and ``FalconH1Model`` of llama.cpp's
converter, and ``build_mamba2_layer`` in its graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ....graph.weights import WeightData
from ...decoder.mamba2 import Mamba2Settings
from ...granite import GRANITE_GGUF, attention_scale
from ..config.read import Config, Shapes
from ..metadata import MAX_EXPERTS, Settings, unsupported
from ..names import BARE, NORM_GROUPS, Rule, expert_names
from ..pieces import check_rows, rows
from ..state_layouts import Both, Flat, Logarithm, Taps
from ..table import PERMUTED, GGUFTable

Tensors = Mapping[str, WeightData]


def _names(mixer: str) -> dict[str, Rule]:
    """The names of the tensors of a :class:`~maxjax.models.decoder.mamba2.Mamba2Mixer`, the attribute ``mixer``."""
    return {
        ".ssm_in": Rule(f"{mixer}.in_proj"),
        ".ssm_conv1d": Rule(f"{mixer}.conv1d", Taps()),
        ".ssm_dt": Rule(f"{mixer}.dt_bias", only="bias"),
        ".ssm_a": Rule(f"{mixer}.A_log", Both(Flat(), Logarithm()), only=BARE),
        ".ssm_d": Rule(f"{mixer}.D", Flat(), only=BARE),
        ".ssm_norm": Rule(f"{mixer}.norm", NORM_GROUPS),
        ".ssm_out": Rule(f"{mixer}.out_proj"),
    }


def _sizes_of(given: Settings, names: Mapping[str, str]) -> dict[str, int]:
    """The sizes of Mamba 2 in a file, under the names of a configuration.

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


def _has(tensor: str, tensors: Shapes) -> bool:
    """Whether a layer of a file has a tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in tensors)


def _to_gguf(config: Any, least: float = 0.0) -> dict[str, Any]:
    """The sizes of ``config.mamba`` as metadata; ``least`` is the minimum time step that models must have.

    Raises:
        UnsupportedModelError: llama.cpp would compute something else.
    """
    of: Mamba2Settings = config.mamba
    for what, fits in (
        (f"time steps of {of.limits[0]} to {of.limits[1]}", of.limits == (least, math.inf)),
        ("a convolution without a bias", of.conv_bias),
        (f"{of.act!r} after the convolution", of.act == "silu"),
        ("a norm before the gate", of.norm != "before"),
    ):
        if not fits:
            raise unsupported(f"Mamba 2 with {what} in a GGUF file")
    return {
        "ssm.conv_kernel": of.taps, "ssm.state_size": of.state_size, "ssm.group_count": of.groups,
        "ssm.time_step_rank": of.heads, "ssm.inner_size": of.inner,
    }  # fmt: skip


def _check_kinds(recurs: Sequence[bool], attends: Sequence[bool]) -> None:
    """Refuses a hybrid that lacks one kind of layer, because llama.cpp aborts on an empty cache."""
    for kind, layers in (("Mamba 2", recurs), ("attention", attends)):
        if not any(layers):
            raise unsupported(f"a hybrid without a layer of {kind} in a GGUF file")


_WRITTEN = tuple(
    f"ssm.{n}" for n in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)
_table = partial(GGUFTable, write=_to_gguf, written=_WRITTEN)

# --- Granite 4 -----------------------------------------------------------------------------------

# Keys of the sizes of Mamba 2 in the configurations of hybrids.
_MAMBA_NAMES = {
    "heads": "mamba_n_heads", "width": "mamba_d_head", "groups": "mamba_n_groups",
    "state": "mamba_d_state", "taps": "mamba_d_conv",
}  # fmt: skip
# Prefixes of the shared MLP's projections after the split, in models without experts and with them.
_DENSE, _SHARED = "mlp.", "mlp.shared_mlp."
_BOTH, _DOWN = (f"shared_mlp.{name}_linear.weight" for name in ("input", "output"))


def _granite_of(given: Settings, tensors: Shapes, config: Config) -> Config:
    """The sizes of Mamba 2, of the experts and of the shared MLP, and the kinds of the layers."""
    experts = given.count("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    inner = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    recurs = [f"blk.{i}.ssm_in.weight" in tensors for i in range(config["num_hidden_layers"])]
    return {
        **attention_scale(given, tensors, config),
        **_sizes_of(given, {**_MAMBA_NAMES, "expand": "mamba_expand"}),
        "mamba_conv_bias": _has("ssm_conv1d.bias", tensors) or not any(recurs),
        "mamba_proj_bias": _has("ssm_in.bias", tensors),
        "layer_types": ["mamba" if one else "attention" for one in recurs],
        "position_embedding_type": "rope" if given.flag("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": given.count("expert_used_count", maximum=experts) if experts else 0,
        "shared_intermediate_size": given.count(inner),
    }  # fmt: skip


def _granite_instead(config: Any) -> tuple[str, dict[str, Any]] | None:
    """A model without Mamba 2 is written as a Granite 3; None for any other."""
    if any(config.recurs):
        return None
    if config.num_experts or config.rotates:
        what = "experts" if config.num_experts else "layers without RoPE"
        raise unsupported(f"a Granite 4 without Mamba 2 and with {what} in a GGUF file")
    return "granite", {"intermediate_size": config.shared_intermediate_size}


def _granite_to(config: Any) -> dict[str, Any]:
    """These settings as metadata; without experts, the shared MLP is written as the layer's MLP."""
    if config.mamba.inner != 2 * config.hidden_size:
        raise unsupported(
            f"a Granite 4 with {config.mamba.inner} features of Mamba 2, which are not two for each of "
            f"{config.hidden_size} hidden ones, in a GGUF file"
        )
    _check_kinds(config.recurs, [not one for one in config.recurs])
    inner = "expert_shared_feed_forward_length" if config.num_experts else "feed_forward_length"
    return {
        **_to_gguf(config), inner: config.shared_intermediate_size,
        "attention.head_count_kv": [0 if one else config.kv_heads for one in config.recurs],
        "rope.scaling.finetuned": not config.rotates,
    }  # fmt: skip


def _split(config: Any, tensors: Tensors) -> Tensors:
    """Splits the shared MLP's tensor of gate and up in two, and renames its projections."""
    to = _SHARED if config.num_experts else _DENSE
    found = {}
    for name, data in tensors.items():
        if name.endswith(_BOTH):
            check_rows(name, data, 2 * config.shared_intermediate_size)
            halves = np.split(np.arange(2 * config.shared_intermediate_size), 2)
            for part, half in zip(("gate", "up"), halves, strict=True):
                new = f"{name.removesuffix(_BOTH)}{to}{part}_proj.weight"
                found[new] = rows(new, [data], half)
        else:
            found[name.replace(_DOWN, f"{to}down_proj.weight")] = data
    return found


def _join(given: Settings, tensors: Tensors) -> Tensors:
    """The inverse of :func:`_split`: joins gate and up of the shared MLP."""
    of = _SHARED if given.count("expert_count", 0, minimum=0) else _DENSE
    found: dict[str, WeightData] = {}
    for name, data in tensors.items():
        front = name.removesuffix(f"{of}gate_proj.weight")
        if front != name:
            up = f"{front}{of}up_proj.weight"
            pair = [data, *([tensors[up]] if up in tensors else [])]
            count = sum(int(one.shape[0]) for one in pair)
            found[front + _BOTH] = rows(front + _BOTH, pair, np.arange(count))
        elif not name.endswith(f"{of}up_proj.weight"):
            found[name.replace(f"{of}down_proj.weight", _DOWN)] = data
    return found


GRANITE_HYBRID_GGUF = _table(
    "granitehybrid",
    {
        **PERMUTED, **_names("mamba"), **expert_names("block_sparse_moe", "router.layer"),
        **{f".ffn_{part}_shexp": f"{_SHARED}{part}_proj" for part in ("gate", "up", "down")},
    },
    keys=GRANITE_GGUF.keys,
    fixed={"hidden_act": "silu"}, read=_granite_of, write=_granite_to, join=_join, split=_split,
    biases=("attn_q", "attn_k", "attn_v", "attn_output", "ssm_conv1d", "ssm_dt"),
    written=(*_WRITTEN, "expert_shared_feed_forward_length", "rope.scaling.finetuned"),
    computed=("layer_types", "intermediate_size", "mamba_d_head"), instead=_granite_instead,
)  # fmt: skip
