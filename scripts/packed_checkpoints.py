"""Checkpoints of models in quantised formats, with all shapes and without data.

``write`` makes a directory with a ``config.json`` and one safetensors file that has the header only: the tensors
are a hole in the file, which takes no space on disk. Names and shapes are those of the model in
maxjax, so that any family can be written; each matrix of its layers becomes the tensors of a format.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxjax.dtype import DType
from maxjax.models import find_family

# Bytes of an element, by the names that safetensors have for dtypes.
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}

# By its name, the dtype and shape of a tensor.
Tensors = dict[str, tuple[str, tuple[int, ...]]]


class Format(NamedTuple):
    """A quantised format of checkpoints.

    Attributes:
        config: ``quantization_config`` in config.json.
        tensors: function of the numbers of outputs and inputs of a linear layer: its tensors, by what follows
            the layer's name.
        experts_only: whether other matrices than those of experts stay floats.
    """

    config: Mapping[str, Any]
    tensors: Callable[[int, int], Tensors]
    experts_only: bool = False


def _fp8(out: int, depth: int) -> Tensors:
    scales = -(-out // 128), -(-depth // 128)
    return {"weight": ("F8_E4M3", (out, depth)), "weight_scale_inv": ("F32", scales)}


def _gptq(out: int, depth: int) -> Tensors:
    return {
        "qweight": ("I32", (depth // 8, out)), "qzeros": ("I32", (depth // 128, out // 8)),
        "scales": ("F16", (depth // 128, out)), "g_idx": ("I32", (depth,)),
    }  # fmt: skip


def _awq(out: int, depth: int) -> Tensors:
    return {
        "qweight": ("I32", (depth, out // 8)), "qzeros": ("I32", (depth // 128, out // 8)),
        "scales": ("F16", (depth // 128, out)),
    }  # fmt: skip


def _int4(out: int, depth: int) -> Tensors:
    return {
        "weight_packed": ("I32", (out, depth // 8)), "weight_scale": ("BF16", (out, depth // 32)),
        "weight_shape": ("I64", (2,)),
    }  # fmt: skip


def _int8(out: int, depth: int) -> Tensors:
    return {"weight": ("I8", (out, depth)), "SCB": ("F32", (out,)), "weight_format": ("U8", ())}


def _nf4(out: int, depth: int) -> Tensors:
    return {
        "weight": ("U8", (out * depth // 2, 1)), "weight.absmax": ("F32", (out * depth // 64,)),
        "weight.quant_map": ("F32", (16,)), "weight.quant_state.bitsandbytes__nf4": ("U8", (160,)),
    }  # fmt: skip


def _nf4_nested(out: int, depth: int) -> Tensors:
    blocks = out * depth // 64
    return {
        **_nf4(out, depth), "weight.absmax": ("U8", (blocks,)), "weight.nested_quant_map": ("F32", (256,)),
        "weight.nested_absmax": ("F32", (-(-blocks // 256),)),
    }  # fmt: skip


def _nvfp4(out: int, depth: int) -> Tensors:
    return {
        "weight": ("U8", (out, depth // 2)), "weight_scale": ("F8_E4M3", (out, depth // 16)),
        "weight_scale_2": ("F32", ()), "input_scale": ("F32", ()),
    }  # fmt: skip


def _mxfp4(out: int, depth: int) -> Tensors:
    return {"blocks": ("U8", (out, depth // 32, 16)), "scales": ("U8", (out, depth // 32))}


_INT4_WEIGHTS = {
    "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
    "dynamic": False,
}  # fmt: skip
FORMATS = {
    "FP8": Format({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                   "weight_block_size": [128, 128]}, _fp8),
    "GPTQ": Format({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False,
                    "sym": True}, _gptq),
    "GPTQ_ORDER": Format({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True,
                          "sym": True}, _gptq),
    "AWQ": Format({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
                   "zero_point": True}, _awq),
    # That of Kimi K2 Thinking.
    "INT4": Format({
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS,
                                      "input_activations": None, "output_activations": None}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                   "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    }, _int4, experts_only=True),
    "INT8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
                   _int8),
    "NF4": Format({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                   "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
                   "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16"}, _nf4),
    "NF4_NESTED": Format({"quant_method": "bitsandbytes", "load_in_4bit": True,
                          "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
                          "bnb_4bit_quant_storage": "uint8"}, _nf4_nested),
    "NVFP4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
    # That of gpt-oss.
    "MXFP4": Format({
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"],
    }, _mxfp4, experts_only=True),
}  # fmt: skip


def write(directory: Path, config: Mapping[str, Any], packed: str) -> None:
    """Writes the checkpoint of a model in a format.

    Args:
        directory: a directory, which must exist.
        config: the model's configuration, without ``quantization_config``.
        packed: a key of ``FORMATS``.
    """
    kind = FORMATS[packed]
    tensors: Tensors = {}
    for name, shape in _shapes(config).items():
        if is_matrix(name, shape, kind.experts_only):
            parts = kind.tensors(*shape)
            tensors |= {f"{name.removesuffix('weight')}{part}": one for part, one in parts.items()}
        else:
            wide = name.endswith("e_score_correction_bias")
            tensors[name] = ("F32" if wide else "BF16", shape)
    if packed == "MXFP4":
        tensors = _fused_experts(tensors)
    _write_header(directory / "model.safetensors", tensors)
    settings = {**config, "quantization_config": kind.config}
    (directory / "config.json").write_text(json.dumps(settings))


def is_matrix(name: str, shape: tuple[int, ...], experts_only: bool = False) -> bool:
    """Whether a weight is one that a quantised checkpoint has quantised: a matrix of a layer.

    Example:
        >>> is_matrix("model.layers.0.mlp.up_proj.weight", (8, 4)), is_matrix("lm_head.weight", (8, 4))
        (True, False)
        >>> is_matrix("model.layers.0.mlp.gate.weight", (8, 4))  # the router
        False
    """
    *_, layer, kind = name.split(".")
    inside = ".experts." if experts_only else ".layers."
    return (
        len(shape) == 2 and kind == "weight" and layer not in ("gate", "router") and inside in name
    )


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's weights, by their names in a checkpoint."""
    family = find_family(config)
    settings: Any = family.config.from_dict(config)  # type: ignore[attr-defined]
    model: Any = family.make(settings, (), DType.bfloat16, DType.float32)
    return {
        name: tuple(int(size) for size in weight.shape)
        for name, weight in model.raw_state_dict().items()
    }


def _fused_experts(tensors: Tensors) -> Tensors:
    """The tensors with all experts of a layer in one, and the gate and up projections in one, as in gpt-oss."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)", name)
        if expert is None:
            found[name] = dtype, shape
            continue
        layer, number, projection, what = expert.groups()
        if projection == "up":
            continue  # it is counted with the gate
        out, *others = shape
        wide = (2 * out if projection == "gate" else out, *others)
        whole = f"{layer}.{'gate_up' if projection == 'gate' else 'down'}_proj_{what}"
        found[whole] = dtype, (int(number) + 1, *wide)
    return found


def _write_header(path: Path, tensors: Tensors) -> None:
    """Writes a safetensors file whose data is a hole."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
