"""How long the repr and HTML of models of 8 and 405 billion parameters take, and how many bytes they are.

    python scripts/bench_render.py            # 32 and 126 layers, stacked and not
    python scripts/bench_render.py --quick    # one round, to see that it runs

The models are abstract: they have no values. Still the transfer guard is on. A round makes the repr and
the HTML of each model, for the first time and again, as a person waits for the first. The figures are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from maxjax.models.llama import Llama, LlamaConfig

WANTED = (50.0, 30_000)  # ms, bytes
MODELS = {
    "8 B": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "405 B": {
        "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip


def milliseconds(model: Llama) -> tuple[float, float, int, int]:
    """Milliseconds of the repr and of the HTML, and the bytes of each."""
    begin = time.perf_counter()
    text = repr(model)
    middle = time.perf_counter()
    page = model._repr_html_()
    end = time.perf_counter()
    sizes = len(text.encode()), len(page.encode())
    return 1e3 * (middle - begin), 1e3 * (end - middle), *sizes


def main() -> int:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, help="default 15, or 1 with --quick")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure is not reached")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 15)
    good = True
    for name, config in MODELS.items():
        for stacked in (True, False):
            settings = LlamaConfig.from_dict(config)
            with jax.transfer_guard("disallow"):
                firsts = [
                    milliseconds(Llama(settings, "bfloat16", stacked=stacked))
                    for _ in range(min(rounds, 3))
                ]
                model = Llama(settings, "bfloat16", stacked=stacked)
                found = [milliseconds(model) for _ in range(rounds)]
            text, page = (statistics.median(row[i] for row in found) for i in (0, 1))
            first = statistics.median(row[0] for row in firsts)
            sizes = found[0][2:]
            reached = max(text, page, first) < WANTED[0] and max(sizes) < WANTED[1]
            good &= reached
            print(
                f"{name:>5} {'stacked' if stacked else 'separate':8}  repr {text:5.1f} ms (first {first:.1f}), "
                f"{sizes[0]:,} bytes; HTML {page:5.1f} ms, {sizes[1]:,} bytes   wanted < {WANTED[0]:.0f} ms, "
                f"< {WANTED[1]:,} bytes: {'reached' if reached else 'NOT REACHED'}"
            )
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
