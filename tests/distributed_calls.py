"""Scenarios of `distributed_worker.py` in which several processes use one model together.

`answers` and `files` also run in a single process, for comparison.
"""

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import maxjax
from maxjax import checkpoint
from maxjax.engine.batching.calls import Calls
from maxjax.engine.batching.scheduler import Scheduler
from maxjax.errors import PeerLostError
from maxjax.graph.weights.gathering import Gathering
from maxjax.lockstep import Lockstep
from maxjax.models import Qwen2, Qwen2Config
from maxjax.storage.files import OpenFile
from maxjax.text.stream import TextStream
from scripts.minilm import minilm_directory

Tell = Callable[..., None]
PROMPTS = ["What is 37 + 48?", "What is 5 + 6?", "Tell me a story", "x"]
SENTENCES = ["a sentence", "another one, that is a bit longer than the first", "", "one two three"]
LARGEST = "100KB"  # the largest file: the tiny model has 15 to 30


def _mesh(axes: dict[str, int]) -> Any:
    count = int(np.prod(list(axes.values())))
    return maxjax.make_mesh(**axes, devices=jax.devices()[:count])


def _told(completion: Any) -> list[Any]:
    return [str(completion), completion.tokens, completion.finish_reason, completion.stop]


def answers(axes: dict[str, int], all_of_them: bool) -> dict[str, Any]:
    """Texts of one model on a mesh, and what each stream yielded until it was closed."""
    me = jax.process_index()
    model, tokenizer = maxjax.load("tiny", mesh=_mesh(axes))
    found: dict[str, Any] = {}

    def generated(name: str, prompts: Any, **values: Any) -> None:
        found[name] = list(map(_told, maxjax.generate(model, tokenizer, prompts, **values)))

    sampled = {"temperature": 1.0, "top_p": 0.9, "key": jax.random.key(3), "eos_ids": ()}
    generated("sampled", PROMPTS[:2], max_new_tokens=70, stop=["37 + 4"], **sampled)
    for name, closes in (
        ("read to the end", []), ("closed on all", [0, 1, 2, 3]), ("closed on the first", [0]),
        ("closed on others", [1, 2, 3]),
    ):  # fmt: skip
        pieces = maxjax.stream(model, tokenizer, PROMPTS[0])
        given = []
        for piece in pieces:
            given.append(piece)
            if len(given) == 2 and me in closes:
                pieces.close()
                break
        found[name] = _told(pieces.completion)
    if not all_of_them:
        return found
    generated("greedy", PROMPTS, max_new_tokens=40)
    generated("stops", PROMPTS, max_new_tokens=40, stop=["= 8", "11"])
    generated("in batches", PROMPTS[:3], max_new_tokens=20, batch_size=2)
    generated("penalties", PROMPTS[:2], max_new_tokens=20, repetition_penalty=1.3)
    generated(
        "sequences",
        PROMPTS[:2],
        max_new_tokens=20,
        no_repeat_ngram_size=2,
        bad_words=["= 8", [4, 5]],
    )
    generated("int8", PROMPTS[:2], max_new_tokens=20, cache_dtype="int8")
    pieces = maxjax.stream(model, tokenizer, PROMPTS[2], max_new_tokens=200, chunk=16, **sampled)
    found["long"] = ["".join(pieces), *_told(pieces.completion)]
    chat = maxjax.Conversation(model, tokenizer, temperature=1.0, key=jax.random.key(5))
    for prompt in PROMPTS[:3]:
        stream = chat.say(prompt)
        if prompt == PROMPTS[1]:
            next(stream)  # the next iteration interrupts the stream
        else:
            list(stream)
    found["chat"] = chat.messages
    rates = maxjax.generate(model, tokenizer, PROMPTS[:2], max_new_tokens=12, logprobs=2)
    text = "".join(f"{prompt}\n" for prompt in PROMPTS)
    scored = maxjax.perplexity(model, tokenizer, text, context=16, batch_size=2)
    losses = [math.log(scored.perplexity)]
    losses += [one.total for one in maxjax.score(model, tokenizer, PROMPTS[:3], logprobs=1)]
    found["logprobs"] = [[one.logprob for one in text.logprobs] for text in rates] + [losses]
    return found


def files(axes: dict[str, int], directory: Path, all_of_them: bool) -> dict[str, str]:
    """Digests of the files of a model on a mesh: saved as one file, and cast and saved as small files."""
    mesh = _mesh(axes)
    model, tokenizer = maxjax.load("tiny", mesh=mesh)
    maxjax.save_pretrained(model, directory, tokenizer=tokenizer)
    if all_of_them:
        more = {"max_shard_size": LARGEST, "dtype": "float32"}
        maxjax.save_pretrained(model, directory / "small", **more)
        encoder, _ = maxjax.load(minilm_directory(), mesh=mesh, tokenizer=False)
        maxjax.save_pretrained(encoder, directory / "encoder")
    return {
        file.relative_to(directory).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def engine_answers(
    axes: dict[str, int], directory: Path, all_of_them: bool, **options: Any
) -> dict[str, Any]:
    """What an engine answers on a mesh; in processes that only follow, what they are told instead."""
    # In float32 rounding decides between no two tokens.
    path = directory / "windows" if options.pop("has_windows", False) else "tiny"
    model, tokenizer = maxjax.load(path, mesh=_mesh(axes), dtype="float32")
    if options.pop("has_draft", False):
        options["draft"] = model
    found: dict[str, Any] = {}
    adapter = directory / "adapter"
    if all_of_them:
        options = {"slots": 2, "adapters": {"first": adapter}, **options}
    else:
        options = {"slots": 2, "exact": True}  # so the fewest programs are compiled
    with maxjax.Engine(model, tokenizer, **options) as engine:
        if jax.process_index():
            found["refused"] = [
                _raised(lambda: engine.submit("x")), _raised(engine.stats),
                _raised(lambda: maxjax.generate(model, tokenizer, "x")),
                _raised(lambda: maxjax.Engine(model, tokenizer)),
            ]  # fmt: skip
            return found
        submit = lambda prompt, **values: engine.submit(prompt, **{"max_new_tokens": 20} | values)
        several = [submit(one, priority=i % 2) for i, one in enumerate(PROMPTS)]
        sampled = {"temperature": 1.0, "top_p": 0.9, "eos_ids": ()}
        several.append(submit(PROMPTS[0], key=jax.random.key(3), **sampled))
        several.append(submit(PROMPTS[1], regex=r"\d \+ \d"))
        found["several"] = [_told(one.result()) for one in several]
        found["streamed"] = list(submit(PROMPTS[0]))
        long = submit(PROMPTS[2], max_new_tokens=400, eos_ids=())
        next(iter(long))
        long.cancel()
        found["cancelled"] = len(long.result().tokens) < 400
        found["bad"] = [
            _raised(lambda: submit("x", regex="(")), _raised(lambda: submit("")),
            _raised(lambda: submit("x", adapter="none")),
        ]  # fmt: skip
        if not all_of_them:
            return found
        several = [submit(one, adapter="first") for one in PROMPTS]
        several.append(submit("x", repetition_penalty=1.3, banned=[5], stop="q"))
        found["settings"] = [_told(one.result()) for one in several]
        engine.add_adapter("second", adapter)
        found["second"] = _told(submit(PROMPTS[1], adapter="second").result())
        engine.remove_adapter("second")
        found["adapters"] = engine.adapters
        scored = submit(PROMPTS[0], prompt_logprobs=True, logprobs=2).result()
        found["logprobs"] = [one.logprob for one in scored.prompt_logprobs[1:]]
        found["logprobs"] += [one.logprob for one in scored.logprobs]
        repeated = "1 2 3 4 5 6 7 8 " * 8
        found["repeated"] = [_told(submit(repeated, chat=False).result()) for _ in range(3)]
        found["window pages"] = engine.stats().window_pages
        found["compiled"] = engine.compile()
        found["after"] = _told(submit(PROMPTS[0]).result())
        missing = directory / "missing"
        found["missing"] = type(_caught(lambda: engine.add_adapter("x", missing))).__name__
    return found


def save_adapter(directory: Path) -> None:
    """Writes an adapter of the tiny model that changes its answers, as :func:`engine_answers` needs it."""
    model, _ = maxjax.load("tiny")
    new = maxjax.lora.add(model, rank=4, key=jax.random.key(0))
    rng = np.random.default_rng(1)
    values = {
        name: rng.normal(0, 0.1, weight.shape).astype(np.float32)
        for name, weight in new.raw_state_dict().items()
        if "lora_" in name
    }
    new.load_state_dict(values, strict=False)
    maxjax.lora.save(directory / "adapter", new)


def save_windows(directory: Path) -> None:
    """Writes a model with the sizes of the tiny one, whose first layer has a sliding window."""
    tiny, tokenizer = maxjax.load("tiny")
    of = tiny.config
    config = Qwen2Config(
        of.vocab_size, of.hidden_size, of.intermediate_size, num_hidden_layers=2,
        num_attention_heads=of.num_attention_heads, num_key_value_heads=of.num_key_value_heads,
        max_position_embeddings=of.max_position_embeddings, sliding_window=20,
        layer_types=("sliding_attention", "full_attention"),
    )  # fmt: skip
    model = maxjax.init(Qwen2(config), jax.random.key(0))
    maxjax.save_pretrained(model, directory / "windows", tokenizer=tokenizer)


def _caught(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _raised(call: Callable[[], Any]) -> str:
    error = _caught(call)
    return f"{type(error).__name__}: {error}"


def vectors(axes: dict[str, int]) -> np.ndarray:
    """Sentence embeddings of an encoder on a mesh."""
    model, tokenizer = maxjax.load(minilm_directory(), mesh=_mesh(axes))
    return maxjax.embed(model, tokenizer, SENTENCES, batch_size=3)


# --- scenarios ----------------------------------------------------------------------------


def _settings() -> dict[str, Any]:
    return json.loads(Path(sys.argv[-1], "settings.json").read_text())


def together(tell: Tell) -> None:
    """The texts, vectors and files of a model that is sharded over the devices of all processes."""
    given, directory = _settings(), Path(sys.argv[-1])
    tell(answers=answers(given["axes"], given["all"]))
    if given["all"]:
        np.save(directory / f"vectors-{jax.process_index()}.npy", vectors(given["axes"]))
    tell(files=files(given["axes"], directory / "saved", given["all"]))


def engine(tell: Tell) -> None:
    """The answers of an engine that all processes share; then calls that all make again."""
    given, directory = _settings(), Path(sys.argv[-1])
    for number, options in enumerate(given.get("engines", [{}])):
        found = engine_answers(given["axes"], directory, given["all"], **options)
        tell(**{f"engine {number}": found})
    model, tokenizer = maxjax.load("tiny", mesh=_mesh(given["axes"]))
    tell(closed=str(maxjax.generate(model, tokenizer, PROMPTS[1])))


def refuse(tell: Tell) -> None:
    """Calls that differ between processes, or fail in one; after each the processes continue together."""
    me = jax.process_index()
    mesh = _mesh(_settings()["axes"])
    model, tokenizer = maxjax.load("tiny", mesh=mesh)

    def raised(name: str, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            call()
            text = "nothing"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        tell(**{name: text, f"{name} seconds": time.monotonic() - began})

    def generate(prompt: str = "x", **values: Any) -> str:
        return str(maxjax.generate(model, tokenizer, prompt, **{"max_new_tokens": 8} | values))

    raised("prompt", lambda: generate("xy"[me]))
    raised("settings", lambda: generate(temperature=0.5 + me, max_new_tokens=8 + me))
    raised("key", lambda: generate(temperature=1.0, key=jax.random.key(me)))
    raised("call", lambda: [generate, lambda: maxjax.stream(model, tokenizer, "x")][me]())
    raised("empty here", lambda: generate("" if me == 1 else "x"))
    raised("empty at the first", lambda: generate("" if me == 0 else "x"))
    raised("empty", lambda: generate(""))
    other = Path(sys.argv[-1], "other")
    if me == 1:
        maxjax.save_pretrained(_changed(), other, tokenizer=tokenizer)
    raised("checkpoint", lambda: maxjax.load(["tiny", other][me], mesh=mesh))
    raised("missing", lambda: maxjax.load(["tiny", other / "nowhere"][me], mesh=mesh))
    raised("file", lambda: maxjax.save_pretrained(model, "/dev/null/x"))
    push = TextStream.push
    if me == 1:
        TextStream.push = lambda *_: (_ for _ in ()).throw(ArithmeticError("no more"))
    raised("decoding", generate)
    raised("decoding a stream", lambda: list(maxjax.stream(model, tokenizer, "What is 5 + 6?")))
    TextStream.push = push
    tell(still=generate(PROMPTS[1]))


def _changed() -> Any:
    """The tiny model with other values."""
    model, _ = maxjax.load("tiny")
    for weight in model.raw_state_dict().values():
        weight.value = weight.value * 1.5
    return model


# --- a process that dies ------------------------------------------------------------------


def _dies(owner: Any, name: str, after: int) -> None:
    """Makes the last process kill itself in a call of a method."""
    plain, calls = getattr(owner, name), []

    def killed(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == after and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **options)

    setattr(owner, name, killed)


def _dying(tell: Tell, owner: Any, name: str, after: int, call: Callable[[], Any]) -> None:
    _dies(owner, name, after)
    tell(ready=True)
    try:
        call()
    except PeerLostError:
        tell(when=time.time())
        raise


def die_generating(tell: Tell) -> None:
    """The last process dies before it dispatches a step that the others have: they wait in a collective."""
    model, tokenizer = maxjax.load("tiny", mesh=_mesh(_settings()["axes"]))
    call = lambda: maxjax.generate(model, tokenizer, PROMPTS, max_new_tokens=60, eos_ids=())
    call()
    _dying(tell, Calls, "run", 3, call)


def die_streaming(tell: Tell) -> None:
    """The last process dies while the others wait for it to reach the next dispatch."""
    model, tokenizer = maxjax.load("tiny", mesh=_mesh(_settings()["axes"]))
    call = lambda: list(maxjax.stream(model, tokenizer, PROMPTS[2], eos_ids=()))
    _dying(tell, Scheduler, "_receive", 3, call)


def die_loading(tell: Tell) -> None:
    """The last process dies after some reads of its part of the checkpoint."""
    call = lambda: maxjax.load("tiny", mesh=_mesh(_settings()["axes"]))
    _dying(tell, OpenFile, "pread_some", 3, call)


def die_saving(tell: Tell) -> None:
    """The last process dies while the first one writes the shards of all."""
    model, _ = maxjax.load("tiny", mesh=_mesh(_settings()["axes"]))
    call = lambda: maxjax.save_pretrained(model, Path(sys.argv[-1], "saved"))
    _dying(tell, Gathering, "_read", 5, call)


def die_in_a_step(tell: Tell) -> None:
    """The last process dies while all write a step of orbax."""
    from maxjax.checkpoint.orbax.save import ArraySums

    model, _ = maxjax.load("tiny", mesh=_mesh(_settings()["axes"]))
    call = lambda: checkpoint.save(Path(sys.argv[-1], "steps"), model)
    _dying(tell, ArraySums, "compute", 1, call)


def die_embedding(tell: Tell) -> None:
    """The last process dies before the second batch."""
    model, tokenizer = maxjax.load(minilm_directory(), mesh=_mesh(_settings()["axes"]))
    maxjax.embed(model, tokenizer, SENTENCES, batch_size=1)  # compiles: JAX may end a late peer
    call = lambda: maxjax.embed(model, tokenizer, 40 * SENTENCES, batch_size=1)
    _dying(tell, Lockstep, "decide", 2, call)


SCENARIOS = (
    together, refuse, engine, die_generating, die_streaming, die_loading, die_saving, die_in_a_step,
    die_embedding,
)  # fmt: skip
