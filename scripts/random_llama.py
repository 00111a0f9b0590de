"""Writes a random Llama to disk: as a Hugging Face directory and as a GGUF file of the same weights.

    python scripts/random_llama.py --size 135m --type BF16 DIR   # DIR/hf and DIR/model.gguf
    python scripts/random_llama.py --quick DIR                   # the tiny size

Speed does not depend on the values of weights, so a benchmark needs no download; and two programs
that read the same weights must compute the same logits. Every tensor has a random stream of its
own, determined by the seed and its name: the two files agree although neither is read to write the
other, and no more than one tensor is in memory at a time.

All values are rounded to bfloat16 once, so F32 and BF16 files hold the same numbers, and F16
files too, except for the few below 2**-17, which lose bits (less than 3e-8 each).
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

STD = 0.02
# safetensors and GGUF call these types the same.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}
DTYPES["BF16"] = np.dtype(ml_dtypes.bfloat16)
CONFIG_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Size:
    """The hyperparameters of a Llama."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    context: int = 8192


SIZES = {
    "tiny": Size(layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, vocab=1024),
    # As SmolLM2-135M.
    "135m": Size(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, vocab=49152),
    # As Llama-3.2-1B, tied like it, with a smaller vocabulary: 1.04e9 weights.
    "1b": Size(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocab=32768),
}


# --- the weights ----------------------------------------------------------------------------


def tensor_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Names and shapes as a Hugging Face checkpoint has them: a matrix is [out, in]."""
    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size.vocab, size.hidden)}
    for i in range(size.layers):
        for name, shape in {
            "input_layernorm": (size.hidden,),
            "self_attn.q_proj": (q, size.hidden),
            "self_attn.k_proj": (kv, size.hidden),
            "self_attn.v_proj": (kv, size.hidden),
            "self_attn.o_proj": (size.hidden, q),
            "post_attention_layernorm": (size.hidden,),
            "mlp.gate_proj": (size.ffn, size.hidden),
            "mlp.up_proj": (size.ffn, size.hidden),
            "mlp.down_proj": (size.hidden, size.ffn),
        }.items():
            found[f"model.layers.{i}.{name}.weight"] = shape
    found["model.norm.weight"] = (size.hidden,)
    if not size.tied:
        found["lm_head.weight"] = (size.vocab, size.hidden)
    return found


def parameters(size: Size) -> int:
    """The number of weights of a model of this size; a tied embedding counts once."""
    return sum(int(np.prod(shape)) for shape in tensor_shapes(size).values())


def tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The bfloat16 values of one tensor, determined by the seed, the name and the shape."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape, np.float32)
    values *= STD
    if len(shape) == 1:  # the weight of a norm
        values += 1
    return values.astype(ml_dtypes.bfloat16)


def _cast(values: np.ndarray, kind: str) -> np.ndarray:
    # Casts through float32, from which NumPy rounds to each type directly.
    return values if kind == "BF16" else values.astype(np.float32).astype(DTYPES[kind], copy=False)


# --- the Hugging Face directory -------------------------------------------------------------


def write_hf(directory: str | Path, size: Size, kind: str, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors of type `kind`; returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(size, kind), indent=2) + "\n")
    with open(directory / "model.safetensors", "wb") as file:
        # Written by hand, because safetensors needs all tensors in memory at once.
        file.write(_safetensors_header(size, kind))
        for name, shape in tensor_shapes(size).items():
            _cast(tensor(name, shape, seed), kind).tofile(file)
    return directory


def hf_config(size: Size, kind: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.context,
        "rms_norm_eps": size.rms_norm_eps,
        "rope_theta": size.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": size.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": CONFIG_DTYPES[kind],
    }


def _safetensors_header(size: Size, kind: str) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensor_shapes(size).items():
        nbytes = int(np.prod(shape)) * DTYPES[kind].itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


# --- the GGUF file --------------------------------------------------------------------------


def write_gguf(path: str | Path, size: Size, kind: str, seed: int = 0) -> Path:
    """Writes a GGUF file that llama.cpp runs; matrices are of type `kind`, norms F32.

    It has a vocabulary size but no tokenizer: whoever runs it passes token ids.
    """
    import gguf

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _add_hyperparameters(writer, size, kind)
    entries = list(_gguf_tensors(size, kind))
    for _, name, shape, own in entries:
        nbytes = int(np.prod(shape)) * DTYPES[own].itemsize
        # gguf supports bfloat16 only as a raw type; for the other types the raw type changes nothing.
        raw = gguf.GGMLQuantizationType[own]
        writer.add_tensor_info(name, shape, DTYPES[own], nbytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for source, _, shape, own in entries:
        values = _permuted(source, tensor(source, shape, seed), size)
        writer.write_tensor_data(_cast(values, own))
    writer.close()
    return path


def _add_hyperparameters(writer, size: Size, kind: str) -> None:
    import gguf

    file_type = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_name("random Llama")
    writer.add_vocab_size(size.vocab)
    writer.add_context_length(size.context)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.ffn)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_key_length(size.head_dim)
    writer.add_value_length(size.head_dim)
    writer.add_rope_dimension_count(size.head_dim)
    writer.add_rope_freq_base(size.rope_theta)
    writer.add_layer_norm_rms_eps(size.rms_norm_eps)
    writer.add_tokenizer_model("none")


def _gguf_tensors(size: Size, kind: str) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
    """(Hugging Face name, GGUF name, shape, type) of each tensor."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, size.layers)
    for source, shape in tensor_shapes(size).items():
        name = names.get_name(source, try_suffixes=(".weight",))
        assert name is not None, source
        yield source, name, shape, "F32" if len(shape) == 1 else kind


def _permuted(source: str, values: np.ndarray, size: Size) -> np.ndarray:
    """The rows of q and k in the order of GGUF.

    Rope rotates pairs of rows: i and i + head_dim / 2 in a Hugging Face file, 2 i and 2 i + 1 in
    GGUF. llama.cpp's converter permutes the rows in the same way, head by head.
    """
    if source.endswith("q_proj.weight"):
        heads = size.heads
    elif source.endswith("k_proj.weight"):
        heads = size.kv_heads
    else:
        return values
    halves = values.reshape(heads, 2, size.head_dim // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


# --- the command ----------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="gets hf/ and model.gguf")
    parser.add_argument("--size", choices=SIZES, default="135m")
    parser.add_argument("--type", choices=sorted(DTYPES), default="BF16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the tiny size")
    options = parser.parse_args()
    name = "tiny" if options.quick else options.size
    size = SIZES[name]
    begin = time.perf_counter()
    written = (
        write_hf(options.directory / "hf", size, options.type, options.seed) / "model.safetensors",
        write_gguf(options.directory / "model.gguf", size, options.type, options.seed),
    )
    print(f"{name}, {options.type}: {parameters(size) / 1e6:.1f} million weights, "
          f"{time.perf_counter() - begin:.1f} s")  # fmt: skip
    for path in written:
        print(f"  {path}: {path.stat().st_size / 2**20:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
