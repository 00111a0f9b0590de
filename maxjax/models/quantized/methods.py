"""The table of quantisation methods: ``quant_method`` → function from its settings to layouts of linear layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...dtype import DType
from ...errors import CheckpointFormatError, shown
from ...nn.quantized import Exactly, QuantLayout, QuantState, QuantTensor, Reshaped
from ...patterns import NameTable
from ..names import TEXT_PREFIX
from .layouts import (
    FLOATS8,
    SCALES,
    SINGLE,
    Found,
    LayoutOf,
    bitnet,
    count_blocks,
    group_indices,
    nvfp4,
    packed,
    scaled,
    tensor,
)
from .settings import KEY, QuantSettings


def _fp8(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``fp8`` of transformers: DeepSeek's blocks of 128 × 128, or one scale for a weight."""
    settings.only("activation_scheme", "dynamic", "static")
    settings.only("fmt", "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2")
    block = settings.pair("weight_block_size")
    if block is None and settings.raw.get("weight_block_size", 0) == 0:
        block = (128, 128)  # transformers' default if the key is absent; null means one scale

    def layout(out: int, inner: int, entries: Found) -> QuantLayout:
        ignored = ("activation_scale", "input_scale")
        if "weight_scale" in entries and "weight_scale_inv" not in entries:  # AutoFP8's and vLLM's
            shape = entries["weight_scale"][1]
            strategy = "channel" if shape[:1] == (out,) and out > 1 else "tensor"
            return scaled(out, inner, entries, dtypes=FLOATS8, strategy=strategy, ignored=ignored)
        return scaled(
            out, inner, entries, dtypes=FLOATS8, scale="weight_scale_inv", block=block,
            strategy="tensor" if block is None else "block", ignored=ignored,
        )  # fmt: skip

    return lambda name: layout


def _fbgemm(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``fbgemm_fp8``: a scale for each row."""

    def layout(out: int, inner: int, entries: Found) -> QuantLayout:
        return scaled(
            out, inner, entries, dtypes=FLOATS8, strategy="channel", ignored=("input_scale_ub",)
        )

    return lambda name: layout


# --- compressed-tensors -------------------------------------------------------------------------

# The supported values of ``format``, and the types of numbers that each allows.
_COMPRESSED = {
    "float-quantized": ("float",), "naive-quantized": ("float", "int"), "int-quantized": ("int",),
    "pack-quantized": ("int",), "nvfp4-pack-quantized": ("float",),
}  # fmt: skip


def _compressed(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``compressed-tensors``: groups of layers, each with settings for its weights."""
    settings.only("quantization_status", "compressed", "frozen")
    settings.part("kv_cache_scheme")  # of a cache in FP8 only, whose scales are ignored
    if sparsity := settings.part("sparsity_config"):
        sparsity.only("format", "dense")
    if transform := settings.part("transform_config"):
        if transform.raw.get("config_groups"):
            raise settings.refused("transform_config")
    layouts: dict[str, LayoutOf] = {}
    for group in settings.parts("config_groups").values():
        if group is not None:
            kind = group.get("format", str, settings.get("format", str, "float-quantized"))
            layouts |= dict.fromkeys(_targets(group), _compressed_group(group, kind))
    if not layouts:
        raise settings.refused("no config_groups")
    # The order of compressed-tensors: names, then patterns, both alphabetically, then classes.
    patterns = {
        target[3:]: layouts[target] for target in sorted(layouts) if target.startswith("re:")
    }
    by_pattern = NameTable(patterns, "targets", path=settings.path)
    of_class = next((layouts[name] for name in _CLASSES if name in layouts), None)

    def layout_for(name: str) -> LayoutOf:
        names = names_in_files(name)
        exact = min((n for n in names if n in layouts), default=None)
        layout = by_pattern.get(*names) if exact is None else layouts[exact]
        layout = of_class if layout is None else layout
        if layout is None:
            raise settings.refused(f"no group for the quantised layer {name!r}")
        return layout

    return layout_for


def names_in_files(module: str) -> list[str]:
    """The names that a module of a text model may have in a multimodal model, its own name first.

    Example:
        >>> names_in_files("lm_head")
        ['lm_head', 'language_model.lm_head', 'thinker.lm_head']
    """
    return [name.removesuffix(".") for name in TEXT_PREFIX.file_names(f"{module}.")]


# The names of the class of linear layers in targets.
_CLASSES = ("Linear", "ColumnParallelLinear")


def _targets(group: QuantSettings) -> list[str]:
    targets = group.get("targets", list, [])
    if not all(isinstance(target, str) for target in targets):
        raise CheckpointFormatError(
            f"'targets' of '{group.where}' is not a list of strings", path=group.path
        )
    return targets


def _compressed_group(group: QuantSettings, kind: str) -> LayoutOf:
    if kind not in _COMPRESSED:
        raise group.refused(f"format {shown(kind)}", tuple(_COMPRESSED))
    weights = group.part("weights")
    if weights is None:
        raise group.refused("no weights")
    if kind == "nvfp4-pack-quantized":
        for key, value in (
            ("type", "float"),
            ("num_bits", 4),
            ("group_size", 16),
            ("symmetric", True),
        ):
            weights.only(key, value)
        return _nvfp4_packed
    number = weights.only("type", *_COMPRESSED[kind], default="int")
    if kind == "pack-quantized":
        # For other widths there are two ways of packing numbers into words.
        known_bits: tuple[int, ...] = (4, 8, 2)
    else:
        # An int8 for each number, also of fewer bits.
        known_bits = (8,) if number == "float" else (8, 7, 6, 5, 4, 3, 2)
    bits = weights.only("num_bits", *known_bits)
    asymmetric = not weights.get("symmetric", bool, True)
    size = weights.get("group_size", int)
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy", str, default)
    known = (
        ("channel", "group")
        if kind == "pack-quantized"
        else ("tensor", "channel", "group", "block")
    )
    if strategy not in known:
        raise weights.refused(f"strategy {shown(strategy)}", known)
    block = weights.pair("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.refused("block_structure null")
    if strategy == "group":
        block = (1, weights.positive("group_size"))
    ignored = ("input_scale", "input_zero_point", "input_global_scale")
    if kind == "pack-quantized":
        order = weights.only("actorder", False, "static", "weight", True, "dynamic", "group")
        ordered = order in (True, "dynamic", "group")
        group_size = None if block is None else block[1]
        return partial(
            packed,
            bits=bits,
            group=group_size,
            asymmetric=asymmetric,
            ordered=ordered,
            ignored=ignored,
        )
    dtypes = FLOATS8 if number == "float" else (DType.int8,)
    return partial(
        scaled, dtypes=dtypes, strategy="block" if strategy == "group" else strategy, block=block,
        asymmetric=asymmetric, ignored=ignored,
    )  # fmt: skip


_nvfp4_packed = partial(
    nvfp4, weight="weight_packed", second="weight_global_scale", divides=True,
    ignored=("input_global_scale", "input_scale"),
)  # fmt: skip


# --- modelopt -----------------------------------------------------------------------------------


def _modelopt(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``modelopt`` of NVIDIA: FP8 with a scale for each weight or row, or NVFP4, as a layer's tensors show."""
    settings.only("quant_algo", "FP8", "NVFP4", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN")

    def layout(out: int, inner: int, entries: Found) -> QuantLayout:
        if "pre_quant_scale" in entries:  # of AWQ: the layer's input is multiplied by it
            raise settings.refused("pre_quant_scale")
        ignored = ("input_scale",)
        if "weight_scale_2" in entries:
            return nvfp4(out, inner, entries, second="weight_scale_2", ignored=ignored)
        shape = entries.get("weight_scale", (None, ()))[1]
        strategy = "channel" if shape[:1] == (out,) and out > 1 else "tensor"
        return scaled(out, inner, entries, dtypes=FLOATS8, strategy=strategy, ignored=ignored)

    return lambda name: layout


# --- MLX ----------------------------------------------------------------------------------------


def _mlx(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """MLX's ``affine`` quantisation: settings for all layers and, under their names, for single layers."""
    whole = _mlx_layout(settings)

    def layout_for(name: str) -> LayoutOf:
        stacked = re.sub(r"\.experts\.\d+\.", ".switch_mlp.", name)  # all experts of a layer
        names = (*names_in_files(name), *names_in_files(stacked))
        key = next((one for one in names if one in settings.raw), None)
        changed = None if key is None else settings.raw[key]
        if not isinstance(changed, Mapping):
            return whole
        given = {**settings.raw, **changed}
        return _mlx_layout(QuantSettings(given, path=settings.path))

    return layout_for


def _mlx_layout(settings: QuantSettings) -> LayoutOf:
    settings.only("mode", "affine")
    bits, group = settings.only("bits", 4, 8, 2), settings.positive("group_size")

    def layout(out: int, inner: int, entries: Found) -> QuantLayout:
        words, groups = count_blocks(inner, 32 // bits), count_blocks(inner, group)
        along = 1 if groups > 1 else None
        tensors = [tensor(entries, "weight", DType.uint32, [((out, words), (0, 1))])]
        for name in ("scales", "biases"):
            tensors.append(tensor(entries, name, SCALES, [((out, groups), (0, along))]))
        options = (("bits", bits), ("group", group))
        return QuantLayout("mlx", out, inner, tuple(tensors), options)

    return layout


# --- GPTQ and AWQ -------------------------------------------------------------------------------


def _gptq(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``gptq``, with settings for all layers and, under ``dynamic``, for single layers."""
    layout = _gptq_layout(settings)
    layouts: dict[str, tuple[LayoutOf | None]] = {}
    for key, changed in settings.parts("dynamic").items():
        raw = {**settings.raw, **(changed.raw if changed is not None else {})}
        of_layers = (
            None if key.startswith("-:") else _gptq_layout(QuantSettings(raw, path=settings.path))
        )
        layouts.setdefault(key.removeprefix("-:").removeprefix("+:"), (of_layers,))
    changes = NameTable(layouts, "dynamic", path=settings.path)

    def layout_for(name: str) -> LayoutOf:
        (of_layer,) = changes.get(*names_in_files(name)) or (layout,)
        if of_layer is None:
            raise settings.refused(f"the quantised layer {name!r}, which 'dynamic' leaves out")
        return of_layer

    return layout_for


def _gptq_layout(settings: QuantSettings) -> LayoutOf:
    """The layout of ``gptq``: groups of rows of the transposed weight, in order or listed by ``g_idx``."""
    bits = settings.only("bits", 4, 8, 2)
    forms = ("gptq", "gptq_v2")
    form = settings.only("checkpoint_format", *forms, default=settings.only("format", *forms))
    settings.only("pack_dtype", "int32")
    for key in ("rotation", "is_marlin_format"):  # other weights, other tensors
        if value := settings.raw.get(key):
            raise settings.refused(f"{key} {shown(value)}")
    ordered = settings.get("desc_act", bool, False)
    size = settings.get("group_size", int, -1)
    if size != -1:
        size = settings.positive("group_size")

    def layout(out: int, inner: int, entries: Found) -> QuantLayout:
        group = inner if size == -1 else size
        words, groups = 32 // bits, count_blocks(inner, group)
        along = None if ordered or groups == 1 else 1
        tensors = [
            tensor(entries, "qweight", DType.int32, [((count_blocks(inner, words), out), (1, 0))]),
            tensor(
                entries, "qzeros", DType.int32, [((groups, count_blocks(out, words)), (along, 0))]
            ),
            tensor(entries, "scales", SCALES, [((groups, out), (along, 0))]),
        ]
        if ordered or "g_idx" in entries:
            tensors.append(group_indices(entries, "g_idx", inner, group, ordered))
        offset = 1 if form == "gptq" else 0
        options = (("bits", bits), ("group", group), ("offset", offset), ("ordered", ordered))
        return QuantLayout("gptq", out, inner, tuple(tensors), options)

    return layout


# AutoRound's forms → whether they are AWQ's, and how GPTQ's zero points are stored.
_AUTO_ROUND = {
    "auto_round:auto_gptq": (False, "gptq"), "auto_round:gptqmodel": (False, "gptq_v2"),
    "auto_round": (False, "gptq_v2"), "auto_round:auto_awq": (True, ""),
}  # fmt: skip
# Layers with as many bits are not quantised.
_FULL_BITS = 16


def _auto_round(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``auto-round`` in GPTQ's or AWQ's packing, with other settings for single layers under ``extra_config``.

    Source: arXiv:2309.05516; https://github.com/intel/auto-round.
    """
    is_awq, form = _AUTO_ROUND[settings.only("packing_format", *_AUTO_ROUND)]
    settings.only("data_type", "int")

    def layout_of(raw: Mapping[str, Any]) -> LayoutOf | None:
        bits = raw.get("bits")
        if type(bits) is int and bits >= _FULL_BITS:
            return None
        group = {key: raw[key] for key in ("bits", "group_size") if key in raw}
        one = QuantSettings({"quant_method": "auto-round", **group}, path=settings.path)
        if not is_awq:
            return _gptq_layout(one.changed(checkpoint_format=form))
        return _awq(one.changed(zero_point=not raw.get("sym", False)))("")

    whole = layout_of(settings.raw)
    layouts: dict[str, tuple[LayoutOf | None]] = {}
    for name, changed in settings.parts("extra_config").items():
        raw = {**settings.raw, **(changed.raw if changed is not None else {})}
        layouts[name] = (layout_of(raw),)
    changes = NameTable(layouts, "extra_config", path=settings.path)

    def layout_for(name: str) -> LayoutOf:
        (of_layer,) = changes.get(*names_in_files(name)) or (whole,)
        if of_layer is None:
            raise settings.refused(f"the quantised layer {name!r}, which has {_FULL_BITS} bits")
        return of_layer

    return layout_for


def _awq(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``awq``: 4 bits in groups, in the order of its kernel ``gemm``."""
    settings.only("bits", 4)
    settings.only("version", "gemm", "GEMM")
    for key in ("format", "checkpoint_format"):
        settings.only(key, "gemm", "GEMM")
    if settings.raw.get("backend") == "llm-awq":  # its words have another order
        raise settings.refused("backend 'llm-awq'")
    asymmetric = settings.get("zero_point", bool, True)
    size = settings.get("group_size", int, 128)
    if size != -1:
        size = settings.positive("group_size", 128)

    def layout(out: int, inner: int, entries: Found) -> QuantLayout:
        group = inner if size == -1 else size
        groups = count_blocks(inner, group)
        along = 1 if groups > 1 else None
        tensors = [
            tensor(entries, "qweight", DType.int32, [((inner, count_blocks(out, 8)), (1, 0))]),
            tensor(entries, "scales", SCALES, [((groups, out), (along, 0))]),
        ]
        if asymmetric or "qzeros" in entries:
            tensors.append(
                tensor(
                    entries, "qzeros", DType.int32, [((groups, count_blocks(out, 8)), (along, 0))]
                )
            )
        return QuantLayout("awq", out, inner, tuple(tensors), (("group", group),))

    return lambda name: layout


# --- bitsandbytes -------------------------------------------------------------------------------

# Numbers in a block, and scales in a block of scales, as transformers writes them.
_BLOCK, _NESTED = 64, 256


def _bitsandbytes(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``bitsandbytes``: nf4 and fp4 in blocks of 64, or int8 with a scale for each row."""
    if settings.get("load_in_8bit", bool, settings.get("_load_in_8bit", bool, False)):
        return lambda name: _int8
    if not settings.get("load_in_4bit", bool, settings.get("_load_in_4bit", bool, False)):
        raise settings.refused("neither load_in_4bit nor load_in_8bit")
    kind = settings.only("bnb_4bit_quant_type", "nf4", "fp4", default="fp4")
    settings.only("bnb_4bit_quant_storage", "uint8")
    nested = settings.get("bnb_4bit_use_double_quant", bool, False)
    return lambda name: partial(_4bit, kind=kind, nested=nested)


def _int8(out: int, inner: int, entries: Found) -> QuantLayout:
    tensors = [
        tensor(entries, "weight", DType.int8, [((out, inner), (0, 1))]),
        tensor(entries, "SCB", SCALES, [((out,), (0,))]),
    ]
    if "weight_format" in entries:  # 0: rows in order, not in the order of a GPU kernel
        found = tensor(entries, "weight_format", DType.uint8, SINGLE)
        tensors.append(replace(found, form=Exactly((0,))))
    return QuantLayout("bitsandbytes8", out, inner, tuple(tensors))


def _4bit(out: int, inner: int, entries: Found, *, kind: str, nested: bool) -> QuantLayout:
    blocks = count_blocks(out * inner, _BLOCK)
    tensors = [
        tensor(entries, "weight", DType.uint8, [((count_blocks(out * inner, 2), 1), (0, None))]),
        tensor(
            entries, "weight.absmax", DType.uint8 if nested else DType.float32, [((blocks,), (0,))]
        ),
    ]
    if inner % _BLOCK == 0:
        # In files they are flat. In memory they are matrices, of which devices can hold parts; blocks of scales,
        # however, are in several rows.
        axes = (0, None if nested else 1)
        tensors = [
            replace(one, shape=(out, inner // each), axes=axes, form=Reshaped(one.shape))
            for one, each in zip(tensors, (2, _BLOCK), strict=True)
        ]
    tensors.append(tensor(entries, "weight.quant_map", DType.float32, [((16,), (None,))]))
    expected: list[tuple[str, Any]] = [
        ("quant_type", kind), ("blocksize", _BLOCK), ("shape", (out, inner)),
    ]  # fmt: skip
    if nested:
        shapes = [((count_blocks(blocks, _NESTED),), (0,))]
        tensors.append(tensor(entries, "weight.nested_absmax", DType.float32, shapes))
        tensors.append(
            tensor(entries, "weight.nested_quant_map", DType.float32, [((256,), (None,))])
        )
        expected.append(("nested_blocksize", _NESTED))
    name = f"weight.quant_state.bitsandbytes__{kind}"
    form = QuantState(tuple(expected))
    tensors.append(QuantTensor(name, DType.uint8, (form.SIZE,), (None,), form))
    options = (("kind", kind), ("size", _BLOCK), ("nested", _NESTED if nested else 0))
    return QuantLayout("bitsandbytes4", out, inner, tuple(tensors), options)


def _mxfp4(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``mxfp4`` of gpt-oss: only experts are quantised, and its family reads them as GGUF's blocks."""

    def refused(name: str) -> LayoutOf:
        raise settings.refused(f"'{name}', which is not an expert: only experts may be in MXFP4")

    return refused


def _bitnet(settings: QuantSettings) -> Callable[[str], LayoutOf]:
    """``bitnet``: weights of -1, 0 and 1, and inputs that are rounded to 8 bits for each token."""
    if settings.get("use_rms_norm", bool, False):
        raise settings.refused("use_rms_norm true")
    kind = settings.only("linear_class", "bitlinear", "autobitlinear")
    mode = settings.only("quantization_mode", "offline", "online")
    online = kind == "autobitlinear" and mode == "online"
    return lambda name: partial(bitnet, online=online, divides=kind == "bitlinear")


METHODS: dict[str, Callable[[QuantSettings], Callable[[str], LayoutOf]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
    "mlx": _mlx,
    "bitnet": _bitnet,
}
"""The methods that can be read: ``quant_method`` → the function that reads its settings."""


def rounds_floats(settings: QuantSettings) -> Callable[[str], bool]:
    """Whether each call of a layer rounds its plain floats, by the layer's name: those of ``bitnet``, in training.

    Example:
        >>> found = rounds_floats(QuantSettings({"quant_method": "bitnet", "linear_class": "autobitlinear",
        ...                                      "quantization_mode": "online"}))
        >>> found("model.layers.0.mlp.up_proj"), found("lm_head")
        (True, False)
    """
    given = settings.raw.get
    if (given("quant_method"), given("linear_class")) != ("bitnet", "autobitlinear"):
        return lambda name: False
    listed = settings.get("modules_to_not_convert", list)
    kept = ["lm_head", "score"] if listed is None else listed
    if not all(isinstance(one, str) for one in kept):
        raise CheckpointFormatError(
            f"'modules_to_not_convert' of '{settings.where}' is not a list of strings",
            path=settings.path,
        )
    # transformers takes each entry as a pattern of the first parts of a name, or as its end.
    ends = r"(?:(?<=\.)|(?=\.|$))"
    first = NameTable({f"(?:{one}){ends}": True for one in kept}, "modules_to_not_convert")
    is_online = given("quantization_mode") == "online"

    def rounds(name: str) -> bool:
        names = names_in_files(name)
        is_kept = any(one.endswith(end) for one in names for end in kept) or first.get(*names)
        return is_online and not is_kept

    return rounds


# Methods whose weights are one tensor of blocks in a model, and further settings that files have.
BLOCKS: dict[str, dict[str, Any]] = {
    "mxfp4": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip


def with_blocks(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The configuration for tensors of these names: it has MXFP4's settings exactly if tensors are in MXFP4.

    Example:
        >>> with_blocks({}, ["experts.down_proj_blocks"])["quantization_config"]["quant_method"]
        'mxfp4'
    """
    method = config.get(KEY)
    method = method.get("quant_method") if isinstance(method, Mapping) else method
    if any(name.endswith("_blocks") for name in names):
        new = {KEY: {"quant_method": "mxfp4", **BLOCKS["mxfp4"]}}
        return dict(config) if method else {**config, **new}
    return {key: value for key, value in config.items() if key != KEY or method not in BLOCKS}
