"""MiniLM: the differences to transformers on torch, and the speed compared with it.

    python scripts/bench_embed.py [--quick]

First it measures the differences over 240 texts (60 with --quick) of 2 to 256 tokens, padded batches
included. Then it measures texts per second of the two in turn on the same texts, sorted by length and in
batches of 32 on both sides, in float32 and in bfloat16: the median and the range of the paired ratios.
Needs the MiniLM checkpoint (scripts/setup.sh), torch and transformers (scripts/setup.sh --oracles).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.oracles

from scripts.minilm import minilm_directory
from scripts.peers import installed
from tests.oracles.make_minilm_golden import embeddings, reference
from tests.oracles.sentences import WORDS, sentences

CONFIGURATIONS = {
    "float32": {"dtype": "float32"},
    "bfloat16, reductions in float32": {"dtype": "bfloat16"},
    "bfloat16 throughout": {"dtype": "bfloat16", "reduce_dtype": "bfloat16"},
}


def accuracy(directory: Path, texts: list[str]) -> None:
    """Prints one line for each configuration."""
    import maxjax

    expected = embeddings(directory, texts).astype(np.float64)
    print(f"differences from transformers in float32, {len(texts)} texts of 2 to 256 tokens")
    for name, options in CONFIGURATIONS.items():
        model, tokenizer = maxjax.load(directory, **options)
        found = maxjax.embed(model, tokenizer, texts).astype(np.float64)
        cosine = (found * expected).sum(1) / np.linalg.norm(found, axis=1)
        error = np.abs(found - expected).max()
        print(f"  {name:32s} max abs {error:.1e}   least cosine {cosine.min():.6f}")


def many_texts(count: int) -> list[str]:
    """Texts with lengths like those of sentences: 22 tokens in the mean, most 10 to 40, some longer."""
    rng = random.Random(0)
    lengths = [min(max(round(rng.lognormvariate(2.88, 0.5)), 1), 100) for _ in range(count)]
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def torch_runner(
    directory: Path, batch_size: int = 32, dtype: str = "float32"
) -> Callable[[list[str]], object]:
    """A function that embeds as sentence-transformers does: longest texts first, batches padded."""
    import torch

    tokenizer, model = reference(directory, attention="sdpa")
    model = model.to(getattr(torch, dtype))

    def run(texts: list[str]) -> object:
        ordered = sorted(texts, key=len, reverse=True)
        found = []
        with torch.inference_mode():
            for start in range(0, len(ordered), batch_size):
                part = ordered[start : start + batch_size]
                batch = tokenizer(
                    part, padding=True, truncation=True, max_length=256, return_tensors="pt"
                )
                states = model(**batch).last_hidden_state
                mask = batch["attention_mask"][..., None].float()
                mean = (states.float() * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
                found.append(torch.nn.functional.normalize(mean, dim=1))
        return torch.cat(found)

    return run


def seconds(run: Callable[[list[str]], object], texts: list[str]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run(texts)
    return time.perf_counter() - start


def speed(directory: Path, quick: bool, dtype: str) -> None:
    """Prints one line for each kind of text."""
    import maxjax

    model, tokenizer = maxjax.load(directory, dtype=dtype)
    ours = lambda texts: maxjax.embed(model, tokenizer, texts)
    theirs = torch_runner(directory, dtype=dtype)
    count, rounds = (32, 3) if quick else (128, 5)
    every = sentences(256)
    kinds = {"1 text of 12 tokens": 1, f"{count} texts of 12 tokens": count}
    jobs = {name: [" ".join(every[-1].split()[:10])] * n for name, n in kinds.items()}
    jobs[f"{count} texts of 3 to 256 tokens"] = every[-count:]
    jobs[f"{8 * count:,} texts of 22 tokens in the mean"] = many_texts(8 * count)
    print(f"{dtype}: texts per second; ratio = maxjax over torch, paired")
    for name, texts in jobs.items():
        ours(texts), theirs(texts)  # compile, and warm up
        pairs = [(seconds(ours, texts), seconds(theirs, texts)) for _ in range(rounds)]
        ratios = sorted(torch / jax for jax, torch in pairs)
        rate = [len(texts) / statistics.median(column) for column in zip(*pairs, strict=True)]
        print(
            f"  {name:38s} maxjax {rate[0]:8.1f}   torch {rate[1]:8.1f}   "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer texts and rounds")
    quick = parser.parse_args().quick
    if not installed("torch", "transformers"):
        return
    directory = minilm_directory()
    if directory is None:
        sys.exit("the MiniLM checkpoint is not installed: run scripts/setup.sh")
    accuracy(directory, sentences(60) if quick else sentences())
    for dtype in ("float32", "bfloat16"):
        speed(directory, quick, dtype)


if __name__ == "__main__":
    main()
