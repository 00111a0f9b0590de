"""The GGUF files of Gemma 3n and 4.

llama.cpp has many numbers of Gemma 3n in its code, so a model with other numbers is refused. Gemma 3n's files
have keys and values also in layers that read those of another layer; checkpoints may leave them out.

Source: ``Gemma3NModel`` and ``Gemma4Model`` of llama.cpp's converter, its ``src/models/gemma3n.cpp`` and
``src/models/gemma4.cpp``.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....dtype import DType
from ....errors import CheckpointFormatError
from ....graph.weights import WeightData
from ....nn.rope_scaling import LinearScalingParams
from ...parts.rotary import Proportional
from ..config.read import rows_of
from ..layouts import Expert
from ..metadata import MAX_EXPERTS, Settings, unsupported
from ..names import HEAD_NORMS, Rule, Source, expert_names
from ..pieces import computed, rows
from ..sources import Relaid
from ..table import GGUFTable

Tensors = Mapping[str, WeightData]

_GELU = "gelu_pytorch_tanh"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Numbers of Gemma 3n in llama.cpp's code: index of the first layer that reads another's keys and values, number
# of layers whose MLPs have a sparsity, and that sparsity.
_FIRST_SHARING, _SPARSE, _SPARSITY = 20, 10, 0.95
_TABLE, _ENTRIES = "embed_tokens_per_layer.weight", "vocab_size_per_layer_input"
_STATES = re.compile(r"(.*\baltup_(?:unembed_)?projections)\.([0-9]{1,3})\.weight")
# A divisor that makes a frequency practically 0.
_STILL = 1e20
_KV = ("k_proj", "v_proj", "k_norm")
_OF_LAYER = re.compile(
    r"(.*\blayers\.)([0-9]{1,4})\.self_attn\.(k_proj|v_proj|k_norm|q_proj)\.weight"
)

_NAMES: Mapping[str, str | Rule] = {
    ".ffn_norm": "pre_feedforward_layernorm",
    ".post_attention_norm": "post_attention_layernorm",
    ".post_ffw_norm": "post_feedforward_layernorm",
    **HEAD_NORMS,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    ".inp_gate": "per_layer_input_gate",
    ".proj": "per_layer_projection",
    ".post_norm": "post_per_layer_input_norm",
}
_KEYS = (
    "attention.shared_kv_layers", "embedding_length_per_layer_input", "final_logit_softcapping",
    "rope.freq_base_swa",
)  # fmt: skip


# --- both models --------------------------------------------------------------------------------


def _filled(config: Any, tensors: Tensors) -> dict[str, WeightData]:
    """The tensors with a per-layer embedding for every token; tokens without one get the first token's."""
    found = dict(tensors)
    for name, data in tensors.items():
        count = int(data.logical_shape[0]) if data.logical_shape else 0
        if name.endswith(_TABLE) and 0 < count < config.vocab_size:
            order = np.arange(config.vocab_size)
            # The first row of the second copy, so that no other row is read for it.
            order[count:] = count
            found[name] = rows(name, [data, data], order)
    return found


def _cut(given: Settings, tensors: Tensors) -> dict[str, WeightData]:
    """The tensors without the per-layer embeddings that :func:`_filled` added."""
    found = dict(tensors)
    for name, data in tensors.items():
        if name.endswith(_TABLE) and given.has(_ENTRIES):
            count = given.count(_ENTRIES)
            if count < int(data.logical_shape[0]):
                found[name] = rows(name, [data], np.arange(count))
    return found


def _entries(given: Settings, tensors: Mapping[str, Sequence[int]]) -> int:
    """The number of per-layer embeddings; in files of other writers there is one for every token."""
    name = "per_layer_token_embd.weight"
    count = rows_of(name, tensors, given.path)
    return given.count(_ENTRIES, count, maximum=count)


def _check_near(config: Any) -> None:
    """Checks the RoPE of sliding layers, and which layers' keys and values are read by others."""
    if config.local_rope.scaling is not None:
        raise unsupported("rope scaling in sliding-window layers of a GGUF file")
    if not config.num_kv_shared_layers:
        return
    first = config.first_sharing
    # llama.cpp uses the last two layers before these, and does not check their kinds.
    for near, source in ((False, first - 1), (True, first - 2)):
        if near in config.slides[first:] and (source < 0 or config.slides[source] is not near):
            raise unsupported(
                f"'layer_types' whose layer {first - 1} does not see all tokens, or whose layer "
                f"{first - 2} has no sliding window, before 'num_kv_shared_layers' "
                f"{config.num_kv_shared_layers} others in a GGUF file"
            )


# --- Gemma 3n -----------------------------------------------------------------------------------


def _split_3n(config: Any, tensors: Tensors) -> dict[str, WeightData]:
    """The tensors with the AltUp projections joined to one tensor, and keys and values in all layers."""
    found, states = {}, {}
    for name, data in _filled(config, tensors).items():
        if match := _STATES.fullmatch(name):
            states.setdefault(match[1] + ".weight", {})[int(match[2])] = data
        else:
            found[name] = data
    for name, each in states.items():
        parts = [each[i] for i in sorted(each)]
        shapes = {tuple(map(int, part.logical_shape)) for part in parts}
        if len(shapes) > 1 or sorted(each) != list(range(config.altup_num_inputs - 1)):
            raise CheckpointFormatError(
                "not one linear layer for each further hidden state", tensor=name,
                expected=f"{config.altup_num_inputs - 1} of one shape", found=f"{len(parts)}: {shapes}",
            )  # fmt: skip
        found[name] = computed(
            name, parts, lambda *arrays: np.stack(arrays), (len(parts), *shapes.pop())
        )
    sizes = {
        "k_proj": (config.kv_heads * config.width, config.hidden_size),
        "k_norm": (config.width,),
    }
    sizes["v_proj"] = sizes["k_proj"]
    for name, data in list(found.items()):
        match = _OF_LAYER.fullmatch(name)
        layer = int(match[2]) if match and match[3] == "q_proj" else -1
        if match and config.first_sharing <= layer < config.num_hidden_layers:
            dtype = DType.float32 if data.is_packed else data.dtype
            for kind in _KV:
                new = f"{match[1]}{match[2]}.self_attn.{kind}.weight"
                if new not in found:
                    found[new] = _nothing(new, sizes[kind], dtype)
    return found


def _nothing(name: str, shape: tuple[int, ...], dtype: DType) -> WeightData:
    """A tensor of zeros, which llama.cpp reads but does not use."""
    return computed(name, [], lambda: np.zeros(shape, dtype.np), shape, dtype)


def _join_3n(given: Settings, tensors: Tensors) -> dict[str, WeightData]:
    """The inverse of :func:`_split_3n`; keys and values that no layer reads are left out."""
    first = _first_sharing(given)
    found = {}
    for name, data in _cut(given, tensors).items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        match = _OF_LAYER.fullmatch(name)
        if match and match[3] in _KV and int(match[2]) >= first:
            continue
        if kind not in ("altup_projections", "altup_unembed_projections"):
            found[name] = data
            continue
        shape = tuple(map(int, data.logical_shape))
        if len(shape) != 3 or shape[0] > MAX_EXPERTS:
            raise CheckpointFormatError(
                "not linear layers of hidden states", path=given.path, tensor=name,
                expected="[states, out, in]", found=shape,
            )  # fmt: skip
        parts = {f"{stem}.{kind}.{i}.weight": Expert(i, shape[0]) for i in range(shape[0])}
        source = Relaid({name: data}, {new: Source(name, layout) for new, layout in parts.items()})
        for new in parts:
            dtype, size = source.stored(new)
            found[new] = WeightData.lazy(
                source, new, DType.of(dtype), size, data.quantization_encoding
            )
    return found


def _first_sharing(given: Settings) -> int:
    return min(given.count("block_count"), _FIRST_SHARING)


def _read_3n(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that llama.cpp's code derives from the number of layers, and checks that the file agrees."""
    layers = config["num_hidden_layers"]
    normal, share = statistics.NormalDist(), [_SPARSITY] * _SPARSE + [0.0] * layers
    key = "activation_sparsity_scale"
    listed = given.items(key, float, None)
    if listed is not None:
        if len(listed) != layers or any(map(math.isnan, listed)):
            raise given.wrong(key, f"{layers} numbers", listed[:8], "does not fit")
        found = [round(normal.cdf(value), 6) for value in listed]
        if found != share[:layers]:
            raise given.unsupported(f"'{given.prefix}{key}' other than llama.cpp's")
    shared = layers - _first_sharing(given)
    if given.count("attention.shared_kv_layers", shared, minimum=0) != shared:
        raise given.unsupported(f"'{given.prefix}attention.shared_kv_layers' other than {shared}")
    return {
        "num_kv_shared_layers": shared, "activation_sparsity_pattern": share[:layers],
        _ENTRIES: _entries(given, tensors),
        "rope_local_base_freq": given.number("rope.freq_base_swa", 10_000.0),
    }  # fmt: skip


def _write_3n(config: Any) -> dict[str, Any]:
    """The metadata keys that the converter writes; models that differ from llama.cpp's code are refused."""
    _check_near(config)
    if config.logit_soft_cap is None:
        raise unsupported("Gemma 3n without 'final_logit_softcapping' in a GGUF file")
    if (shared := config.num_kv_shared_layers) != max(config.num_hidden_layers - _FIRST_SHARING, 0):
        raise unsupported(
            f"'num_kv_shared_layers' {shared} in a GGUF file of 'gemma3n' (llama.cpp's layers share "
            f"keys and values from layer {_FIRST_SHARING} on)"
        )
    if not isinstance(config.rope.scaling, (LinearScalingParams, type(None))):
        raise unsupported("rope scaling of a type other than 'linear' in a GGUF file of 'gemma3n'")
    if len(set(config.sizes)) > 1:
        raise unsupported(
            "'intermediate_size' that differs between layers in a GGUF file of 'gemma3n'"
        )
    share = [_SPARSITY] * _SPARSE + [0.0] * config.num_hidden_layers
    if list(config.sparsity) != share[: config.num_hidden_layers]:
        raise unsupported(
            f"'activation_sparsity_pattern' other than {_SPARSITY} in the first {_SPARSE} layers and 0 in "
            "the others in a GGUF file of 'gemma3n'"
        )
    normal = statistics.NormalDist()
    return {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.logit_soft_cap,
        "rope.freq_base_swa": config.local_rope.theta,
        _ENTRIES: config.vocab_size_per_layer_input,
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "activation_sparsity_scale": [
            normal.inv_cdf(s) if s else -math.inf for s in config.sparsity
        ],
    }


GEMMA3N_GGUF = GGUFTable(
    "gemma3n",
    {
        **_NAMES,
        "altup_proj": "model.altup_projections",
        "altup_unembd_proj": "model.altup_unembed_projections",
        ".altup_correct_coef": "altup.correction_coefs",
        ".altup_correct_scale": Rule("altup.correct_output_scale", only="weight"),
        ".altup_predict_coef": "altup.prediction_coefs",
        ".altup_router": "altup.modality_router",
        ".altup_router_norm": "altup.router_norm",
        ".laurel_l": "laurel.linear_left",
        ".laurel_r": "laurel.linear_right",
        ".laurel_post_norm": "laurel.post_laurel_norm",
    },
    fixed={
        "hidden_activation": _GELU, "hidden_act": _GELU, "altup_num_inputs": 4, "altup_active_idx": 0,
        "altup_correct_scale": True, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
    },
    read=_read_3n, write=_write_3n, split=_split_3n, join=_join_3n,
    biases=(), period=5, lists_windows=True,
    written=(*_KEYS, "altup.active_idx", "altup.num_inputs", "activation_sparsity_scale"),
    computed=("intermediate_size", "activation_sparsity_pattern"),
)  # fmt: skip


# --- Gemma 4 ------------------------------------------------------------------------------------


def _of_layers(given: Settings, key: str, layers: int, default: Any) -> list[int]:
    """The number for each layer; a file has one for all layers, or a list with one for each."""
    if not given.has(key) or not isinstance(given.any(key), list):
        return [given.count(key, default)] * layers
    found = given.items(key, int)
    if len(found) != layers:
        raise given.wrong(key, f"{layers} values", len(found), "does not fit", shown=True)
    return found


def _read_4(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths, heads and RoPE of each kind of layer, and the sizes of MLPs."""
    given.count("attention.sliding_window")  # required: without it, all layers would be of one kind
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    shared = given.count("attention.shared_kv_layers", 0, minimum=0, maximum=layers - 1)
    near = given.count("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (other := given.count(key, near)) != near:
            raise given.unsupported(f"'{given.prefix}{key}' {other} of heads that are {near} wide")
    full = [i for i, kind in enumerate(kinds) if kind == _FULL]
    values = [i for i in full if i < layers - shared]
    same = bool(values) and f"blk.{values[0]}.attn_v.weight" not in tensors
    own = given.count("embedding_length_per_layer_input", minimum=0)
    found = {
        "global_head_dim": config["head_dim"], "head_dim": near, "num_kv_shared_layers": shared,
        "attention_k_eq_v": same, "hidden_size_per_layer_input": own,
        # llama.cpp's default, which a file without a cap takes away.
        "final_logit_softcapping": given.number("final_logit_softcapping", 30.0, positive=False) or None,
        **_heads(given, kinds, config["num_attention_heads"], same),
        **_sizes(given, layers, shared),
        **_ropes(given, config),
    }  # fmt: skip
    if own:
        found[_ENTRIES] = _entries(given, tensors)
    experts = given.count("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    if experts:
        found |= {
            "enable_moe_block": True, "num_experts": experts,
            "top_k_experts": given.count("expert_used_count", maximum=experts),
            "moe_intermediate_size": given.count("expert_feed_forward_length"),
        }  # fmt: skip
    return found


def _heads(given: Settings, kinds: Sequence[str], heads: int, same: bool) -> dict[str, Any]:
    """The numbers of KV heads in both kinds of layers."""
    key = "attention.head_count_kv"
    counts = _of_layers(given, key, len(kinds), heads)
    near, full = (
        {count for count, kind in zip(counts, kinds, strict=True) if kind == one}
        for one in (_SLIDING, _FULL)
    )
    if len(near) > 1 or len(full) > 1 or (near and full and near != full and not same):
        raise given.unsupported(f"a model whose layers of a kind differ in '{given.prefix}{key}'")
    usual = next(iter(near or full))
    return {
        "num_key_value_heads": usual,
        "num_global_key_value_heads": next(iter(full), usual) if same else None,
    }


def _sizes(given: Settings, layers: int, shared: int) -> dict[str, Any]:
    """The inner size of the MLPs; if layers differ, it must be twice as large in layers that share keys."""
    key = "feed_forward_length"
    sizes = _of_layers(given, key, layers, ...)
    doubles = len(set(sizes)) > 1
    if sizes != [sizes[0] * (2 if doubles and i >= layers - shared else 1) for i in range(layers)]:
        raise given.unsupported(f"a model whose layers differ in '{given.prefix}{key}'")
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": doubles}


def _ropes(given: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE of both kinds of layers; for full attention, files hold a list of divisors of frequencies."""
    scaling, half = config["rope_scaling"], config["head_dim"] // 2
    divisors = scaling.get("short_factor", ()) if scaling else [1.0] * half
    turned = sum(one < _STILL for one in divisors)
    if not turned or len(divisors) != half or len(set(divisors[:turned])) > 1:
        raise given.unsupported(
            "rope of other frequencies than the first in layers that see all tokens"
        )
    share = turned / half
    while int(share * config["head_dim"] // 2) < turned:  # the formula of ``Proportional``
        share = math.nextafter(share, 2)
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": share,
        "rope_theta": config["rope_theta"],
    }
    if divisors[0] != 1:
        full["factor"] = divisors[0]
    near = {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10_000.0)}
    return {"rope_scaling": None, "rope_parameters": {_FULL: full, _SLIDING: near}}


def _write_4(config: Any) -> dict[str, Any]:
    """The widths, heads and RoPE of each kind of layer, and the sizes of MLPs."""
    _check_near(config)
    if not isinstance(config.rope.scaling, Proportional):
        raise unsupported(
            "rope of a type other than 'proportional' in layers that see all tokens of a GGUF file of "
            "'gemma4'"
        )
    if config.num_hidden_layers < 2:
        raise unsupported("'num_hidden_layers' 1 in a GGUF file of 'gemma4'")
    each = [config.of_layer(i) for i in range(config.num_hidden_layers)]
    own = config.hidden_size_per_layer_input
    return {
        "feed_forward_length": _one([one.intermediate_size for one in each]),
        "attention.head_count_kv": _one([one.kv_heads for one in each]),
        "attention.key_length": config.global_head_dim,
        "attention.value_length": config.global_head_dim,
        "attention.key_length_swa": config.width,
        "attention.value_length_swa": config.width,
        "rope.dimension_count": config.global_head_dim,
        "rope.dimension_count_swa": config.width,
        "rope.freq_base_swa": config.local_rope.theta,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": own,
        "final_logit_softcapping": config.logit_soft_cap or 0.0,
        **({_ENTRIES: config.vocab_size_per_layer_input} if own else {}),
    }


def _one(values: list[int]) -> int | list[int]:
    """One number if all are equal, else the list."""
    return values if len(set(values)) > 1 else values[0]


GEMMA4_GGUF = GGUFTable(
    "gemma4",
    {
        **_NAMES,
        **expert_names("moe"),
        ".ffn_gate_inp": (Rule("router.proj"), Rule("router.scale", only="scale")),
        ".ffn_down_exps": (
            expert_names("moe")[".ffn_down_exps"], Rule("router.per_expert_scale", only="scale")
        ),
        ".pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        ".post_ffw_norm_1": "post_feedforward_layernorm_1",
        ".post_ffw_norm_2": "post_feedforward_layernorm_2",
        ".layer_output_scale": Rule("layer_scalar", only="weight"),
    },
    fixed={"hidden_activation": _GELU, "hidden_act": _GELU},
    read=_read_4, write=_write_4, split=_filled, join=_cut,
    biases=(), period=6, lists_windows=True, is_divided=True,
    listed=("feed_forward_length", "attention.head_count_kv"),
    written=(
        *_KEYS, "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa",
        "expert_feed_forward_length",
    ),
    computed=(
        "intermediate_size", "global_head_dim", "num_global_key_value_heads",
        "layer_types", "rope_parameters",
    ),
)  # fmt: skip
