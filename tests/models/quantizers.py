"""Quantised repositories of Hugging Face, written by reference quantisers in NumPy.

Each format is written from its definition, in float64 and one number at a time where that is what
the definition says. A quantiser gives the tensors of one linear layer, by what follows its name, and
the weight that they stand for. ``repository`` writes a small Llama of such layers, and the same
Llama with these weights as floats.
"""

import json
from typing import NamedTuple

import ml_dtypes
import numpy as np

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
NAMES = {
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bfloat16": "BF16", "float16": "F16",
    "float32": "F32", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8",
    "float8_e8m0fnu": "F8_E8M0", "uint32": "U32",
}  # fmt: skip


class Case(NamedTuple):
    """A format: ``quantization_config``, and w [out, in] → (tensors, the weight they stand for)."""

    config: dict
    quantise: object


def rounded(values, dtype):
    """The values in a dtype, as float64."""
    return np.asarray(values, np.float32).astype(dtype).astype(np.float64)


def blocks_of(shape, size):
    for i in range(-(-shape[0] // size[0])):
        for j in range(-(-shape[1] // size[1])):
            yield (i, j), np.s_[i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]


def scaled(w, size, dtype, most, scale_dtype=np.float32):
    """(weight, scales, values) with a scale for each block of that size."""
    counts = [-(-n // s) for n, s in zip(w.shape, size, strict=True)]
    q, s, values = np.zeros(w.shape, dtype), np.zeros(counts, scale_dtype), np.zeros(w.shape)
    for at, part in blocks_of(w.shape, size):
        s[at] = np.abs(w[part]).max() / most
        scale = np.float64(s[at])
        raw = w[part] / scale
        if dtype == np.int8:
            raw = np.clip(np.rint(raw), -128, 127)
        q[part] = raw.astype(np.float32).astype(dtype)
        values[part] = q[part].astype(np.float64) * scale
    return q, s, values


def fp8(block=(32, 64), extra=()):
    def quantise(w, rng):
        size = w.shape if block is None else block
        q, s, values = scaled(w, size, E4M3, 448)
        s = s.reshape(()) if block is None else s
        return {
            "weight": q,
            "weight_scale_inv": s,
            **{name: np.float32(0.5) for name in extra},
        }, values

    config = {
        "quant_method": "fp8", "activation_scheme": "static" if extra else "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return Case(config, quantise)


def fbgemm():
    def quantise(w, rng):
        q, s, values = scaled(w, (1, w.shape[1]), E4M3, 448)
        return {"weight": q, "weight_scale": s}, values

    return Case({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, quantise)


def compressed(weights, form, activations=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def compressed_scaled(kind, strategy, size=None, scale_dtype=np.float32, extra=()):
    """``float-quantized`` and ``int-quantized``."""

    def quantise(w, rng):
        shape = {"tensor": w.shape, "channel": (1, w.shape[1])}.get(strategy, size)
        dtype, most = (E4M3, 448) if kind == "float" else (np.int8, 127)
        q, s, values = scaled(w, shape, dtype, most, scale_dtype)
        s = s.reshape(1) if strategy == "tensor" else s
        return {
            "weight": q,
            "weight_scale": s,
            **{n: np.ones(1, np.float32) for n in extra},
        }, values

    weights = {
        "num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False,
        "group_size": size[1] if strategy == "group" else None,
        "block_structure": list(size) if strategy == "block" else None,
    }  # fmt: skip
    return Case(compressed(weights, f"{kind}-quantized"), quantise)


def words(values, bits, axis):
    """Unsigned numbers along an axis as words of 32 bits, the first in the lowest bits."""
    values = np.moveaxis(np.asarray(values, np.int64), axis, -1)
    each = 32 // bits
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % each)])
    found = np.zeros((*values.shape[:-1], values.shape[-1] // each), np.uint64)
    for i in range(each):
        found |= values[..., i::each].astype(np.uint64) << np.uint64(bits * i)
    return np.moveaxis(found.astype(np.uint32).view(np.int32), -1, axis).copy()


def affine(w, bits, group_of, symmetric, scale_dtype=np.float16):
    """(numbers [out, in], zero points [out, groups], scales, values) with a group for each column."""
    most, groups = 2**bits - 1, int(group_of.max()) + 1
    q = np.zeros(w.shape, np.int64)
    zero, scale = np.zeros((len(w), groups), np.int64), np.zeros((len(w), groups), scale_dtype)
    values = np.zeros(w.shape)
    for g in range(groups):
        at = group_of == g
        low, high = np.minimum(w[:, at].min(1), 0), np.maximum(w[:, at].max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scale[:, g] = np.maximum((high - low) / most, 1e-4)
        s = scale[:, g].astype(np.float64)
        # Zero points of the first version of GPTQ are stored less 1, so that 0 cannot be one.
        zero[:, g] = (most + 1) // 2 if symmetric else np.clip(np.rint(-low / s), 1, most)
        q[:, at] = np.clip(np.rint(w[:, at] / s[:, None]) + zero[:, g][:, None], 0, most)
        values[:, at] = (q[:, at] - zero[:, g][:, None]) * s[:, None]
    return q, zero, scale, values


def consecutive(count, group):
    return np.arange(count) // group


def pack_quantized(bits=4, group=32, symmetric=True, actorder=None):
    def quantise(w, rng):
        group_of = consecutive(w.shape[1], group or w.shape[1])
        group_of = rng.permutation(group_of) if actorder == "group" else group_of
        q, zero, scale, values = affine(w, bits, group_of, symmetric, BF16)
        found = {
            "weight_packed": words(q, bits, 1), "weight_scale": scale,
            "weight_shape": np.array(w.shape, np.int64),
        }  # fmt: skip
        if not symmetric:
            found["weight_zero_point"] = words(zero, bits, 0)
        if actorder == "group":
            found["weight_g_idx"] = group_of.astype(np.int32)
        return found, values

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "channel" if group is None else "group", "group_size": group,
        "actorder": actorder,
    }  # fmt: skip
    return Case(compressed(weights, "pack-quantized"), quantise)


def gptq(bits=4, group=32, desc_act=False, form="gptq", symmetric=False):
    def quantise(w, rng):
        group_of = consecutive(w.shape[1], w.shape[1] if group == -1 else group)
        group_of = rng.permutation(group_of) if desc_act else group_of
        q, zero, scale, values = affine(w, bits, group_of, symmetric)
        return {
            "qweight": words(q.T, bits, 0), "g_idx": group_of.astype(np.int32), "scales": scale.T.copy(),
            "qzeros": words(zero.T - (form == "gptq"), bits, 1),
        }, values  # fmt: skip

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act,
        "sym": symmetric, "checkpoint_format": form, "lm_head": False,
    }  # fmt: skip
    return Case(config, quantise)


def awq(group=32):
    def quantise(w, rng):
        q, zero, scale, values = affine(w, 4, consecutive(w.shape[1], group), False)

        def packed(numbers):
            """Eight columns in a word, of which position i holds column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
            order = (
                np.arange(numbers.shape[1]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
            )
            return words(numbers[:, order], 4, 1)

        return {"qweight": packed(q.T), "qzeros": packed(zero.T), "scales": scale.T.copy()}, values

    config = {
        "quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip
    return Case(config, quantise)


def auto_round(packing, bits=4, group=32, symmetric=False):
    """AutoRound writes what GPTQ or AWQ writes, with settings of its own."""
    form = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": ""}.get(packing, "gptq_v2")
    of = gptq(bits, group, form=form, symmetric=symmetric) if form else awq(group)

    def quantise(w, rng):
        found, values = of.quantise(w, rng)
        found.pop("g_idx", None)
        return found, values

    config = {
        "quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": group,
        "sym": symmetric, "data_type": "int", "autoround_version": "0.8.0", "iters": 200,
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
    }  # fmt: skip
    return Case(config, quantise)


def mlx(bits=4, group=64, own=None):
    """``affine``: q · scale + bias."""

    def quantise(w, rng):
        most, groups = 2**bits - 1, w.reshape(len(w), -1, group)
        low, high = groups.min(2), groups.max(2)
        scale = np.maximum((high - low) / most, 1e-7).astype(np.float16)
        bias = low.astype(np.float16)
        s, b = (a.astype(np.float64)[..., None] for a in (scale, bias))
        q = np.clip(np.rint((groups - b) / s), 0, most)
        found = {"weight": words(q.reshape(w.shape), bits, 1).view(np.uint32)}
        return found | {"scales": scale, "biases": bias}, (q * s + b).reshape(w.shape)

    config = {"group_size": group, "bits": bits, "mode": "affine", **(own or {})}
    return Case(config, quantise)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(config, second, weight="weight", divides=False):
    """Blocks of 16 numbers of 4 bits, each with a scale of 8 bits, and one scale for them all."""

    def quantise(w, rng):
        blocks = w.reshape(len(w), -1, 16)
        whole = np.float32(np.abs(w).max() / (6 * 448))
        scale = (np.abs(blocks).max(2) / 6 / whole).astype(np.float32).astype(E4M3)
        stored = np.float32(1) / whole if divides else whole
        of_all = 1 / np.float64(stored) if divides else np.float64(stored)
        each = scale.astype(np.float64)[..., None] * of_all
        q = nearest((blocks / np.where(each == 0, 1, each)).reshape(-1), E2M1).reshape(w.shape)
        values = E2M1[q] * np.repeat(each[..., 0], 16, axis=1)
        q = q.astype(np.uint8)
        found = {weight: q[:, 0::2] | q[:, 1::2] << 4, "weight_scale": scale}
        more = "input_global_scale" if divides else "input_scale"
        one = stored.reshape(1) if divides else stored
        return {**found, second: one, more: np.ones_like(one)}, values

    return Case(config, quantise)


def modelopt_fp8():
    def quantise(w, rng):
        q, s, values = scaled(w, w.shape, E4M3, 448)
        one = {"input_scale": np.float32(0.5)}
        return {"weight": q, "weight_scale": s.reshape(()), **one}, values

    return Case({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, quantise)


MODELOPT_NVFP4 = nvfp4(
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "weight_scale_2"
)
NVFP4 = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
    "dynamic": False,
}  # fmt: skip

# The levels of 4-bit NormalFloat (arXiv:2305.14314, appendix E), and those of fp4.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]
LEVELS = {"nf4": np.array(NF4, np.float32), "fp4": np.array(FP4, np.float32) / 12}


def nearest(values, levels):
    return np.abs(values[:, None] - levels[None, :].astype(np.float64)).argmin(1)


def bitsandbytes4(kind="nf4", nested=True):
    def quantise(w, rng):
        flat = w.reshape(-1)
        blocks = np.pad(flat, (0, -flat.size % 64)).reshape(-1, 64)
        absmax = np.abs(blocks).max(1).astype(np.float32)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
        found = {"weight.quant_map": LEVELS[kind]}
        scale = absmax.astype(np.float64)
        if nested:
            offset = absmax.mean()
            levels = np.sort(np.tanh(rng.normal(size=256))).astype(np.float32)
            levels /= np.abs(levels).max()
            rest = absmax - offset
            groups = np.pad(rest, (0, -rest.size % 256)).reshape(-1, 256)
            most = np.abs(groups).max(1)
            each = np.repeat(most, 256)[: rest.size]
            q = nearest(rest.astype(np.float64) / each, levels)
            scale = levels.astype(np.float64)[q] * each + np.float64(offset)
            state |= {
                "nested_blocksize": 256,
                "nested_dtype": "float32",
                "nested_offset": float(offset),
            }
            found |= {
                "weight.absmax": q.astype(np.uint8), "weight.nested_absmax": most,
                "weight.nested_quant_map": levels,
            }  # fmt: skip
        else:
            found["weight.absmax"] = absmax
        each = np.repeat(scale, 64)[: flat.size]
        q = nearest(flat / each, LEVELS[kind]).astype(np.uint8)
        found["weight"] = (q[0::2] << 4 | q[1::2])[:, None]
        text = json.dumps(state).encode()
        found[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
        return found, (LEVELS[kind].astype(np.float64)[q] * each).reshape(w.shape)

    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    }  # fmt: skip
    return Case(config, quantise)


def bitsandbytes8():
    def quantise(w, rng):
        most = np.abs(w).max(1).astype(np.float32)
        q = np.rint(127 * w / most[:, None].astype(np.float64)).astype(np.int8)
        found = {"weight": q, "SCB": most, "weight_format": np.zeros((), np.uint8)}
        return found, q * (most[:, None].astype(np.float64) / 127)

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return Case(config, quantise)


CASES = {
    "fp8 blocks": fp8(),
    "fp8 one scale": fp8(None, ("activation_scale",)),
    "fbgemm_fp8": fbgemm(),
    "float-quantized tensor": compressed_scaled("float", "tensor", extra=("input_scale",)),
    "float-quantized channel": compressed_scaled("float", "channel", scale_dtype=BF16),
    "float-quantized block": compressed_scaled("float", "block", (32, 32)),
    "int-quantized channel": compressed_scaled("int", "channel"),
    "int-quantized group": compressed_scaled("int", "group", (1, 32)),
    "pack-quantized 4": pack_quantized(),
    "pack-quantized 4 zero points": pack_quantized(symmetric=False),
    "pack-quantized 4 order": pack_quantized(symmetric=False, actorder="group"),
    "pack-quantized 8 channel": pack_quantized(8, None),
    "gptq 4": gptq(),
    "gptq 4 order": gptq(desc_act=True),
    "gptq 8 whole": gptq(8, -1, form="gptq_v2"),
    "gptq 4 symmetric": gptq(symmetric=True, desc_act=True),
    "awq": awq(),
    "bitsandbytes nf4": bitsandbytes4(),
    "bitsandbytes fp4": bitsandbytes4("fp4", nested=False),
    "bitsandbytes int8": bitsandbytes8(),
    "auto-round gptq": auto_round("auto_round:auto_gptq"),
    "auto-round gptqmodel": auto_round("auto_round:gptqmodel", 8, 64, symmetric=True),
    "auto-round awq": auto_round("auto_round:auto_awq"),
    "mlx 4": mlx(4, 32),
    "mlx 8": mlx(8, 32),
    "modelopt fp8": modelopt_fp8(),
    "modelopt nvfp4": MODELOPT_NVFP4,
    "compressed nvfp4": nvfp4(
        compressed(NVFP4, "nvfp4-pack-quantized", NVFP4),
        "weight_global_scale",
        "weight_packed",
        True,
    ),
}

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def tensors_of(case, seed=0, **settings):
    """(config, tensors) of a quantised Llama, and of the same one as floats."""
    rng = np.random.default_rng(seed)
    config = {**SMALL, **settings}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    experts = range(config.get("num_experts", 0))
    linear = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    if experts:  # of a Qwen 3 MoE
        mlp = {name: linear.pop(name) for name in list(linear) if name.startswith("mlp.")}
        linear |= {
            name.replace("mlp", f"mlp.experts.{i}"): shape
            for i in experts
            for name, shape in mlp.items()
        }
    packed, floats = {}, {}

    def plain(name, *shape):
        value = rng.normal(0, 0.3, shape) + (len(shape) == 1)
        packed[name] = floats[name] = value.astype(np.float32)

    plain("model.embed_tokens.weight", config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        for name, shape in linear.items():
            full = f"model.layers.{i}.{name}"
            found, values = case.quantise(rng.normal(0, shape[1] ** -0.5, shape), rng)
            packed |= {f"{full}.{key}": np.asarray(value) for key, value in found.items()}
            floats[f"{full}.weight"] = values.astype(np.float32)
        if experts:
            plain(f"model.layers.{i}.mlp.gate.weight", len(experts), hidden)
            for name in ("q_norm", "k_norm"):
                plain(f"model.layers.{i}.self_attn.{name}.weight", config["head_dim"])
        plain(f"model.layers.{i}.input_layernorm.weight", hidden)
        plain(f"model.layers.{i}.post_attention_layernorm.weight", hidden)
    plain("model.norm.weight", hidden)
    plain("lm_head.weight", config["vocab_size"], hidden)
    return ({**config, "quantization_config": case.config}, packed), (config, floats)


def write(directory, config, tensors):
    """A directory with config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, array in tensors.items():
        end = at + array.nbytes
        dtype = NAMES[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in tensors.values())
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


def repository(case, directory, **settings):
    """The directories of a quantised Llama and of the same one as floats, and the tensors of the first."""
    (config, packed), (plain, floats) = tensors_of(case, **settings)
    quantised = write(directory / "quantised", config, packed)
    return quantised, write(directory / "floats", plain, floats), packed
