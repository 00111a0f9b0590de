"""maxjax serve: what it costs over its engine, and against llama-server.

    python scripts/bench_serve.py --quick                      # the model "tiny" and seconds
    python scripts/bench_serve.py --model MODEL.gguf           # load, first
    python scripts/bench_serve.py --model MODEL.gguf --only peer --server llama-server

Server and clients run on one machine, over the loopback. The model has a tokenizer; answers are greedy, and of
given lengths (ignore_eos).

load   --clients streaming clients for --minutes: errors, answers that differ from the same request alone, memory at the
       end over memory after a fifth of the time, CPU seconds of the server for a token over those of an Engine that
       gets the same requests
first  CPU milliseconds of the server until the first token of one client, beyond those of an idle Engine
peer   tokens a second over llama-server's, and the median time to the first token over its; in pairs
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import maxjax
from maxjax.cli.bench_server import ask, ask_all, random_texts
from maxjax.cli.remote import RemoteServer, pieces

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process_of(command: Sequence[str], url: str, path: str) -> Iterator[int]:
    """Runs a server until ``path`` answers with 200, and ends it afterwards."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(list(map(str, command)), stdout=quiet, stderr=quiet) as process:
        try:
            for _ in range(6000):
                try:
                    urllib.request.urlopen(url + path).close()
                    break
                except OSError:
                    if process.poll() is not None:
                        raise RuntimeError(f"{command[0]} has ended") from None
                    time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def maxjax_server(
    model: str, slots: int, is_quick: bool = False
) -> Iterator[tuple[RemoteServer, int]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "maxjax", "serve", model, "--port", port, "--slots", slots, "--name", "m",
               *(["--no-compile"] if is_quick else [])]  # fmt: skip
    with process_of(command, url, "/ready") as pid:
        yield RemoteServer(url, None, "m"), pid


@contextmanager
def llama_server(model: str, slots: int, binary: str) -> Iterator[RemoteServer]:
    port, threads = free_port(), os.cpu_count()
    url = f"http://127.0.0.1:{port}"
    command = [binary, "-m", model, "--port", port, "-np", slots, "-c", slots * 2048, "-t", threads, "-tb", threads,
               "--threads-http", slots, "--no-webui"]  # fmt: skip
    with process_of(command, url, "/health"):
        yield RemoteServer(url, None, "m")


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_of(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def text_of(server: RemoteServer, prompt: str, new: int) -> str:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    found = [one.body.get("choices") or () for one in pieces(server, "/completions", body)]
    return "".join(choice.get("text") or "" for choices in found for choice in choices)


def load(options: argparse.Namespace) -> None:
    prompts = list(random_texts(options.clients, 24))
    news = [8 + 8 * (i % 5) for i in range(len(prompts))]
    problems: list[str] = []
    counts = [0] * len(prompts)
    with maxjax_server(options.model, options.slots, options.quick) as (server, pid):
        alone = [text_of(server, *one) for one in zip(prompts, news, strict=True)]
        until = time.monotonic() + 60 * options.minutes

        def client(i: int) -> None:
            while time.monotonic() < until:
                try:
                    if text_of(server, prompts[i], news[i]) != alone[i]:
                        problems.append("another answer")
                except Exception as error:
                    problems.append(repr(error))
                counts[i] += 1

        threads = [Thread(target=client, args=(i,)) for i in range(len(prompts))]
        began = cpu_of(pid)
        for thread in threads:
            thread.start()
        time.sleep(60 * options.minutes / 5)
        early = memory_of(pid)
        for thread in threads:
            thread.join()
        cpu, late = cpu_of(pid) - began, memory_of(pid)
    tokens = sum(n * count for n, count in zip(news, counts, strict=True))
    own = engine_cpu(options, prompts, news)
    print(
        f"load   {sum(counts):,} requests of {len(prompts)} clients, {tokens:,} tokens: {len(problems)} problems "
        f"{sorted(set(problems))[:2] if problems else ''}; memory {late / early:.3f}; CPU for a token "
        f"{cpu / tokens / own:.3f} of the engine's {1e3 * own:.2f} ms"
    )


def engine_cpu(options: argparse.Namespace, prompts: Sequence[str], news: Sequence[int]) -> float:
    """CPU seconds of an Engine for a token, with the same requests by as many threads."""
    model, tokenizer = maxjax.load(options.model)
    with maxjax.Engine(model, tokenizer, slots=options.slots) as engine:
        if not options.quick:
            engine.compile()

        def client(rounds: int, prompt: str, new: int) -> int:
            settings = {"chat": False, "max_new_tokens": new, "temperature": 0, "eos_ids": ()}
            answers = (engine.submit(prompt, **settings).result() for _ in range(rounds))
            return sum(len(answer.tokens) for answer in answers)

        def run(rounds: int) -> int:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return sum(
                    pool.map(lambda one: client(rounds, *one), zip(prompts, news, strict=True))
                )

        run(1)
        began = time.process_time()
        tokens = run(options.rounds)
        return (time.process_time() - began) / tokens


def first(options: argparse.Namespace) -> None:
    (prompt,) = random_texts(1, 24)
    model, tokenizer = maxjax.load(options.model)
    found: list[float] = []
    with (
        maxjax.Engine(model, tokenizer, slots=options.slots) as engine,
        maxjax_server(options.model, options.slots, options.quick) as (server, pid),
    ):
        if not options.quick:
            engine.compile()

        def served() -> float:
            began = cpu_of(pid)
            for _ in range(20):  # the clock of a process has 10 ms
                ask(server, prompt, 1)
            return (cpu_of(pid) - began) / 20

        def own() -> float:
            began = time.process_time()
            for _ in range(20):
                engine.submit(
                    prompt, chat=False, max_new_tokens=1, temperature=0, eos_ids=()
                ).result()
            return (time.process_time() - began) / 20

        served(), own()
        for i in range(options.pairs):
            both: dict[Callable[[], float], float] = {}
            for one in (served, own)[:: 1 if i % 2 else -1]:
                both[one] = one()
            found.append(both[served] - both[own])
    print(
        f"first  {1e3 * statistics.median(found):.2f} ms of CPU beyond the engine's, {options.pairs} pairs of 20"
    )


def peer(options: argparse.Namespace) -> None:
    rates, firsts = [], []
    with (
        maxjax_server(options.model, options.slots, options.quick) as (ours, _),
        llama_server(options.model, options.slots, options.server) as theirs,
    ):
        for server in (ours, theirs):
            ask_all(server, list(random_texts(16, 48)), 32, 16)
        for i in range(options.pairs):
            # Others in each pair: both servers keep the beginnings that they have read.
            prompts = list(random_texts(options.requests, 48, seed=i + 1))
            rate, time_to_first = {}, {}
            for server in (ours, theirs)[:: 1 if i % 2 else -1]:
                began = time.perf_counter()
                found = ask_all(server, prompts, 32, 16)
                assert not any(one.error for one in found), {one.error for one in found}
                rate[server] = sum(one.written for one in found) / (time.perf_counter() - began)
                time_to_first[server] = statistics.median(one.first for one in found)
            rates.append(rate[ours] / rate[theirs])
            firsts.append(time_to_first[ours] / time_to_first[theirs])
            print(f"  {rate[ours]:.1f} and {rate[theirs]:.1f} tokens a second", flush=True)
    print(
        f"peer   tokens a second {statistics.median(rates):.2f}, time to first token {statistics.median(firsts):.2f} "
        f"of llama-server's, 16 clients, {options.pairs} pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", default="tiny", help="a directory or a GGUF file with a tokenizer"
    )
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--rounds", type=int, default=4, help="requests of each client to the Engine alone"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--server", help="the path of llama-server")
    parser.add_argument("--only", choices=("load", "first", "peer"))
    parser.add_argument("--quick", action="store_true", help="few clients, for seconds")
    options = parser.parse_args()
    if options.quick:
        options.slots, options.clients, options.minutes, options.pairs, options.rounds = (
            4,
            8,
            0.1,
            1,
            1,
        )
    if options.only in (None, "load"):
        load(options)
    if options.only in (None, "first"):
        first(options)
    if options.only == "peer":
        if not options.server or not re.search(r"\.gguf$", options.model):
            parser.error("--only peer needs --server and a GGUF file")
        peer(options)


if __name__ == "__main__":
    main()
