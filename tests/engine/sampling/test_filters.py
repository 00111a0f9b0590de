"""Top-n-sigma and XTC against plain transcriptions of llama.cpp's; typical, epsilon and eta are in test_draw.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.engine.sampling.rows import RowSettings, Words, sample_rows
from maxjax.engine.sampling.settings import Sampling
from tests.engine.sampling.equal_rows import draw, processed
from tests.engine.sampling.test_draw import random_logits

V = 50


def top_n_sigma(logits, n):
    """``llama_sampler_top_n_sigma_apply``."""
    found = logits.astype(np.float64)
    for row in found:
        real = row[np.isfinite(row)]
        row[row < real.max() - n * np.sqrt(np.mean((real - real.mean()) ** 2))] = -np.inf
    return found


def xtc(logits, threshold):
    """``llama_sampler_xtc_apply``, where it is applied."""
    found = logits.astype(np.float64)
    for row in found:
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        order = np.argsort(-probabilities, kind="stable")
        above = [token for token in order if probabilities[token] >= threshold]
        row[above[:-1]] = -np.inf
    return found


@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_top_n_sigma_is_llama_cpps(n, temperature):
    """The temperature changes nothing about what is kept."""
    logits = np.concatenate([random_logits(kind, width=V) for kind in ("random", "few", "far")])
    settings = Sampling(temperature=temperature, top_n_sigma=n)
    kept = np.isfinite(np.asarray(processed(logits, settings)))
    expected = np.isfinite(top_n_sigma(logits, n))
    assert not expected.all()
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.3, 0.6])
def test_xtc_is_llama_cpps(threshold):
    logits = random_logits(batch=6, width=V)
    settings = Sampling(temperature=1, xtc_probability=1, xtc_threshold=threshold)
    kept = np.isfinite(np.asarray(processed(logits, settings)))
    expected = np.isfinite(xtc(logits, threshold))
    np.testing.assert_array_equal(kept, expected)
    assert expected.all() == (threshold >= 0.3)


def test_xtc_is_applied_as_often_as_it_says():
    """Of two thirds and one third, the first is drawn only where XTC is not applied."""
    logits, n = jnp.log(jnp.array([[2.0, 1.0]])), 4000
    many = jnp.broadcast_to(logits, (n, 2))
    for probability in (0.0, 0.25, 0.5, 1.0):
        settings = Sampling(temperature=1, xtc_probability=probability)
        tokens = np.asarray(draw(many, jax.random.key(3), settings).tokens)
        expected = (1 - probability) * 2 / 3
        error = 4 * np.sqrt(expected * (1 - expected) / n)
        assert abs(np.mean(tokens == 0) - expected) <= error, probability


RARE = [
    {},
    {"typical_p": 0.5},
    {"top_n_sigma": 1.0},
    {"epsilon_cutoff": 0.03},
    {"eta_cutoff": 0.05},
    {"xtc_probability": 0.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 20},
    {"typical_p": 0.9, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0},
]


def test_rows_with_settings_of_their_own_draw_as_alone():
    logits = random_logits(batch=len(RARE), width=V)
    each = [Sampling(**{"temperature": 1.3, **one}) for one in RARE]
    key, ends = np.asarray(jax.random.key_data(jax.random.key(5))), np.full(1, -1, np.int32)
    rows = [RowSettings.of(one, key, i, ends, V) for i, one in enumerate(each)]
    settings = jax.tree.map(lambda *a: jnp.stack(a), *rows)
    run, words, numbers = jax.jit(sample_rows), Words.empty(len(each), V, 8), jnp.arange(len(each))
    for position in range(5):
        positions = jnp.full(len(each), position, jnp.int32)
        found = run(logits, settings, positions, positions, words, numbers).tokens
        for i, one in enumerate(each):
            alone = draw(logits[i : i + 1], jax.random.key(5), one, rows=[i], positions=position)
            assert alone.tokens[0] == found[i], (RARE[i], position)


def test_greedy_has_no_filters():
    logits = random_logits(width=V)
    settings = Sampling(xtc_probability=1, xtc_threshold=0, typical_p=0.01, top_n_sigma=1)
    assert not settings.has_rare_filters
    np.testing.assert_array_equal(draw(logits, settings=settings).tokens, logits.argmax(axis=1))
