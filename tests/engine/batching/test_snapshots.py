"""Models with recurrent layers share prefixes too: by snapshots of their states."""

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.batching.memory import is_recurrent, rows_of_states
from maxjax.engine.batching.snapshots import Snapshots, copied, snapshot_count
from maxjax.models import Llama, LlamaConfig, Mamba, MambaConfig
from tests.models.decoders import ids_of
from tests.models.families.cases import every, first_of_each_family

FAMILIES = [param.values[0] for param in first_of_each_family(every()) if not param.marks]
PAGE = 64


@pytest.fixture(scope="module")
def mamba():
    return maxjax.init(Mamba(MambaConfig(96, 16, 2, state_size=6)), jax.random.key(0))


def ids(model, count, seed):
    return (ids_of(1, count, seed)[0] % model.config.vocab_size).tolist()


def check(model, prompts, *, found, slots=2, **options):
    """One prompt after the other, and all at once: the texts are those of engines of their own."""
    settings = {"max_new_tokens": 6, "eos_ids": (), "logprobs": 0}
    expected = []
    for prompt in prompts:
        with maxjax.Engine(model, None, slots=slots, **options) as engine:
            expected.append(engine.submit(prompt, **settings).result())
    for at_once in (False, True):
        with maxjax.Engine(model, None, slots=slots, **options) as engine:
            answers = []
            for prompt in prompts:
                answers.append(engine.submit(prompt, **settings))
                if not at_once:
                    answers[-1].result()
            for answer, wanted in zip(answers, expected, strict=True):
                assert answer.result().tokens == wanted.tokens
                each = ([one.logprob for one in of.logprobs] for of in (answer.result(), wanted))
                np.testing.assert_allclose(*each, atol=1e-4)
            # Prompts that are read at the same time find less of each other.
            assert at_once or engine.stats().found_tokens == found


@pytest.mark.parametrize("chunk", [64, 512])
def test_common_beginnings(mamba, chunk):
    """The second prompt shows where prompts differ, from the third on they begin there; the same prompt at its end."""
    common = ids(mamba, 3 * PAGE + 9, 1)
    prompts = [[*common, *ids(mamba, 70, n)] for n in (2, 3, 4, 5)]
    prompts[3:3] = [prompts[0], ids(mamba, 30, 6)]
    check(mamba, prompts, found=2 * 3 * PAGE + 4 * PAGE, chunk=chunk)


def test_families(tmp_path):
    for case in FAMILIES:
        if str(case).startswith(("jamba", "qwen3_next")):
            where = tmp_path / str(case)
            where.mkdir()
            case.model(where)
            model, _ = maxjax.load(where)
            assert is_recurrent(model)
            common = ids(model, 2 * PAGE, 1)
            check(model, [[*common, *ids(model, 5 + n, n)] for n in (2, 3)], found=2 * PAGE)


def test_exact(mamba):
    """The same bits, whether the beginning was read or found."""
    prompt, found = ids(mamba, 3 * PAGE, 1), []
    options = {"max_new_tokens": 5, "eos_ids": (), "logprobs": 2}
    with maxjax.Engine(mamba, None, slots=2, chunk=64, exact=True) as engine:
        for _ in range(2):
            found.append(engine.submit(prompt, **options).result().logprobs)
        assert engine.stats().found_tokens == 2 * PAGE
    assert found[0] == found[1]


def test_forks_and_compile(mamba):
    """A fork begins where its answer's prompt has a state; copies need no program that compile() has not made."""
    with maxjax.Engine(mamba, None, slots=4, chunk=64) as engine:
        assert engine._worker.call(lambda scheduler: scheduler.memory.compile_snapshots()) == 2
        before = copied._cache_size()
        answer = engine.submit(ids(mamba, 150, 1), max_new_tokens=20, eos_ids=())
        answer.result()
        fork = answer.fork(max_new_tokens=9).result()
        assert engine.stats().found_tokens == 2 * PAGE and copied._cache_size() == before
        alone = engine.submit(list(fork.prompt_tokens), max_new_tokens=9, eos_ids=(), salt="other")
        assert alone.result().tokens == fork.tokens


def test_least_recently_used(mamba):
    """More prompts than there are snapshots: the first one's is gone, the last one's is there."""
    count = snapshot_count(2)
    prompts = [ids(mamba, 2 * PAGE + 1, n) for n in range(count + 1)]
    with maxjax.Engine(mamba, None, slots=2) as engine:
        for prompt in prompts:
            engine.submit(prompt, max_new_tokens=2).result()
        for prompt, found in ((prompts[-1], 2 * PAGE), (prompts[0], 0)):
            before = engine.stats().found_tokens
            engine.submit(prompt, max_new_tokens=2).result()
            assert engine.stats().found_tokens - before == found


def test_states_that_are_not_finite_are_dropped():
    snapshots, keys = Snapshots(2), [b"a", b"b"]
    assert snapshots.add(keys) == 0 and snapshots.find(keys, (2, 1)) == (2, 0)
    snapshots.drop(keys)
    assert snapshots.find(keys, (2, 1)) is None and snapshots.add([b"c"]) == 0


def test_rows(mamba):
    """What cache_bytes counts: the states of slots, and snapshots of models that have states."""
    config = LlamaConfig(8, 8, 8, num_hidden_layers=1, num_attention_heads=1)
    assert rows_of_states(mamba, 32) == 32 + 8
    assert rows_of_states(maxjax.init(Llama(config), jax.random.key(0)), 32) == 32
