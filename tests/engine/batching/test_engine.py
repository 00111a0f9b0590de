"""Engine: each prompt gets the text that generate gives it, whatever else runs."""

import asyncio
import dataclasses
import itertools
import math
import threading

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.batching import programs
from maxjax.engine.batching.calls import compiled_count
from maxjax.engine.batching.pages import Pages
from maxjax.errors import OutOfMemoryError, UserInputError
from maxjax.models import Llama, LlamaConfig
from tests.models.decoders import ids_of, one_character_each

VOCAB = 96
PROMPTS = [(ids_of(1, n, seed=n)[0] % VOCAB).tolist() for n in (7, 1, 30, 18, 90, 3, 45, 2)]
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 0.7, "banned": [3, 4]},
    {"logit_bias": {5: 4.0, 9: -3.0}, "logprobs": 3},
    {"temperature": 0.9, "top_k": 40, "logprobs": 0},
]
RARE = [
    {"no_repeat_ngram_size": 2},
    {"dry_multiplier": 1.0, "bad_words": [[1, 2]], "sequence_bias": {(3, 4): 1.0}},
    {"temperature": 1.0, "typical_p": 0.5, "top_n_sigma": 1.0},
    {"temperature": 1.0, "xtc_probability": 0.5, "eta_cutoff": 0.01},
]


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        VOCAB, 32, 64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    return maxjax.init(Llama(config), jax.random.key(3))


def alone(model, prompt, **options):
    return maxjax.generate(
        model, options.pop("tokenizer", None), prompt, **{"chunk": 16, **options}
    )


def facts(completion):
    return completion.tokens, completion.finish_reason, completion.stop, str(completion)


def same(found, expected):
    assert facts(found) == facts(expected)
    for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert one.token == other.token
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.extra), 4])
def test_settings_of_their_own(model, slots):
    """Different settings run side by side, in few slots, and give what each gives alone."""
    common = {"eos_ids": (), "key": jax.random.key(1)}
    options = [{"max_new_tokens": 9 + 5 * i, **common, **s} for i, s in enumerate(SETTINGS)]
    expected = [alone(model, p, **o) for p, o in zip(PROMPTS, options, strict=True)]
    with maxjax.Engine(model, slots=slots, chunk=32) as engine:
        answers = [engine.submit(p, **o) for p, o in zip(PROMPTS, options, strict=True)]
        for answer, wanted in zip(answers, expected, strict=True):
            same(answer.result(), wanted)


def test_keys_and_ends(model):
    key, end = jax.random.key(11), alone(model, PROMPTS[0], max_new_tokens=9).tokens[5]
    each = [
        {"temperature": 1.0, "key": key, "max_new_tokens": 20},
        {"eos_ids": [end, 94], "max_new_tokens": 20},
        {"eos_ids": [end], "min_new_tokens": 8, "max_new_tokens": 20},
        {
            "eos_ids": range(40),
            "min_new_tokens": 20,
            "temperature": 1.0,
            "key": key,
            "max_new_tokens": 30,
        },
    ]
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        answers = [engine.submit(PROMPTS[0], **o) for o in each]
        for answer, options in zip(answers, each, strict=True):
            same(answer.result(), alone(model, PROMPTS[0], **options))


def test_without_a_key_each_prompt_draws_otherwise(model):
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        answers = [engine.submit([1, 2, 3], max_new_tokens=12, temperature=1.0) for _ in range(4)]
        assert len({answer.result().tokens for answer in answers}) == 4


def test_text_and_stop_strings(model):
    tokenizer = one_character_each()
    whole = alone(model, "abc", tokenizer=tokenizer, max_new_tokens=30)
    stop = str(whole)[7:9]
    with maxjax.Engine(model, tokenizer, slots=4, chunk=16) as engine:
        answer = engine.submit("abc", max_new_tokens=30, stop=stop)
        pieces = list(answer)
        wanted = alone(model, "abc", tokenizer=tokenizer, max_new_tokens=30, stop=stop)
        same(answer.result(), wanted)
        assert "".join(pieces) == str(wanted) == "".join(answer)


def test_prefixes_are_shared(model):
    """What several prompts begin with is read once, also while the first of them is still being read."""
    common = (ids_of(1, 200, seed=5)[0] % VOCAB).tolist()
    prompts = [[*common, *rest] for rest in PROMPTS[:5]]
    with maxjax.Engine(model, slots=4, chunk=16) as engine:
        answers = [engine.submit(p, max_new_tokens=6) for p in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            same(answer.result(), alone(model, prompt, max_new_tokens=6))
        stats = engine.stats()
        assert stats.found_tokens == 4 * 192  # three pages of 64 tokens, for all but the first
        assert stats.read_tokens == sum(map(len, prompts)) - stats.found_tokens
        # The answer of a turn is the beginning of the next one.
        turn = [*prompts[0], *answers[0].result().tokens, 1, 2, 3]
        same(engine.submit(turn, max_new_tokens=6).result(), alone(model, turn, max_new_tokens=6))
        before = engine.stats().found_tokens
        engine.submit(turn, max_new_tokens=1, salt="another").result()
        assert engine.stats().found_tokens == before


def test_too_few_pages(model):
    """Texts give their pages to older ones, wait, and go on with the same tokens."""
    size = 6 * page_bytes(model)
    options = {
        "max_new_tokens": 120,
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "key": jax.random.key(1),
    }
    with maxjax.Engine(model, slots=4, cache_bytes=size, chunk=16) as engine:
        assert engine.stats().pages == 6
        answers = [engine.submit(p, **options) for p in PROMPTS]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            same(answer.result(), alone(model, prompt, **options))
        stats = engine.stats()
        assert stats.free_pages == stats.pages
        # Some of them have been read again.
        assert stats.read_tokens + stats.found_tokens > sum(map(len, PROMPTS)) + 120
        with pytest.raises(UserInputError, match=r"384 tokens"):
            engine.submit(PROMPTS[0], max_new_tokens=400)


def page_bytes(model):
    leaves = jax.tree.leaves(model.page_pool(1, 64, 1, abstract=True))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_priorities_and_cancelling(model):
    ended = []
    with maxjax.Engine(model, slots=1) as engine:
        first = engine.submit(PROMPTS[0], max_new_tokens=400)
        low = engine.submit(PROMPTS[1], max_new_tokens=3, priority=2)
        high = engine.submit(PROMPTS[2], max_new_tokens=3, priority=1)
        threads = [
            threading.Thread(target=lambda a=a, n=n: (a.result(), ended.append(n)))
            for n, a in (("low", low), ("high", high))
        ]
        for thread in threads:
            thread.start()
        first.cancel()
        assert len(first.result().tokens) < 400
        for thread in threads:
            thread.join()
    assert ended == ["high", "low"]


def test_asyncio(model):
    tokenizer = one_character_each()

    async def run(engine):
        answers = [engine.submit("abc", max_new_tokens=12), engine.submit("de", max_new_tokens=9)]
        pieces = [piece async for piece in answers[0]]
        return "".join(pieces), await answers[1], await answers[0]

    with maxjax.Engine(model, tokenizer, slots=4, chunk=16) as engine:
        streamed, second, first = asyncio.run(run(engine))
    assert streamed == first == alone(model, "abc", tokenizer=tokenizer, max_new_tokens=12)
    assert second == alone(model, "de", tokenizer=tokenizer, max_new_tokens=9)


def test_nothing_is_compiled_after_compile(model):
    """Whatever prompts and settings come."""
    config = dataclasses.replace(model.config, rms_norm_eps=1e-4)  # no other test has its programs
    each = [programs.read, programs.read_tokens, programs.decode]
    before = compiled_count(*each)
    other = maxjax.init(Llama(config), jax.random.key(3))
    with maxjax.Engine(other, one_character_each(), slots=3, chunk=32) as engine:
        count = engine.compile()
        # Chunks of 16 and 32 tokens, steps of 1 and 3 texts; with and without counts of words.
        assert count == compiled_count(*each) - before == 2 * (2 + 2)
        options = [{"max_new_tokens": 20, **settings} for settings in [*SETTINGS, *RARE]]
        prompts = itertools.cycle(PROMPTS)
        answers = [engine.submit(p, **o) for p, o in zip(prompts, options, strict=False)]
        for answer in answers:
            answer.result()
        assert compiled_count(*each) - before == count


def test_not_finite(model):
    """Only the text with such numbers ends with an error."""
    bad = jax.tree.map(lambda leaf: leaf, model)
    table = bad.model.embed_tokens.weight
    table.value = table.value.at[7].set(jax.numpy.nan)
    with maxjax.Engine(bad, slots=4, chunk=16) as engine:
        good, wrong = engine.submit([5, 6], max_new_tokens=4, banned=[7]), engine.submit([5, 7, 6])
        with pytest.raises(FloatingPointError, match="prompt 1"):
            wrong.result()
        assert len(good.result().tokens) == 4


def test_refused(model):
    with pytest.raises(UserInputError, match="slots"):
        maxjax.Engine(model, slots=0)
    with pytest.raises(UserInputError, match="chunk"):
        maxjax.Engine(model, chunk=48)
    with pytest.raises(UserInputError, match="cache_bytes"):
        maxjax.Engine(model, cache_bytes="1KB")
    with pytest.raises(OutOfMemoryError, match=r"100\.\d* TiB|99\.\d* TiB|100 TiB"):
        maxjax.Engine(model, cache_bytes="100TiB")
    with maxjax.Engine(model, slots=1) as engine:
        with pytest.raises(UserInputError, match="vocabulary"):
            engine.submit([1, VOCAB])
        with pytest.raises(UserInputError, match="logprobs"):
            engine.submit([1], logprobs=21)
        with pytest.raises(UserInputError, match="empty"):
            engine.submit([])
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([1])


def test_closed_before_the_end(model):
    engine = maxjax.Engine(model, slots=1)
    answer = engine.submit([1, 2], max_new_tokens=500)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        answer.result(timeout=60)


@pytest.mark.parametrize(
    ("axes", "explicit"),
    [
        ({"model": 2}, False),
        pytest.param({"model": 2}, True, marks=pytest.mark.extra),
        ({"data": 2}, False),
        ({"data": 2, "model": 4}, True),
    ],
)
def test_a_mesh(model, axes, explicit):
    """With an axis of data each of its devices has a slot of its own, and pages for its texts alone."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    count = math.prod(axes.values())
    mesh = maxjax.make_mesh(**axes, axis_types=kind, devices=jax.devices()[:count])
    placed = maxjax.init(Llama(model.config), jax.random.key(3)).to(mesh)
    with maxjax.Engine(placed, slots=1 + axes.get("data", 1), chunk=16) as engine:
        answers = [engine.submit(p, max_new_tokens=8) for p in PROMPTS[:4]]
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            same(answer.result(), alone(model, prompt, max_new_tokens=8))
        assert engine.slots % axes.get("data", 1) == 0
        assert engine.stats().free_pages == engine.stats().pages
        for leaf in jax.tree.leaves(engine._worker.scheduler.memory.arrays.pool):
            parts = {
                tuple(map(str, part))
                for part in leaf.sharding.devices_indices_map(leaf.shape).values()
            }
            assert len(parts) == count  # no two devices have the same


def logprobs(answer):
    return [one.logprob for one in answer.result().logprobs]


def test_exact(model):
    """The bits of log-probabilities are the same alone, in company, after other texts, and with a shared prefix."""
    key = jax.random.key(1)
    options = {"max_new_tokens": 30, "temperature": 1.0, "logprobs": 0, "eos_ids": (), "key": key}
    common = (ids_of(1, 150, seed=5)[0] % VOCAB).tolist()
    prompts = [*PROMPTS, [*common, 1, 2], [*common, 3]]
    expected = {}
    for i, prompt in enumerate(prompts):
        with maxjax.Engine(model, slots=5, exact=True) as engine:
            expected[i] = logprobs(engine.submit(prompt, **options))
    size = 14 * page_bytes(model)
    with maxjax.Engine(model, slots=5, exact=True, cache_bytes=size, chunk=64) as engine:
        for order in (range(len(prompts)), reversed(range(len(prompts)))):
            answers = {i: engine.submit(prompts[i], **options) for i in order}
            for i, answer in answers.items():
                assert logprobs(answer) == expected[i]
        assert engine.stats().found_tokens


def test_logits_processor(model):
    """It is a part of the programs that read and of those that write."""

    def never_twice(logits, last, positions):
        columns = jax.lax.broadcasted_iota(jax.numpy.int32, logits.shape, 1)
        odd = positions[:, None] % 2 == 1
        return jax.numpy.where(
            (columns == last[:, None]) | (odd & (columns < 48)), -jax.numpy.inf, logits
        )

    with maxjax.Engine(model, slots=2, logits_processor=never_twice, chunk=16) as engine:
        answers = [engine.submit(p, max_new_tokens=30, temperature=2.0) for p in PROMPTS[:4]]
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            tokens = [*prompt, *answer.result().tokens]
            for i in range(len(prompt), len(tokens)):
                assert tokens[i] != tokens[i - 1] and (i % 2 == 0 or tokens[i] >= 48)
    with maxjax.Engine(model, slots=2, logits_processor=lambda x, *_: x * jax.numpy.nan) as engine:
        with pytest.raises(FloatingPointError):
            engine.submit([1]).result()
    with pytest.raises(UserInputError, match="same shape"):
        maxjax.Engine(model, logits_processor=lambda x, *_: x[0])


# --- pages


def test_pages_at_random():
    """Pages have one owner or share a beginning, whatever happens to them."""
    rng, pages, texts = np.random.default_rng(0), Pages(12, 2), []
    known = {}
    for _ in range(3000):
        if texts and rng.random() < 0.5:
            tokens, numbers = texts.pop(rng.integers(len(texts)))
            pages.publish(numbers, pages.keys(tokens, b""))
            for start, number in zip(range(0, len(tokens) - 1, 2), numbers, strict=False):
                known[number] = tuple(tokens[: start + 2])
            pages.release(numbers)
            continue
        tokens = rng.integers(0, 2, rng.integers(1, 9)).tolist()
        keys = pages.keys(tokens, b"")
        found = pages.share(keys)
        for i, number in enumerate(found):
            assert known[number] == tuple(tokens[: 2 * i + 2])
        more = pages.allocate(pages.needed(len(tokens)) - len(found))
        if more is None:
            pages.release(found)
            continue
        used = {n for _, numbers in texts for n in numbers}
        assert not used.intersection(more)
        for number in more:
            known.pop(number, None)
        texts.append((tokens, [*found, *more]))
        assert pages.free == 12 - len({n for _, numbers in texts for n in numbers})
