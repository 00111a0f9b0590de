"""Decoders with a classification head: ``…ForSequenceClassification`` of transformers."""

import json
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax import lora
from maxjax.errors import CheckpointMismatchError, UnsupportedModelError, UserInputError
from tests.engine.sentence_models import EMBEDDERS, QUERY, TEXTS, write
from tests.models.decoders import padded
from tests.oracles.recorded import recorded, torch, transformers


def scored(path, labels=1):
    """The files of an embedding model with a classification head instead of what says how to pool."""
    place = write(EMBEDDERS["qwen3"], path)
    (place / "modules.json").unlink()
    config = json.loads((place / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "pad_token_id": 0}
    config["id2label"] = {str(i): f"label {i}" for i in range(labels)}
    (place / "config.json").write_text(json.dumps(config))
    values = load_file(place / "model.safetensors")
    values = {n if n.startswith("model.") else f"model.{n}": v for n, v in values.items()}
    values.pop("model.lm_head.weight", None)
    width = config["hidden_size"]
    values["score.weight"] = np.random.default_rng(3).normal(size=(labels, width)).astype("f4")
    save_file(values, place / "model.safetensors", {"format": "pt"})
    return place


def opened(path) -> Any:
    return maxjax.load(path)


states_of = jax.jit(lambda model, ids: model.states(ids))


def last_states(model, rows):
    """The states of each row's last token; what is behind it changes none of them."""
    ids, lengths = padded([row.ids for row in rows])
    return np.asarray(states_of(model, ids))[np.arange(len(rows)), lengths - 1]


def test_scores_are_those_of_transformers(tmp_path):
    ids = np.random.default_rng(0).integers(1, 300, (2, 9)).astype(np.int32)
    place = scored(tmp_path / "a", 3)

    def answer(place=place):
        model = transformers.Qwen3ForSequenceClassification.from_pretrained(place).eval()
        return model(torch.tensor(ids)).logits.detach().float().numpy()

    expected = recorded(answer)
    model, _ = opened(place)
    scores = jax.jit(lambda m, ids: m.scores(m.states(ids)[:, -1]))
    np.testing.assert_allclose(scores(model, ids), expected, rtol=1e-3, atol=1e-4)

    again, _ = opened(maxjax.save_pretrained(model, tmp_path / "b"))
    assert again.hf_config["architectures"] == ["Qwen3ForSequenceClassification"]
    np.testing.assert_array_equal(scores(again, ids), scores(model, ids))


@pytest.mark.parametrize("template", [None, "<s>{query} the {document}?"])
def test_reranks_by_its_head(tmp_path, template):
    model, tokenizer = opened(scored(tmp_path))
    found = maxjax.rerank(model, tokenizer, QUERY, TEXTS[:3], template=template)
    if template is None:
        rows = tokenizer.pairs([(QUERY, text) for text in TEXTS[:3]])
    else:
        texts = [template.format(query=QUERY, document=text) for text in TEXTS[:3]]
        rows = tokenizer.tokens(texts, special=False)
    scores = last_states(model, rows) @ np.asarray(model.score.weight.value).T
    expected = 1 / (1 + np.exp(-scores[:, 0]))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def with_head(source, target, head, template):
    """A GGUF file of a reranker of two answers, as llama.cpp's converter writes it from a language model."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    writer.add_chat_template([{"name": "rerank", "template": template}])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor("cls.output.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_a_gguf_file_of_two_answers(tmp_path):
    place = scored(tmp_path / "a")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    values = load_file(place / "model.safetensors")
    del values["score.weight"]
    save_file(values, place / "model.safetensors", {"format": "pt"})
    maxjax.convert(place, tmp_path / "m.gguf")
    head = np.random.default_rng(3).normal(size=(2, config["hidden_size"])).astype("f4")
    template = "{<s>} {query} the {document}?"
    path = with_head(tmp_path / "m.gguf", tmp_path / "r.gguf", head, template)
    model, tokenizer = opened(path)
    found = maxjax.rerank(model, tokenizer, QUERY, TEXTS[:3])
    texts = [f"{{<s>}} {QUERY} the {text}?" for text in TEXTS[:3]]
    rows = tokenizer.tokens(texts, special=False)
    scores = last_states(model, rows) @ head.T
    expected = 1 / (1 + np.exp(scores[:, 1] - scores[:, 0]))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    again, _ = opened(maxjax.save_pretrained(model, tmp_path / "b"))
    np.testing.assert_array_equal(again.score.weight.value, model.score.weight.value)
    assert not (tmp_path / "b" / "modules.json").exists()
    tokenizer.chat_templates["rerank"] = "{{query}} the {{document}}?"  # Jinja's is not read
    pairs = maxjax.rerank(model, tokenizer, QUERY, TEXTS[:3])
    del tokenizer.chat_templates["rerank"]
    np.testing.assert_array_equal(pairs, maxjax.rerank(model, tokenizer, QUERY, TEXTS[:3]))


def test_what_a_classification_head_is_not_for(tmp_path):
    place = scored(tmp_path / "a", 2)
    model, tokenizer = maxjax.load(place)
    with pytest.raises(UserInputError, match="no language-model head"):
        model(np.ones((1, 3), np.int32))
    with pytest.raises(UserInputError, match="2 labels"):
        maxjax.rerank(model, tokenizer, QUERY, TEXTS)
    one, _ = maxjax.load(scored(tmp_path / "b"))
    with pytest.raises(UserInputError, match="answers are for"):
        maxjax.rerank(one, tokenizer, QUERY, TEXTS, answers=("a", "b"))
    adapted = lora.add(model, rank=2, key=jax.random.key(0))
    settings = lora.save(tmp_path / "c", adapted) / "adapter_config.json"
    assert json.loads(settings.read_text())["task_type"] == "SEQ_CLS"
    assert "score" not in json.loads(settings.read_text())["target_modules"]

    values = load_file(place / "model.safetensors")
    del values["score.weight"]
    save_file(values, place / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"score\.weight"):
        maxjax.load(place)
    bare = {name.removeprefix("model."): value for name, value in values.items()}
    save_file(bare, place / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=r"score\.weight"):
        maxjax.load(place)
    config = json.loads((place / "config.json").read_text())
    config["architectures"] = ["Qwen3ForTokenClassification"]
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="Qwen3ForTokenClassification"):
        maxjax.load(place)
