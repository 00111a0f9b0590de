"""embed() of decoders: states of transformers, pooled as the files of sentence-transformers say."""

import json
import logging
import zlib

import numpy as np
import pytest

import maxjax
from maxjax.checkpoint import convert
from maxjax.engine.embed import embed
from maxjax.errors import CheckpointFormatError, UserInputError
from maxjax.models.pooling import POOLINGS, Pooling
from maxjax.models.sentence_files import pooling_files, read_pooling
from tests.models.decoders import call, drawn, ids_of, one_character_each, oracle
from tests.oracles.models import OracleModel, ask_of, opened
from tests.oracles.recorded import torch

KINDS = {
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Llama": {},
    "Gemma": {"head_dim": 16},
}
# Of several lengths, so that some are padded; long ones in another batch.
TEXTS = ["!", "abc", "ABCDEFGH" * 3, 'a"b#c$', "xyz" * 7]


POOLED = {"lasttoken": lambda states: states[-1], "mean": lambda states: states.mean(0)}


def pooled_of(model, tokenizer, mode, prompt="", start=0):
    """Of the states of each text alone, in float64, what is pooled of those from a place on."""
    rows = [tokenizer.encode(prompt + text) for text in TEXTS]

    def answer(model):
        found = []
        for ids in rows:
            with torch.no_grad():
                states = model.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
            found.append(POOLED[mode](states[start:]))
        return np.stack(found)

    asked = [ord(letter) for letter in prompt]
    return model.ask(f"pooled by {mode} from {start} after {asked}", answer)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def write(folder, pooling, **more):
    for name, content in pooling_files(pooling, 64).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    for name, content in more.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def saved(folder, tokenizer):
    for name, text in tokenizer.files().items():
        (folder / name).write_text(text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Gemma"])
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_vectors_are_those_of_the_states_of_transformers(tmp_path, kind, mode):
    theirs, tokenizer = oracle(kind, tmp_path, **KINDS[kind]), one_character_each()
    write(tmp_path, Pooling((mode,), normalize=True))
    model, _ = maxjax.load(tmp_path)
    found = embed(model, tokenizer, TEXTS, batch_size=4)
    expected = pooled_of(theirs, tokenizer, mode)
    np.testing.assert_allclose(found, unit(expected), atol=2e-5)
    plain = embed(model, tokenizer, TEXTS, normalize=False, batch_size=4)
    np.testing.assert_allclose(plain, expected, atol=2e-4)
    assert np.linalg.norm(plain[0] - plain[1]) > 0.1


def test_padding_may_be_any_token(tmp_path):
    oracle("Qwen3", tmp_path, **KINDS["Qwen3"])
    model, _ = maxjax.load(tmp_path)
    results = []
    for pad in (0, 5, 96_000):  # the last one is none of the model's
        tokenizer = one_character_each()
        tokenizer.pad_id = pad
        results.append(embed(model, tokenizer, TEXTS, pooling="mean"))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_without_files_it_must_be_said(tmp_path, capsys):
    oracle("Qwen3", tmp_path, **KINDS["Qwen3"])
    tokenizer = one_character_each()
    saved(tmp_path, tokenizer)
    model, _ = maxjax.load(tmp_path)
    with pytest.raises(UserInputError, match=r"decoder.*pooling='lasttoken'.*1_Pooling"):
        embed(model, tokenizer, TEXTS)
    last = embed(model, tokenizer, TEXTS, pooling="lasttoken")
    np.testing.assert_array_equal(
        last, embed(model, tokenizer, TEXTS, pooling=Pooling(("lasttoken",)))
    )
    for wrong, message in (
        ("las", "pooling must be one of 'cls'"),
        (3, "must be a name or a Pooling"),
    ):
        with pytest.raises(UserInputError, match=message):
            embed(model, tokenizer, TEXTS, pooling=wrong)
    from maxjax.cli import application as cli

    assert cli.main(["embed", "--model", str(tmp_path), "abc"]) == 1
    assert "--pooling lasttoken" in capsys.readouterr().err
    assert cli.main(["embed", "--model", str(tmp_path), "--pooling", "lasttoken", "abc"]) == 0
    line = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(line["embedding"], last[1], atol=1e-6)


PROMPTS = (("query", "??"), ("document", ""))


@pytest.mark.parametrize("mode", POOLINGS)
def test_an_empty_text_without_any_token(mode):
    """All its vector's numbers are 0, as for encoders, and not those of the padding."""
    model, tokenizer = maxjax.load("tiny")
    found = embed(model, tokenizer, ["", "1 + 1"], pooling=mode, batch_size=np.int64(2))
    assert not found[0].any() and found[1].any()
    with pytest.raises(TypeError, match="prompt is a int, not a str"):
        embed(model, tokenizer, [""], pooling=mode, prompt=5)


def test_prompts_and_whether_they_are_pooled(tmp_path):
    theirs, tokenizer = oracle("Qwen3", tmp_path, **KINDS["Qwen3"]), one_character_each()
    for include, start in ((True, 0), (False, 2)):
        write(tmp_path, Pooling(("mean",), prompts=PROMPTS, prompt="query", include_prompt=include))
        model, _ = maxjax.load(tmp_path)
        assert model.pooling == Pooling(
            ("mean",), prompts=PROMPTS, prompt="query", include_prompt=include
        )
        expected = pooled_of(theirs, tokenizer, "mean", "??", start)
        np.testing.assert_allclose(embed(model, tokenizer, TEXTS), expected, atol=2e-4)
        found = embed(model, tokenizer, TEXTS, prompt="??")
        np.testing.assert_allclose(found, expected, atol=2e-4)
        plain = pooled_of(theirs, tokenizer, "mean")
        for options in ({"prompt": ""}, {"prompt_name": "document"}):
            np.testing.assert_allclose(embed(model, tokenizer, TEXTS, **options), plain, atol=2e-4)
    with pytest.raises(UserInputError, match="no prompt 'q': it has 'query', 'document'"):
        embed(model, tokenizer, TEXTS, prompt_name="q")
    with pytest.raises(UserInputError, match="pass one of them"):
        embed(model, tokenizer, TEXTS, prompt_name="query", prompt="x")
    maxjax.save_pretrained(model, tmp_path / "again")
    assert read_pooling(tmp_path / "again")[0] == model.pooling


@pytest.mark.parametrize(
    "content", [{"prompts": []}, {"prompts": {"a": 1}}, {"default_prompt_name": "a"},
                {"prompts": {"a": "b"}, "default_prompt_name": "c"}, {"default_prompt_name": 3}],
)  # fmt: skip
def test_prompts_that_cannot_be(tmp_path, content):
    write(tmp_path, Pooling(), config_sentence_transformers=content)
    with pytest.raises(CheckpointFormatError, match="prompt"):
        read_pooling(tmp_path)


def below_the_head(theirs):
    """The model of a causal one, as transformers saves it."""
    settings = {k: v for k, v in theirs.config.settings.items() if k != "transformers_version"}
    found = OracleModel("Qwen3Model", "Qwen3Config", settings, draw=drawn)
    found.tensors = {name: theirs.tensors[f"model.{name}"] for name in found.tensors}
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [True, False])
def test_files_of_the_model_below_its_head(tmp_path, tied):
    """As sentence-transformers saves them: names without "model.", and no head."""
    theirs = oracle("Qwen3", tmp_path / "whole", **{**KINDS["Qwen3"], "tie_word_embeddings": tied})
    bare = below_the_head(theirs)
    bare.save(tmp_path / "bare")
    tokenizer = one_character_each()
    model, _ = maxjax.load(tmp_path / "bare")
    found = embed(model, tokenizer, TEXTS, pooling="lasttoken")
    expected = pooled_of(theirs, tokenizer, "lasttoken")
    np.testing.assert_allclose(found, expected, atol=2e-4)
    ids = ids_of(1, 4)
    if tied:
        assert np.isfinite(np.asarray(call(model, ids))).all()
    else:
        with pytest.raises(UserInputError, match="no language-model head"):
            model(ids)
    maxjax.save_pretrained(model, tmp_path / "again")
    kind = "Qwen3ForCausalLM" if tied else "Qwen3Model"
    expected = {name: zlib.crc32(array) for name, array in sorted(bare.tensors.items())}

    def again():
        found = opened(kind, tmp_path / "again")
        state = getattr(found, "model", found).state_dict()
        return {name: zlib.crc32(state[name].numpy()) for name in sorted(state)}

    assert ask_of(tmp_path / "again", f"checksums of {kind}", again) == expected
    spread, _ = maxjax.load(tmp_path / "bare", mesh=maxjax.make_mesh(model=2))
    np.testing.assert_allclose(
        embed(spread, tokenizer, TEXTS, pooling="lasttoken"), found, atol=2e-5
    )


def test_gguf_says_it_too(tmp_path, caplog):
    oracle("Qwen3", tmp_path / "hf", **KINDS["Qwen3"])
    tokenizer = one_character_each()
    write(tmp_path / "hf", Pooling(("lasttoken",), normalize=True))
    convert(tmp_path / "hf", tmp_path / "x.gguf")
    model, _ = maxjax.load(tmp_path / "x.gguf", tokenizer=False)
    assert model.pooling == Pooling(("lasttoken",), normalize=True)
    first, _ = maxjax.load(tmp_path / "hf")
    found, expected = (embed(one, tokenizer, TEXTS) for one in (model, first))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    caplog.set_level(logging.WARNING, "maxjax")
    oracle("Llama", tmp_path / "llama")
    write(tmp_path / "llama", Pooling(("mean",), normalize=True))
    convert(tmp_path / "llama", tmp_path / "y.gguf")
    assert any("--pooling" in record.getMessage() for record in caplog.records)


def test_an_output_that_is_there_stays(tmp_path, capsys):
    from maxjax.cli import application as cli

    path = tmp_path / "x.npy"
    path.write_bytes(b"mine")
    assert cli.main(["embed", "--model", str(tmp_path), "--output", str(path), "text"]) == 1
    assert "--overwrite" in capsys.readouterr().err and path.read_bytes() == b"mine"
