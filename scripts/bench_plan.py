"""How long `maxjax plan` takes for a Llama of 405 billion parameters, and in how much memory.

    python scripts/bench_plan.py            # 1138 tensors in 191 files
    python scripts/bench_plan.py --quick    # four layers, to see that it runs

The files have real headers and no data: they are sparse files of 811 GB, of which a few hundred kB
are on the disk. Every round is a new process, and its time includes Python's start and the imports; the
figure is the median. Memory is the peak resident size of that process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEGA = 1 << 20
WANTED = (2.0, 300)  # s, MB
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 126,
    "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Llama with this configuration."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            found[f"model.layers.{i}.{name}.weight"] = shape
    return found | {
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }


def write_sparse(directory: Path, config: dict, files: int) -> int:
    """Writes a bfloat16 checkpoint of this model without data; returns the bytes of its tensors."""
    weights = shapes(config)
    sizes = {name: 2 * _product(shape) for name, shape in weights.items()}
    total, seen = sum(sizes.values()), 0
    parts: list[dict[str, int]] = [{} for _ in range(files)]
    for name, nbytes in sizes.items():
        parts[min(seen * files // total, files - 1)][name] = nbytes
        seen += nbytes
    parts = [part for part in parts if part]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file, header, at = f"model-{number:05d}-of-{len(parts):05d}.safetensors", {}, 0
        for name, nbytes in part.items():
            offsets = [at, at + nbytes]
            header[name] = {"dtype": "BF16", "shape": weights[name], "data_offsets": offsets}
            at += nbytes
        raw = json.dumps(header).encode()
        with open(directory / file, "wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + at)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    return total


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def run(arguments: list[str]) -> tuple[float, float, str]:
    """(seconds, peak MB, output) of a new process."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "maxjax", *arguments], env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    output = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        sys.exit(f"maxjax {' '.join(arguments)} failed")
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_maxrss * unit / MEGA, output


def main() -> int:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four layers, one round")
    parser.add_argument("--rounds", type=int, help="default 5, or 1 with --quick")
    parser.add_argument("--dir", help="where the temporary files go (default: the system's place)")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure is not reached")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    config = LLAMA_405B | ({"num_hidden_layers": 4} if options.quick else {})
    with tempfile.TemporaryDirectory(prefix="maxjax-bench-", dir=options.dir) as place:
        total = write_sparse(Path(place), config, 7 if options.quick else 191)
        arguments = ["plan", place, "--mesh", "model=8", "--json"]
        found = [run(arguments) for _ in range(rounds)]
        result = json.loads(found[0][2])
    if result["total_bytes"] != total:
        sys.exit(f"the plan counts {result['total_bytes']} bytes, and there are {total}")
    seconds = statistics.median(row[0] for row in found)
    peak = statistics.median(row[1] for row in found)
    tensors = sum(kind["count"] for kind in result["kinds"])
    print(
        f"{tensors} tensors, {total:,} bytes, {result['bytes_per_device']:,} on each of 8 devices"
    )
    good = seconds < WANTED[0] and peak < WANTED[1]
    print(
        f"maxjax plan, median of {rounds}: {seconds:.2f} s, {peak:.0f} MB   wanted < "
        f"{WANTED[0]:.0f} s, < {WANTED[1]} MB: {'reached' if good else 'NOT REACHED'}"
    )
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
