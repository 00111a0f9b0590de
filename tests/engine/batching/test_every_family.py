"""The Engine gives each family's texts what a batch gives them: every kind of attention, cache and recurrence."""

import pytest

import maxjax
from tests.models.decoders import ids_of
from tests.models.families.cases import every, first_of_each_family

# One of each kind of layers.
KINDS = ("gemma3n_text-sparse", "deepseek_v32-yarn", "llama4_text-1", "jamba-mini", "gpt_oss-1")
CASES = [param.values[0] for param in first_of_each_family(every()) if not param.marks]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if str(case) in KINDS else pytest.mark.extra)
        for case in CASES
    ],
)
def test_texts(case, tmp_path, monkeypatch):
    case.model(tmp_path)
    model, _ = maxjax.load(tmp_path)
    prompts = [(ids_of(1, n, n)[0] % model.config.vocab_size).tolist() for n in (21, 3, 70, 9)]
    prompts = [ids for ids in prompts if len(ids) + 14 < model.max_length]
    options = {"max_new_tokens": 12, "eos_ids": ()}
    monkeypatch.setattr(type(model), "shares_pages", lambda self: False)
    expected = [text.tokens for text in maxjax.generate(model, None, prompts, **options)]
    with maxjax.Engine(model, None, slots=2, chunk=32) as engine:
        answers = [engine.submit(ids, **options) for ids in prompts]
        assert [answer.result().tokens for answer in answers] == expected
