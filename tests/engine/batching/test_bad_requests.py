"""Bad requests among good ones, from several threads and coroutines at once: each ends alone, with a clear error."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import maxjax
from maxjax.engine.generate.completion import PartialCompletion
from maxjax.errors import UserInputError

GOOD: list[tuple[Any, dict[str, Any]]] = [
    ("What is 37 + 48?", {}),
    ("What is 5 + 6?", {"temperature": 0.9, "key": jax.random.key(4)}),
    ("Tell me a story", {"max_new_tokens": 50, "eos_ids": ()}),
    ([5, 6, 7], {"repetition_penalty": 1.3, "max_new_tokens": 20}),
    ("What is 1 + 1?", {"regex": r"\d \+ \d = \d+"}),
    ("What is 2 + 2?", {"stop": "=", "logprobs": 2}),
]
NAN, INF = float("nan"), float("inf")
# (prompt, arguments of submit, class of the error, a part of its message)
BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("What is 1 + 1?", {"max_new_tokens": 10**9}, UserInputError, "do not fit"),
    ([5] * 5000, {}, UserInputError, "5,?000"),
    ("", {}, UserInputError, "empty"),
    ([], {}, UserInputError, "empty"),
    ([-1], {}, UserInputError, "-1"),
    ([10**12], {}, UserInputError, "1000000000000|1,000"),
    ([1.5], {}, TypeError, "token ids"),
    (None, {}, TypeError, "None|prompt"),
    (b"What", {}, TypeError, "bytes"),
    ([{"role": "user"}], {}, UserInputError, "content"),
    ([{"content": "x"}], {}, UserInputError, "role"),
    ([{"role": 5, "content": "x"}], {}, (UserInputError, TypeError), "role"),
    ("x", {"adapter": "unknown"}, UserInputError, "no adapter 'unknown'"),
    ("x", {"adapter": 5}, TypeError, "adapter"),
    ("x", {"schema": {"type": "nothing"}}, UserInputError, "schema"),
    ("x", {"schema": "{"}, UserInputError, "schema"),
    ("x", {"schema": {"enum": []}}, UserInputError, "schema|grammar"),
    ("x", {"schema": {"type": "string", "minLength": 5, "maxLength": 3}}, UserInputError, "schema|grammar"),
    ("x", {"schema": False}, (UserInputError, TypeError), "schema"),
    ("x", {"schema": 5}, (UserInputError, TypeError), "schema"),
    ("x", {"regex": "("}, UserInputError, "regex"),
    ("x", {"regex": "a", "grammar": 'root ::= "a"'}, UserInputError, "regex and grammar"),
    ("x", {"grammar": "root ::= nothing"}, UserInputError, "grammar"),
    ("x", {"regex": "a", "eos_ids": ()}, UserInputError, "eos_ids"),
    ("x", {"regex": "a+", "banned": range(1000)}, UserInputError, "banned|vocabulary|outside"),
    ("x", {"temperature": -1.0}, UserInputError, "temperature"),
    ("x", {"temperature": NAN}, UserInputError, "temperature"),
    ("x", {"top_p": 2.0}, UserInputError, "top_p"),
    ("x", {"top_p": NAN}, UserInputError, "top_p"),
    ("x", {"logit_bias": {3: NAN}}, UserInputError, "logit_bias"),
    ("x", {"logit_bias": {10**9: 1.0}}, UserInputError, "logit_bias|outside|vocabulary"),
    ("x", {"repetition_penalty": 0.0}, UserInputError, "repetition_penalty"),
    ("x", {"logprobs": 21}, UserInputError, "at most 20"),
    ("x", {"max_new_tokens": 0}, UserInputError, "max_new_tokens"),
    ("x", {"max_new_tokens": True}, (UserInputError, TypeError), "max_new_tokens"),
    ("x", {"stop": ""}, UserInputError, "stop"),
    ("x", {"stop": 5}, (UserInputError, TypeError), "stop"),
    ("x", {"eos_ids": [10**9]}, UserInputError, "eos_ids|vocabulary"),
    ("x", {"bad_words": [[]]}, UserInputError, "bad_words"),
    ("x", {"no_repeat_ngram_size": -2}, UserInputError, "no_repeat_ngram_size"),
    ("x", {"unknown": 5}, (UserInputError, TypeError), "unknown"),
    ("x", {"key": "a key", "temperature": 1.0}, (UserInputError, TypeError, ValueError), "key"),
    ("x", {"priority": 1.5}, TypeError, "priority"),
    ("x", {"salt": 5}, TypeError, "salt"),
    ("x", {"template_kwargs": {"tools": [5]}}, (UserInputError, TypeError), "tool"),
]  # fmt: skip
# The token after which the hook makes all logits NaN, and the prompts whose tokens cannot be decoded.
POISON, UNREADABLE = 9, [7, 7, 7, 8]


def nan_after_poison(logits: jax.Array, last: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.where((last == POISON)[:, None], jnp.nan, logits)


@pytest.fixture
def unreadable(monkeypatch) -> None:
    """A tokenizer that raises while it decodes the answers to some prompts: at their third token, or at their end."""
    push, flush = PartialCompletion._push, PartialCompletion.flush

    def is_bad(partial: PartialCompletion) -> bool:
        return list(partial._prompt[:4]) == UNREADABLE

    def raising_push(partial: PartialCompletion, token: int) -> str:
        if is_bad(partial) and len(partial._prompt) == 4 and len(partial.tokens) == 2:
            raise ArithmeticError("this token has no text")
        return push(partial, token)

    def raising_flush(partial: PartialCompletion) -> str:
        if is_bad(partial) and len(partial._prompt) == 5:
            raise ArithmeticError("this end has no text")
        return flush(partial)

    monkeypatch.setattr(PartialCompletion, "_push", raising_push)
    monkeypatch.setattr(PartialCompletion, "flush", raising_flush)


@pytest.mark.parametrize(
    "axes",
    [
        None,
        pytest.param({"data": 8}, marks=pytest.mark.extra),
        pytest.param({"data": 4, "model": 2}, marks=pytest.mark.extra),
    ],
    ids=str,
)
def test_each_bad_request_ends_alone(axes, unreadable, caplog):
    mesh = None if axes is None else maxjax.make_mesh(**axes)
    model, tokenizer = maxjax.load("tiny", mesh=mesh)
    # Three pages of each group of devices: texts are put back, and the longest that the model could write do not fit.
    size = 400_000 // (axes or {}).get("model", 1)
    problems: list[str] = []
    with maxjax.Engine(
        model, tokenizer, slots=8, logits_processor=nan_after_poison, cache_bytes=size
    ) as engine:
        expected = [engine.submit(prompt, **options).result(600).tokens for prompt, options in GOOD]

        def check(name: str, found: Any, wanted: Any) -> None:
            if found != wanted:
                problems.append(f"{name}: {found!r} instead of {wanted!r}")

        def good(number: int) -> None:
            prompt, options = GOOD[number]
            check(
                f"good {number}",
                engine.submit(prompt, **options).result(600).tokens,
                expected[number],
            )

        def raised(call: Callable[[], Any]) -> tuple[str, str]:
            try:
                call()
            except Exception as error:
                return type(error).__name__, str(error)
            return "nothing", ""

        def bad(number: int) -> None:
            prompt, options, kind, says = BAD[number]
            with pytest.raises(kind, match=says):
                engine.submit(prompt, **options).result(600)

        def while_written() -> None:
            """Errors that come when the answer has begun."""
            many = {"max_new_tokens": 30, "eos_ids": ()}
            hooked = engine.submit([3, POISON], **many)
            check("NaN", raised(lambda: hooked.result(600))[0], "FloatingPointError")
            for more, text in (([], "this token has no text"), ([5], "this end has no text")):
                answer = engine.submit(UNREADABLE + more, **many)
                check(
                    "tokenizer", raised(lambda a=answer: a.result(600)), ("ArithmeticError", text)
                )
                check("pieces", raised(lambda a=answer: list(a)), ("ArithmeticError", text))
            for kind in (ZeroDivisionError, SystemExit, KeyboardInterrupt):
                answer = engine.submit("What is 5 + 6?", **many)

                def raises(one: Any, kind: Any = kind) -> None:
                    raise kind("of a callback")

                answer.add_done_callback(raises)
                check("callback", len(answer.result(600).tokens), 30)
            answer = engine.submit("What is 5 + 6?", **many)
            answer.cancel()
            check("cancelled", answer.result(600).finish_reason, "length")

        async def awaited(number: int) -> None:
            prompt, options = GOOD[number]
            check(
                f"awaited {number}",
                (await engine.submit(prompt, **options)).tokens,
                expected[number],
            )
            prompt, options, kind, _ = BAD[number]
            try:
                await engine.submit(prompt, **options)
                problems.append(f"{prompt!r} {options} was answered")
            except Exception as error:
                if not isinstance(error, kind):
                    problems.append(f"{prompt!r} {options}: {type(error).__name__}: {error}")

        async def coroutines() -> None:
            await asyncio.gather(*(awaited(number) for number in range(len(GOOD))))

        def watched(call: Callable[[], Any]) -> None:
            try:
                call()
            except BaseException as error:
                problems.append(f"{type(error).__name__}: {error}"[:500])

        calls = [
            while_written,
            lambda: asyncio.run(coroutines()),
            lambda: asyncio.run(coroutines()),
        ]
        for part in range(3):
            calls.append(
                lambda part=part: [watched(lambda n=n: bad(n)) for n in range(part, len(BAD), 3)]
            )
            calls.append(
                lambda part=part: [good((n + part) % len(GOOD)) for n in range(2 * len(GOOD))]
            )
        threads = [threading.Thread(target=watched, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(900)
        assert not any(thread.is_alive() for thread in threads)
        assert not problems, "\n".join(problems)
        assert caplog.text.count("a callback of an answer has raised an error") == 3
        stats = engine.stats()
        assert stats.running == stats.waiting == 0 and stats.free_pages == stats.pages
