"""Layers with a sliding window have pages of their own, which texts give back; texts are the same."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax.engine.batching.draft import ModelGuesses
from maxjax.engine.batching.engine import page_counts
from maxjax.engine.batching.memory import TextMemory, window_page_count
from maxjax.engine.batching.pages import Pages, SlidingWindow
from maxjax.engine.batching.speculation import Speculation
from maxjax.errors import UserInputError
from maxjax.models import Mamba, MambaConfig, Qwen2, Qwen2Config
from maxjax.nn.kv_cache.pages import PagedCache
from tests.models.decoders import greedy, ids_of

VOCAB, PAGE, WINDOW = 96, 64, 70
# The window, the 32 tokens of a dispatch (more than a piece of 16), and a page.
MOST = 4
OPTIONS = {"slots": 2, "chunk": 16}


def made(kinds, seed=0):
    kinds = tuple({"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds)
    config = Qwen2Config(
        VOCAB, 32, 48, num_hidden_layers=len(kinds), num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, layer_types=kinds, sliding_window=WINDOW,
    )  # fmt: skip
    return maxjax.init(Qwen2(config), jax.random.key(seed))


@pytest.fixture(scope="module")
def mixed():
    return made("sfs")


@pytest.fixture(scope="module")
def windows():
    return made("ss")


def ids(count, seed):
    return (ids_of(1, count, seed)[0] % VOCAB).tolist()


def oracle(model, prompts, new):
    """The texts by a plain loop over a KVCache."""
    return list(map(tuple, greedy(model, prompts, new).tolist()))


def held(text):
    return sum(number >= 0 for number in text.window_pages)


@pytest.fixture
def most_held(monkeypatch):
    """The numbers of pages for windows that texts have had."""
    found, move = [], TextMemory.move_window

    def moved(self, text, tokens):
        move(self, text, tokens)
        found.append(held(text))

    monkeypatch.setattr(TextMemory, "move_window", moved)
    return found


@pytest.mark.parametrize("kinds", ["sfs", "ss"])
def test_a_long_text_has_the_pages_of_its_window(kinds, most_held):
    """Read in pieces and written: 11 pages of tokens, at most four of which hold keys of layers with a window."""
    model = made(kinds)
    prompts = [ids(500, 1), ids(9, 2), ids(230, 3)]
    with maxjax.Engine(model, **OPTIONS) as engine:
        answers = [engine.submit(p, max_new_tokens=200, eos_ids=()) for p in prompts]
        found = [answer.result().tokens for answer in answers]
        stats = engine.stats()
        assert (stats.window_pages, stats.free_window_pages) == (2 * MOST, 2 * MOST)
        assert (stats.pages, stats.free_pages) == ((32, 32) if "f" in kinds else (0, 0))
    assert max(most_held) == MOST
    assert found == oracle(model, prompts, 200)


@pytest.mark.parametrize(
    ("chunk", "at_once"),
    [
        (16, False),
        *(pytest.param(*one, marks=pytest.mark.extra) for one in ((16, True), (128, False))),
    ],
)
def test_beginnings_are_shared_where_the_last_window_is_there(mixed, chunk, at_once):
    """Then long texts take the pages for windows, and nothing can be shared."""
    common = ids(5 * PAGE + 9, 1)
    prompts = [[*common, *ids(20 + n, n)] for n in (2, 3, 4)]
    expected = oracle(mixed, prompts, 20)
    options = {"max_new_tokens": 20, "eos_ids": ()}
    with maxjax.Engine(mixed, slots=2, chunk=chunk) as engine:
        answers = []
        for prompt in prompts:
            answers.append(engine.submit(prompt, **options))
            if not at_once:
                answers[-1].result()
        assert [answer.result().tokens for answer in answers] == expected
        assert engine.stats().found_tokens == 2 * 5 * PAGE
        for n in (5, 6):
            engine.submit(ids(600, n), max_new_tokens=1).result()
        before = engine.stats().found_tokens
        assert engine.submit(prompts[0], **options).result().tokens == expected[0]
        assert engine.stats().found_tokens == before


def test_a_page_that_one_text_gives_back_stays_with_another(mixed):
    """The first text goes on far beyond what both begin with, while the second one still sees it."""
    common = ids(3 * PAGE, 1)
    prompts = [[*common, 1], [*common, 2]]
    with maxjax.Engine(mixed, **OPTIONS) as engine:
        first = engine.submit(prompts[0], max_new_tokens=300, eos_ids=())
        while len(first.completion.tokens) < 2:
            time.sleep(1e-3)
        second = engine.submit(prompts[1], max_new_tokens=3, eos_ids=())
        found = [answer.result().tokens for answer in (first, second)]
        assert engine.stats().found_tokens == 3 * PAGE
    expected = oracle(mixed, prompts, 300)
    assert found == [expected[0], expected[1][:3]]


def test_paused_texts_go_on(mixed):
    """Pages of the layers that keep all tokens run out: texts wait, lose both kinds of pages, and are read again."""
    prompts = [ids(n, n) for n in (90, 100, 110, 120)]
    leaves = jax.tree.leaves(mixed.page_pool(20, PAGE, 3, window_pages=3 * MOST, abstract=True))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    with maxjax.Engine(mixed, slots=3, chunk=16, cache_bytes=size) as engine:
        stats = engine.stats()
        assert (stats.pages, stats.window_pages) == (20, 3 * MOST)
        answers = [engine.submit(p, max_new_tokens=360, eos_ids=()) for p in prompts]
        found = [answer.result().tokens for answer in answers]
        stats = engine.stats()
        assert stats.read_tokens > sum(map(len, prompts)) + PAGE
        assert (stats.free_pages, stats.free_window_pages) == (stats.pages, stats.window_pages)
    assert found == oracle(mixed, prompts, 360)


def test_forks(mixed):
    prompt = ids(150, 1)
    with maxjax.Engine(mixed, slots=3, chunk=16) as engine:
        answer = engine.submit(prompt, max_new_tokens=300, eos_ids=())
        while len(answer.completion.tokens) < 130:
            time.sleep(1e-3)
        forks = [answer.fork(max_new_tokens=40) for _ in range(2)]
        whole = answer.result().tokens
        for fork in forks:
            done = len(fork.result().prompt_tokens) - len(prompt)
            assert done >= 130 and fork.result().tokens == whole[done : done + 40]
        assert engine.stats().found_tokens >= 2 * 4 * PAGE


@pytest.fixture
def free(monkeypatch):
    """Guesses that cost nothing, so that all are used, whatever the machine measures."""
    monkeypatch.setattr(Speculation, "_time_of", lambda self, shape, rows: 1 + 1e-3 * shape[0])
    monkeypatch.setattr(Speculation, "plain_seconds", lambda self, rows: 1.0)
    monkeypatch.setattr(ModelGuesses, "extra_time", lambda self, count, rows: 0.0)


@pytest.mark.parametrize("is_ragged", [True, pytest.param(False, marks=pytest.mark.extra)])
def test_rejected_guesses(mixed, is_ragged, monkeypatch, most_held, free):
    """Pages are given back by the tokens that were accepted alone."""
    before = Speculation.__init__
    init = lambda self, slots, counts, _, is_exact: before(self, slots, counts, is_ragged, is_exact)
    monkeypatch.setattr(Speculation, "__init__", init)
    prompts = [[*range(20)] * 6, ids(90, 1)]
    with maxjax.Engine(mixed, speculation="lookup", **OPTIONS) as engine:
        answers = [engine.submit(p, max_new_tokens=300, eos_ids=()) for p in prompts]
        found = [answer.result().tokens for answer in answers]
        stats = engine.stats()
        assert 0 < stats.right_tokens < stats.guessed_tokens
    assert found == oracle(mixed, prompts, 300) and max(most_held) == MOST


def test_drafts(mixed, windows, free):
    """A draft has the pages of layers that keep all tokens; where there are none, all layers keep all tokens."""
    for model, count in ((mixed, 2 * MOST), (windows, 0)):
        with maxjax.Engine(model, draft=windows, **OPTIONS) as engine:
            found = engine.submit(ids(200, 1), max_new_tokens=100, eos_ids=()).result().tokens
            stats = engine.stats()
            assert stats.window_pages == count and stats.guessed_tokens > 0
        assert [found] == oracle(model, [ids(200, 1)], 100)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        pytest.param({"data": 2, "model": 4}, AxisType.Auto, id="tokens of pages divided"),
        pytest.param(
            {"data": 2, "model": 2}, AxisType.Explicit, id="explicit", marks=pytest.mark.extra
        ),
    ],
)
def test_on_a_mesh(sizes, kind):
    """Each group of devices has pages for its own slots."""
    prompts = [ids(n, n) for n in (260, 150)]
    expected = oracle(made("sf"), prompts, 12)
    count = sizes["data"] * sizes["model"]
    mesh = maxjax.make_mesh(**sizes, devices=jax.devices()[:count], axis_types=kind)
    with maxjax.Engine(made("sf").to(mesh), **OPTIONS) as engine:
        answers = [engine.submit(p, max_new_tokens=12, eos_ids=()) for p in prompts]
        assert [answer.result().tokens for answer in answers] == expected
        stats = engine.stats()
        assert stats.window_pages == stats.free_window_pages == 2 * MOST


def test_exact(mixed):
    """The same bits alone, in company, and after a beginning that was found."""
    options = {"max_new_tokens": 90, "eos_ids": (), "logprobs": 2}
    prompt, found = ids(4 * PAGE + 5, 1), []
    for others in (0, 2):
        with maxjax.Engine(mixed, slots=3, chunk=64, exact=True) as engine:
            for _ in range(2):
                waiting = [engine.submit(ids(300, n), **options) for n in range(others)]
                found.append(engine.submit(prompt, **options).result())
                for answer in waiting:
                    answer.result()
    assert {one.tokens for one in found} == {*oracle(mixed, [prompt], 90)}
    assert all(one.logprobs == found[0].logprobs for one in found)


@pytest.mark.parametrize("kinds", ["sfs", pytest.param("ss", marks=pytest.mark.extra)])
def test_generate_and_stream(kinds):
    """A pool that grows has pages for windows as well."""
    model, prompts = made(kinds), [ids(400, 1), ids(30, 2)]
    expected = oracle(model, prompts, 90)
    found = maxjax.generate(model, None, prompts, max_new_tokens=90, eos_ids=(), chunk=16)
    assert [one.tokens for one in found] == expected
    stream = maxjax.stream(model, None, prompts[0], max_new_tokens=90, eos_ids=())
    assert not list(stream) and stream.completion.tokens == expected[0]


def test_what_freed_pages_hold_reaches_no_token(mixed):
    """Pages that are not the text's have NaN: chunks, and steps, give the logits of a call without a cache."""
    prompt = np.asarray([ids(400, 1)], np.int32)
    window, width = SlidingWindow(WINDOW, PAGE), 8
    blank = mixed.page_pool(width, PAGE, 1, window_pages=width)
    pool = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), blank)
    read = jax.jit(lambda model, ids, cache: model(ids, cache))
    found = []
    for start, end in ((0, 150), (150, 300), (300, 399), (399, 400)):
        first = window.first(start)
        pages = np.where(np.arange(width) < first, -1, np.arange(width)[::-1])[None]
        table = np.arange(width)[None]
        lengths, rows = np.asarray([start], np.int32), np.zeros(1, np.int32)
        cache = PagedCache(pool, table, lengths, rows, window_table=pages.astype(np.int32))
        logits, cache = read(mixed, prompt[:, start:end], cache)
        found.append(logits)
        # What is given back may be another text's.
        states = dict(cache.pool.states)
        gone = np.arange(width)[::-1][: window.first(end)]
        spoil = lambda a, gone=gone: a.at[:, gone].set(jnp.nan)
        states["sliding"] = jax.tree.map(spoil, states["sliding"])
        pool = type(pool)(states, cache.pool.parts)
    wanted = mixed(prompt)
    np.testing.assert_allclose(jnp.concatenate(found, 1), wanted, rtol=1e-4, atol=1e-5)


def test_page_counts(mixed, windows):
    """The two pools take what cache_bytes says; windows have a pool of their own where that is smaller."""
    size = lambda model, pages, window_pages: sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(
            model.page_pool(pages, PAGE, 2, window_pages=window_pages, abstract=True)
        )
    )
    of = lambda model, given, chunk=16: tuple(page_counts(model, 2, given, None, chunk))
    assert of(mixed, None) == (32, 2 * MOST) and of(windows, None) == (32, 2 * MOST)
    assert of(mixed, size(mixed, 50, 2 * MOST)) == (50, 2 * MOST)
    assert of(windows, size(windows, 1, 50))[1] == 50  # the rest keeps beginnings
    # In few pages, or for large pieces, there is nothing to save.
    assert of(mixed, size(mixed, 2 * MOST, 0)) == (2 * MOST, 0)
    assert of(mixed, None, 1024) == (32, 0)
    assert window_page_count(made("f"), 2, 100, 16) == 0
    with pytest.raises(UserInputError, match="cache_bytes"):
        of(mixed, 1000)


def test_a_recurrent_model_needs_room_for_its_states():
    mamba = maxjax.init(Mamba(MambaConfig(96, 16, 2, state_size=6)), jax.random.key(0))
    with pytest.raises(UserInputError, match="4 slots"):
        page_counts(mamba, 4, "1KiB", None, 16)
    assert page_counts(mamba, 4, "1MiB", None, 16).window_pages == 0


def test_pages_given_back_are_kept_for_others():
    pages = Pages(3, 2)
    keys = pages.keys([1, 2, 3, 4], b"")
    own = pages.allocate(2)
    pages.publish([-1, own[1]], keys)
    pages.release([-1, *own])
    assert not pages.has(keys[0]) and pages.has(keys[1]) and pages.free == 3
    pages.withdraw(keys)
    assert not pages.has(keys[1]) and pages.free == 3
