"""score(): log-probabilities of given tokens, against transformers' models on torch."""

import math

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine import token_losses
from maxjax.engine.score import Score
from maxjax.errors import UserInputError
from maxjax.models import Llama
from tests.engine.test_perplexity import TINY, TYPES_AND_AXES, text_of
from tests.fill import filled
from tests.models.decoders import VOCAB
from tests.oracles.models import opened
from tests.oracles.recorded import recorded, torch

TEXTS = [
    ("What is 37 + 48?\n", "37 + 48 = 85"),
    ("What is 37 + 48?\n", "37 + 48 = 86"),
    ("What is 5 + 6?", "\n5 + 6 = 11"),
    ("What is", " 90 - 17?\n90 - 17 = 73"),
    ("What is 1 + 1? ", "1"),
]


def theirs(ids):
    """The log-probability of each token after the first, and whether it is the most probable one."""
    model = opened("LlamaForCausalLM", TINY)
    with torch.no_grad():
        logits = model(torch.tensor(np.array([ids])).long()).logits[0].double()
    logs = torch.log_softmax(logits, -1).numpy()[:-1]
    return [logs[np.arange(len(ids) - 1), ids[1:]], logs.argmax(-1) == np.array(ids[1:])]


def values(found):
    return [one.logprob for one in found.logprobs]


def test_as_lm_evaluation_harness_with_transformers(tiny):
    """Encoded together, spaces at the end of the prompt belong to the continuation."""
    model, tokenizer = tiny
    found = maxjax.score(model, tokenizer, *map(list, zip(*TEXTS, strict=True)), batch_size=2)
    greedy = []
    for (prompt, rest), one in zip(TEXTS, found, strict=True):
        whole, count = tokenizer.encode(prompt + rest), len(tokenizer.encode(prompt.rstrip(" ")))
        logs, best = recorded(lambda: theirs(whole))  # noqa: B023
        assert one.tokens == tuple(whole[count:]) and one.prompt_tokens == tuple(whole[:count])
        np.testing.assert_allclose(values(one), logs[count - 1 :], atol=2e-4)
        np.testing.assert_allclose(one.total, logs[count - 1 :].sum(), atol=1e-3)
        assert one.is_greedy == best[count - 1 :].all()
        greedy.append(one.is_greedy)
    assert True in greedy and False in greedy


def test_a_text_by_itself_and_the_most_probable_tokens(tiny):
    model, tokenizer = tiny
    text = "What is 37 + 48?\n37 + 48 = 85"
    ids = tokenizer.encode(text)
    found = maxjax.score(model, tokenizer, text, logprobs=3)
    whole = np.asarray(jax.nn.log_softmax(model(np.array([ids]))[0], axis=-1))[:-1]
    assert found.tokens == tuple(ids[1:]) and found.prompt_tokens == tuple(ids[:1])
    np.testing.assert_allclose(values(found), whole[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    for one, row in zip(found.logprobs, whole, strict=True):
        best = np.argsort(-row)[:3]
        assert [token for token, _ in one.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in one.top], row[best], atol=1e-4)


def test_what_generate_writes_has_its_log_probabilities(tiny):
    model, tokenizer = tiny
    prompts = [tokenizer.encode(prompt) for prompt, _ in TEXTS[:3]]
    written = maxjax.generate(model, tokenizer, prompts, logprobs=0)
    found = maxjax.score(model, None, prompts, [list(one.tokens) for one in written])
    for one, other in zip(found, written, strict=True):
        assert one.is_greedy and one.tokens == other.tokens
        np.testing.assert_allclose(values(one), values(other), atol=1e-4)


def test_results_are_nested_as_the_texts_are(small):
    model, _ = small
    one = maxjax.score(model, None, [1, 2, 3])
    assert isinstance(one, Score) and one.tokens == (2, 3)
    assert str(one).startswith("log-probability -") and "of 2 tokens" in str(one)
    pair = maxjax.score(model, None, [1, 2], [[3], [4, 5]])
    assert [each.tokens for each in pair] == [(3,), (4, 5)]
    mixed = maxjax.score(model, None, [[1, 2], np.array([1])], [[[3], [4, 5]], [6]])
    assert [each.tokens for each in [*mixed[0], mixed[1]]] == [(3,), (4, 5), (6,)]
    (again,) = maxjax.score(model, None, [[1, 2]], [[3]])
    for each, other in zip([*mixed[0], again], [*pair, pair[0]], strict=True):
        np.testing.assert_allclose(values(each), values(other), atol=1e-6)
    np.testing.assert_allclose(one.total, math.fsum(values(one)))
    np.testing.assert_allclose(values(one)[1:], values(pair[0]), atol=1e-6)
    assert maxjax.score(model, None, [], []) == []


def test_ids_and_texts_together(small):
    model, tokenizer = small
    ids = tokenizer.encode
    for prompt, rest in ((ids("ab"), "cd"), ("ab", ids("cd")), (ids("ab"), ids("cd"))):
        assert maxjax.score(model, tokenizer, prompt, rest) == maxjax.score(
            model, tokenizer, "ab", "cd"
        )


def test_a_token_across_the_border_is_scored():
    """Where the tokens of both together do not begin with those of the prompt."""
    model, tokenizer = maxjax.load("tiny")
    prompt, rest = "What is ple", "ase tell"
    whole, before = tokenizer.encode(prompt + rest), tokenizer.encode(prompt)
    assert whole[: len(before)] != before
    found = maxjax.score(model, tokenizer, prompt, rest)
    assert [*found.prompt_tokens, *found.tokens] == whole
    assert len(found.prompt_tokens) < len(before)


def test_batches_and_chunks_change_nothing(small, monkeypatch):
    model, _ = small
    texts = [list(range(1, n)) for n in (3, 40, 7, 64, 12, 33)]
    expected = maxjax.score(model, None, texts, batch_size=1, logprobs=2)
    monkeypatch.setattr(token_losses, "_LOGITS", 4 * 4 * VOCAB * 4)
    for one, other in zip(
        maxjax.score(model, None, texts, batch_size=4, logprobs=2), expected, strict=True
    ):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(values(one), values(other), rtol=1e-4)
        assert [t for t, _ in one.logprobs[-1].top] == [t for t, _ in other.logprobs[-1].top]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("axes", "axis_types"), TYPES_AND_AXES)
def test_on_meshes_as_on_one_device(small, axes, axis_types):
    model, _ = small
    texts = [list(range(1, n)) for n in (3, 40, 7)]
    expected = maxjax.score(model, None, texts, logprobs=2)
    mesh = maxjax.make_mesh(axis_types=axis_types, **axes)
    placed = filled(Llama(model.config).to(mesh))
    for one, other in zip(maxjax.score(placed, None, texts, logprobs=2), expected, strict=True):
        np.testing.assert_allclose(values(one), values(other), rtol=1e-4)
        assert [t for t, _ in one.logprobs[0].top] == [t for t, _ in other.logprobs[0].top]


@pytest.mark.parametrize(
    ("prompts", "continuations", "options", "error", "says"),
    [
        ("", None, {}, UserInputError, "the prompt has 0 tokens: there is nothing to score"),
        ("a", None, {}, UserInputError, "the prompt has 1 token: there is nothing to score"),
        (["ab", []], None, {}, UserInputError, r"prompts\[1\] has 0 tokens"),
        ("ab", "", {}, UserInputError, "the continuation has 0 tokens"),
        ("", "ab", {}, UserInputError, "the continuation has nothing before its first token"),
        (["a"], ["b", "c"], {}, UserInputError, "there are 1 prompts and 2 continuations"),
        (["a", "b"], "cd", {}, TypeError, "continuations must be a list, not str"),
        ([1, VOCAB], None, {}, UserInputError, f"the prompt has the token id {VOCAB}"),
        ([1], [[2], [-1]], {}, UserInputError, r"the continuation\[1\] has the token id -1"),
        ("a\ud800", None, {}, UserInputError, "the prompt"),
        ([1.5], None, {}, TypeError, r"prompts\[0\] must be text"),
        (b"ab", None, {}, TypeError, "prompts must be text"),
        ([{"role": "user", "content": "a"}], None, {}, TypeError, "the prompt is a chat"),
        ([0] * 66, None, {}, UserInputError, "66 tokens .* context is 64: maxjax.perplexity"),
        ([0] * 60, [0] * 6, {}, UserInputError, "66 tokens with its prompt"),
        ("ab", None, {"logprobs": -1}, UserInputError, "logprobs is -1"),
        ("ab", None, {"logprobs": VOCAB + 1}, UserInputError, f"an integer from 0 to {VOCAB}"),
        ("ab", None, {"batch_size": 0}, UserInputError, "batch_size is 0"),
    ],
)
def test_bad_input(small, prompts, continuations, options, error, says):
    with pytest.raises(error, match=says):
        maxjax.score(*small, prompts, continuations, **options)


def test_the_longest_text(small):
    model, _ = small
    assert len(maxjax.score(model, None, [1] * 65).logprobs) == 64


def test_bad_models(small):
    model, tokenizer = small
    with pytest.raises(UserInputError, match="the prompt is text, and there is no tokenizer"):
        maxjax.score(model, None, "ab")
    with pytest.raises(UserInputError, match="not loaded"):
        maxjax.score(Llama(model.config), tokenizer, "abc")
    with pytest.raises(UserInputError, match="Linear is not a language model"):
        maxjax.score(maxjax.nn.Linear(2, 2, "float32", maxjax.DeviceRef.CPU()), tokenizer, "abc")
    bad = jax.tree.map(lambda a: a * np.nan, model)
    with pytest.raises(FloatingPointError, match=r"prompts\[0\]: the logits of the model are NaN"):
        maxjax.score(bad, None, [[1, 2]])


def test_a_capture_sees_each_text_by_its_number(small):
    model, _ = small
    with maxjax.capture(model, "model.norm") as found:
        maxjax.score(model, None, [[1, 2, 3, 4], [5, 6]])
    states = found["model.norm"]
    assert states.shape[0] == 2
    assert np.isfinite(np.asarray(states)[1, 0]).all()


def test_text_of_the_perplexity(small):
    """The mean of the losses is that of perplexity, where one window holds the text."""
    model, tokenizer = small
    text = text_of(40)
    mean = -maxjax.score(model, tokenizer, text).total / 39
    np.testing.assert_allclose(
        mean, math.log(maxjax.perplexity(model, tokenizer, text, context=64).perplexity), rtol=1e-5
    )
