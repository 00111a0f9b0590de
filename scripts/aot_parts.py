"""Compiles parts of models ahead of time for TPUs or GPUs that this machine does not have.

    .compilers/bin/python scripts/aot_parts.py v5e:2x4 attention gradient --tokens 32768
    .compilers/bin/python scripts/aot_parts.py h200:8 experts packed

`scripts/accelerators.sh` makes `.compilers`. The parts are sharded over all devices of the topology:

attention  causal attention of all tokens of a text, 32 heads of width 128
gradient   the derivative of this attention
experts    the experts of one layer of Mixtral 8x22B, for one token
packed     one row times a matrix of 8192 x 8192 in blocks of Q8_0, and of Q4_K, on one device

Printed are the bytes of arguments and temporaries on one device, copies of 1 MiB and more of the
arguments, kernels, and for TPUs the bytes that the program reads and writes, with each loop counted once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import maxjax  # noqa: E402
from maxjax import kernels  # noqa: E402
from maxjax.engine.plan.topology import Topology  # noqa: E402
from maxjax.graph.quantization import QuantizationEncoding  # noqa: E402
from maxjax.kernels import QuantArray, explicit  # noqa: E402
from maxjax.kernels.attention import causal_attention  # noqa: E402
from scripts import hlo  # noqa: E402
from scripts.aot import model_of  # noqa: E402
from scripts.aot_programs import Case  # noqa: E402

MIB = 1 << 20
HEADS, WIDTH = 32, 128


def attention(devices: list[Any], tokens: int, gradient: bool = False) -> Any:
    """The lowered program of causal attention."""
    mesh = maxjax.make_mesh(devices=devices, model=len(devices))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    x = jax.ShapeDtypeStruct((1, tokens, HEADS, WIDTH), jnp.bfloat16, sharding=sharding)
    division = explicit.Division.of(mesh, [(), (), ("model",), ()])

    def run(q: Any, k: Any, v: Any) -> Any:
        at = jnp.arange(tokens, dtype=jnp.int32)[None]
        cache = [a.swapaxes(1, 2)[None] for a in (k, v)]
        return causal_attention(q, cache, 0, at, at, division=division)

    total = lambda *a: jnp.sum(run(*a), dtype=jnp.float32)
    return jax.jit(jax.grad(total, (0, 1, 2)) if gradient else run).lower(x, x, x)


def experts(devices: list[Any], _: int) -> Any:
    """The lowered program of a layer's experts for one token."""
    mesh = maxjax.make_mesh(devices=devices, model=len(devices))
    model = model_of(Case("call", "mixtral22", 1, {}, 1, 0, unstack=True), mesh)
    layer = model.model.layers[0].block_sparse_moe
    size = model.config.hidden_size
    here = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((1, size), jnp.bfloat16, sharding=here)
    return jax.jit(lambda layer, x: layer(x)).lower(layer, x)


def packed(devices: list[Any], encoding: str) -> Any:
    """The lowered program of a matmul of one row with a quantised weight."""
    kind, size = QuantizationEncoding(encoding), 8192
    where = NamedSharding(maxjax.make_mesh(devices=devices[:1], model=1), PartitionSpec())
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    blocks = of(jnp.uint8, *kind.packed_shape([size, size]))
    run = lambda x, blocks: kernels.matmul(x, QuantArray(blocks, encoding))
    return jax.jit(run).lower(of(jnp.bfloat16, 1, size), blocks)


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "attention": lambda devices, tokens: {"attention": attention(devices, tokens)},
    "gradient": lambda devices, tokens: {"gradient": attention(devices, tokens, True)},
    "experts": lambda devices, tokens: {"experts": experts(devices, tokens)},
    "packed": lambda devices, _: {f"packed {e}": packed(devices, e) for e in ("Q8_0", "Q4_K")},
}  # fmt: skip


def line(name: str, lowered: Any) -> str:
    """The report of the compiled program, in one line."""
    executable = lowered.compile()
    memory, text = executable.memory_analysis(), executable.as_text()
    parsed = hlo.parse(text)
    copies = sum(one.times for one in hlo.copies(parsed, lambda name: True, MIB))
    found = [f"arguments {memory.argument_size_in_bytes / MIB:.2f} MiB",
             f"temporaries {memory.temp_size_in_bytes / MIB:.2f} MiB", f"copies {copies}"]  # fmt: skip
    cost = executable.cost_analysis() or {}
    if "bytes accessed" in cost:
        found.append(f"reads and writes {cost['bytes accessed'] / MIB:.1f} MiB")
    names = [f"{count} x {kernel}" for kernel, count in sorted(hlo.kernels(parsed).items())]
    return f"{name}: {', '.join(found)}; kernels: {', '.join(names) or 'none'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each part."""
    parser = argparse.ArgumentParser(description="Compile parts of models for accelerators.")
    parser.add_argument("topology", help="v5e:2x4, v5p:2x2x2, h200:8")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args(arguments)
    devices = Topology.of(options.topology).devices()
    for part in options.parts:
        length = f" {options.tokens}" if part in ("attention", "gradient") else ""
        for name, lowered in PARTS[part](devices, options.tokens).items():
            text = line(re.sub(r"^(attention|gradient)$", rf"\1{length}", name), lowered)
            print(f"{options.topology} {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
