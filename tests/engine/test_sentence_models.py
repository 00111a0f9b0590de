"""Embeddings and scores of every kind of model, against what sentence-transformers made of the same files."""

import numpy as np
import pytest

import maxjax
from maxjax.checkpoint import convert
from tests.engine.sentence_models import EMBEDDERS, QUERY, RERANKERS, TEXTS, write
from tests.oracles.recorded import FOLDER

pytestmark = pytest.mark.slow
COMPARED = ["modernbert", "embeddinggemma"]  # also saved, and written as a step of orbax


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(FOLDER / "sentence_transformers.npz"))


def cosines(a, b):
    a, b = (x.astype(np.float64) for x in (a, b))
    return np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def same(found, expected):
    """The same directions and lengths."""
    assert found.shape == expected.shape
    assert cosines(found, expected).min() >= 0.99999
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings(tmp_path, golden, name):
    model, tokenizer = maxjax.load(write(EMBEDDERS[name], tmp_path))
    same(maxjax.embed(model, tokenizer, TEXTS, truncate=True), golden[f"embed {name}"])
    if f"query {name}" in golden:
        found = maxjax.embed(model, tokenizer, TEXTS[:3], truncate=True, prompt_name="query")
        same(found, golden[f"query {name}"][:3])


@pytest.mark.parametrize("name", RERANKERS)
def test_scores(tmp_path, golden, name):
    model, tokenizer = maxjax.load(write(RERANKERS[name], tmp_path))
    found = maxjax.rerank(model, tokenizer, QUERY, TEXTS, truncate=True)
    np.testing.assert_allclose(found, golden[f"rerank {name}"], rtol=1e-4, atol=1e-5)
    if name == "bert":  # text pairs do not depend on those beside them
        alone = maxjax.rerank(model, tokenizer, QUERY, TEXTS[:1], activation="linear")
        np.testing.assert_allclose(1 / (1 + np.exp(-alone)), found[:1], rtol=1e-5)


@pytest.mark.parametrize("name", COMPARED)
def test_saved_and_converted(tmp_path, golden, name):
    """The files of sentence-transformers go with the model, their Dense modules too."""
    model, tokenizer = maxjax.load(write(EMBEDDERS[name], tmp_path / "a"))
    maxjax.save_pretrained(model, tmp_path / "b", tokenizer=tokenizer)
    convert(tmp_path / "b", tmp_path / "c", to="orbax")
    for place in ("b", "c"):
        again, text = maxjax.load(tmp_path / place)
        assert again.pooling == model.pooling
        same(maxjax.embed(again, text, TEXTS[:3]), golden[f"embed {name}"][:3])
