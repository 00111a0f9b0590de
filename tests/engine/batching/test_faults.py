"""Faults of a caller, or of one prompt: the others go on, and nobody waits for ever."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import weakref

import jax
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.models import Llama, LlamaConfig, Mamba, MambaConfig

SUM, ANSWER = "What is 37 + 48?", "37 + 48 = 85"


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny")


@pytest.fixture(scope="module")
def engine(tiny):
    with maxjax.Engine(*tiny, slots=4) as found:
        yield found


def test_callback_that_raises(engine, caplog):
    answer = engine.submit(SUM, max_new_tokens=30)
    with caplog.at_level(logging.ERROR, "maxjax"):
        answer.add_done_callback(lambda one: 1 / 0)
        assert engine.submit(SUM).result(60) == ANSWER
    assert "ZeroDivisionError" in caplog.text


def test_callback_submits_but_cannot_wait(tiny):
    found = []

    def ended(answer):
        following = engine.submit(SUM)
        for wait in (following.result, lambda: list(following), engine.compile):
            with pytest.raises(RuntimeError, match="own thread|engine's thread"):
                wait()
        found.extend([answer.result(), following])

    with maxjax.Engine(*tiny, slots=1) as engine:
        engine.submit(SUM).add_done_callback(ended)
    assert found[0] == ANSWER == found[1].result(60)


def test_cancelled_before_it_is_in_the_queue(engine):
    """In the moment between the engine's look at what has come and its look at what is cancelled."""

    def at_once(scheduler):
        made.append(engine.submit(SUM, max_new_tokens=100, eos_ids=()))
        made[0].cancel()

    made = []
    running = engine.submit(SUM, max_new_tokens=100, eos_ids=())
    next(iter(running))
    engine._worker.call(at_once)
    assert running.result() and not made[0].result(60)


def test_event_loop_that_is_gone(engine):
    """A coroutine gives up, and its loop is closed before the answer has its next piece."""
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(engine.submit(SUM, max_new_tokens=100, eos_ids=()), 0.001))
    assert engine.submit(SUM).result(60) == ANSWER


def test_threads_are_not_kept_waiting(tiny):
    """Whoever waits learns that the engine is closed, by whichever way they wait."""
    engine, errors = maxjax.Engine(*tiny, slots=1), []
    answers = [
        engine.submit(SUM, max_new_tokens=200, eos_ids=()) for _ in range(3)
    ]  # the first may end

    def all_of(waits):
        try:
            waits()
        except RuntimeError as error:
            errors.append(str(error))

    async def gathered():
        await asyncio.gather(*answers)

    waits = [w for a in answers for w in (a.result, lambda a=a: list(a))]
    waits += [engine.compile, lambda: asyncio.run(gathered())]
    threads = [threading.Thread(target=all_of, args=(one,)) for one in waits]
    for thread in threads:
        thread.start()
    next(iter(answers[0]))
    engine.close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(errors) >= 5 and all("closed" in error for error in errors)
    assert engine.stats().running == engine.stats().waiting == 0 and "closed" in repr(engine)


def test_weights_that_are_gone():
    model, tokenizer = maxjax.load("tiny")
    engine = maxjax.Engine(model, tokenizer, slots=1)
    answers = [engine.submit(SUM, max_new_tokens=200, eos_ids=()) for _ in range(3)]
    next(iter(answers[0]))
    for leaf in jax.tree.leaves(model):
        leaf.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        answers[2].result(60)
    engine.close()


def test_interrupted_while_it_waits(tiny, monkeypatch):
    """Ctrl-C at the end of a with block: the engine is closed."""
    with pytest.raises(KeyboardInterrupt):
        with maxjax.Engine(*tiny, slots=1) as engine:
            worker = engine._worker

            def interrupted():
                raise KeyboardInterrupt

            monkeypatch.setattr(worker, "finish", interrupted)
    assert not worker.thread.is_alive()


def test_dropped_engine_frees_everything():
    """Also if its answers are kept."""
    model, tokenizer = maxjax.load("tiny")
    engine = maxjax.Engine(model, tokenizer, slots=1)
    answer = engine.submit(SUM)
    assert answer.result() == ANSWER
    thread, pool, weights = (
        engine._worker.thread,
        weakref.ref(engine._worker.scheduler.memory.arrays.pool),
        weakref.ref(model.model),
    )
    del engine, model
    thread.join(60)
    gc.collect()
    assert not thread.is_alive() and pool() is None and weights() is None
    assert answer.result() == ANSWER


def test_grammar_that_leaves_nothing(engine):
    """Only that answer ends with an error, which says why."""
    tokenizer = engine.tokenizer
    others = [engine.submit(SUM), engine.submit(SUM, regex="[0-9 +=]*")]
    size = engine.model.config.vocab_size
    banned = [i for i in range(size) if "a" in tokenizer.decode([i])]
    wrong = engine.submit("x", regex="a+", banned=banned)
    short = engine.submit("x", regex="(b|bc)", banned=tokenizer.encode("c"), min_new_tokens=3)
    for answer in (wrong, short):
        with pytest.raises(UserInputError, match="every token that its grammar allows"):
            answer.result()
    assert others[0].result() == ANSWER and set(others[1].result()) <= set("0123456789 +=")


def test_refused_types(engine):
    for salt in (b"a", 5):
        with pytest.raises(TypeError, match="salt"):
            engine.submit(SUM, salt=salt)

    class Unhashable:
        __hash__ = None

        def __call__(self, logits, last, positions):
            return logits

    with pytest.raises(UserInputError, match="hashable"):
        maxjax.Engine(engine.model, logits_processor=Unhashable())


def llama():
    config = LlamaConfig(
        96, 32, 64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    return maxjax.init(Llama(config), jax.random.key(3))


def test_forbidden_transfers():
    """Those that a caller forbids for its own programs; the engine's thread has them too."""
    model, options = llama(), {"max_new_tokens": 9, "temperature": 1.0, "repetition_penalty": 1.2}
    expected = maxjax.generate(model, None, [1, 2, 3], **options)
    key = jax.random.key(0)
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with maxjax.Engine(model, slots=4, chunk=16) as engine:
            answer = engine.submit([1, 2, 3], key=key, **options)
        several = maxjax.generate(model, None, [[1, 2, 3], [4]], key=key, **options)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert answer.result().tokens == expected.tokens == several[0].tokens


def test_recurrent_states_are_each_text_s_own():
    """More prompts than slots: none begins with the state of the text before. Their length needs no pages."""
    model = maxjax.init(Mamba(MambaConfig(96, 16, 2, state_size=6)), jax.random.key(0))
    prompts = [[(7 * i + n) % 96 for i in range(n)] for n in (3, 20, 150, 1, 33)]
    options = {"max_new_tokens": 12, "eos_ids": ()}
    with maxjax.Engine(model, slots=2, chunk=16, cache_bytes="1MB") as engine:
        answers = [engine.submit(prompt, **options) for prompt in prompts]
        assert engine.stats().pages == 0
    several = maxjax.generate(model, None, prompts, **options, chunk=16)
    for prompt, answer, other in zip(prompts, answers, several, strict=True):
        expected = maxjax.generate(model, None, prompt, **options, chunk=16).tokens
        assert answer.result().tokens == other.tokens == expected


def test_nan_in_a_page_does_not_stay():
    """Pages with NaN are given to other texts, which write over them and do not read what is behind."""
    model, prompts = llama(), [[5, 6, 9], list(range(8, 80))]
    options = {"max_new_tokens": 30, "banned": [7]}
    expected = [maxjax.generate(model, None, one, **options, chunk=16).tokens for one in prompts]
    table = model.model.embed_tokens.weight
    table.value = table.value.at[7].set(jax.numpy.nan)
    with maxjax.Engine(model, slots=1, chunk=16, cache_bytes="80KB") as engine:
        assert engine.stats().pages == 4
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                engine.submit([5] * 63 + [7] * 70, max_new_tokens=5, banned=[7]).result()
            assert [engine.submit(p, **options).result().tokens for p in prompts] == expected


def test_an_engine_lives_as_long_as_its_answers(tiny):
    """One that nobody has kept."""
    assert maxjax.Engine(*tiny, slots=1).submit(SUM).result(60) == ANSWER


AT_EXIT = """
import atexit, threading
atexit.register(lambda: print([one.name for one in threading.enumerate()]))  # runs after that of maxjax
import maxjax
engine = maxjax.Engine(*maxjax.load("tiny"), slots=2)
next(iter(engine.submit("What is 37 + 48?", max_new_tokens=500, eos_ids=())))
"""


def test_a_program_that_ends_without_closing_it():
    """Its thread has ended before Python does: a thread that returns from JAX later would abort the process."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "['MainThread']"
