"""``with capture`` and ``with patch``: one model object, one thread or task, and nothing after the block."""

import asyncio
import gc
import pickle
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.models import BertConfig, BertModel, Gemma3, Gemma3Config, Llama, LlamaConfig
from maxjax.nn.layer.definition import marked
from maxjax.nn.layer.observe import frames
from maxjax.nn.layer.observe.plans import plan_of
from tests.models.decoders import padded

IDS = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
CALL = lambda model, ids: model(ids)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        100, 16, 16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    return maxjax.init(Llama(config), jax.random.key(0))


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not frames.OBSERVERS.get() and not frames.OBSERVING.frames


def close(found, expected, atol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


def test_eager_calls_of_the_object_and_of_its_modules(model):
    plain = model(IDS)
    _, expected = maxjax.captured(CALL, "layers.*.mlp", "norm")(model, IDS)
    with maxjax.capture(model, "layers.*.mlp", "norm") as c:
        np.testing.assert_array_equal(model(IDS), plain)
        jax.tree.map(lambda a: a, model)(IDS)  # an equal model is another object
        states = model.states(IDS)  # calls a module in the model
        model.logits(states)
    assert len(c.runs) == 2 == len(c.calls)
    close(c["layers.1.mlp"], expected["layers.1.mlp"])
    close(c["layers.*.mlp"], expected["layers.*.mlp"])
    close(c["norm"], states)
    assert set(c) == set(expected) and "layers.1.mlp" in c and "the last of 2 runs" in repr(c)
    model(IDS)
    assert len(c.runs) == 2


def test_patches_in_a_block(model):
    plain = model(IDS)
    expected = maxjax.patched(CALL, {"layers.1.mlp": 0.0})(model, IDS)
    with maxjax.patch(model, {"layers.1.mlp": 0.0}), maxjax.capture(model, "layers.*.mlp") as c:
        close(model(IDS), expected)
    assert not np.any(c["layers.1.mlp"]) and np.any(c["layers.2.mlp"])
    np.testing.assert_array_equal(model(IDS), plain)
    with maxjax.patch(model, {"layers.1.mlp": jnp.zeros(3)}):
        with pytest.raises(UserInputError, match=r"float32\[2,5,16\].*float32\[3\]"):
            model(IDS)
        warnings.simplefilter("ignore")  # that it was not used
    np.testing.assert_array_equal(model(IDS), plain)


def test_what_the_caller_jitted_runs_as_compiled(model):
    traced = []

    @jax.jit
    def mine(model, ids):
        traced.append(1)
        return model(ids)

    mine(model, IDS)
    with maxjax.capture(model, "layers.1") as c:
        mine(model, IDS)
        jax.vmap(lambda ids: model(ids))(IDS[:, None])
    assert len(traced) == 1 and not c.runs
    with pytest.raises(
        KeyError, match=r"the model ran under jax.jit or another transformation.*maxjax.captured"
    ):
        c["layers.1"]
    with pytest.raises(KeyError, match="no call of this model object ran in the block"):
        maxjax.capture(model, "layers.1")["layers.1"]
    with pytest.warns(UserWarning, match="patch 'layers.1' was not used"):
        with maxjax.patch(model, {"layers.1": 0.0}):
            mine(model, IDS)
    with pytest.raises(UserInputError, match="did you mean 'model.layers"):
        maxjax.capture(model, "layer.1")


def test_what_was_captured_does_not_keep_the_model():
    config = LlamaConfig(100, 16, 16, num_hidden_layers=3, num_attention_heads=4)
    one = maxjax.init(Llama(config), jax.random.key(0))
    held = weakref.ref(one)
    with maxjax.patch(one, {"layers.0": 0.0}), maxjax.capture(one, "layers.1") as c:
        one(IDS)
    copy = pickle.loads(pickle.dumps(c))
    assert list(copy) == c._ipython_key_completions_() == ["model.layers.1"]
    np.testing.assert_array_equal(copy["layers.1"], c["layers.1"])
    with c:
        one(IDS + 1)
    assert len(c.runs) == 2
    del one
    gc.collect()
    assert held() is None


def test_observed_models_that_differ_in_their_weights_alone_are_told_apart():
    config = LlamaConfig(100, 16, 16, num_hidden_layers=3, num_attention_heads=4)
    mesh = maxjax.make_mesh(data=2, model=4)
    models = Llama(config), Llama(config, "bfloat16"), Llama(config).to(mesh)
    plan, _ = plan_of(models[0], "capture", [("layers.1", None)])
    copies = [marked(marked(model, plan, ""), plan, "") for model in models]
    assert len({jax.tree.structure(copy) for copy in copies}) == 3
    for model, copy in zip(models, copies, strict=True):
        own, other = model.raw_state_dict(), copy.raw_state_dict()
        assert [(w.dtype, w.sharding) for w in own.values()] == [
            (w.dtype, w.sharding) for w in other.values()
        ]


def test_in_a_jitted_function_of_ones_own(model):
    @jax.jit
    def run(model, ids):
        with maxjax.capture(model, "layers.1") as c:
            y = model(ids)
        return y, c["layers.1"]

    close(run(model, IDS)[1], maxjax.captured(CALL, "layers.1")(model, IDS)[1]["layers.1"])


def test_exceptions_generators_threads_and_tasks(model):
    with pytest.raises(ZeroDivisionError), maxjax.capture(model, "layers.1"):
        model(IDS)
        raise ZeroDivisionError

    def pieces():
        with maxjax.capture(model, "layers.1") as c:
            yield c
            yield c

    first, second = pieces(), pieces()
    one, two = next(first), next(second)
    model(IDS)
    first.close()  # not in the order in which they were opened
    model(IDS)
    second.close()
    model(IDS)
    assert (len(one.runs), len(two.runs)) == (1, 2)

    with maxjax.capture(model, "layers.1") as c:
        thread = threading.Thread(target=lambda: model(IDS))
        thread.start()
        thread.join()
        assert not c.runs

    async def task():
        with maxjax.capture(model, "layers.1") as c:
            await asyncio.sleep(0)
            model(IDS)
            await asyncio.sleep(0)
        return len(c.runs)

    async def both():
        return await asyncio.gather(task(), task(), asyncio.sleep(0))

    assert asyncio.run(both())[:2] == [1, 1]


# --- maxjax's own programs -----------------------------------------------------------------------

NAMES = ("layers.*", "layers.1.self_attn:weights", "layers.2.self_attn:heads", "lm_head")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_generate(model, family):
    """What is recorded over prefill and decode steps is what one call of the model has."""
    if family == "gemma":
        config = Gemma3Config(
            100,
            16,
            16,
            num_hidden_layers=7,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            sliding_window=3,
        )
        model = maxjax.init(Gemma3(config), jax.random.key(0))
    plain = maxjax.generate(model, None, PROMPTS, max_new_tokens=6)
    with maxjax.capture(model, *NAMES) as c:
        texts = maxjax.generate(model, None, PROMPTS, max_new_tokens=6, batch_size=2)
    assert [text.tokens for text in texts] == [text.tokens for text in plain]
    assert len(c.runs) == 1 and c.runs[0].lengths.tolist() == [8, 10, 6]
    # The whole texts as rows of one call: no token sees those after it.
    wholes = [[*text.prompt_tokens, *text.tokens[:-1]] for text in texts]
    ids, _ = padded(wholes)
    _, expected = jax.jit(maxjax.captured(CALL, *NAMES))(model, ids)
    for i, (text, one) in enumerate(zip(texts, wholes, strict=True)):
        n, count = len(one), len(text.tokens)
        close(c["layers.*"][:, i, :n], expected["layers.*"][:, i, :n])
        name = "layers.1.self_attn:weights"
        close(c[name][i, :, :n, :n], expected[name][i, :, :n, :n])
        close(c["layers.2.self_attn:heads"][i, :n], expected["layers.2.self_attn:heads"][i, :n])
        close(c["lm_head"][i, :count], expected["lm_head"][i, n - count : n])
        assert not np.any(c["layers.*"][:, i, n:])
    last = c.calls[-1]  # one decode step of the last text, as the model computes it
    assert last["layers.1"].shape == (1, 16) and last["lm_head"].shape == (1, 100)


def test_a_function_around_a_program_of_maxjax(model):
    run = lambda model: maxjax.generate(model, None, PROMPTS[0], max_new_tokens=2)
    with pytest.raises(UserInputError, match="write `with maxjax.capture"):
        maxjax.captured(run, "layers.*")(model)


def test_patched_generation_and_streams(model):
    new = {"layers.1.mlp": lambda y: -5 * y}
    with maxjax.patch(model, new), maxjax.capture(model, "layers.1") as c:
        text = maxjax.generate(model, None, PROMPTS[0], max_new_tokens=6)
        pieces = maxjax.stream(model, None, PROMPTS[0], max_new_tokens=6)
        assert not c.runs[1:]  # it begins with the first token that is asked for
        list(pieces)
    assert pieces.completion.tokens == text.tokens and len(c.runs) == 2
    ids = np.array([[*PROMPTS[0], *text.tokens[:-1]]], np.int32)
    run = maxjax.captured(maxjax.patched(CALL, new), "layers.1")
    logits, expected = jax.jit(run)(model, ids)
    assert np.argmax(logits[0, 2:], -1).tolist() == list(text.tokens)
    assert text.tokens != maxjax.generate(model, None, PROMPTS[0], max_new_tokens=6).tokens
    for found in (c.runs[0], c.runs[1]):
        assert found["layers.1"].shape == (1, 8, 16)
        close(found["layers.1"], expected["layers.1"])


def test_programs_of_others_stay_and_are_found_again(model):
    from maxjax.engine.batching.programs import decode, read, read_tokens

    # JAX keeps a limited number of programs: those of earlier tests could leave while this one counts.
    programs = read, read_tokens, decode
    for program in programs:
        program.clear_cache()
    count = lambda: [program._cache_size() for program in programs]
    other = jax.tree.map(lambda a: a, model)
    run = lambda model: maxjax.generate(model, None, PROMPTS[0], max_new_tokens=6)
    run(model)
    sizes = count()
    with maxjax.capture(model, "layers.0:input"):
        run(other)
        assert count() == sizes
        run(model)
        more = count()
    assert sum(more) > sum(sizes)
    run(model)
    with maxjax.capture(model, "layers.0:input"):
        run(model)
    assert count() == more
    with pytest.raises(UserInputError, match="'model.layers.1.mlp' has no 'weights'"):
        with maxjax.capture(model, "layers.1.mlp:weights"):
            run(model)


def test_a_misspelt_site_is_refused_in_each_call(model):
    place = "layers.1.self_attn:weight"
    observed = {
        "capture": lambda: maxjax.capture(model, place),
        "patch": lambda: maxjax.patch(model, {place: 0.0}),
    }
    for what, block in observed.items():
        for _ in range(2):  # the second call runs a compiled loop, which is not traced again
            with pytest.raises(
                UserInputError, match=f"{what}: .* no 'weight' .did you mean 'weights'"
            ):
                with block():
                    model(IDS)
    for function in (maxjax.captured(CALL, place), maxjax.patched(CALL, {place: 0.0})):
        for _ in range(2):
            with pytest.raises(UserInputError, match="no 'weight' .did you mean 'weights'"):
                function(model, IDS)


def test_generation_on_a_mesh(model):
    there = jax.tree.map(lambda a: a, model).to(maxjax.make_mesh(data=2, model=4))
    with maxjax.capture(there, "layers.*.mlp") as c, maxjax.capture(model, "layers.*.mlp") as d:
        texts = maxjax.generate(there, None, PROMPTS[:2], max_new_tokens=3)
        ids, lengths = padded([[*text.prompt_tokens, *text.tokens[:-1]] for text in texts])
        model(ids)
    assert lengths.tolist() == [5, 7]
    for i, n in enumerate(lengths):
        close(c["layers.*.mlp"][:, i, :n], d["layers.*.mlp"][:, i, :n])


def test_embed_and_perplexity():
    model, tokenizer = maxjax.load("tiny")
    text = "What is 2 + 3?\n2 + 3 = 5"
    with maxjax.capture(model, "layers.1") as c:
        maxjax.perplexity(model, tokenizer, text, context=8, stride=4)
    ids = jnp.asarray([tokenizer.encode(text)[:8]], jnp.int32)
    _, expected = maxjax.captured(CALL, "layers.1")(model, ids)
    close(c["layers.1"][:1].astype(jnp.float32), expected["layers.1"].astype(jnp.float32), 5e-2)
    texts = ["abc", "hello there, you"]
    plain = maxjax.embed(model, tokenizer, texts, pooling="mean")
    with maxjax.capture(model, "norm") as c:
        np.testing.assert_array_equal(maxjax.embed(model, tokenizer, texts, pooling="mean"), plain)
    counts = [len(tokenizer.encode(one)) for one in texts]
    assert c.runs[0].lengths.tolist() == counts
    for i, count in enumerate(counts):
        close(np.asarray(c["norm"][i, :count], np.float32).mean(0), plain[i], 1e-2)


@pytest.mark.extra
def test_encoders_do_not_pack_texts_that_are_observed():
    """Otherwise several texts share a row."""
    tokenizer = maxjax.load("tiny")[1]
    config = BertConfig(704, 16, 16, num_hidden_layers=2, num_attention_heads=2)
    model = maxjax.init(BertModel(config), jax.random.key(0))
    texts = ["hello there, you", "abc", "abc abc"]
    plain = maxjax.embed(model, tokenizer, texts)
    with maxjax.capture(model, "layer.1", "layer.*.attention.self:weights") as c:
        close(maxjax.embed(model, tokenizer, texts), plain)
    for i, text in enumerate(texts):
        ids = jnp.asarray([tokenizer.encode(text)], jnp.int32)
        states = model(ids).last_hidden_state
        close(c["layer.1"][i, : ids.shape[1]], states[0])
    assert c["layer.*.attention.self:weights"].shape[:3] == (2, 3, 2)
