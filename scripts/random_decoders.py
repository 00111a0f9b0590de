"""Random configurations of every family of decoders, against transformers.

    python scripts/random_decoders.py                # 20 of each family
    python scripts/random_decoders.py --family Gemma2 --count 5 --seed 7
    python scripts/random_decoders.py --quick        # one of each: does it run

A configuration is drawn: heads, widths, layers, ties, biases, windows, kinds of rope, caps, experts.
transformers makes a model of it with random weights and saves it; maxjax opens the directory, on one
device or several, stacked or not. Compared are the logits of two texts (largest difference, in
their standard deviation) and what `maxjax.generate` writes, greedily, for prompts of different length
read in chunks. Ends with 1 if a difference is over 1e-4 or a token is another one where the oracle's two
best logits are not that near; after the command that shows it again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MAXJAX_COMPILE_CACHE", "0")

import jax
import numpy as np
import torch

import maxjax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.models import decoders

FAMILIES = [
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Mixtral",
    "Qwen3Moe",
    "GPT2",
]
NEW, CHUNK = 24, 16


def settings(family: str, rng: np.random.Generator) -> dict[str, Any]:
    """A configuration."""
    pick = lambda *of: of[rng.integers(len(of))]
    kv = int(pick(1, 2, 3, 4))
    heads = kv * int(pick(1, 2, 3))
    width = int(pick(4, 6, 8, 16))
    layers = int(pick(1, 2, 3, 4, 5, 8))
    found: dict[str, Any] = {
        "num_key_value_heads": kv, "num_attention_heads": heads, "head_dim": width,
        "hidden_size": int(pick(16, 24, 36, 64)), "intermediate_size": int(pick(20, 33, 64)),
        "num_hidden_layers": layers, "tie_word_embeddings": bool(pick(True, False)),
        "rms_norm_eps": float(pick(1e-6, 1e-5, 1e-3)), "vocab_size": decoders.VOCAB,
        "max_position_embeddings": int(pick(96, 128, 512)), "rope_theta": float(pick(100.0, 1e4, 1e6)),
    }  # fmt: skip
    if family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        found["hidden_act"] = pick("silu", "gelu", "gelu_pytorch_tanh", "relu")
    if family in ("Llama", "Gemma", "Gemma2", "Gemma3"):  # transformers wants it so
        found["hidden_size"] = heads * int(pick(4, 6, 10))
    if family == "Mixtral":  # torch's grouped product does
        found["intermediate_size"] = int(pick(20, 32, 64))
    if family == "Qwen2":  # has no width of its own
        del found["head_dim"]
        found["hidden_size"] = heads * width
    if family == "Llama":
        found |= {"attention_bias": bool(pick(True, False)), "mlp_bias": bool(pick(True, False))}
    if family in ("Llama", "Qwen2", "Qwen3", "Mistral"):
        found["rope_parameters"] = rope(pick, found)
        del found["rope_theta"]
    if family in ("Mistral", "Mixtral"):
        found["sliding_window"] = pick(None, 3, 9, 40)
    if family in ("Qwen2", "Qwen3", "Qwen3Moe") and pick(True, False):
        first = int(rng.integers(0, layers + 1))
        window = int(pick(3, 9))
        found |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first}
    if family == "Mixtral":
        found["num_local_experts"] = experts = int(pick(2, 3, 8))
        found["num_experts_per_tok"] = int(rng.integers(1, experts + 1))
    if family == "Qwen3Moe":
        found["num_experts"] = experts = int(pick(2, 3, 8))
        found |= {
            "num_experts_per_tok": int(rng.integers(1, experts + 1)), "norm_topk_prob": bool(pick(True, False)),
            "moe_intermediate_size": int(pick(12, 20)), "decoder_sparse_step": int(pick(1, 2)),
            "mlp_only_layers": sorted({int(i) for i in rng.integers(0, layers, 2)}) if pick(True, False) else [],
        }  # fmt: skip
    if family in ("Gemma2", "Gemma3"):
        found |= {
            "sliding_window": int(pick(3, 9, 40)),
            "query_pre_attn_scalar": int(pick(8, 16, 100)),
        }
    if family == "Gemma2":
        found |= {
            "attn_logit_softcapping": pick(None, 2.0, 50.0),
            "final_logit_softcapping": pick(None, 4.0, 30.0),
        }
    if family == "Gemma3":
        found["num_hidden_layers"] = int(pick(2, 6, 7, 13))
        found.pop("rope_theta")
    if family == "GPT2":
        found = {
            "n_head": heads, "n_embd": heads * width, "n_layer": layers, "n_positions": 96,
            "n_inner": pick(None, 33, 64), "vocab_size": decoders.VOCAB, "tie_word_embeddings": bool(pick(True, False)),
            "scale_attn_weights": bool(pick(True, False)), "scale_attn_by_inverse_layer_idx": bool(pick(True, False)),
            "activation_function": pick("gelu_new", "relu", "gelu"), "layer_norm_epsilon": 1e-5,
        }  # fmt: skip
    return found


def rope(pick: Any, found: dict[str, Any]) -> dict[str, Any]:
    """A kind of rope with its settings."""
    kind = pick("default", "default", "linear", "dynamic", "llama3", "yarn")
    more: dict[str, Any] = {
        "default": {},
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 2.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
        "yarn": {"factor": 3.0, "original_max_position_embeddings": 32},
    }[kind]  # fmt: skip
    return {"rope_type": kind, "rope_theta": found["rope_theta"], **more}


def one(family: str, seed: int) -> tuple[float, int, str]:
    """(largest difference of logits, tokens that differ for no reason, what was run)."""
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    drawn = settings(family, rng)
    devices, stacked = int(rng.choice([1, 1, 2, 4])), bool(rng.random() < 0.7)
    with tempfile.TemporaryDirectory() as folder:
        theirs = decoders.oracle(family, Path(folder), seed, **drawn)
        mesh = maxjax.make_mesh(model=devices) if devices > 1 else None
        model, _ = maxjax.load(folder, mesh=mesh)
        if not stacked:
            model.unstack()
        ids = decoders.ids_of(2, 40, seed)
        expected = decoders.logits_of(theirs, ids)
        found = np.asarray(decoders.call(model, ids))
        worst = float(np.abs(found - expected).max() / expected.std())
        prompts = [decoders.ids_of(1, n, seed + n)[0].tolist() for n in (5, 33, 1)]
        texts = maxjax.generate(
            model, None, prompts, max_new_tokens=NEW, chunk=CHUNK, eos_ids=(), temperature=0.0
        )
        wrong = sum(
            differs(theirs, p, list(text.tokens)) for p, text in zip(prompts, texts, strict=True)
        )
    return worst, wrong, f"{devices} devices, {'stacked' if stacked else 'list'}: {drawn}"


def differs(theirs: Any, prompt: list[int], tokens: list[int]) -> int:
    """How many tokens are not the oracle's best after the same text, by more than rounding."""
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + tokens]).long()).logits[0].numpy()
    rows = logits[len(prompt) - 1 : -1]
    short = rows.max(-1) - rows[np.arange(len(tokens)), tokens]
    return int((short > 1e-4 * rows.std()).sum())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="the first; each one has its own")
    parser.add_argument("--quick", action="store_true", help="one of each")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    bad = 0
    for family in [options.family] if options.family else FAMILIES:
        worst, tokens, began = 0.0, 0, time.perf_counter()
        count = 1 if options.quick else options.count
        for seed in range(options.seed, options.seed + count):
            try:
                difference, wrong, what = one(family, seed)
            except Exception as error:
                difference, wrong, what = np.inf, 0, f"{type(error).__name__}: {error}"
            worst, tokens = max(worst, difference), tokens + wrong
            if difference > 1e-4 or wrong:
                bad += 1
                print(
                    f"{family} --seed {seed} --count 1: {difference:.1e}, {wrong} tokens; {what}",
                    flush=True,
                )
        print(
            f"{family:9} {count} configurations: logits differ by at most {worst:.1e} of their deviation, "
            f"{tokens} of {count * 3 * NEW} tokens; {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
