"""embed(): MiniLM's embeddings against transformers on torch, live and recorded."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.embed import _encode, embed
from maxjax.engine.load import load
from maxjax.engine.rows import batches
from maxjax.errors import UnsupportedModelError, UserInputError
from maxjax.graph.weights import load_weights
from maxjax.models import BertConfig, BertModel, build
from maxjax.models.pooling import POOLINGS, Pooling, pool
from tests.fill import filled
from tests.oracles.recorded import recorded
from tests.oracles.sentences import ODD, sentences

GOLDEN = Path(__file__).parent / "goldens" / "minilm.npz"
FEW = ["A cat sleeps on the sill.", "The kitten naps.", "Interest rates rose.", ""]


@pytest.fixture(scope="module")
def loaded(minilm):
    return load(minilm)


@pytest.fixture(scope="module")
def random_model(loaded):
    model = small_model()
    model.pooling = loaded[0].pooling
    return model


@pytest.fixture
def small(random_model, loaded, monkeypatch):
    """A small model with MiniLM's pooling and tokenizer, of which tests may change both."""
    tokenizer = loaded[1]
    monkeypatch.setattr(random_model, "pooling", random_model.pooling)
    monkeypatch.setattr(tokenizer, "max_length", tokenizer.max_length)
    return random_model, tokenizer


def small_model():
    """One layer of BERT with heads of MiniLM's width."""
    return filled(BertModel(BertConfig(30522, 64, 96, num_hidden_layers=1, num_attention_heads=2)))


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return json.loads(file["texts"].tobytes()), file["tokens"], file["embeddings"]


# Of the recorded texts: odd ones, and a plain one of 63 tokens, in rows of 64; one of 196 tokens.
SHORT, LONG = [*range(0, 16, 3), 36], [16]


def cosines(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


# --- accuracy -------------------------------------------------------------------------------


@pytest.mark.oracle
def test_every_length_as_torch_has_it(minilm, loaded):
    from tests.oracles.make_minilm_golden import embeddings

    texts = sentences()
    counts = [len(row.ids) for row in loaded[1].tokens(texts)]
    assert len(texts) >= 200 and min(counts) <= 3 and max(counts) == 256
    found, expected = embed(*loaded, texts), embeddings(minilm, texts)
    assert found.dtype == np.float32 and found.shape == (len(texts), 384)
    assert np.abs(found - expected).max() <= 1e-5


def test_the_recorded_texts(loaded, golden):
    texts, tokens, expected = golden
    assert [len(row.ids) for row in loaded[1].tokens(texts)] == list(tokens)
    found = embed(*loaded, [texts[i] for i in SHORT + LONG])
    assert np.abs(found - expected[SHORT + LONG]).max() <= 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reduce_dtype, least", [("float32", 0.9999), ("bfloat16", 0.9995)])
def test_bfloat16(minilm, loaded, golden, reduce_dtype, least):
    texts, expected = [golden[0][i] for i in SHORT], golden[2][SHORT]
    narrow, _ = load(minilm, dtype="bfloat16", reduce_dtype=reduce_dtype, tokenizer=False)
    found = embed(narrow, loaded[1], texts)
    assert found.dtype == np.float32
    assert cosines(found, expected).min() >= least
    assert np.abs(found - expected).max() > 1e-4  # it is computed in 16 bits


def test_truncation_as_torch_has_it(minilm, loaded):
    from tests.oracles.make_minilm_golden import embeddings

    texts = [" ".join(["time", "year", "people"] * 150), "short"]
    found = embed(*loaded, texts, truncate=True)
    assert np.abs(found - recorded(lambda: embeddings(minilm, texts))).max() <= 1e-5


# --- what holds whatever the model is -------------------------------------------------------


def test_neither_batches_nor_neighbours_matter(small):
    texts = sentences(14, longest=30)
    together = embed(*small, texts)
    for size in (1, 5):
        np.testing.assert_allclose(embed(*small, texts, batch_size=size), together, atol=2e-6)
    backwards = embed(*small, texts[::-1], batch_size=5)[::-1]
    np.testing.assert_allclose(backwards, together, atol=2e-6)
    np.testing.assert_allclose(embed(*small, [texts[10]])[0], together[10], atol=2e-6)


def test_any_iterable_of_texts(small):
    expected = embed(*small, FEW)
    np.testing.assert_array_equal(embed(*small, tuple(FEW)), expected)
    np.testing.assert_array_equal(embed(*small, (text for text in FEW)), expected)
    np.testing.assert_array_equal(embed(*small, np.array(FEW, object)), expected)


def test_no_texts(small):
    found = embed(*small, [])
    assert found.shape == (0, 64) and found.dtype == np.float32


def test_the_result_belongs_to_the_caller(small):
    found = embed(*small, FEW)
    found[:] = 0
    assert np.abs(embed(*small, FEW)).max() > 0


def test_normalize(small):
    plain = embed(*small, FEW, normalize=False)
    assert (np.linalg.norm(plain, axis=1) > 1.1).all()
    scaled = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(embed(*small, FEW, normalize=True), scaled, atol=1e-6)
    np.testing.assert_array_equal(embed(*small, FEW), embed(*small, FEW, normalize=True))


def test_truncated_vectors(small):
    texts = ["one", "two words"]
    whole = maxjax.embed(*small, texts)
    part = maxjax.embed(*small, texts, truncate_dim=16)
    np.testing.assert_array_equal(part, whole[:, :16])
    again = maxjax.embed(*small, texts, truncate_dim=16, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(again, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(again, part / np.linalg.norm(part, axis=1, keepdims=True), atol=1e-6)
    assert maxjax.embed(*small, [], truncate_dim=16).shape == (0, 16)
    for wrong in (0, "16", 1.5, True):
        with pytest.raises(
            UserInputError, match="truncate_dim is .*: it must be an integer of at least 1"
        ):
            maxjax.embed(*small, texts, truncate_dim=wrong)
    with pytest.raises(UserInputError, match="truncate_dim=65.*1.*64"):
        maxjax.embed(*small, texts, truncate_dim=whole.shape[1] + 1)


def test_a_model_without_pooling_files_gives_the_plain_mean(small):
    model, tokenizer = small_model(), small[1]
    assert small[0].pooling.modes == ("mean",) and not hasattr(model, "pooling")
    expected = embed(*small, FEW, normalize=False)
    np.testing.assert_allclose(embed(model, tokenizer, FEW), expected, atol=1e-6)


def test_the_pooling_of_the_model_is_used(small):
    model, tokenizer = small
    model.pooling = Pooling(("cls", "max"), lower_case=True)
    found = embed(model, tokenizer, FEW)
    batch = tokenizer.batch(FEW)
    states = np.asarray(jax.jit(lambda m, *rows: m(*rows).last_hidden_state)(model, *batch))
    np.testing.assert_allclose(found[:, :64], states[:, 0], atol=1e-5)
    for i, n in enumerate(batch.attention_mask.sum(1)):
        np.testing.assert_allclose(found[i, 64:], states[i, :n].max(0), atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", sorted(POOLINGS))
def test_packed_texts_are_pooled_as_alone(small, mode):
    model, tokenizer = small
    model.pooling = Pooling((mode,), prompts=(("query", "time year people: "),))
    texts = [*FEW, *sentences(20, longest=90)[16:]]
    run = jax.jit(lambda model, mask, *rows: pool(model(*rows).last_hidden_state, mask, (mode,)))
    query = {"prompt_name": "query"}
    for options, include_prompt in (({}, True), (query, True), (query, False)):
        model.pooling = replace(model.pooling, include_prompt=include_prompt)
        found = embed(model, tokenizer, texts, **options)
        alone = [embed(model, tokenizer, [text], **options)[0] for text in texts[::3]]
        np.testing.assert_allclose(found[::3], alone, atol=1e-5)
        # Unpacked, as the states and the mask of a text say.
        rows = tokenizer.batch([("time year people: " if options else "") + t for t in texts])
        mask = rows.attention_mask
        if options and not include_prompt:
            mask = np.where(np.arange(mask.shape[1]) >= 5, mask, 0)
        np.testing.assert_allclose(found, run(model, mask, *rows), atol=1e-5)


def test_packed_texts_on_a_mesh(small):
    texts = sentences(40, longest=40)[16:]
    model, tokenizer = small_model().to(maxjax.make_mesh(data=2, model=2)), small[1]
    model.pooling = small[0].pooling
    np.testing.assert_allclose(embed(model, tokenizer, texts), embed(*small, texts), atol=2e-6)


def test_lower_case(small):
    class Recorder:
        max_length, pad_id = 512, 0

        def tokens(self, texts, *, max_length=None):
            self.seen = list(texts)
            raise StopIteration

    model, _ = small
    for lower_case, seen in ((True, ["straße ab"]), (False, ["Straße AB"])):
        model.pooling = Pooling(lower_case=lower_case)
        recorder = Recorder()
        with pytest.raises(StopIteration):
            embed(model, recorder, ["Straße AB"])
        assert recorder.seen == seen


# --- lengths --------------------------------------------------------------------------------


def test_a_text_that_is_too_long_is_refused_with_both_numbers(small):
    text = " ".join(["time"] * 255)
    with pytest.raises(UserInputError, match=r"texts\[1\].*257.*256"):
        embed(*small, ["a", text])
    cut = embed(*small, [text], truncate=True)
    np.testing.assert_allclose(cut, embed(*small, [text[:-5]]), atol=1e-6)


def test_the_least_of_the_limits_counts(small):
    model, tokenizer = small
    text = " ".join(["time"] * 20)
    model.pooling = Pooling(max_length=10)
    with pytest.raises(UserInputError, match="takes 10"):
        embed(model, tokenizer, [text])
    model.pooling, tokenizer.max_length = Pooling(), 12
    with pytest.raises(UserInputError, match="takes 12"):
        embed(model, tokenizer, [text])
    # As in sentence-transformers, the files of the pooling take the place of the tokenizer's limit.
    model.pooling, long = Pooling(max_length=30), " ".join(["time"] * 20)
    assert embed(model, tokenizer, [long]).shape == (1, 64)
    model.pooling, tokenizer.max_length = Pooling(), None
    with pytest.raises(UserInputError, match="takes 512"):
        embed(model, tokenizer, [" ".join(["time"] * 511)])


# --- compilations ---------------------------------------------------------------------------


def compilations(caplog, run):
    caplog.clear()
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        run()
    return sum(
        "Compiling jit(_encode)" in r.message or "Compiling _encode" in r.message
        for r in caplog.records
    )


def test_compiled_once_for_each_shape(small, caplog):
    model, tokenizer = small
    model.pooling = Pooling(("cls",))
    jax.clear_caches()  # of programs that other tests have compiled
    words = lambda n: " ".join(["time"] * n)
    first = compilations(caplog, lambda: embed(model, tokenizer, [words(n) for n in (1, 5, 9, 20)]))
    assert first == 1  # all four in [1, 64]
    again = lambda: embed(model, tokenizer, [words(n) for n in (14, 2, 11, 26)])
    assert compilations(caplog, again) == 0
    other = small_model()
    assert compilations(caplog, lambda: embed(other, tokenizer, [])) == 0
    other.pooling = Pooling(("cls",))
    assert compilations(caplog, lambda: embed(other, tokenizer, [words(10)] * 4)) == 0
    long = lambda: embed(model, tokenizer, [words(n) for n in (200, 120, 250, 140, 3)])
    assert compilations(caplog, long) == 2  # rows of 256 and of 128 tokens


@pytest.mark.parametrize("batch_size", [1, 3, 32, 100])
@pytest.mark.parametrize("limit", [10, 256, 500])
def test_batches_cover_everything_once_in_few_shapes(batch_size, limit):
    lengths = np.random.default_rng(0).integers(0, limit + 1, 1000).tolist()
    found = batches(lengths, batch_size, limit)
    assert sorted(i for batch in found for i in batch.members) == list(range(1000))
    for batch in found:
        assert 1 <= len(batch.members) <= batch.count <= batch_size
        assert max(lengths[i] for i in batch.members) <= batch.length <= limit
    shapes = {(batch.count, batch.length) for batch in found}
    assert len(shapes) <= 2 * 6  # six lengths, a full and a last batch of each
    assert sum(batch.count for batch in found) <= 1000 + 4 * batch_size * 6


# --- what can be wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("texts", ["one text", b"x", ["a", 3], [None], [b"a"], [["a"]], 3, None])
def test_only_texts(small, texts):
    with pytest.raises(TypeError, match="texts"):
        embed(*small, texts)


def test_no_tokenizer(small):
    for texts in (["a"], []):
        with pytest.raises(UserInputError, match=r"tokenizer\.json"):
            embed(small[0], None, texts)


def test_no_weights(minilm, loaded):
    with pytest.raises(UserInputError, match="load_state_dict"):
        embed(build(load_weights(minilm)), loaded[1], ["a"])


def test_no_text_encoder(small):
    with pytest.raises(UserInputError, match="Linear"):
        from maxjax.graph import DeviceRef
        from maxjax.nn.linear import Linear

        embed(Linear(2, 2, "float32", DeviceRef.CPU()), small[1], ["a"])


def test_steps_that_are_not_there(small):
    model, tokenizer = small
    model.pooling = Pooling(unsupported="the module Dense")
    with pytest.raises(NotImplementedError, match="Dense") as caught:
        embed(model, tokenizer, ["a"])
    assert isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, None, "3"])
def test_batch_sizes_that_are_none(small, batch_size):
    with pytest.raises(UserInputError, match="batch_size"):
        embed(*small, ["a"], batch_size=batch_size)


def test_a_tokenizer_of_another_model(small):
    class Other:
        max_length, pad_id = 512, 0

        def tokens(self, texts, *, max_length=None):
            return [row._replace(ids=[30522]) for row in small[1].tokens(texts)]

    with pytest.raises(UserInputError, match="30522.*belongs to another model"):
        embed(small[0], Other(), ["a"])


def test_invalid_unicode_names_the_text(small):
    with pytest.raises(UserInputError, match=r"texts\[1\]"):
        embed(*small, ["a", "\udcff"])


def test_the_odd_texts_differ_from_each_other(loaded):
    """All but the two empty ones: no text falls through to the same vector."""
    found = embed(*loaded, ODD, truncate=True)
    similarity = found @ found.T - np.eye(len(ODD))
    assert similarity[0, 1] > 0.999999
    similarity[0, 1] = similarity[1, 0] = 0
    assert similarity.max() < 0.99
    assert _encode._cache_size() > 0
