"""Many prompts: tokens a second of maxjax.Engine over those of transformers' generate_batch and of llama-server.

    python scripts/bench_engine_peers.py                                   # transformers; a random Llama of 135 M
    python scripts/bench_engine_peers.py --server llama-server --model MODEL.gguf
    python scripts/bench_engine_peers.py --quick                           # a tiny model and few prompts

Both get the same weights, the same prompts, as many slots and threads, and the lengths of bench_engine.txt, which they
are not told beforehand. They choose the most probable token, and no token ends an answer. They run in turns; printed
are the ratio of each pair and the median.

llama-server is built from the source that the sdist of llama-cpp-python has (vendor/llama.cpp). It needs a GGUF file
with a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import random_llama
from bench_engine import lengths
from peers import installed

import maxjax

Work = list[tuple[list[int], int]]
Run = Callable[[Work], int]  # returns the number of tokens of the answers


@contextmanager
def engine(path: Path, slots: int) -> Iterator[Run]:
    """maxjax.Engine."""
    model, _ = maxjax.load(path, tokenizer=False)
    with maxjax.Engine(model, None, slots=slots) as made:
        made.compile()

        def run(work: Work) -> int:
            settings = {"eos_ids": (), "temperature": 0}
            answers = [made.submit(ids, max_new_tokens=n, **settings) for ids, n in work]
            return sum(len(answer.result().tokens) for answer in answers)

        yield run


@contextmanager
def llama_server(path: Path, slots: int, server: str, longest: int) -> Iterator[Run]:
    """llama-server, by HTTP on the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(os.cpu_count())
    command = [server, "-m", path, "--host", "127.0.0.1", "--port", str(port), "-np", str(slots),
               "-c", str(slots * longest), "-t", threads, "-tb", threads, "--threads-http", str(slots)]  # fmt: skip
    address = f"http://127.0.0.1:{port}"

    def answer(one: tuple[list[int], int]) -> int:
        ids, count = one
        asked = {"prompt": ids, "n_predict": count, "ignore_eos": True, "temperature": 0,
                 "cache_prompt": False}  # fmt: skip
        request = urllib.request.Request(
            f"{address}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as found:
            return json.load(found)["tokens_predicted"]

    def run(work: Work) -> int:
        with ThreadPoolExecutor(2 * slots) as pool:
            return sum(pool.map(answer, work))

    quiet = subprocess.DEVNULL
    with subprocess.Popen(list(map(str, command)), stdout=quiet, stderr=quiet) as process:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{address}/health").close()
                    break
                except OSError:
                    if process.poll() is not None:
                        raise RuntimeError("llama-server has ended") from None
                    time.sleep(0.1)
            yield run
        finally:
            process.terminate()


@contextmanager
def generate_batch(path: Path, slots: int) -> Iterator[Run]:
    """The continuous batching of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="sdpa")
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(max_batch_tokens=512, num_blocks=slots * 8, block_size=256)

    def run(work: Work) -> int:
        with torch.inference_mode(), model.continuous_batching_context_manager(
            settings, continuous_batching_config=sizes
        ) as manager:  # fmt: skip
            for ids, count in work:
                manager.add_request(ids, max_new_tokens=count)
            return sum(len(manager.get_result().generated_tokens) for _ in work)

    yield run


def compare(name: str, ours: Run, theirs: Run, work: Work, pairs: int) -> None:
    wanted = sum(count for _, count in work)

    def speed(run: Run) -> float:
        began = time.perf_counter()
        found = run(work)
        if found != wanted:
            raise RuntimeError(f"{found} tokens instead of {wanted}")
        return found / (time.perf_counter() - began)

    few = work[: max(4, len(work) // 8)]
    ours(few), theirs(few)  # the first call reads weights
    ratios = []
    for number in range(pairs):
        found = {run: speed(run) for run in ([ours, theirs] if number % 2 else [theirs, ours])}
        ratios.append(found[ours] / found[theirs])
        print(
            f"  {found[ours]:7.1f} and {found[theirs]:7.1f} tokens a second: {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"Engine over {name}: {statistics.median(ratios):.2f} ({len(work)} prompts)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--type", default="BF16", choices=("F32", "BF16"), help="of a random Llama")
    parser.add_argument("--server", help="llama-server; with --model")
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few prompts")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.slots, options.pairs = 12, 4, 1
    if (options.server is None) != (options.model is None):
        parser.error("--server and --model go together")
    size = random_llama.SIZES["tiny" if options.quick else "135m"]
    rng, sizes = np.random.default_rng(0), lengths(options.prompts)
    work = [(rng.integers(0, size.vocab, prompt).tolist(), answer) for prompt, answer in sizes]
    if options.server:
        longest = max(prompt + answer for prompt, answer in sizes)
        with (
            engine(options.model, options.slots) as ours,
            llama_server(options.model, options.slots, options.server, longest) as theirs,
        ):
            compare("llama-server", ours, theirs, work, options.pairs)
    elif installed("torch", "transformers"):
        with tempfile.TemporaryDirectory() as place:
            folder = random_llama.write_hf(Path(place) / "hf", size, options.type)
            with (
                engine(folder, options.slots) as ours,
                generate_batch(folder, options.slots) as theirs,
            ):
                compare("generate_batch", ours, theirs, work, options.pairs)


if __name__ == "__main__":
    main()
