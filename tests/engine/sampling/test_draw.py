"""Sampling: the processors against transformers in float64, the draws against their definition."""

import dataclasses
import functools
import logging
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.engine.batching.running import bias_of, key_words
from maxjax.engine.sampling.draw import (
    CANDIDATES,
    _largest,
    largest,
    standard_gumbel,
    threshold_among,
    threshold_of,
)
from maxjax.engine.sampling.rows import sample_rows
from maxjax.engine.sampling.settings import Sampling, eos_token_ids
from maxjax.errors import UserInputError
from tests.engine.sampling.equal_rows import (
    draw,
    draw_rows,
    processed,
    row_settings,
    words_of,
)
from tests.oracles.recorded import recorded, torch, transformers

V = 600
INF = math.inf


def random_logits(kind="random", batch=3, width=V, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, width)) * 3
    if kind == "ties":  # as bfloat16 logits have them: many equal ones
        x = np.round(x * 2) / 2
    if kind == "equal":
        x = np.full_like(x, 2.5)
    if kind == "few":  # only a few tokens are possible at all
        x[:, 7:] = -INF
        x[0, 3:] = -INF
    if kind == "far":
        x = x * 1e4
    return x.astype(np.float32)


KINDS = ["random", "ties", "equal", "few", "far"]


# --- the processors, against transformers ---------------------------------------------------


def hf_scores(config, ids, logits):
    """What transformers makes of the logits, in its own order, in float64."""
    GenerationConfig = transformers.GenerationConfig
    generation = GenerationConfig(**config)
    defaults = GenerationConfig._get_default_generation_params()
    generation.update(**defaults, defaults_only=True)
    eos = generation.eos_token_id
    generation._eos_token_tensor = None if eos is None else torch.tensor([eos]).flatten()
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda default, custom: default,
    )
    mixin = transformers.GenerationMixin
    steps = mixin._get_logits_processor(model, generation, ids.shape[1])
    assert isinstance(steps, transformers.LogitsProcessorList)
    scores = torch.from_numpy(logits.astype(np.float64))
    return steps(torch.from_numpy(ids), scores).numpy()


def normal(scores):
    scores = scores.astype(np.float64)
    return scores - scores.max(axis=1, keepdims=True)


# The tokens that configurations name, and some others.
SOME = [*range(12), 599, *range(20, V, 29)]


def facts(scores):
    """What is compared of scores: which tokens are kept, and the values of some of them."""
    scores = normal(scores)
    return [scores > -INF, scores[:, [i for i in SOME if i < scores.shape[1]]]]


def agree(found, expected, top_p=False):
    """Equal; and of logits equal to the last that top-p keeps all are kept, not just some."""
    found, (kept, expected) = normal(np.asarray(found)), expected
    if top_p:
        edge = np.where(kept, found, 0).min(axis=1, keepdims=True)
        np.testing.assert_array_equal(found > -INF, found >= edge)
        assert (kept <= (found > -INF)).all()
    else:
        np.testing.assert_array_equal(found > -INF, kept)
    some = np.isfinite(expected)
    np.testing.assert_allclose(facts(found)[1][some], expected[some], rtol=2e-6, atol=2e-6)


CONFIGS = {
    "default": {"do_sample": True},
    "greedy": {"temperature": 0.5, "top_k": 3},
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "cold": {"do_sample": True, "temperature": 1e-3, "top_k": 0},
    "hot": {"do_sample": True, "temperature": 1e3, "top_k": 0},
    "top_k": {"do_sample": True, "top_k": 5},
    "top_k 1": {"do_sample": True, "top_k": 1},
    "top_k over V": {"do_sample": True, "top_k": 10 * V},
    "top_p": {"do_sample": True, "top_p": 0.9, "top_k": 0},
    "top_p 0": {"do_sample": True, "top_p": 0.0, "top_k": 0},
    "top_p 1": {"do_sample": True, "top_p": 1.0, "top_k": 0},
    "top_p tiny": {"do_sample": True, "top_p": 1e-6, "top_k": 0},
    "min_p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "min_p 1": {"do_sample": True, "min_p": 1.0, "top_k": 0},
    "min_p 0": {"do_sample": True, "min_p": 0.0, "top_k": 0},
    "all three": {
        "do_sample": True, "temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02
    },
    "typical": {"do_sample": True, "typical_p": 0.9, "top_k": 0},
    "typical little": {"do_sample": True, "typical_p": 1e-3, "top_k": 0},
    "typical of few": {"do_sample": True, "typical_p": 0.7, "top_k": 30, "top_p": 0.9},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 0.01, "top_k": 0},
    "epsilon large": {"do_sample": True, "epsilon_cutoff": 0.99, "top_k": 0},
    "eta": {"do_sample": True, "eta_cutoff": 0.01, "top_k": 0},
    "rare": {
        "do_sample": True, "temperature": 1.3, "top_k": 300, "min_p": 0.001, "typical_p": 0.97,
        "epsilon_cutoff": 3e-4, "eta_cutoff": 2e-3,
    },
    "repetition": {"repetition_penalty": 1.3},
    "repetition under 1": {"repetition_penalty": 0.8, "do_sample": True, "top_p": 0.9},
    "suppressed": {"suppress_tokens": [0, 3, 599]},
    "bad words": {"bad_words_ids": [[4], [1], [9]], "eos_token_id": 9},
    "bias": {"sequence_bias": [[[2], 5.0], [[5], -INF], [[6], -0.5]]},
    "everything": {
        "do_sample": True, "temperature": 0.6, "top_k": 30, "top_p": 0.95, "min_p": 0.01,
        "repetition_penalty": 1.2, "suppress_tokens": [1, 2], "bad_words_ids": [[4]],
        "sequence_bias": [[[6], 1.5], [[0], 3.0]],
    },
}  # fmt: skip


def test_processors_are_those_of_transformers():
    """Every configuration, on logits of every kind at once."""
    logits = np.concatenate([random_logits(kind, batch=2) for kind in KINDS])
    ids = np.random.default_rng(1).integers(0, 12, (len(logits), 9))
    texts = [(row[:5], row[5:]) for row in ids]
    for name, config in CONFIGS.items():
        settings = Sampling.from_generation_config(config)
        found = processed(logits, settings, texts)
        assert found.dtype == jnp.float32
        try:
            expected = recorded(lambda: facts(hf_scores(config, ids, logits)))  # noqa: B023
            agree(found, expected, config.get("top_p", 1.0) < 1)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_presence_and_frequency_are_of_the_answer_only():
    logits = random_logits()
    settings = Sampling(presence_penalty=0.5, frequency_penalty=-0.25)
    words, numbers = words_of(settings, [([1, 2, 2], ())] * 3, V), np.arange(3)
    for position, token in enumerate((2, 5, 5, 5), 3):
        is_new, at = np.array([True, True, False]), np.full(3, position)
        words = words.added(numbers, np.full(3, token), at, is_new)
    expected = logits.astype(np.float64)
    expected[:2, 2] -= 0.5 - 0.25
    expected[:2, 5] -= 0.5 - 3 * 0.25
    agree(processed(logits, settings, words=words), facts(expected))


def test_extreme_temperatures_stay_numbers():
    logits = jnp.asarray(random_logits("few"))
    for temperature in (5e-324, 1e-20, 1e300):
        values = processed(logits, Sampling(temperature=temperature))
        assert not bool(jnp.isnan(values).any())
        assert values.max(axis=1).tolist() == [0, 0, 0]
    cold = draw(logits, jax.random.key(0), Sampling(temperature=1e-45))
    assert cold.tokens.tolist() == jnp.argmax(logits, axis=1).tolist()


# --- what is drawn --------------------------------------------------------------------------


@jax.jit
def random_bits(key, row, position, tokens):
    """By their definition: key, row, position, token."""
    one = jax.random.fold_in(jax.random.fold_in(key, row), position)
    folded = jax.vmap(jax.random.fold_in, (None, 0))(one, tokens)
    return jax.random.key_data(folded)[:, 0]


def gumbel(key, rows, position, width):
    tokens = np.arange(width)
    bits = np.stack([random_bits(key, row, position, tokens) for row in rows])
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))


def test_the_noise_of_any_bits_is_finite():
    # Half a step from 0, and from 1 the last float32 before it.
    found = standard_gumbel(jnp.array([0, 1, 1 << 31, 2**32 - 1], jnp.uint32))
    uniform = np.array([2.0**-33, 1.5 * 2.0**-32, 0.5 + 2.0**-33, 1 - 2.0**-24])
    np.testing.assert_allclose(found, -np.log(-np.log1p(-uniform)), rtol=1e-6)


DRAWS = {
    "temperature": Sampling(temperature=1.3),
    "top_k": Sampling(temperature=1, top_k=20),
    "top_k, large": Sampling(temperature=2, top_k=2000),  # the same
    "top_p": Sampling(temperature=0.5, top_p=0.9),
    "top_p, flat": Sampling(temperature=9, top_p=0.9),  # more than the candidates hold
    "top_p after top_k": Sampling(temperature=1, top_k=100, top_p=0.7),
    "min_p": Sampling(temperature=1, min_p=0.1),
    "min_p, flat": Sampling(temperature=5, min_p=1e-4),
    "all three": Sampling(temperature=1.2, top_k=300, top_p=0.95, min_p=0.01),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_largest_of_logit_and_noise(name):
    """Whichever way a filter takes: among a few candidates or through the whole vocabulary."""
    key, width, settings = jax.random.key(5), 4000, DRAWS[name]
    noise = gumbel(key, range(4), 11, width)
    for kind in ("random", "ties", "few"):
        logits = jnp.asarray(random_logits(kind, batch=4, width=width))
        kept = np.asarray(processed(logits, settings))
        found = draw(logits, key, settings, positions=11)
        assert found.tokens.dtype == jnp.int32 and found.valid.tolist() == [True] * 4
        assert found.tokens.tolist() == (kept + noise).argmax(axis=1).tolist(), kind


@pytest.mark.parametrize(
    ("p", "top_p", "keeps"),
    [
        # What stands before a token has to hold less than top-p, as in transformers: at exactly
        # so much the next one goes.
        ([0.5, 0.25, 0.25], 0.5, [0]),
        ([0.5, 0.25, 0.125, 0.125], 0.75, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.5 + 2**-12, [0, 1]),
        ([0.125, 0.5, 0.125, 0.25], 0.5 - 2**-12, [1]),
    ],
)
def test_the_threshold_of_top_p(p, top_p, keeps):
    """Probabilities that are exact in binary, so that the edge is met to the last bit."""
    weights = jnp.asarray(p, jnp.float32) / max(p)
    values = jnp.log(weights)[None]
    assert jnp.exp(values)[0].tolist() == weights.tolist()
    of = (len(p), top_p, -jnp.inf)
    edges = {
        "all": threshold_of(values, *of),
        "candidates": threshold_among(*largest(values, len(p))[:1], values, *of)[0],
    }
    for way, edge in edges.items():
        assert np.flatnonzero(np.asarray(values >= edge)[0]).tolist() == keeps, way
    config = {"do_sample": True, "top_k": 0, "top_p": top_p}
    ids = np.zeros((1, 1), np.int64)
    kept, _ = recorded(lambda: facts(hf_scores(config, ids, np.asarray(values))))
    assert np.flatnonzero(kept[0]).tolist() == keeps


def test_both_ways_are_taken():
    """The tests of draws mean something: some settings are too flat for the candidates."""
    logits = jnp.asarray(random_logits(batch=4, width=4000))
    for name, few in {
        "top_k": True,
        "top_k, large": False,
        "top_p": True,
        "top_p, flat": False,
        "min_p": True,
        "min_p, flat": False,
    }.items():
        settings = DRAWS[name]
        values = jnp.log(jax.nn.softmax(logits / settings.temperature, axis=1))
        values -= values.max(axis=1, keepdims=True)
        found, _ = largest(values, CANDIDATES)
        kept = row_settings(settings, 4, 4000)
        filters = (a[:, None] for a in (kept.top_k, kept.top_p, kept.least))
        assert threshold_among(found, values, *filters)[1].tolist() == [few] * 4, name


def test_wide_vocabularies_draw_the_same():
    """There the largest logits are looked for by blocks."""
    key, width = jax.random.key(6), 70_001
    logits = random_logits("random", batch=2, width=width)
    noise = gumbel(key, range(2), 0, width)
    settings = Sampling(temperature=1, top_k=20)
    kept = np.asarray(processed(jnp.asarray(logits), settings))
    found = draw(jnp.asarray(logits), key, settings)
    assert found.tokens.tolist() == (kept + noise).argmax(axis=1).tolist()


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "few"])
@pytest.mark.parametrize("width", [700, 70_001])
def test_largest_is_top_k(kind, width):
    values = jnp.asarray(random_logits(kind, width=width))
    expected = jax.lax.top_k(values, 40)
    for run in (largest, functools.partial(_largest, size=128)):  # as on TPUs
        found, columns = run(values, 40)
        np.testing.assert_array_equal(found, expected[0])
        np.testing.assert_array_equal(columns, expected[1])


def test_frequencies_are_the_probabilities():
    count, logits = 40_000, jnp.log(jnp.array([0.5, 0.3, 0.15, 0.04, 0.0099, 0.0001]))
    settings = Sampling(temperature=0.8, top_p=0.999)
    p = np.exp(np.asarray(processed(logits[None], settings)[0], np.float64))
    p /= p.sum()
    assert (p > 0).tolist() == [True] * 5 + [False]
    batch = np.broadcast_to(np.asarray(logits), (count, 6))
    ways = {
        "rows": draw(batch, jax.random.key(1), settings),
        "positions": draw(
            batch, jax.random.key(2), settings, rows=jnp.zeros(count, jnp.int32),
            positions=jnp.arange(count),
        ),
        "keys": draw_rows(
            batch, row_settings(settings, count, 6)._replace(
                keys=jax.random.key_data(jax.random.split(jax.random.key(3), count))
            ), settings,
        ),
    }  # fmt: skip
    for name, found in ways.items():
        seen = np.bincount(np.asarray(found.tokens), minlength=6)
        assert seen[5] == 0
        deviation = (seen[:5] - count * p[:5]) / np.sqrt(count * p[:5])
        assert (deviation**2).sum() < 23.5, name  # chance 1 in 10 000, and the keys are fixed


def test_a_row_draws_the_same_in_any_batch():
    logits, key = random_logits(batch=6), jax.random.key(3)
    settings = Sampling(temperature=1.5, top_k=30)
    whole = np.asarray(draw(logits, key, settings, positions=np.arange(6, dtype=np.int32)).tokens)
    order = np.array([4, 1, 3], np.int32)
    part = draw(logits[order], key, settings, rows=order, positions=order).tokens
    assert part.tolist() == whole[order].tolist()
    for i in order:
        alone = draw(logits[i : i + 1], key, settings, rows=[i], positions=i).tokens
        assert alone.tolist() == [whole[i]]
    equal = np.broadcast_to(logits[:1], (40, V))
    settings = Sampling(temperature=1.5)
    assert len(set(draw(equal, key, settings).tokens.tolist())) > 10
    assert len({int(draw(equal[:1], key, settings, positions=i).tokens[0]) for i in range(9)}) > 3


PLACED = {
    "greedy": Sampling(logprobs=0),
    "temperature": Sampling(temperature=1.5),
    "filters": Sampling(temperature=1.5, top_k=40, top_p=0.9, logprobs=3),
    "top_p": Sampling(temperature=3, top_p=0.95),
}


SPECS = [P("data", "model"), P(None, ("data", "model")), P("data"), P()]
TYPES = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_meshes_change_nothing(kind, name, spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    logits, key = random_logits(batch=4), jax.random.key(9)
    settings = dataclasses.replace(
        PLACED[name], repetition_penalty=1.5, banned=[5, 9], logit_bias={3: 1.0}
    )
    texts = [([1, 2, 3], ())] * 4
    expected = draw(logits, key, settings, texts=texts)
    placed = jax.device_put(logits, NamedSharding(mesh, spec))
    found = draw(placed, key, settings, texts=texts)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.valid.tolist() == [True] * 4
    if settings.logprobs is not None:
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5)
    if settings.logprobs:
        np.testing.assert_array_equal(found.top_tokens, expected.top_tokens)
    expected = processed(logits, settings, texts)
    np.testing.assert_allclose(processed(placed, settings, texts), expected, rtol=1e-5)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_any_kind_of_key(impl):
    logits = jnp.asarray(random_logits(batch=5))
    key, settings = jax.random.key(4, impl=impl), Sampling(temperature=2)
    whole = draw(logits, key, settings).tokens
    part = draw(logits[3:], key, settings, rows=[3, 4]).tokens
    assert part.tolist() == whole[3:].tolist()
    assert draw(logits, jax.random.key_data(key), settings).tokens.tolist() == whole.tolist()
    assert whole.tolist() != draw(logits, jax.random.key(8, impl=impl), settings).tokens.tolist()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_greedy_is_the_first_of_the_largest(dtype):
    for kind in KINDS[:4]:
        logits = jnp.asarray(random_logits(kind), dtype)
        found = draw(logits)
        np.testing.assert_array_equal(found.tokens, jnp.argmax(logits, axis=1))
        assert found.logprobs is None and found.top_tokens is None
    hot = draw(logits, jax.random.key(0), Sampling(temperature=1, top_k=1))
    np.testing.assert_array_equal(hot.tokens, jnp.argmax(logits, axis=1))


# --- log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_logprobs_are_of_the_model(dtype):
    """Not of the processed logits."""
    logits = random_logits("ties").astype(dtype)
    wide = logits.astype(np.float64)[:, :500]
    logits = logits[:, :500]
    expected = recorded(lambda: torch.log_softmax(torch.from_numpy(wide), -1).numpy())
    settings = Sampling(temperature=0.3, top_k=4, banned=[2], logit_bias={8: 4.0}, logprobs=5)
    found = draw(logits, jax.random.key(0), settings)
    chosen = np.take_along_axis(expected, np.asarray(found.tokens)[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.logprobs, chosen, rtol=1e-5)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(found.top_tokens, order)
    top = np.take_along_axis(expected, order, axis=1)
    np.testing.assert_allclose(found.top_logprobs, top, rtol=1e-5)
    assert found.top_tokens.dtype == jnp.int32 and found.logprobs.dtype == jnp.float32


def test_more_logprobs_than_tokens():
    found = draw(np.log(np.array([[0.5, 0.3, 0.2]], np.float32)), settings=Sampling(logprobs=9))
    assert found.top_tokens.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(found.top_logprobs, np.log([[0.5, 0.3, 0.2]]), rtol=1e-6)
    np.testing.assert_allclose(found.logprobs, [math.log(0.5)], rtol=1e-6)


# --- what cannot be sampled from ------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [Sampling(), Sampling(temperature=1), Sampling(temperature=1, top_k=2, top_p=0.5)],
    ids=["greedy", "temperature", "filters"],
)
def test_flag_of_rows_that_hold_no_distribution(settings):
    logits = random_logits(batch=5)
    logits[1, 3] = np.nan
    logits[2, 0] = INF
    logits[3] = -INF
    found = draw(jnp.asarray(logits), jax.random.key(0), settings)
    assert found.valid.tolist() == [True, False, False, False, True]
    assert found.tokens[1:4].tolist() == [0, 0, 0]
    alone = draw(jnp.asarray(logits[[0, 4]]), jax.random.key(0), settings, rows=[0, 4])
    assert found.tokens[jnp.array([0, 4])].tolist() == alone.tokens.tolist()


def test_everything_banned_is_flagged():
    found = draw(jnp.zeros((1, 3)), settings=Sampling(banned=[0, 1, 2]))
    assert found.valid.tolist() == [False]


def test_tokens_outside_the_vocabulary_are_refused():
    for settings, message in (
        (Sampling(logit_bias={5: 1}), "logit_bias names token 5: the vocabulary has 5 tokens"),
        (Sampling(banned=[4, 6]), "banned names token 6: the vocabulary has 5 tokens"),
    ):
        with pytest.raises(UserInputError, match=message):
            bias_of(settings, 5)


@pytest.mark.parametrize("key", [jnp.zeros(2), jax.random.split(jax.random.key(0), 2), "7"])
def test_what_is_no_key_is_refused(key):
    with pytest.raises((UserInputError, TypeError), match="key"):
        key_words(key)


# --- the programs ---------------------------------------------------------------------------


def program(settings, width=70_001):
    run = jax.jit(sample_rows, static_argnames=("tops", "draws", "delays_ends"))
    each, zeros = row_settings(settings, 2, width), jnp.zeros(2, jnp.int32)
    how = {
        "tops": settings.logprobs,
        "draws": not settings.is_greedy,
        "delays_ends": settings.min_new_tokens > 0,
    }
    return run.lower(jnp.zeros((2, width)), each, zeros, zeros, **how).compile().as_text()


FILTERS = {
    "top_k": Sampling(temperature=1, top_k=50, top_p=0.9),
    "top_p": Sampling(temperature=1, top_p=0.9, logprobs=4),
}


@pytest.mark.sampled
@pytest.mark.parametrize("width", [50_001, 70_001])
@pytest.mark.parametrize("filters", ["top_k", "top_p"])
def test_no_vocabulary_is_sorted(filters, width):
    text = program(FILTERS[filters], width)
    sorts = [line for line in text.splitlines() if " sort(" in line]
    assert not [line for line in sorts if str(width) in line]
    assert "TopK" in text


def test_greedy_draws_nothing():
    text = program(Sampling())
    assert not any(word in text for word in ("TopK", " while(", "exponential", " sort("))


def test_equal_settings_are_one_value():
    """So a function that takes them as static arguments is traced once."""
    given = (([2, 1], {3: 1, 0: 2}), ((1, 2, 2), {0: 2.0, 3: 1.0}))
    (found,) = {Sampling(banned=banned, logit_bias=bias) for banned, bias in given}
    assert found.banned == (1, 2)


# --- the settings ---------------------------------------------------------------------------

WRONG = [
    ("temperature", -0.1, "a number of at least 0"),
    ("temperature", INF, "a number of at least 0"),
    ("temperature", math.nan, "a number of at least 0"),
    ("temperature", 10**400, "a number of at least 0"),
    ("temperature", 10**5000, "a very large integer: it must be a number of at least 0"),
    ("temperature", "1", "a number of at least 0"),
    ("temperature", True, "a number of at least 0"),
    ("top_k", -1, "an integer of at least 0"),
    ("top_k", 2.0, "an integer of at least 0"),
    ("top_k", 2**31, "an integer of at least 0"),
    ("top_p", 1.01, "a number from 0 to 1"),
    ("top_p", None, "a number from 0 to 1"),
    ("min_p", -1, "a number from 0 to 1"),
    ("repetition_penalty", 0, "a number above 0"),
    ("repetition_penalty", -1, "a number above 0"),
    ("presence_penalty", 2.1, "a number from -2 to 2"),
    ("frequency_penalty", -3, "a number from -2 to 2"),
    ("logprobs", -1, "an integer of at least 0"),
    ("logit_bias", {1: math.nan}, "for token 1 it must be a float32 number"),
    ("logit_bias", {1: INF}, "for token 1 it must be a float32 number"),
    ("logit_bias", {-1: 1.0}, "a token id from 0"),
    ("logit_bias", {"1": 1.0}, "a token id from 0"),
    ("logit_bias", [1, 2], "a dict from token ids"),
    ("logit_bias", 3, "a dict from token ids"),
    ("typical_p", 0, "a number above 0 and at most 1"),
    ("typical_p", math.nan, "a number above 0 and at most 1"),
    ("typical_p", 1.5, "a number above 0 and at most 1"),
    ("epsilon_cutoff", -0.1, "a number from 0 to 1"),
    ("eta_cutoff", "0.1", "a number from 0 to 1"),
    ("top_n_sigma", -1, "a number of at least 0"),
    ("top_n_sigma", INF, "a number of at least 0"),
    ("xtc_probability", 1.01, "a number from 0 to 1"),
    ("xtc_threshold", math.nan, "a number from 0 to 1"),
    ("xtc_threshold", None, "a number from 0 to 1"),
    ("no_repeat_ngram_size", -1, "an integer of at least 0"),
    ("no_repeat_ngram_size", 2.0, "an integer of at least 0"),
    ("no_repeat_ngram_size", True, "an integer of at least 0"),
    ("dry_multiplier", -0.5, "a number of at least 0"),
    ("dry_multiplier", INF, "a number of at least 0"),
    ("dry_base", 0.9, "a number of at least 1"),
    ("dry_base", math.nan, "a number of at least 1"),
    ("dry_allowed_length", -1, "an integer of at least 0"),
    ("dry_sequence_breakers", "abc", "a list of texts or of lists of token ids"),
    ("dry_sequence_breakers", [""], "a text or a list of token ids, and not empty"),
    ("dry_sequence_breakers", ["\ud800"], "valid Unicode"),
    ("dry_sequence_breakers", [b"a"], "a text or a list of token ids, and not empty"),
    ("bad_words", "abc", "a list of texts or of lists of token ids"),
    ("bad_words", [[]], "a text or a list of token ids, and not empty"),
    ("bad_words", [3], "a text or a list of token ids, and not empty"),
    ("bad_words", [[-1]], "a token id from 0"),
    ("bad_words", [["a"]], "a token id from 0"),
    ("bad_words", 5, "a list of texts or of lists of token ids"),
    ("sequence_bias", {(1, 2): math.nan}, "for (1, 2) it must be a float32 number"),
    ("sequence_bias", {(1, 2): INF}, "for (1, 2) it must be a float32 number"),
    ("sequence_bias", {"ab": 1.0}, "a dict from tuples of token ids"),
    ("sequence_bias", {(): 1.0}, "a text or a list of token ids, and not empty"),
    ("sequence_bias", {(-1,): 1.0}, "a token id from 0"),
    ("sequence_bias", [1, 2], "a dict from tuples of token ids"),
    ("sequence_bias", 3, "a dict from tuples of token ids"),
    ("banned", [-1], "a token id from 0"),
    ("banned", "12", "a list of token ids"),
    ("banned", 5, "a list of token ids"),
]


def test_a_bias_may_be_a_numpy_number():
    bias = Sampling(logit_bias={1: np.float32(-INF), np.int64(2): np.float16(0.5)}).logit_bias
    assert bias == ((1, -INF), (2, 0.5)) and {type(number) for _, number in bias} == {float}


def test_wrong_values_are_named():
    for name, value, range_ in WRONG:
        with pytest.raises(UserInputError) as caught:
            Sampling(**{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} is ") and range_ in message, message
        assert "\n" not in message and len(message) < 250


def test_settings_are_values():
    a = Sampling(
        temperature=np.float32(0.5), top_k=np.int64(3), banned={4, 2}, logit_bias={7: 1},
        bad_words=["a", np.array([3, 1]), [3, 1]], sequence_bias={(3, 4): 2, (1,): -INF},
        dry_sequence_breakers=["\n", [5]],
    )  # fmt: skip
    assert a.bad_words == ("a", (3, 1)) and a.dry_sequence_breakers == ("\n", (5,))
    assert a.sequence_bias == (((1,), -INF), ((3, 4), 2.0))
    assert a == dataclasses.replace(a) and hash(a) == hash(dataclasses.replace(a))
    assert a.banned == (2, 4) and a.logit_bias == ((7, 1.0),)
    assert type(a.temperature) is float and type(a.top_k) is int
    assert dataclasses.replace(a, temperature=0).is_greedy


def test_generation_config_that_is_unsupported_is_named(caplog):
    with caplog.at_level(logging.WARNING, "maxjax"):
        Sampling.from_generation_config(
            {"num_beams": 1, "no_repeat_ngram_size": None, "typical_p": 0.5, "max_length": 20,
             "transformers_version": "5", "suppress_tokens": None, "unheard_of": [1]}
        )  # fmt: skip
        assert not caplog.records
        settings = Sampling.from_generation_config(
            {"do_sample": True, "num_beams": 4, "mirostat": 2, "top_h": 0.4, "bad_words_ids": [[4], []]}
        )  # fmt: skip
    (record,) = caplog.records
    assert record.message.endswith("not supported: num_beams, top_h, mirostat")
    assert settings.banned == (4,)


def test_generation_config_of_sequences_and_rare_filters():
    config = {
        "no_repeat_ngram_size": 3, "bad_words_ids": [[1, 2], [3, 3], [4], [9]], "eos_token_id": 9,
        "sequence_bias": [[[1, 2], 1.0], [[7], -2.0]], "typical_p": 0.5, "eta_cutoff": 1e-3,
        "epsilon_cutoff": 2e-4, "xtc_probability": 0.3, "xtc_threshold": 0.2,
    }  # fmt: skip
    found = Sampling.from_generation_config({"do_sample": True, **config})
    assert found.bad_words == ((1, 2), (3, 3)) and found.banned == (4,)
    assert found.sequence_bias == (((1, 2), 1.0),) and found.logit_bias == ((7, -2.0),)
    assert found.no_repeat_ngram_size == 3
    filters = found.typical_p, found.eta_cutoff, found.epsilon_cutoff
    assert filters == (0.5, 1e-3, 2e-4)
    assert (found.xtc_probability, found.xtc_threshold) == (0.3, 0.2)
    greedy = Sampling.from_generation_config(config)  # typical and others are for drawing only
    assert greedy.typical_p == 1 and not greedy.xtc_probability
    assert greedy.no_repeat_ngram_size == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": "false"}, "do_sample is 'false': it must be true or false"),
        ({"do_sample": True, "temperature": "0.5"}, "temperature is '0.5'"),
        ({"do_sample": True, "top_k": 5.5}, "top_k is 5.5"),
        ({"bad_words_ids": [1]}, r"bad_words_ids is \[1\]: it must be a list of lists"),
        ({"bad_words_ids": {"a": 1}}, "bad_words_ids is"),
        ({"suppress_tokens": [None]}, "suppress_tokens is None"),
        ({"sequence_bias": [[1, 2.0]]}, r"sequence_bias is \[1, 2.0\]"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": True}, "eos_token_id is True"),
    ],
)
def test_generation_config_with_wrong_values(config, message):
    with pytest.raises(UserInputError, match=message):
        Sampling.from_generation_config(config)


def test_eos_token_ids():
    assert eos_token_ids({}) == eos_token_ids({"eos_token_id": None}) == ()
    assert eos_token_ids({"eos_token_id": 2}) == (2,)
    assert eos_token_ids({"eos_token_id": [5, 2, 5]}) == (2, 5)
