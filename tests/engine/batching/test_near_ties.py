"""Near-ties: the steps after which a text may depend on what else runs are known, and only after them it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.engine.sampling.rows import RowSettings, near_margin, sample_rows
from maxjax.engine.sampling.settings import Sampling
from maxjax.models import Llama, LlamaConfig

VOCAB, NEW = 512, 40
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "logprobs": 1},
    {"repetition_penalty": 1.2},
]


def model_of(dtype, layers=3):
    config = LlamaConfig(
        VOCAB, 64, 128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    return maxjax.init(Llama(config, dtype), jax.random.key(3))


def prompts_of(count):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist() for _ in range(count)]


def answers_of(model, prompts, *, alone, **options):
    """The answers, and the engine's count of near-ties."""
    options = {"max_new_tokens": NEW, "eos_ids": (), **options}
    with maxjax.Engine(model, slots=16) as engine:
        found = []
        for i, prompt in enumerate(prompts):
            settings = {"key": jax.random.key(i), **SETTINGS[i % len(SETTINGS)]}
            found.append(engine.submit(prompt, **options, **settings))
            if alone:
                found[-1].result()
        found = [answer.result() for answer in found]
        return found, engine.stats().near_ties


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [32, pytest.param(400, marks=pytest.mark.extra)])
def test_texts_differ_only_after_a_near_tie(dtype, count):
    """Each text alone and in company: where tokens differ, a near-tie came before or is there."""
    model, prompts = model_of(dtype), prompts_of(count)
    alone, near_ties = answers_of(model, prompts, alone=True)
    assert near_ties == sum(len(one.near_ties) for one in alone)
    assert near_ties < 0.2 * count * NEW  # it says something
    for one, other in zip(alone, answers_of(model, prompts, alone=False)[0], strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), NEW)
        assert first == NEW or any(i <= first for i in one.near_ties)
        # Before a difference both have the same near-ties, up to those at the margin itself.
        before = [{i for i in found.near_ties if i < first} for found in (one, other)]
        assert len(before[0] ^ before[1]) <= 2


def test_tokens_in_pairs():
    """Where each token has a twin of almost the same logit, each greedy step is a near-tie, and one of two drawn."""
    model = model_of("float32")
    head = np.asarray(model.lm_head.weight)
    head = np.repeat(head[::2], 2, axis=0) * np.tile([1, 1 + 1e-6], VOCAB // 2)[:, None]
    model = maxjax.replace(model, {"lm_head.weight": jnp.asarray(head, jnp.float32)})
    found, _ = answers_of(model, prompts_of(4), alone=True)
    assert found[0].near_ties == tuple(range(NEW))
    assert len(found[1].near_ties) < NEW / 2  # twins have noises of their own


def test_margins():
    """A lead is compared with the spread of the logits, or with the step of their dtype."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 50)).astype(np.float32)
    logits[:, 7], logits[:, 9] = 8.0, [8.0 - 0.9e-4 * logits[0].std(), 7.99, 7.0]
    logits[0, 20] = -np.inf
    row = RowSettings.of(Sampling(), np.zeros(2, np.uint32), 0, np.full(1, -1, np.int32), 50)
    settings, zeros = jax.tree.map(lambda a: jnp.stack([a] * 3), row), jnp.zeros(3, jnp.int32)
    near = lambda step: sample_rows(logits, settings, zeros, zeros, step=step).is_near_tie.tolist()
    assert near(float(jnp.finfo(jnp.float32).eps)) == [True, False, False]
    assert near(float(jnp.finfo(jnp.bfloat16).eps)) == [True, True, False]
    few = near_margin(rng.normal(size=(1, 200_000)), np.zeros(1), 0.0)
    np.testing.assert_allclose(few, 1e-4, rtol=0.1)
