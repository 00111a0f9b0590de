"""Forks: an answer that goes on from the tokens of another one, and shares its pages."""

import json
import time

import jax
import pytest

import maxjax
from maxjax.errors import UserInputError
from tests.engine.batching.test_engine import PROMPTS, VOCAB, facts, model  # noqa: F401

PAGE = 64


def started(answer, count):
    """The answer, once it has so many tokens."""
    while len(answer.completion.tokens) < count:
        time.sleep(1e-3)
    return answer


def test_equals_the_same_ids(model):  # noqa: F811
    """A fork of an answer that is being written is the answer to its ids so far, and shares their pages."""
    with maxjax.Engine(model, slots=3) as engine:
        answer = started(engine.submit(PROMPTS[4], max_new_tokens=300, eos_ids=()), 130)
        read = engine.stats().read_tokens
        forks = [
            answer.fork(temperature=1.0, key=jax.random.key(i), max_new_tokens=20) for i in (1, 2)
        ]
        forks = [fork.result() for fork in forks]
        for fork in forks:
            shared = len(fork.prompt_tokens) // PAGE * PAGE
            assert shared >= 3 * PAGE and len(fork.prompt_tokens) >= 90 + 130
            assert answer.result().tokens[:130] == fork.prompt_tokens[90:][:130]
        # The tokens that no full page has are read, of each fork.
        assert engine.stats().read_tokens - read < 2 * PAGE + 2
        assert forks[0].tokens != forks[1].tokens
    with maxjax.Engine(model, slots=3) as engine:
        for i, fork in enumerate(forks, 1):
            options = {
                "temperature": 1.0,
                "key": jax.random.key(i),
                "max_new_tokens": 20,
                "eos_ids": (),
            }
            assert engine.submit(list(fork.prompt_tokens), **options).result().tokens == fork.tokens


def test_settings(model):  # noqa: F811
    """Settings are those of the answer, but for those that are given; an end-of-text token is not continued."""
    options = {"temperature": 1.0, "top_k": 5, "logprobs": 2, "max_new_tokens": 9, "eos_ids": ()}
    with maxjax.Engine(model, slots=2) as engine:
        answer = engine.submit(PROMPTS[0], key=jax.random.key(1), **options)
        answer.result()
        one, other = answer.fork(), answer.fork(key=jax.random.key(1), max_new_tokens=4)
        assert len(one.result().tokens) == 9 and len(one.result().logprobs[0].top) == 2
        assert one.result().prompt_tokens == (*PROMPTS[0], *answer.result().tokens)
        assert one.result().tokens[:4] != other.result().tokens
        greedy = answer.fork(temperature=0.0, logprobs=None).result()
        assert greedy.logprobs is None
        with pytest.raises(UserInputError, match="are both given"):
            answer.fork(sampling=maxjax.Sampling(), temperature=0.5)
        with pytest.raises(TypeError, match="temprature"):
            answer.fork(temprature=0.5)
        end = answer.result().tokens[4]
        ended = engine.submit(PROMPTS[0], key=jax.random.key(1), **options | {"eos_ids": [end]})
        tokens = ended.result().tokens
        assert tokens[-1] == end
        again = ended.fork(temperature=0.0, eos_ids=()).result()
        assert again.prompt_tokens == (*PROMPTS[0], *tokens[:-1])
    with pytest.raises(RuntimeError, match="closed"):
        answer.fork()
    del engine
    with pytest.raises(RuntimeError, match="closed"):
        answer.fork()


def test_grammars():
    """The grammar of an answer goes on in its fork; one that is given begins there."""
    with maxjax.Engine(*maxjax.load("tiny"), slots=2) as engine:
        schema = {"type": "object", "properties": {"a": {"enum": [11, 12]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        answer = engine.submit("x", schema=schema, max_new_tokens=4)
        assert answer.result().finish_reason == "length"
        rest = answer.fork(max_new_tokens=60).result()
        assert json.loads(answer.result() + rest)["a"] in (11, 12)
        assert answer.fork(regex="[xy]", max_new_tokens=9).result() in ("x", "y")


def test_exact(model):  # noqa: F811
    """With exact=True, pages that steps have written are not shared: their bits are not those of reading."""
    with maxjax.Engine(model, slots=2, chunk=64, exact=True) as engine:
        answer = engine.submit(PROMPTS[4], max_new_tokens=100, eos_ids=(), logprobs=0)
        answer.result()
        fork = answer.fork(max_new_tokens=5).result()
        assert engine.stats().found_tokens == PAGE  # of the prompt
        alone = engine.submit(
            list(fork.prompt_tokens), max_new_tokens=5, eos_ids=(), logprobs=0, salt="other"
        ).result()
        assert facts(alone)[0] == fork.tokens and alone.logprobs == fork.logprobs
    assert max(fork.tokens) < VOCAB
