"""Many prompts: slots that are filled again against the same engine with batches that end with their longest text.

    python scripts/bench_engine.py                       # 512 prompts, 32 slots, a random Llama of 135 M
    python scripts/bench_engine.py --quick               # a tiny model and few prompts, in seconds
    python scripts/bench_engine.py --only busy --prompts 2048   # only counts, which are the same on each machine
    python scripts/bench_engine.py --only prefix         # a common beginning of 1,024 tokens
    python scripts/bench_engine.py --only speculation --model SmolLM2-135M-Instruct.Q4_1.gguf   # real texts

Lengths of prompts are log-normal (median 48, sigma 0.8, 4 to 512), those of answers too (median 32, sigma 1, 1 to 256);
they are read from bench_engine.txt. An answer's length is the largest number of its tokens, which no scheduler looks at
to decide which text is next. Both ways run in turns, in one process; printed are medians of ratios of pairs.

batches  decode steps, CPU seconds of reading and of writing, tokens a second: engine over batches
busy     share of the slots that write, until the last prompt has started and over all, with a model of no size: with
         one step in each dispatch, and with the most, so that nothing depends on times
prefix   time to the first token of 64 prompts with a common beginning, second over first
speculation  tokens a second of one stream with guesses over without; and whether the text is the same
schemas  seconds of answers with a JSON schema over those of the same lengths without; and of all, if two have one
python   seconds of Python for a step of all slots, with a model of no size
adapters tokens a second with four LoRA adapters of rank 16 of all linear layers, one in each slot, over none
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import random_llama

import maxjax
from maxjax.engine.batching.adapters import Adapters
from maxjax.engine.batching.compile import _compile
from maxjax.engine.batching.draft import Drafts
from maxjax.engine.batching.memory import page_size_of
from maxjax.engine.batching.running import RunningText, running_text
from maxjax.engine.batching.scheduler import Scheduler
from maxjax.engine.bucket import bucket
from maxjax.engine.generate.request import Prompt, Request
from maxjax.lora.side_by_side import updates_of

LENGTHS = Path(__file__).with_suffix(".txt")
SUMMARIES = Path(__file__).with_name("bench_engine_summaries.txt")


def lengths(count: int) -> list[tuple[int, int]]:
    """The lengths of so many prompts and answers."""
    rows = [line.split() for line in LENGTHS.read_text().splitlines() if not line.startswith("#")]
    found = [(int(prompt), int(answer)) for prompt, answer in rows]
    return [found[i % len(found)] for i in range(count)]


class Times:
    """Wall and CPU seconds, by a name."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def of(self, name: str, function: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        found = function()
        self.wall[name] = self.wall.get(name, 0) + time.perf_counter() - wall
        self.cpu[name] = self.cpu.get(name, 0) + time.process_time() - cpu
        return found


class Timed(Scheduler):
    """A scheduler that counts the seconds of reading and of writing."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.times = Times()

    def read(self) -> None:
        self.times.of("read", super().read)

    def write(self) -> None:
        self.times.of("write", super().write)


def with_slots(
    model: Any,
    work: list[tuple[list[int], int]],
    slots: int,
    adapters: Adapters | None = None,
    **more: Any,
) -> dict[str, float]:
    """Each prompt as soon as a slot is free, with each of the adapters in turn; ``more`` is for the scheduler."""
    return written(model, [work], slots, adapters, **more)


def batch_after_batch(
    model: Any, work: list[tuple[list[int], int]], slots: int
) -> dict[str, float]:
    """Batches of prompts of similar length, of which the next one waits until all texts of the last have ended."""
    order = sorted(work, key=lambda one: len(one[0]))
    return written(model, [order[i : i + slots] for i in range(0, len(order), slots)], slots)


def written(
    model: Any, parts: list[list[tuple[list[int], int]]], slots: int, adapters: Adapters | None = None,
    **more: Any,
) -> dict[str, float]:  # fmt: skip
    """The figures of a scheduler that gets one part of the work after the other."""
    names = (None,) if adapters is None else adapters.names
    work = [one for part in parts for one in part]
    size = page_size_of(model)
    pages = bucket(sum(sorted(-(-(len(p) + n) // size) for p, n in work)[-slots:]))
    scheduler = Timed(model, slots, pages, adapters=adapters, **more)
    number, texts = 0, []
    began, started = time.perf_counter(), None
    for part in parts:
        for ids, n in part:
            texts.append(text_of(model, ids, n, number, adapter=names[number % len(names)]))
            scheduler.add(texts[-1])
            number += 1
        while scheduler.is_busy:
            scheduler.step()
            if started is None and not scheduler.waiting and part is parts[-1]:
                started = scheduler.steps, scheduler.busy_rows
    taken, times = time.perf_counter() - began, scheduler.times
    assert started is not None and all(text.error is None for text in texts)
    scheduler.close()
    tokens = sum(n for _, n in work)
    return {
        "seconds": taken, "tokens": tokens / taken, "steps": scheduler.steps, "read cpu": times.cpu["read"],
        "write cpu": times.cpu["write"], "busy until the last start": started[1] / max(started[0] * slots, 1),
        "busy": scheduler.busy_rows / (scheduler.steps * slots),
    }  # fmt: skip


def text_of(model: Any, ids: list[int], new: int, number: int, **options: Any) -> RunningText:
    request = Request(model, None, new, None, (), None, {})
    return running_text(request, Prompt(ids, None, False), None, number, number=number, **options)


def work_of(model: Any, count: int) -> list[tuple[list[int], int]]:
    """So many prompts, and the lengths of their answers."""
    rng = np.random.default_rng(0)
    size = model.config.vocab_size
    return [(rng.integers(0, size, prompt).tolist(), answer) for prompt, answer in lengths(count)]


def batches(model: Any, options: argparse.Namespace) -> None:
    work = work_of(model, options.prompts)
    few = work[: 2 * options.slots]
    with_slots(model, few, options.slots), batch_after_batch(model, work, options.slots)  # compile
    pairs = []
    for number in range(options.pairs):
        ways = [with_slots, batch_after_batch][:: 1 if number % 2 else -1]
        found = {way: way(model, work, options.slots) for way in ways}
        pairs.append((found[with_slots], found[batch_after_batch]))
        print({k: round(v, 3) for k, v in pairs[-1][0].items()})
        print({k: round(v, 3) for k, v in pairs[-1][1].items()}, flush=True)
    print(f"{options.prompts} prompts, {options.slots} slots: slots filled again over batches")
    for name in ("steps", "read cpu", "write cpu", "tokens"):
        ratio = statistics.median(a[name] / b[name] for a, b in pairs)
        print(f"  {name:10} {ratio:.2f}")
    for name in ("busy until the last start", "busy"):
        print(f"  {name}: {statistics.median(a[name] for a, _ in pairs):.1%}")


def prefix(model: Any, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    size = model.config.vocab_size
    ratios = []
    for number in range(options.pairs + 1):
        common = rng.integers(0, size, 1024).tolist()
        prompts = [[*common, *rng.integers(0, size, 16).tolist()] for _ in range(64)]
        with maxjax.Engine(model, None, slots=options.slots, cache_bytes=None) as engine:
            first = []
            for prompt in prompts[:2]:
                began = time.perf_counter()
                engine.submit(prompt, max_new_tokens=1).result()
                first.append(time.perf_counter() - began)
            if number:  # the first one compiles
                ratios.append(first[1] / first[0])
    print(f"prefix     second over first: {statistics.median(ratios):.3f}")


def adapters(model: Any, options: argparse.Namespace) -> None:
    work = work_of(model, 4 * options.slots)
    several = Adapters(model)
    for number in range(4):
        tuned = maxjax.lora.add(model, rank=16, key=jax.random.key(number))
        several.add(str(number), updates_of(model, tuned), ())
    for each in (None, several):  # compile
        with_slots(model, work, options.slots, each)
    ratios = []
    for number in range(options.pairs):
        ways = [None, several][:: 1 if number % 2 else -1]
        found = {each: with_slots(model, work, options.slots, each)["tokens"] for each in ways}
        ratios.append(found[several] / found[None])
    print(f"adapters   tokens a second, four over none: {statistics.median(ratios):.2f}")


def compile_plain(scheduler: Scheduler) -> None:
    """Compiles the programs for texts without penalties and biases."""
    _compile(scheduler, False)
    if isinstance(scheduler.speculation, Drafts):
        scheduler.speculation.compile()


def speculation(model: Any, options: argparse.Namespace) -> None:
    """One stream with guesses and without: tokens a second after the first one."""
    tokenizer, draft = None, None
    rng = np.random.default_rng(2)
    ids = rng.integers(0, model.config.vocab_size, 64).tolist()
    hot = {"temperature": 1.0, "key": jax.random.key(1)}
    jobs: dict[str, tuple[Any, dict[str, Any]]] = {
        "a text that repeats itself": (ids, {}),
        "nothing is found": (ids, hot),
    }
    if options.model is not None:
        model, tokenizer = maxjax.load(
            options.model, dtype=random_llama.CONFIG_DTYPES[options.type]
        )
        draft, _ = maxjax.load(options.model)
        texts = SUMMARIES.read_text().split("\n\n")
        jobs = {
            f"{task} {number}": (f"{task} the following text.\n\n{' '.join(text.split())}", {})
            for number, text in enumerate(texts, 1)
            for task in ("Summarize", "Correct the spelling of")
        }
        jobs["nothing is found"] = ("Write a story about a dog and a lighthouse.", hot)
    new = 48 if options.quick else 160
    ways: dict[str, dict[str, Any]] = {
        "lookup": {"speculation": "lookup"},
        "draft": {"draft": draft},
    }
    engines = {
        name: maxjax.Engine(model, tokenizer, slots=1, **way)
        for name, way in {"plain": {}, **ways}.items()
        if name != "draft" or draft is not None
    }
    for engine in engines.values():
        engine._worker.call(compile_plain)
    for job, (prompt, settings) in jobs.items():
        rates: dict[str, list[float]] = {name: [] for name in engines}
        found, before = {}, {name: engine.stats() for name, engine in engines.items()}
        for number in range(options.pairs):
            for name in list(engines)[:: 1 if number % 2 else -1]:
                answer = engines[name].submit(prompt, max_new_tokens=new, eos_ids=(), **settings)
                while not answer.completion.tokens:
                    time.sleep(1e-3)
                began, first = time.perf_counter(), len(answer.completion.tokens)
                found[name] = answer.result()
                rates[name].append((new - first) / (time.perf_counter() - began))
        for name in list(engines)[1:]:
            ratio = statistics.median(
                a / b for a, b in zip(rates[name], rates["plain"], strict=True)
            )
            stats, old = engines[name].stats(), before[name]
            made = stats.guessed_tokens - old.guessed_tokens
            right = stats.right_tokens - old.right_tokens
            same = "equal" if found[name].tokens == found["plain"].tokens else "different"
            print(
                f"{name:10} {job}: {statistics.median(rates[name]):.1f} tokens a second, {ratio:.2f} times as many; "
                f"{right} of {made} guesses right; text {same}", flush=True,
            )  # fmt: skip
    for engine in engines.values():
        engine.close()


def drawn_schema(rng: np.random.Generator) -> dict[str, Any]:
    """A schema of an object whose values have at most a few characters."""
    kinds = [
        {"type": "integer", "minimum": -20, "maximum": 20},
        {"type": "boolean"},
        {"type": "string", "maxLength": 12},
        {"enum": ["red", "blue", "green"]},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    ]
    names = ["name", "colour", "count", "is_open", "places", "size"][: rng.integers(2, 7)]
    each = {name: kinds[rng.integers(len(kinds))] for name in names}
    return {"type": "object", "properties": each, "required": names, "additionalProperties": False}


def schemas(options: argparse.Namespace) -> None:
    """Answers with a schema each over answers of the same lengths without, and what schemas cost others."""
    dtype = random_llama.CONFIG_DTYPES[options.type]
    model, tokenizer = maxjax.load(options.model or "tiny", dtype=dtype)
    rng = np.random.default_rng(3)
    drawn = [drawn_schema(rng) for _ in range(2 * options.slots)]
    prompts = [f"Describe house number {i} in JSON." for i in range(len(drawn))]
    hot = {"temperature": 1.0}
    with maxjax.Engine(model, tokenizer, slots=options.slots) as engine:

        def run(jobs: list[dict[str, Any]]) -> tuple[float, float, list[int]]:
            """The wall and CPU seconds for these answers, and the numbers of their tokens."""
            wall, cpu = time.perf_counter(), time.process_time()
            keys = [jax.random.key(i) for i in range(len(jobs))]
            each = zip(prompts, keys, jobs, strict=True)
            answers = [engine.submit(p, key=key, **hot, **job) for p, key, job in each]
            counts = [len(answer.result().tokens) for answer in answers]
            return time.perf_counter() - wall, time.process_time() - cpu, counts

        if not options.quick:
            engine._worker.call(compile_plain)
        with_schema = [{"schema": one, "max_new_tokens": 400} for one in drawn]
        _, _, counts = run(with_schema)
        plain = [{"max_new_tokens": count, "eos_ids": ()} for count in counts]
        # Two answers have a schema, and all others are long.
        long = [{"max_new_tokens": 64, "eos_ids": ()} for _ in drawn]
        beside = [{"regex": "[a-z ]{1000}", "max_new_tokens": 64} for _ in drawn[:2]] + long[2:]
        for name, job, other in (("all", with_schema, plain), ("two of all", beside, long)):
            run(job), run(other)
            pairs = []
            for number in range(options.pairs):
                found = {}
                for which in (0, 1)[:: 1 if number % 2 else -1]:
                    found[which] = run((job, other)[which])
                assert found[0][2] == found[1][2]
                pairs.append([found[0][i] / found[1][i] for i in (0, 1)])
            wall, cpu = (statistics.median(pair) for pair in zip(*pairs, strict=True))
            print(
                f"schemas    {name} of {len(drawn)} answers have one: seconds {wall:.3f}, CPU seconds {cpu:.3f}, "
                "over the same lengths without", flush=True,
            )  # fmt: skip


def model_of_no_size() -> Any:
    config = maxjax.models.LlamaConfig(64, 8, 8, num_hidden_layers=1, num_attention_heads=1)
    return maxjax.init(maxjax.models.Llama(config), jax.random.key(0))


def busy(options: argparse.Namespace) -> None:
    model = model_of_no_size()
    work = work_of(model, options.prompts)
    for name, dispatch_s in (("one step", 0.0), ("most steps", float("inf"))):
        found = with_slots(model, work, options.slots, dispatch_s=dispatch_s)
        print(
            f"busy       {name} in each dispatch: {found['busy until the last start']:.1%} until the last prompt of "
            f"{options.prompts:,} has started, {found['busy']:.1%} over all {found['steps']:,} steps",
            flush=True,
        )


def python(options: argparse.Namespace) -> None:
    model = model_of_no_size()
    scheduler = Scheduler(model, options.slots, options.slots * 8)
    scheduler._most_steps = 1
    for i in range(options.slots):
        scheduler.add(text_of(model, [1, 2, 3], 400, i))
    scheduler.step()
    seconds = []
    for _ in range(100):
        scheduler._most_steps = 1
        began = time.perf_counter()
        scheduler.step()
        seconds.append(time.perf_counter() - began)
    print(
        f"python     a step of {options.slots} slots: {1e3 * statistics.median(seconds):.2f} ms, the model included"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--type", default="BF16", choices=random_llama.DTYPES)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few prompts")
    parser.add_argument(
        "--only",
        choices=("batches", "busy", "prefix", "adapters", "speculation", "schemas", "python"),
    )
    parser.add_argument(
        "--model",
        help="a chat model for speculation and schemas, of whose file a quantised one is the draft",
    )
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.slots, options.pairs = 24, 4, 1
    if options.only not in ("busy", "python"):
        with tempfile.TemporaryDirectory() as place:
            size = random_llama.SIZES["tiny" if options.quick else "135m"]
            model, _ = maxjax.load(random_llama.write_hf(place, size, options.type))
            if options.only in (None, "batches"):
                batches(model, options)
            if options.only in (None, "prefix"):
                prefix(model, options)
            if options.only in (None, "adapters"):
                adapters(model, options)
            if options.only in (None, "speculation"):
                speculation(model, options)
    if options.only in (None, "busy"):
        busy(options)
    if options.only in (None, "schemas"):
        schemas(options)
    if options.only in (None, "python"):
        python(options)


if __name__ == "__main__":
    main()
