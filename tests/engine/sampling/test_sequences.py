"""Bans and penalties by the order of tokens, against transformers and a plain transcription of llama.cpp's DRY."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.engine.sampling.sequences import (
    Repeats,
    Sequences,
    biased,
    match_lengths,
    sequences_of,
    without_repeats,
)
from maxjax.engine.sampling.settings import Sampling
from maxjax.errors import UserInputError
from tests.engine.sampling.test_draw import hf_scores
from tests.oracles.recorded import recorded

V, INF = 24, math.inf


def texts(seed=0, width=40, kinds=4):
    """Rows of few different tokens, so that they repeat, each of another length; and what follows is not read."""
    rng = np.random.default_rng(seed)
    lengths = np.array([1, 2, 3, 7, 12, 25, 38, 40])
    ids = rng.integers(0, kinds, (len(lengths), width)).astype(np.int32)
    ids[:, 20:] = ids[:, :20]
    return ids, lengths.astype(np.int32)


def of_rows(settings, rows):
    """The settings as they are for some rows."""
    each = jax.tree.map(lambda a: jnp.stack([a] * rows), sequences_of(settings, V))
    numbers = [jnp.full((rows, 1), x, jnp.float32) for x in Repeats.of(settings)]
    return each, Repeats(*numbers)


@jax.jit
def adjusted(logits, repeats, sequences, ids, lengths):
    values = biased(logits, sequences, ids, lengths)
    return without_repeats(values, repeats, sequences, ids, lengths)


def applied(settings, logits, ids, lengths):
    sequences, repeats = of_rows(settings, len(ids))
    return np.asarray(adjusted(jnp.asarray(logits), repeats, sequences, ids, lengths))


def logits_of(rows, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32)


CONFIGS = {
    "1-grams": {"no_repeat_ngram_size": 1},
    "2-grams": {"no_repeat_ngram_size": 2},
    "4-grams": {"no_repeat_ngram_size": 4},
    "long n-grams": {"no_repeat_ngram_size": 41},
    "bias": {"sequence_bias": [[[1, 2], 5.0], [[0, 1, 2], -3.0], [[3, 3, 3, 0], -INF], [[2, 2], 0.5]]},
    "bad words": {"bad_words_ids": [[1, 2], [3, 0, 1], [2, 2, 2], [0, 0], [1, 20]]},
    "both": {"no_repeat_ngram_size": 3, "bad_words_ids": [[1, 2], [5, 5]], "sequence_bias": [[[2, 3], 4.0]]},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_processors_are_those_of_transformers(name):
    config = CONFIGS[name]
    ids, lengths = texts()
    logits = logits_of(len(ids))
    expected = recorded(
        lambda: [
            hf_scores(config, row[None, :n].astype(np.int64), one[None])[0]
            for row, n, one in zip(ids, lengths, logits, strict=True)
        ]
    )
    found = applied(Sampling.from_generation_config(config), logits, ids, lengths)
    assert not np.array_equal(found, logits) or name == "long n-grams"
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-6)


# --- DRY ------------------------------------------------------------------------------------------


def dry(logits, text, multiplier, base, allowed, breakers):
    """The penalties of llama.cpp's DRY (``src/llama-sampler.cpp``), from their definition.

    Of a text without what a breaker ends, the longest repetition that each token would continue.
    """
    found, n = logits.astype(np.float64), len(text)
    ends = [
        i
        for i in range(n)
        for breaker in breakers
        if i + 1 >= len(breaker) and tuple(text[i + 1 - len(breaker) : i + 1]) == tuple(breaker)
    ]
    limit = n - 1 - max(ends, default=-1)
    longest = {}
    for j in range(1, n):
        same = 0
        while same < j and text[j - 1 - same] == text[n - 1 - same]:
            same += 1
        if (same := min(same, limit)) >= allowed:
            longest[text[j]] = max(longest.get(text[j], 0), same)
    most = int(88.7228391 / math.log(base)) if base > 1.000001 else 0
    for token, length in longest.items():
        excess = length - allowed
        found[token] -= multiplier * base ** (min(excess, most) if most else excess)
    return found


DRY = [
    (0.8, 1.75, 2, ()),
    (1.5, 1.1, 0, ()),
    (0.8, 1.75, 2, ((3,),)),
    (2.0, 1.0, 1, ((0, 2), (1, 1, 3))),
    (0.5, 3.0, 3, ((2,), (0, 1))),
    (1.0, 1.5, 1, ((0, 0, 1, 0), (1, 0, 0), (0, 2), (3, 3))),
]


@pytest.mark.parametrize("case", DRY, ids=str)
@pytest.mark.parametrize("kinds", [2, 4])
def test_dry_is_llama_cpps(case, kinds):
    multiplier, base, allowed, breakers = case
    ids, lengths = texts(3, kinds=kinds)
    logits = logits_of(len(ids))
    settings = Sampling(
        dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_sequence_breakers=breakers
    )  # fmt: skip
    found = applied(settings, logits, ids, lengths)
    assert not np.array_equal(found, logits)
    for row, text, n, one in zip(found, ids, lengths, logits, strict=True):
        expected = dry(one, text[:n].tolist(), *case)
        np.testing.assert_allclose(row, expected, rtol=2e-5, atol=1e-5)


def test_a_long_repetition_has_a_finite_penalty():
    ids, logits = np.zeros((1, 400), np.int32), np.zeros((1, V), np.float32)
    settings = Sampling(dry_multiplier=5, dry_base=4, dry_sequence_breakers=())
    found = applied(settings, logits, ids, np.array([400], np.int32))
    assert np.isfinite(found).all() and found[0, 0] < -1e30 and (found[0, 1:] == 0).all()


def test_match_lengths_stop_at_the_largest_that_counts():
    text = np.array([[1, 1, 1, 1, 1, 0, 0]], np.int32)
    found = [match_lengths(text, np.array([5]), np.array([most])).tolist() for most in (0, 2, 9)]
    assert found == [
        [[0] * 7],
        [[0, 1, 2, 2, 2, 0, 0]],
        [[0, 1, 2, 3, 4, 0, 0]],
    ]


# --- sequences ------------------------------------------------------------------------------------


def test_more_and_longer_sequences_are_larger_arrays():
    many = Sequences.of([((i % V, 1), 1.0) for i in range(65)], [], V)
    long = Sequences.of([(tuple(range(9)), 1.0)], [], V)
    assert many.tokens.shape == (128, 8) and long.tokens.shape == (64, 16)
    ids, lengths = texts(kinds=V)
    logits = logits_of(len(ids))
    for one in (many, long):
        each = jax.tree.map(lambda a: jnp.stack([a] * len(ids)), one)
        resized = each.resized(256, 32)
        assert resized.tokens.shape == (len(ids), 256, 32)
        found = [biased(jnp.asarray(logits), s, ids, lengths) for s in (each, resized)]
        np.testing.assert_array_equal(*found)


def test_sequences_outside_the_vocabulary_are_refused():
    for name in ("bad_words", "sequence_bias", "dry_sequence_breakers"):
        value = {(1, V): 1.0} if name == "sequence_bias" else [[1, V]]
        with pytest.raises(UserInputError, match=f"{name} names token {V}: the vocabulary has {V}"):
            sequences_of(Sampling(**{name: value}), V)
    with pytest.raises(UserInputError, match="bad_words has the text 'a', which needs a tokenizer"):
        sequences_of(Sampling(bad_words=["a"]), V)


def test_too_many_or_too_long_sequences_are_refused():
    long = Sampling(bad_words=[[1] * 20_000])
    with pytest.raises(UserInputError, match="1 sequences of up to 20,000 tokens: the product"):
        sequences_of(long, V)
    many = Sampling(bad_words=[[i // 400 % V, i // 20 % 20, i % 20] for i in range(9000)])
    assert sequences_of(many, V).tokens.shape == (16384, 8)
    kinds = [[0, i, 1] for i in range(V)] + [[0, i, 2] for i in range(9)]
    for breakers in (kinds, [[0] * 22]):
        settings = Sampling(dry_multiplier=1, dry_sequence_breakers=breakers)
        with pytest.raises(UserInputError, match="pass fewer or shorter ones"):
            sequences_of(settings, V)
    assert sequences_of(Sampling(dry_multiplier=1, dry_sequence_breakers=kinds[:31]), V) is not None
