"""Log-probabilities of the tokens of a prompt: those of maxjax.score, whatever else runs."""

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.batching import programs
from maxjax.errors import UserInputError
from maxjax.models import Llama
from tests.engine.batching.test_engine import PROMPTS, facts, model  # noqa: F401


def check(model, prompt, found, tops=0):  # noqa: F811
    assert found[0] is None and len(found) == len(prompt)
    if len(prompt) == 1:
        return
    expected = maxjax.score(model, None, prompt, logprobs=tops).logprobs
    for one, other in zip(found[1:], expected, strict=True):
        assert one.token == other.token
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [(o.logprob, *(value for _, value in o.top)) for o in (one, other)]
        np.testing.assert_allclose(*values, atol=1e-4)


def test_as_score_has_them(model):  # noqa: F811
    """Beside other prompts, in pieces, and of a prompt whose pages are known already; the answer is the same."""
    prompts = [*PROMPTS, [*PROMPTS[4], *PROMPTS[2], *PROMPTS[6]]]
    options = {"max_new_tokens": 5, "eos_ids": ()}
    with maxjax.Engine(model, slots=3, chunk=32) as engine:
        plain = [engine.submit(prompt, **options) for prompt in prompts]
        plain = [answer.result() for answer in plain]
        assert plain[0].prompt_logprobs is None
        programs_before = programs.read_scored._cache_size()
        for given in (True, 3):
            answers = [engine.submit(p, prompt_logprobs=given, **options) for p in prompts]
            for prompt, answer, one in zip(prompts, answers, plain, strict=True):
                check(model, prompt, answer.result().prompt_logprobs, 0 if given is True else 3)
                assert facts(answer.result())[0] == one.tokens
        # The number of tokens that are reported compiles nothing.
        assert programs.read_scored._cache_size() - programs_before <= 3
        assert engine.submit(prompts[0], **options).result().prompt_logprobs is None


def test_preempted_and_exact(model):  # noqa: F811
    """A text that is put back after its prompt was read keeps them; with exact=True bits are the same."""
    options = {"max_new_tokens": 60, "eos_ids": (), "prompt_logprobs": 2}
    page = 64 * 2 * 2 * 2 * 8 * 4  # tokens, keys and values, layers, heads, features, bytes
    with maxjax.Engine(model, slots=3, cache_bytes=5 * page) as engine:
        answers = [engine.submit(PROMPTS[4], **options) for _ in range(3)]
        for answer in answers:
            check(model, PROMPTS[4], answer.result().prompt_logprobs, 2)
    found = []
    for others in (0, 2):
        with maxjax.Engine(model, slots=3, chunk=64, exact=True) as engine:
            [engine.submit(prompt, max_new_tokens=9, eos_ids=()) for prompt in PROMPTS[:others]]
            found.append(engine.submit(PROMPTS[4], **options).result())
    assert found[0].prompt_logprobs == found[1].prompt_logprobs
    check(model, PROMPTS[4], found[0].prompt_logprobs, 2)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_mesh(model, kind):  # noqa: F811
    mesh = maxjax.make_mesh(data=2, model=2, axis_types=kind, devices=jax.devices()[:4])
    placed = maxjax.init(Llama(model.config), jax.random.key(3)).to(mesh)
    with maxjax.Engine(placed, slots=4, chunk=32) as engine:
        options = {"max_new_tokens": 3, "eos_ids": ()}
        prompts = PROMPTS[:4]
        for prompt in prompts:
            engine.submit(prompt, **options)
        answers = [engine.submit(prompt, prompt_logprobs=1, **options) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            check(model, prompt, answer.result().prompt_logprobs, 1)


@pytest.mark.parametrize("given", [-1, 21, 1.5, "1"])
def test_refused(model, given):  # noqa: F811
    with maxjax.Engine(model, slots=1) as engine:
        with pytest.raises(UserInputError, match="prompt_logprobs"):
            engine.submit([1, 2], prompt_logprobs=given)
        answer = engine.submit(
            [1, 2], prompt_logprobs=False, max_new_tokens=2, key=jax.random.key(0)
        )
        assert answer.result().prompt_logprobs is None
