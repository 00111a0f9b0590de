"""Decode steps of each family of decoders on a CPU, against a Llama that reads as many weights per token.

decode    one token after a context, of a random model of the family and of a Llama of the same hidden
          size, layers and vocabulary, in turns. The Llama's MLP is so wide that it reads as many weights
          for a token (of experts, those that one token uses). Printed: the Llama's time over the
          family's (1: as fast; wanted: 0.9 for dense families), its median and quartiles.
compile   seconds until the first tokens, less those of a second run in the same process, of a model of 2
          and of 8 layers of each kind: they grow with the kinds of layers, not with their number.

All weights are random float32. --only a,b chooses families by a part of their names.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MAXJAX_COMPILE_CACHE", "0")

import bench_decode
import jax

import maxjax
from maxjax import models

_MOE = {"num_experts_per_tok": 4, "moe_intermediate_size": 384, "intermediate_size": 3072}
_LATENT = {
    "kv_lora_rank": 256, "q_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "num_key_value_heads": 12,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One row: a family's class in ``maxjax.models``, its settings, and the kinds of its layers.

    Attributes:
        name: the class's name.
        settings: settings of ``config.json`` in addition to :data:`COMMON`.
        period: number of layers after which the kinds repeat.
        first: name of the setting with the number of leading layers that are of another kind.
        kinds: kinds of the layers of a period, where the configuration lists them.
        listed: name of the setting that lists the kinds.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    period: int = 1
    first: str = ""
    kinds: tuple[str, ...] = ()
    listed: str = "layer_types"


COMMON = {
    "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16384, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
ROWS = [
    Family("Llama"),
    Family("Qwen3"),
    Family("Olmo2"),
    Family("Gemma2", {"query_pre_attn_scalar": 64, "sliding_window": 512}, 2),
    Family("Gemma3", {"query_pre_attn_scalar": 64, "sliding_window": 512}, 6),
    Family("Qwen3MoE", {**_MOE, "num_experts": 32}),
    Family("GptOss", {**_MOE, "num_local_experts": 32, "sliding_window": 128}, 2),
    Family("DeepseekV3", {**_MOE, **_LATENT, "n_routed_experts": 32, "n_group": 4, "topk_group": 2},
           1, "first_k_dense_replace"),
    Family("DeepseekV2", {**_MOE, **_LATENT, "n_routed_experts": 32}, 1, "first_k_dense_replace"),
    Family("Qwen3Next", {**_MOE, **_DELTA, "num_experts": 32, "shared_expert_intermediate_size": 384}, 4),
    Family("Qwen35", _DELTA, 4),
    Family("LFM2", {}, 4, kinds=("conv", "conv", "full_attention", "conv")),
    Family("Mamba2", {"num_heads": 24, "n_groups": 1}),
    Family("FalconH1", {"mamba_n_heads": 12, "mamba_d_head": 64, "mamba_d_ssm": 768, "mamba_d_state": 128}),
    Family("GraniteHybrid", {"num_local_experts": 0, "mamba_n_heads": 24, "mamba_d_state": 128,
                             "shared_intermediate_size": 2048, "attention_multiplier": 0.125},
           4, kinds=("mamba", "mamba", "attention", "mamba")),
    Family("NemotronH", {"mamba_num_heads": 24, "n_groups": 1},
           4, kinds=("linear_attention", "mlp", "full_attention", "mlp"), listed="layers_block_type"),
]  # fmt: skip


def made(name: str, settings: dict[str, Any]) -> Any:
    """A random model of a family."""
    kind = getattr(models, name)
    model = kind(getattr(models, f"{name}Config").from_dict(settings))
    return maxjax.init(model, jax.random.key(0))


def of(row: Family, each: int, small: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The settings of a model with ``each`` layers of each kind, and its number of layers."""
    layers = each * row.period * (2 if row.first else 1)
    settings = {**COMMON, **row.settings, **small, "num_hidden_layers": layers}
    if row.name in ("Gemma2", "Gemma3", "GptOss"):
        slides = [bool((i + 1) % row.period) for i in range(layers)]
        settings["layer_types"] = [
            "sliding_attention" if one else "full_attention" for one in slides
        ]
    if row.kinds:
        settings[row.listed] = [*row.kinds] * each
    return settings | ({row.first: each} if row.first else {}), layers


def read(model: Any) -> int:
    """The number of weights that one token reads: all but those of experts that it is not routed to."""
    config = model.config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if hasattr(config, name)), 0)
    share = getattr(config, "num_experts_per_tok", 1) / (experts or 1)
    sizes = {name: weight.value.size for name, weight in model.raw_state_dict().items()}
    return round(sum(n * (share if ".experts." in name else 1) for name, n in sizes.items()))


def like(settings: dict[str, Any], layers: int, count: int) -> Any:
    """A Llama of the same hidden size, layers and vocabulary that reads ``count`` weights."""
    same = ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
            "head_dim", "tie_word_embeddings")  # fmt: skip
    plain = {key: settings[key] for key in same}
    plain |= {"num_key_value_heads": COMMON["num_key_value_heads"], "num_hidden_layers": layers}
    hidden, width, heads = (
        settings[key] for key in ("hidden_size", "head_dim", "num_attention_heads")
    )
    attention = 2 * hidden * width * (heads + plain["num_key_value_heads"])
    inner = (count - settings["vocab_size"] * hidden) / layers - attention
    plain["intermediate_size"] = max(32, round(inner / (3 * hidden) / 32) * 32)
    return made("Llama", plain)


def timed(model: Any, context: int) -> bench_decode.Ours:
    """Decode steps of one text after ``context`` tokens."""
    return bench_decode.Ours(model, bench_decode.Row("", "F32", 1, context))


def decode(row: Family, each: int, small: dict[str, Any], pairs: int, context: int) -> str:
    """The line of a family's speed."""
    settings, layers = of(row, each, small)
    model = made(row.name, settings)
    other = like(settings, layers, count := read(model))
    sides = timed(model, context), timed(other, context)
    ratios, mine = [], []
    for i in range(pairs):
        found = {}
        for k in (0, 1) if i % 2 else (1, 0):
            time.sleep(0.02)  # threads of the other model spin a little longer
            found[k] = statistics.median(sides[k].step(8))
        ratios.append(found[1] / found[0])
        mine.append(found[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"{row.name:12} {layers:3} layers, {count / 1e6:6.1f} M numbers a token "
        f"({read(other) / 1e6:6.1f} M)  {statistics.median(mine) * 1e3:7.2f} ms  "
        f"of a Llama's speed {middle:.2f} [{low:.2f}, {high:.2f}]"
    )


def compiled(row: Family, each: int, small: dict[str, Any]) -> float:
    """Seconds of compiling the programs of prefill and of the first decode steps."""
    model = made(row.name, of(row, each, small)[0])
    times = []
    for _ in range(2):
        start = time.perf_counter()
        timed(model, 32)
        times.append(time.perf_counter() - start)
    return times[0] - times[1]


def main() -> None:
    """Runs the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small models, without meaning")
    parser.add_argument("--only", default="", help="families, by a part of their names: a,b")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--part", choices=["decode", "compile"], help="one of the two alone")
    options = parser.parse_args()
    wanted = [part.lower() for part in options.only.split(",") if part]
    rows = [row for row in ROWS if not wanted or any(part in row.name.lower() for part in wanted)]
    small: dict[str, Any] = {}
    if options.quick:
        small = {"hidden_size": 64, "vocab_size": 1024}
        rows = [row for row in rows if wanted or row.name in ("Qwen3MoE", "DeepseekV3")]
    if options.part != "compile":
        for row in rows:
            each = 1 if options.quick else max(1, 8 // (row.period * (2 if row.first else 1)))
            pairs = 2 if options.quick else options.pairs
            print(decode(row, each, small, pairs, 32 if options.quick else 256), flush=True)
    if options.part != "decode":
        for row in rows[:1] if options.quick else rows:
            few, many = 2, 3 if options.quick else 8
            first, second = compiled(row, few, small), compiled(row, many, small)
            print(
                f"{row.name:12} compile: {few} layers of each kind {first:5.1f} s, {many} {second:5.1f} s, "
                f"ratio {second / first:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
