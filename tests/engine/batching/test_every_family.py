"""The Engine gives each family's texts what a plain loop gives them: every kind of attention, cache and recurrence."""

import jax
import numpy as np
import pytest

import maxjax
from maxjax.lora.targets import targets
from tests.models.decoders import greedy, ids_of
from tests.models.families.cases import every, first_of_each_family

# One of each kind of layers, of which the default set runs three.
KINDS = ("gemma3n_text-sparse", "deepseek_v32-yarn", "llama4_text-1", "jamba-mini", "gpt_oss-1")
DEFAULT = ("deepseek_v32-yarn", "jamba-mini", "gpt_oss-1")
# On meshes one that remembers something of its own beside latent vectors.
ON_MESHES = ("deepseek_v32-yarn",)
CASES = [param.values[0] for param in first_of_each_family(every()) if not param.marks]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if str(case) in DEFAULT else pytest.mark.extra)
        for case in CASES
    ],
)
def test_texts(case, tmp_path):
    case.model(tmp_path)
    model, _ = maxjax.load(tmp_path)
    prompts = [(ids_of(1, n, n)[0] % model.config.vocab_size).tolist() for n in (21, 3, 70, 9)]
    prompts = [ids for ids in prompts if len(ids) + 14 < model.max_length]
    options = {"max_new_tokens": 12, "eos_ids": ()}
    expected = list(map(tuple, greedy(model, prompts, 12).tolist()))
    with maxjax.Engine(model, None, slots=2, chunk=16) as engine:
        answers = [engine.submit(ids, **options) for ids in prompts]
        assert [answer.result().tokens for answer in answers] == expected


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=str(case), marks=[] if str(case) == "jamba-mini" else pytest.mark.extra
        )
        for case in CASES
    ],
)
def test_adapters(case, tmp_path):
    """Rows with updates of every layer that can have one, and without, side by side."""
    case.model(tmp_path)
    model, _ = maxjax.load(tmp_path)
    names = [name for one in targets(model) for name in one.names if one.in_mixture != "expert"]
    each = {"linear": tuned(model, None, 1), "all": tuned(model, names, 2)}
    options = {"max_new_tokens": 6, "eos_ids": (), "logprobs": 1}
    prompts = [(ids_of(1, n, n)[0] % model.config.vocab_size).tolist() for n in (21, 3, 9)]
    with maxjax.Engine(model, None, slots=3, chunk=16, adapters=each) as engine:
        order = ("linear", "all", None)
        answers = [
            engine.submit(ids, adapter=name, **options)
            for ids, name in zip(prompts, order, strict=True)
        ]
        for answer, ids, name in zip(answers, prompts, order, strict=True):
            found = answer.result()
            wanted = maxjax.generate(each.get(name, model), None, ids, **options, chunk=16)
            assert found.tokens == wanted.tokens
            found, wanted = ([one.logprob for one in of.logprobs] for of in (found, wanted))
            np.testing.assert_allclose(found, wanted, atol=1e-4)


def tuned(model, names, seed):
    """The model with LoRA weights that change its text."""
    new, rng = maxjax.lora.add(model, names, rank=3), np.random.default_rng(seed)
    values = {
        name: rng.normal(0, 0.2, [int(n) for n in weight.shape]).astype(np.float32)
        for name, weight in new.raw_state_dict().items()
        if ".lora_" in name
    }
    new.load_state_dict(values, strict=False)
    return new


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if str(case) in ON_MESHES else pytest.mark.extra)
        for case in CASES
        if str(case) in KINDS
    ],
)
def test_texts_on_a_mesh(case, tmp_path):
    """Each group of devices has its own texts: their pages, recurrent states and remembered vectors."""
    case.model(tmp_path)
    alone, _ = maxjax.load(tmp_path, tokenizer=False)
    prompts = [(ids_of(1, n, n)[0] % alone.config.vocab_size).tolist() for n in (21, 3, 70, 9, 40)]
    options = {"max_new_tokens": 8, "eos_ids": (), "chunk": 16}
    expected = [text.tokens for text in maxjax.generate(alone, None, prompts, **options)]
    mesh = maxjax.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    model, _ = maxjax.load(tmp_path, mesh=mesh, tokenizer=False)
    found = maxjax.generate(model, None, prompts, **options, batch_size=2)
    assert [text.tokens for text in found] == expected
    assert maxjax.generate(model, None, prompts[2], **options).tokens == expected[2]
