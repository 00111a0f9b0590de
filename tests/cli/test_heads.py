"""The commands for encoders with a head: the lines that they write are the results of the calls."""

import json

import pytest

import maxjax
from tests.cli.test_application import fails, succeeds
from tests.engine.head_models import LABELS, write

TEXTS = ["the cat [MASK] on the mat", "[MASK] 猫 [MASK]"]


def lines(*arguments, **kwargs):
    return [json.loads(line) for line in succeeds(*arguments, **kwargs).splitlines()]


@pytest.fixture
def model(tmp_path):
    """A function from a head to a model's directory."""
    return lambda head, **more: write("bert", head, tmp_path / "m", **more)


def test_fill_mask(model):
    folder = model("MaskedLM")
    found = lines("fill-mask", "--model", folder, *TEXTS, "--top", 2)
    expected = maxjax.fill_mask(*maxjax.load(folder), TEXTS, top=2)
    assert [row["text"] for row in found] == TEXTS
    for row, masks in zip(found, expected, strict=True):
        assert [[one["token_id"] for one in mask] for mask in row["masks"]] == [
            [one.token_id for one in mask] for mask in masks
        ]
        assert row["masks"][0][0]["score"] == pytest.approx(masks[0][0].score, 1e-6)
    assert "no mask token" in fails("fill-mask", "--model", folder, "text")


def test_tag_of_stdin(model):
    folder = model("TokenClassification", labels=LABELS)
    found = lines("tag", "--model", folder, "--aggregation", "max", stdin="the cat sat\nis it?\n")
    expected = maxjax.tag(*maxjax.load(folder), ["the cat sat", "is it?"], aggregation="max")
    assert [[tag["text"] for tag in row["tags"]] for row in found] == [
        [tag.text for tag in row] for row in expected
    ]
    assert "use maxjax.tag" in fails("classify", "--model", folder, "text")
    assert "--stride" in fails("tag", "--model", folder, "the cat " * 50)


def test_classify(model):
    folder = model("SequenceClassification", labels=("bad", "good"))
    (found,) = lines("classify", "--model", folder, "the cat")
    expected = maxjax.classify(*maxjax.load(folder), "the cat")
    assert [one["label"] for one in found["labels"]] == [one.label for one in expected]
    (best,) = lines("classify", "--model", folder, "the cat " * 50, "--top", 1, "--truncate")
    assert len(best["labels"]) == 1


def test_blank_lines_have_no_answer(model):
    folder = model("QuestionAnswering")
    found = lines(
        "answer", "--model", folder, "where is it?", stdin="The cat sat.\n\nOn the mat.\n"
    )
    assert [row["text"] for row in found] == ["The cat sat.", "", "On the mat."]
    assert found[1]["answer"] == {"text": "", "score": 0.0, "start": 0, "end": 0}
    assert found[0]["answer"]["text"] and found[2]["answer"]["text"]


@pytest.mark.parametrize("command, missing", [("answer", "QUESTION"), ("rerank", "QUERY")])
def test_what_stdin_may_give_is_not_required(model, command, missing):
    message = fails(command, "--model", model("QuestionAnswering"), code=2)
    assert message.endswith(f"required: {missing}\n")


@pytest.mark.parametrize("command", ["embed", "rerank", "fill-mask", "tag", "classify", "answer"])
def test_commands_without_a_default_model_require_one(command):
    assert "required: --model" in fails(command, code=2)


def test_answer(model):
    folder = model("QuestionAnswering")
    (found,) = lines("answer", "--model", folder, "where is it?", "The cat sat on the mat.")
    expected = maxjax.answer(*maxjax.load(folder), "where is it?", "The cat sat on the mat.")
    assert found["answer"]["text"] == expected.text
    assert (found["answer"]["start"], found["answer"]["end"]) == (expected.start, expected.end)
