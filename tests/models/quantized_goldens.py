"""Writes quantized_goldens.npz: quantised weights, dequantised by the libraries that made the formats.

    python tests/models/quantized_goldens.py AUTOGPTQ AUTOAWQ

It needs torch, transformers, bitsandbytes and compressed-tensors, and the unpacked sources of AutoGPTQ
and AutoAWQ, whose code in torch for CPUs it runs. Keys are ``case/tensor``, with the dtype behind a colon
where NumPy has none such, and ``case//values``.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".npz")
OUT, IN, GROUP = 32, 64, 32


def goldens():
    """Case → (tensors by name, values), from the file."""
    import ml_dtypes

    found = {}
    with np.load(FILE) as file:
        for key, array in file.items():
            case, _, name = key.partition("/")
            tensors, values = found.setdefault(case, ({}, []))
            name, _, dtype = name.partition(":")
            if name == "/values":
                values.append(array)
            else:
                tensors[name] = array.view(getattr(ml_dtypes, dtype)) if dtype else array
    return {case: (tensors, values) for case, (tensors, [values]) in found.items()}


def module_of(path):
    spec = spec_from_file_location("source", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bitsandbytes(torch, weight):
    import bitsandbytes.functional as F

    for kind, nested in (("nf4", True), ("fp4", False)):
        q, state = F.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, blocksize=64
        )
        more = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        yield f"bitsandbytes {kind}", {"weight": q, **more}, F.dequantize_4bit(q, state)
    q, most, _ = F.int8_vectorwise_quant(weight.half())
    yield "bitsandbytes int8", {"weight": q, "SCB": most}, F.int8_vectorwise_dequant(q, most)


def compressed_tensors(torch, weight):
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = {"strategy": "group", "group_size": GROUP}
    channel = {"strategy": "channel", "symmetric": True}
    for name, kind, args in (
        ("pack-quantized 4", "Packed", {"num_bits": 4, "type": "int", "symmetric": True, **group}),
        ("pack-quantized 4 zero points", "Packed",
         {"num_bits": 4, "type": "int", "symmetric": False, **group}),
        ("pack-quantized 8 channel", "Packed", {"num_bits": 8, "type": "int", **channel}),
        ("int-quantized channel", "Int", {"num_bits": 8, "type": "int", **channel}),
        ("float-quantized channel", "Float", {"num_bits": 8, "type": "float", **channel}),
    ):  # fmt: skip
        kind = getattr(compressors, f"{kind}QuantizationCompressor")
        settings = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=settings)
        groups = weight.reshape(OUT, -1, args.get("group_size", IN))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), settings)
        state = {"weight": weight, "weight_scale": scale}
        if not args["symmetric"]:
            state["weight_zero_point"] = zero
        found = kind.compress(state, scheme)
        yield name, found, kind.decompress(dict(found), scheme)["weight"]


def transformers(torch, weight):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    q = (weight / 0.001).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(1, 1) * 0.01
    values = Fp8Dequantize(None)._dequantize_one(q, scales, torch.float32)
    yield "fp8 blocks", {"weight": q, "weight_scale_inv": scales}, values


def autogptq(torch, folder):
    module = module_of(folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    for name, ordered, bits in (
        ("gptq 4", False, 4),
        ("gptq 4 order", True, 4),
        ("gptq 8", True, 8),
    ):
        layer = module.QuantLinear(bits, GROUP, IN, OUT, False)
        layer.qweight = anything(torch, layer.qweight)
        # No zero point of 15: its classes differ in what it is with 1 added, 0 or 16.
        layer.qzeros = anything(torch, layer.qzeros) & 0x77777777
        layer.scales = (torch.rand(*layer.scales.shape) * 0.1).half().float()
        if ordered:
            layer.g_idx = layer.g_idx[torch.randperm(IN)]
        layer.autogptq_cuda_available = False
        tensors = {
            "qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half(),
            "g_idx": layer.g_idx.to(torch.int32),
        }  # fmt: skip
        yield name, tensors, layer(torch.eye(IN)).T


def autoawq(torch, folder):
    module = module_of(folder / "awq/utils/packing_utils.py")
    like = torch.zeros(IN, OUT // 8), torch.zeros(IN // GROUP, OUT // 8)
    q, zeros = (anything(torch, one) for one in like)
    scales = (torch.rand(IN // GROUP, OUT) * 0.1).half()
    values = module.dequantize_gemm(q, zeros, scales, 4, GROUP).T
    yield "awq", {"qweight": q, "qzeros": zeros, "scales": scales}, values


def anything(torch, like):
    """Random words of 32 bits: every number and every zero point is possible."""
    return torch.randint(-(2**31), 2**31, like.shape, dtype=torch.int64).to(torch.int32)


def main(gptq, awq):
    import torch

    torch.manual_seed(0)
    weight = torch.randn(OUT, IN) * 0.1
    made = [
        *bitsandbytes(torch, weight), *compressed_tensors(torch, weight), *transformers(torch, weight),
        *autogptq(torch, Path(gptq)), *autoawq(torch, Path(awq)),
    ]  # fmt: skip
    arrays = {}
    for case, tensors, values in made:
        for name, value in tensors.items():
            if value.dtype is torch.float8_e4m3fn:
                name, value = f"{name}:float8_e4m3fn", value.view(torch.uint8)
            arrays[f"{case}/{name}"] = value.detach().numpy()
        arrays[f"{case}//values"] = values.detach().float().numpy()
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
