"""Many prompts: tokens a second of maxjax.Engine over those of llama-server and of transformers' generate_batch.

    python scripts/bench_engine_peers.py --server path/to/llama-server     # 256 prompts, 32 slots, 135 M, BF16
    python scripts/bench_engine_peers.py --quick                           # a tiny model; transformers only

All get the same random Llama, the same prompts, as many slots and threads, and the lengths of bench_engine.txt, which
they are not told beforehand. They choose the most probable token, and no token ends an answer. They run in turns;
printed are the ratios of each pair and their median.

llama-server is built from the source that the sdist of llama-cpp-python has (vendor/llama.cpp); its path is that of
--server or of the variable LLAMA_SERVER. Neither it nor transformers is needed: what is missing is not compared.
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
from maxjax import checkpoint

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
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--type", default="BF16", choices=("F32", "BF16", "Q8_0"))
    parser.add_argument("--server", default=os.environ.get("LLAMA_SERVER"))
    parser.add_argument("--quick", action="store_true", help="a tiny model and few prompts")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.slots, options.pairs = 12, 4, 1
    size = random_llama.SIZES["tiny" if options.quick else "135m"]
    rng, sizes = np.random.default_rng(0), lengths(options.prompts)
    work = [(rng.integers(0, size.vocab, prompt).tolist(), answer) for prompt, answer in sizes]
    longest = max(prompt + answer for prompt, answer in sizes)
    with tempfile.TemporaryDirectory() as place:
        stored = "F16" if options.type == "Q8_0" else options.type
        folder = random_llama.write_hf(Path(place) / "hf", size, stored)
        gguf = random_llama.write_gguf(Path(place) / "model.gguf", size, stored)
        if options.type == "Q8_0":
            checkpoint.convert(gguf, packed := Path(place) / "q8.gguf", quantize="Q8_0")
            gguf = packed
        with engine(gguf if options.type == "Q8_0" else folder, options.slots) as ours:
            if options.server:
                with llama_server(gguf, options.slots, options.server, longest) as theirs:
                    compare("llama-server", ours, theirs, work, options.pairs)
            else:
                print("without llama-server: --server or LLAMA_SERVER names it")
            if options.type != "Q8_0" and installed("torch", "transformers"):
                with generate_batch(folder, options.slots) as theirs:
                    # It is so much slower that a few prompts tell enough.
                    compare(
                        "generate_batch", ours, theirs, work[: options.prompts // 4], options.pairs
                    )


if __name__ == "__main__":
    main()
