"""``maxjax generate``: answers a message with a chat model, or continues a text with a language model."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from typing import Any

from ..errors import UserInputError
from .answer import nan_error, say, show, stats
from .model import (
    chosen_key,
    model_arguments,
    open_model,
    sampling_arguments,
    sampling_values,
    system_message,
    template_variables,
)
from .options import adapter, file_path, positive, setting, size
from .tables import json_line
from .terminal import decoded


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("prompt", nargs="*", metavar="PROMPT",
                        help="the prompt: all words together are one; -, or no argument, reads stdin."
                        " For several prompts, run the command for each, or give maxjax chat a line"
                        " of stdin for each turn")  # fmt: skip
    parser.add_argument("--file", type=file_path, help="read the prompt from a file")
    parser.add_argument("--image", action="append", type=file_path, default=[], metavar="FILE",
                        help="a picture that comes before the prompt; may be repeated")  # fmt: skip
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--raw", "--no-chat", action="store_const", const=False, dest="chat",
                        help="continue the prompt as it is (default: it is a user's message if the model"
                        " has a chat template)")  # fmt: skip
    either.add_argument("--chat", action="store_const", const=True, dest="chat",
                        help="refuse a model without a chat template")  # fmt: skip
    model_arguments(parser)
    sampling_arguments(parser)
    parser.add_argument("--logprobs", type=setting("logprobs"), metavar="N",
                        help="with --json: log-probabilities, also of the N most probable tokens")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    job = parser.add_argument_group("many prompts")
    job.add_argument("--input", type=file_path, metavar="FILE",
                     help='answer each line: a JSON text, or an object with "prompt", "messages" or'
                     ' "tokens"; relative paths of pictures in messages begin at the folder of FILE')  # fmt: skip
    job.add_argument("--output", metavar="FILE",
                     help="append a line of JSON for each answer; after an interrupt, run it again")  # fmt: skip
    job.add_argument("--slots", type=positive, metavar="N",
                     help="answers that are written at once (default: 32)")  # fmt: skip
    job.add_argument("--adapter", action="append", type=adapter, default=[], metavar="NAME=FOLDER",
                     help='a LoRA adapter, which a line names as its "adapter"; may be repeated')  # fmt: skip
    job.add_argument("--cache-bytes", type=size, metavar="SIZE",
                     help="size of the cache on each device, as 8GiB (default: 2,048 tokens a slot)")  # fmt: skip


def generate(options: argparse.Namespace) -> Iterable[str]:
    """Prints the answer to PROMPT, a user's message, while it is generated. Ctrl-C stops it.

    A model without a chat template continues the text of PROMPT, as every model does with --raw.
    """
    is_job = options.input is not None or options.output is not None
    if is_job:
        _check_job(options)
    elif options.slots is not None or options.cache_bytes is not None or options.adapter:
        options.error("--slots, --adapter and --cache-bytes are for --input and --output")
    prompt = "" if is_job else _prompt(options)
    if options.logprobs is not None and not options.json:
        options.error("--logprobs needs --json")
    names = ("template_arg", "system", "image")
    given = [name for name in names if getattr(options, name) not in (None, [])]
    if options.chat is False and given:
        name = given[0].replace("_", "-")
        options.error(f"--{name} cannot be given with --raw: only a chat has a template")
    values = sampling_values(options)
    return _run_job(options, values) if is_job else _generate(options, prompt, values)


def _generate(options: argparse.Namespace, prompt: str, values: dict[str, Any]) -> list[str]:
    from ..images.decode import open_rgb

    # Before the model, which may take minutes.
    parts = [{"type": "image", "image": open_rgb(path)} for path in options.image]
    opened = open_model(options)
    from ..engine.generate.request import Request
    from ..engine.generate.texts import stream_answer
    from ..lockstep import Lockstep

    request = Request(
        opened.model, opened.tokenizer, options.max_new_tokens, options.stop, None, None, values,
        options.chat, template_variables(options, opened.tokenizer),
    )  # fmt: skip
    system = system_message(options)
    content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
    is_list = bool(system or parts)
    read = request.prompt([*system, {"role": "user", "content": content}] if is_list else prompt)
    seed, key = chosen_key(options, request.sampling)
    alone = Lockstep("generate", ())
    stream = stream_answer(request, read, key, options.chunk, options.cache_dtype, alone)
    try:
        answer = show(stream, quiet=options.json)
    except FloatingPointError as error:
        raise nan_error(opened.model, stream.completion, options.debug_nans) from error
    if options.stats:
        say(stats(answer, request.sampling, seed, opened.seconds, is_chat=read.is_chat))
    if answer.stopped:
        raise KeyboardInterrupt
    return [_json(answer.completion, seed)] if options.json else []


# --- many prompts ---------------------------------------------------------------------------


def _check_job(options: argparse.Namespace) -> None:
    if options.input is None or options.output is None:
        options.error("--input and --output belong together")
    if options.prompt or options.file is not None:
        options.error("a prompt and --input are both given: leave one out")
    for name in ("json", "stats", "system", "image", "logprobs", "debug_nans"):
        if getattr(options, name, None):
            options.error(f"--{name.replace('_', '-')} cannot be given with --input")


def _run_job(options: argparse.Namespace, values: dict[str, Any]) -> list[str]:
    opened = open_model(options)
    from ..engine.batching.engine import Engine
    from ..engine.batching.job import run_job
    from ..engine.generate.request import Request

    settings = {
        "max_new_tokens": options.max_new_tokens, "stop": options.stop, "chat": options.chat, **values,
        "template_kwargs": template_variables(options, opened.tokenizer),
    }  # fmt: skip
    request = Request(
        opened.model, opened.tokenizer, options.max_new_tokens, options.stop, None, None, values,
        options.chat, settings["template_kwargs"],
    )  # fmt: skip
    _, key = chosen_key(options, request.sampling)
    engine = Engine(
        opened.model, opened.tokenizer, slots=options.slots or 32, cache_bytes=options.cache_bytes,
        chunk=options.chunk, cache_dtype=options.cache_dtype, adapters=dict(options.adapter),
    )  # fmt: skip
    with engine:
        done = run_job(engine, options.input, options.output, key=key, **settings)
    before = f", {done.before:,} were there" if done.before else ""
    rate = done.tokens / max(done.seconds, 1e-3)
    say([f"{done.answers:,} answers, {done.errors:,} errors{before}; {rate:,.0f} tokens a second"])
    return []


# --- the prompt -----------------------------------------------------------------------------


def _prompt(options: argparse.Namespace) -> str:
    """The prompt from the arguments, a file or stdin; a final newline of the last two is removed."""
    given = " ".join(options.prompt) if options.prompt else None
    if options.file is not None:
        if given is not None:
            options.error("a PROMPT and --file are both given: leave one out")
        text = _without_newline(decoded(options.file.read_bytes(), str(options.file)))
    elif given is None or given == "-":
        if sys.stdin is None or (given is None and sys.stdin.isatty()):
            options.error("no PROMPT given, and none on stdin")
        assert sys.stdin is not None  # options.error() does not return
        text = _without_newline(decoded(sys.stdin.buffer.read(), "stdin"))
    elif any("\ud800" <= c <= "\udfff" for c in given):
        raise UserInputError("the prompt is not valid UTF-8")
    else:
        text = given
    if not text:
        raise UserInputError("the prompt is empty: give it at least one character")
    return text


def _without_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


# --- JSON -----------------------------------------------------------------------------------


def _json(found: Any, seed: int | None) -> str:
    document = {
        "text": str(found),
        "tokens": list(found.tokens),
        "finish_reason": found.finish_reason,
        "stop": found.stop,
        "prompt": found.prompt,
        "prompt_tokens": list(found.prompt_tokens),
        "seed": seed,
    }
    if found.logprobs is not None:
        document["logprobs"] = [
            {
                "token": one.token,
                "logprob": _finite(one.logprob),
                "top": [[token, _finite(value)] for token, value in one.top],
            }
            for one in found.logprobs
        ]
    return json_line(document)


def _finite(number: float) -> float | None:
    """The number, or None if it is infinite, which JSON cannot represent."""
    return number if math.isfinite(number) else None
