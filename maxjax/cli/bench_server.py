"""``maxjax bench --url``: measures a server of OpenAI's API. The terms are those of vLLM's ``bench serve``."""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

from ..columns import Table
from ..errors import UserInputError, printable
from .remote import RemoteServer, pieces, server_of

_WORDS = "apple river stone cloud green seven quiet north paper light music table winter bread glass".split()


class Answered(NamedTuple):
    """A request that has been answered: all times in seconds.

    Attributes:
        first: time to the first piece of text.
        gaps: times between pieces.
        whole: time to the end.
        read, written: numbers of tokens of the prompt and of the answer.
        error: why there is no answer; "" if there is one.
    """

    first: float = 0.0
    gaps: Sequence[float] = ()
    whole: float = 0.0
    read: int = 0
    written: int = 0
    error: str = ""


def bench_server(options: argparse.Namespace) -> Iterable[str | Table]:
    """Measures a server with random texts, so many requests at once."""
    server = server_of(options)
    prompts = list(random_texts(options.requests, options.prompt))
    ask(server, prompts[0], options.new)  # connections, and programs that are compiled at first use
    began = time.perf_counter()
    found = ask_all(server, prompts, options.new, options.concurrency)
    document = summary(found, time.perf_counter() - began)
    document = {
        "url": server.url,
        "model": server.model,
        "concurrency": options.concurrency,
    } | document
    return [json.dumps(document, indent=1)] if options.json else _table(document, found)


def random_texts(count: int, words: int, seed: int = 0) -> Iterator[str]:
    """Texts of about so many tokens, all different."""
    draw = random.Random(seed)
    for _ in range(count):
        yield " ".join(draw.choice(_WORDS) for _ in range(words))


def ask_all(
    server: RemoteServer, prompts: Sequence[str], new: int, concurrency: int
) -> list[Answered]:
    """Asks for an answer to each prompt, so many at once."""
    left, found, lock = iter(prompts), [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                return
            one = ask(server, prompt, new)
            with lock:
                found.append(one)

    threads = [threading.Thread(target=work) for _ in range(min(concurrency, len(prompts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ask(server: RemoteServer, prompt: str, new: int) -> Answered:
    """The answer to a prompt, of exactly ``new`` tokens where the server knows ``ignore_eos``."""
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    began, times, usage = time.perf_counter(), [], {}
    try:
        for when, found in pieces(server, "/completions", body):
            usage = found.get("usage") or usage
            if any(choice.get("text") for choice in found.get("choices") or ()):
                times.append(when)
    except UserInputError as error:
        return Answered(error=str(error))
    end = time.perf_counter()
    if not times or not usage:
        return Answered(error="the server has sent no text, or no numbers of tokens")
    return Answered(
        times[0] - began, [b - a for a, b in pairwise(times)], end - began, usage["prompt_tokens"],
        usage["completion_tokens"],
    )  # fmt: skip


def summary(found: Sequence[Answered], seconds: float) -> dict[str, Any]:
    """Rates, and the mean, median and 99th percentile of times in milliseconds.

    Raises:
        UserInputError: no request was answered.

    Example:
        >>> one = Answered(first=0.5, gaps=[0.1, 0.1], whole=0.7, read=4, written=3)
        >>> found = summary([one], 1.0)
        >>> found["output_tokens_s"], found["tpot_ms"]["median"]
        (3.0, 100.0)
    """
    good = [one for one in found if not one.error]
    if not good:
        raise UserInputError(
            f"no request was answered: {found[0].error if found else 'there is none'}"
        )
    written = sum(one.written for one in good)
    read = sum(one.read for one in good)
    later = lambda one: (one.whole - one.first) / (one.written - 1)
    return {
        "requests": len(good), "failed": len(found) - len(good), "seconds": seconds,
        "prompt_tokens": read, "output_tokens": written, "requests_s": len(good) / seconds,
        "output_tokens_s": written / seconds, "total_tokens_s": (written + read) / seconds,
        "ttft_ms": _times([one.first for one in good]),
        "tpot_ms": _times([later(one) for one in good if one.written > 1]),
        "itl_ms": _times([gap for one in good for gap in one.gaps]),
        "e2el_ms": _times([one.whole for one in good]),
    }  # fmt: skip


def _times(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"mean": 0.0, "median": 0.0, "p99": 0.0}
    last = sorted(seconds)[min(int(len(seconds) * 0.99), len(seconds) - 1)]
    values = {"mean": mean(seconds), "median": median(seconds), "p99": last}
    return {name: round(value * 1e3, 6) for name, value in values.items()}


_NAMES = {
    "ttft_ms": "time to first token", "tpot_ms": "time per output token", "itl_ms": "inter-token latency",
    "e2el_ms": "end-to-end latency",
}  # fmt: skip


def _table(found: dict[str, Any], asked: Sequence[Answered]) -> Iterator[str | Table]:
    failed = f", {found['failed']} failed" if found["failed"] else ""
    yield Table(
        [
            ["server", f"{found['url']}, model {printable(found['model'])}"],
            [
                "requests",
                f"{found['requests']}{failed}, {found['concurrency']} at once, {found['seconds']:.1f} s",
            ],
            ["tokens", f"{found['prompt_tokens']:,} read, {found['output_tokens']:,} written"],
            ["requests/s", f"{found['requests_s']:,.2f}"],
            ["output tok/s", f"{found['output_tokens_s']:,.1f}"],
            ["total tok/s", f"{found['total_tokens_s']:,.1f}"],
        ],
        titles=0,
    )
    yield ""
    rows = [
        [text, *(f"{found[name][kind]:,.2f}" for kind in ("mean", "median", "p99"))]
        for name, text in _NAMES.items()
    ]
    yield Table([["ms", "mean", "median", "p99"], *rows], right={1, 2, 3}, titles=1)
    errors = {one.error for one in asked if one.error}
    for error in sorted(errors)[:3]:
        yield f"failed: {printable(error)}"
