"""Embeddings and scores of every kind of model, against what sentence-transformers made of the same files."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import maxjax
from maxjax.checkpoint import convert
from maxjax.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointMissingError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.models.pooling import Dense, Pooling
from tests.engine.sentence_models import EMBEDDERS, QUERY, RERANKERS, TEXTS, drawn, write
from tests.models.gguf import llama_cpp
from tests.oracles.recorded import FOLDER

COMPARED = ["modernbert", "embeddinggemma"]  # also saved, and written as a step of orbax


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(FOLDER / "sentence_transformers.npz"))


def one_layer(kind):
    """The same kind for tests without recorded answers: each layer of an encoder is traced."""
    return replace(kind, settings={**kind.settings, "num_hidden_layers": 1})


def cosines(a, b):
    a, b = (x.astype(np.float64) for x in (a, b))
    return np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def same(found, expected):
    """The same directions and lengths."""
    assert found.shape == expected.shape
    assert cosines(found, expected).min() >= 0.99999
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings(tmp_path, golden, name):
    model, tokenizer = maxjax.load(write(EMBEDDERS[name], tmp_path))
    same(maxjax.embed(model, tokenizer, TEXTS, truncate=True), golden[f"embed {name}"])
    if f"query {name}" in golden:
        found = maxjax.embed(model, tokenizer, TEXTS[:3], truncate=True, prompt_name="query")
        same(found, golden[f"query {name}"][:3])


@pytest.mark.sampled(4)
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


GGUFS = {
    "nomic_bert": EMBEDDERS["nomic_bert"],
    "modernbert": EMBEDDERS["modernbert"],
    "jina": replace(EMBEDDERS["jina"], settings={"num_hidden_layers": 1}),
    "embeddinggemma": replace(
        EMBEDDERS["embeddinggemma"],
        settings=EMBEDDERS["embeddinggemma"].settings | {"num_hidden_layers": 7, "sliding_window_pattern": 6},
        dense=(),
    ),
}  # fmt: skip


def gguf_of(tmp_path, name):
    """The model, its tokenizer and a GGUF file of it, with the state of the first token as the vector."""
    kind = replace(GGUFS[name], tokenizer="wordpiece", modes=("cls",), more=("normalize",))
    model, tokenizer = maxjax.load(write(kind, tmp_path / "a"))
    if name == "embeddinggemma":  # its dense layers are in the file, as they have no biases
        layers = (Dense.of(drawn("a", (24, 32)), None), Dense.of(drawn("b", (32, 24)), None))
        model.pooling = replace(model.pooling, dense=layers, modes=("mean",))
        maxjax.save_pretrained(model, tmp_path / "b", tokenizer=tokenizer)
    convert(tmp_path / ("b" if name == "embeddinggemma" else "a"), tmp_path / "m.gguf")
    return model, tokenizer, tmp_path / "m.gguf"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GGUFS)
def test_gguf(tmp_path, name):
    model, tokenizer, path = gguf_of(tmp_path, name)
    again, text = maxjax.load(path)
    assert again.pooling.dense == model.pooling.dense
    expected = maxjax.embed(model, tokenizer, TEXTS[:3])
    same(maxjax.embed(again, text, TEXTS[:3]), expected)


@pytest.mark.extra
@pytest.mark.skipif(not llama_cpp.available(), reason="there is no llama.cpp")
@pytest.mark.parametrize("name", GGUFS)
def test_gguf_in_llama_cpp(tmp_path, name):
    model, tokenizer, path = gguf_of(tmp_path, name)
    texts = [text for text in TEXTS if text and len(tokenizer.encode(text)) < 60]
    found = np.array(llama_cpp.hidden(path, texts, 1 if name == "embeddinggemma" else 2))
    assert cosines(found, maxjax.embed(model, tokenizer, texts)).min() >= 0.99999


def test_what_a_gguf_file_cannot_hold(tmp_path, caplog):
    kind = replace(EMBEDDERS["bert"], dense=("Tanh",))
    convert(write(kind, tmp_path / "a"), tmp_path / "m.gguf")
    assert "Dense modules, that 'text: ' is put before each text" in caplog.text


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return maxjax.load(write(EMBEDDERS["qwen3"], tmp_path_factory.mktemp("qwen3")))


def test_a_decoder_reranks_by_its_answer(qwen3):
    model, tokenizer = qwen3
    texts = [f"<s>{QUERY} the {text}?" for text in TEXTS[:3]]
    found = maxjax.rerank(
        model,
        tokenizer,
        QUERY,
        TEXTS[:3],
        template="<s>{query} the {document}?",
        answers=("a", "b"),
    )
    a, b = (tokenizer.encode(answer, special=False)[0] for answer in "ab")
    rows = tokenizer.tokens(texts, special=False)
    batch = tokenizer.pad(rows)
    call = jax.jit(lambda model, ids, lengths: model(ids, lengths=lengths, last=True))
    logits = call(model, batch.input_ids, batch.attention_mask.sum(1))
    np.testing.assert_allclose(found, logits[:, a] - logits[:, b], rtol=1e-3, atol=1e-4)
    options = {"template": "<s>{query} the {document}?", "batch_size": np.int64(32)}
    again = maxjax.rerank(model, tokenizer, QUERY, TEXTS[:3], answers=["a", "b"], **options)
    np.testing.assert_array_equal(again, found)
    for wrong in ({"answers": (1, 2)}, {"answers": "ab"}, {"answers": ("a", "b"), "template": 5}):
        with pytest.raises(TypeError, match="two str, not|template is a int, not a str"):
            maxjax.rerank(model, tokenizer, QUERY, TEXTS, **{**options, **wrong})


@pytest.mark.parametrize(
    "options, named",
    [
        ({}, "answers="),
        ({"answers": ("a", "b")}, "template="),
        ({"answers": ("a", "b"), "template": "{query}"}, "template="),
        ({"answers": ("a", "b"), "template": "{query.x} {document}"}, "template="),
        ({"answers": ("a", "b"), "template": "{"}, "format"),
        ({"answers": ("a", "b"), "template": "{query}{document:d}"}, "format"),
        ({"answers": ("a", "b"), "template": "{query}{document:{width}}"}, "format"),
        ({"answers": ("aa", "b"), "template": "{query}{document}"}, "one"),
        ({"activation": "tanh"}, "activation"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_options_of_rerank(qwen3, options, named):
    with pytest.raises(UserInputError, match=named):
        maxjax.rerank(*qwen3, QUERY, TEXTS, **options)


def test_the_files_of_newer_rerankers(tmp_path):
    place = write(one_layer(RERANKERS["bert"]), tmp_path)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    (place / "modules.json").write_text(json.dumps(modules))
    settings = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {"query": "find: "}}
    file = place / "config_sentence_transformers.json"

    def scores(query, **options):
        model, tokenizer = maxjax.load(place)
        return maxjax.rerank(model, tokenizer, query, TEXTS[:3], truncate=True, **options)

    plain = scores(QUERY, activation="linear")
    file.write_text(json.dumps(settings))
    np.testing.assert_array_equal(scores(QUERY), plain)
    file.write_text(json.dumps(settings | {"default_prompt_name": "query"}))
    with_prompt = scores(QUERY)
    assert (with_prompt != plain).all()
    file.unlink()
    np.testing.assert_array_equal(scores("find: " + QUERY, activation="linear"), with_prompt)
    file.write_text(json.dumps(settings | {"activation_fn": "torch.nn.modules.activation.Tanh"}))
    with pytest.raises(UnsupportedModelError, match="Tanh"):
        scores(QUERY)
    assert np.isfinite(scores(QUERY, activation="sigmoid")).all()


def test_a_reranker_lowercases_as_its_files_say(tmp_path):
    model, tokenizer = maxjax.load(write(one_layer(RERANKERS["linear"]), tmp_path))
    lower = maxjax.rerank(model, tokenizer, QUERY.lower(), [TEXTS[0].lower()])
    model.pooling = Pooling(lower_case=True)
    found = maxjax.rerank(model, tokenizer, QUERY.upper(), [TEXTS[0].upper()])
    np.testing.assert_array_equal(found, lower)


def test_files_that_name_the_length_of_embeddings(tmp_path):
    place = write(one_layer(EMBEDDERS["bert"]), tmp_path)
    whole = maxjax.embed(*maxjax.load(place), TEXTS[:3])
    file = place / "config_sentence_transformers.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | {"truncate_dim": 8}))
    loaded = maxjax.load(place)
    np.testing.assert_array_equal(maxjax.embed(*loaded, TEXTS[:3]), whole[:, :8])
    np.testing.assert_array_equal(maxjax.embed(*loaded, TEXTS[:3], truncate_dim=32), whole)


def test_what_rerank_needs(tmp_path):
    model, tokenizer = maxjax.load(write(one_layer(EMBEDDERS["bert"]), tmp_path / "a"))
    with pytest.raises(UserInputError, match="classification head"):
        maxjax.rerank(model, tokenizer, QUERY, TEXTS)
    kind = replace(RERANKERS["bert"], settings={"num_labels": 2})
    two, _ = maxjax.load(write(one_layer(kind), tmp_path / "b"))
    with pytest.raises(UserInputError, match="2 labels"):
        maxjax.rerank(two, tokenizer, QUERY, TEXTS)
    one, _ = maxjax.load(write(one_layer(RERANKERS["bert"]), tmp_path / "c"))
    with pytest.raises(UserInputError, match=r"documents\[3\] has 83 tokens|truncate"):
        maxjax.rerank(one, tokenizer, QUERY, [*TEXTS[:3], "the " * 90])
    with pytest.raises(UserInputError, match="decoders"):
        maxjax.rerank(one, tokenizer, QUERY, TEXTS, template="{query}")
    with pytest.raises(TypeError, match=r"documents\[1\]"):
        maxjax.rerank(one, tokenizer, QUERY, ["a", 3])
    with pytest.raises(TypeError, match="brackets"):
        maxjax.rerank(one, tokenizer, QUERY, "a")
    with pytest.raises(TypeError, match="truncate"):
        maxjax.rerank(one, tokenizer, QUERY, TEXTS, truncat=True)
    assert maxjax.rerank(one, tokenizer, QUERY, []).shape == (0,)
    vectors = maxjax.embed(one, tokenizer, TEXTS[:1])  # the encoder below the head
    assert vectors.shape == (1, 32)


def test_bad_dense_modules(tmp_path):
    place = write(EMBEDDERS["distilbert"], tmp_path) / "2_Dense"
    config = json.loads((place / "config.json").read_text())
    for change, error, named in (
        ({"out_features": 7}, CheckpointMismatchError, "2_Dense"),
        ({"in_features": "x"}, CheckpointFormatError, "in_features"),
        ({"bias": False}, CheckpointMismatchError, "linear.bias"),
    ):
        (place / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(error, match=named):
            maxjax.load(tmp_path)
    for change in ({"activation_function": "torch.nn.Softplus"}, {"use_residual": True},
                   {"module_output_name": "scores"}):  # fmt: skip
        (place / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(NotImplementedError, match="Dense"):
            maxjax.embed(*maxjax.load(tmp_path), ["a"])
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").unlink()
    with pytest.raises(CheckpointMissingError, match="2_Dense"):
        maxjax.load(tmp_path)
