"""Pooling: the arithmetic against float64, the files against what sentence-transformers writes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.errors import CheckpointError, CheckpointFormatError, CheckpointUnsafeError
from maxjax.models.pooling import POOLINGS, Pooling, pool
from maxjax.models.sentence_files import pooling_files, read_pooling

LENGTHS = [1, 4, 7, 3]


def states(dtype=np.float32):
    rng = np.random.default_rng(0)
    mask = (np.arange(7)[None] < np.array(LENGTHS)[:, None]).astype(np.int32)
    return rng.standard_normal((4, 7, 5)).astype(dtype), mask


ORACLES = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / np.sqrt(len(x)),
    "weightedmean": lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}


@pytest.mark.parametrize("mode", sorted(POOLINGS))
@pytest.mark.parametrize("normalize", [False, True])
def test_each_mode(mode, normalize):
    x, mask = states()
    rows = [ORACLES[mode](x[i, :n].astype(np.float64)) for i, n in enumerate(LENGTHS)]
    expected = np.stack([r / np.linalg.norm(r) if normalize else r for r in rows])
    found = pool(x, mask, (mode,), normalize=normalize)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", sorted(POOLINGS))
def test_masked_places_have_no_influence(mode):
    x, mask = states()
    before = pool(x, mask, (mode,))
    x[mask == 0] = 1e3
    np.testing.assert_array_equal(pool(x, mask, (mode,)), before)


def test_the_first_token_is_the_first_that_is_pooled():
    x, mask = states()
    mask[:, 0] = 0  # a prompt
    expected = [x[0, 0] if n == 1 else x[i, 1] for i, n in enumerate(LENGTHS)]
    np.testing.assert_array_equal(pool(x, mask, ("cls",)), expected)


def test_several_modes_stand_side_by_side():
    x, mask = states()
    found = pool(x, mask, ("cls", "mean"))
    np.testing.assert_array_equal(found[:, :5], pool(x, mask, ("cls",)))
    np.testing.assert_array_equal(found[:, 5:], pool(x, mask, ("mean",)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_no_tokens_at_all_is_finite(dtype):
    x, mask = states()
    every = jax.jit(lambda x, m: {mode: pool(x, m, (mode,), normalize=True) for mode in POOLINGS})
    for mode, found in every(jnp.asarray(x, dtype), mask * 0).items():
        assert found.dtype == dtype
        assert bool(jnp.isfinite(found).all()), mode


def test_long_texts_in_bfloat16():
    x = jnp.ones((1, 512, 3), jnp.bfloat16)
    mask = jnp.asarray(np.arange(512)[None] < 511)
    np.testing.assert_array_equal(pool(x, mask).astype(jnp.float32), 1.0)
    x = x.at[0, 510].set(2.0).at[0, 511].set(3.0)
    np.testing.assert_array_equal(pool(x, mask, ("lasttoken",)).astype(jnp.float32), 2.0)


# --- files ----------------------------------------------------------------------------------


def write(directory, kinds=("Transformer", "Pooling", "Normalize"), pooling=None, sentence=None):
    modules = []
    for i, kind in enumerate(kinds):
        path = "" if kind == "Transformer" else f"{i}_{kind}"
        modules.append(
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (directory / path).mkdir(exist_ok=True)
        if kind == "Pooling":
            content = {"word_embedding_dimension": 5, "pooling_mode_mean_tokens": True}
            (directory / path / "config.json").write_text(json.dumps(pooling or content))
    (directory / "modules.json").write_text(json.dumps(modules))
    if sentence is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps(sentence))
    return directory


def test_minilm(minilm):
    assert read_pooling(minilm) == (Pooling(("mean",), True, 256, False), minilm)


def test_no_files(tmp_path):
    assert read_pooling(tmp_path) == (None, tmp_path)


@pytest.mark.parametrize(
    "pooling, modes",
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_max_tokens": True}, ("max",)),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len_tokens",)),
        ({"pooling_mode_weightedmean_tokens": True, "include_prompt": False}, ("weightedmean",)),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"embedding_dimension": 5, "pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": ["max", "cls"]}, ("max", "cls")),
        ({"word_embedding_dimension": 32}, ("mean",)),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
    ],
)
def test_modes(tmp_path, pooling, modes):
    found, _ = read_pooling(write(tmp_path, pooling=pooling))
    assert found.modes == modes and found.unsupported is None


@pytest.mark.parametrize("modes", [("cls", "mean"), ("lasttoken", "cls")])
def test_the_order_of_modes_and_the_width_are_written(tmp_path, modes):
    for name, content in pooling_files(Pooling(modes), 7).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    assert read_pooling(tmp_path)[0].modes == modes
    settings = json.loads((tmp_path / "1_Pooling/config.json").read_text())
    assert settings["word_embedding_dimension"] == 7  # without it sentence-transformers stops


def test_the_files_of_a_reranker_are_written_as_they_were(tmp_path):
    """sentence-transformers loaded what was saved with another limit, activation function and prompt."""
    task = {"transformer_task": "sequence-classification"}
    write(tmp_path, ["Transformer"], sentence={"max_seq_length": 8, "do_lower_case": True} | task)
    found, _ = read_pooling(tmp_path)
    files = pooling_files(found, 7)
    assert [module["path"] for module in files["modules.json"]] == [""]
    assert task.items() <= files["sentence_bert_config.json"].items()
    assert files["config_sentence_transformers.json"] == {"model_type": "CrossEncoder"}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_pooling(tmp_path)[0] == found
    assert (found.max_length, found.lower_case) == (8, True)


def test_a_step_that_is_not_supported_is_so_after_a_save(tmp_path):
    pooling = Pooling(unsupported="the module LayerNorm", max_length=9)
    for name, content in pooling_files(pooling, 7).items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_pooling(tmp_path)[0] == pooling


@pytest.mark.parametrize(
    ("sentence", "says"),
    [
        ({"modality_config": {"text": {}, "message": {"format": "flat"}}}, "chat template"),
        ({"modality_config": {"text": {"method_output_name": "pooler_output"}}}, "pooler_output"),
        ({"config_kwargs": {"is_causal": False}}, "is_causal"),
        ({"processor_kwargs": {"model_max_length": 99, "padding_side": "left"},
          "processing_kwargs": {"text": {"max_length": 8}}, "max_seq_length": 99}, None),
        ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special_tokens"),
        ({"tokenizer_args": {"trust_remote_code": True, "model_max_length": int(1e30)},
          "config_args": {"trust_remote_code": True}}, None),
        (
            {
                "modality_config": {"text": {"method_output_name": "last_hidden_state"}},
                "config_kwargs": {},
            },
            None,
        ),
    ],
)  # fmt: skip
def test_settings_of_newer_files_are_read_or_named(tmp_path, sentence, says):
    found, _ = read_pooling(write(tmp_path, sentence={"max_seq_length": 8} | sentence))
    assert found.max_length == 8
    assert found.unsupported is None if says is None else says in found.unsupported


@pytest.mark.parametrize("kind", ["distilbert", "xlm-roberta"])
def test_the_sentence_config_has_the_name_of_the_model(tmp_path, kind):
    write(tmp_path, sentence=None)
    (tmp_path / f"sentence_{kind}_config.json").write_text(
        '{"max_seq_length": 20, "do_lower_case": true}'
    )
    found, _ = read_pooling(tmp_path)
    assert (found.max_length, found.lower_case) == (20, True)


def test_settings_of_the_model_are_read_and_written(tmp_path):
    write(tmp_path)
    file = tmp_path / "config_sentence_transformers.json"
    settings = {
        "truncate_dim": 8,
        "activation_fn": "torch.nn.modules.linear.Identity",
        "default_prompt_name": "query",
    }
    file.write_text(json.dumps(settings | {"prompts": {"query": None}}))
    found, _ = read_pooling(tmp_path)
    assert (found.truncate_dim, found.activation) == (8, settings["activation_fn"])
    assert found.before(None) == found.before("document") == ""
    written = pooling_files(found, 7)[file.name]
    assert settings.items() <= written.items()
    unsupported = pooling_files(dataclasses.replace(found, unsupported="x"), 7)
    assert unsupported[file.name] == written


def test_normalize_and_sentence_config(tmp_path):
    found, _ = read_pooling(write(tmp_path, ("Transformer", "Pooling", "Dropout")))
    assert found == Pooling(("mean",), False, None, False)
    found, _ = read_pooling(
        write(tmp_path, sentence={"max_seq_length": None, "do_lower_case": True})
    )
    assert found == Pooling(("mean",), True, None, True)


def test_a_transformer_in_a_folder_of_its_own(tmp_path):
    write(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 99}')
    found, place = read_pooling(tmp_path)
    assert place == tmp_path / "0_Transformer" and found.max_length == 99


@pytest.mark.parametrize(
    "kinds, pooling, named",
    [
        (("Transformer", "Dense", "Pooling"), None, "Dense"),
        (("Transformer", "Pooling", "LayerNorm"), None, "LayerNorm"),
        (("Transformer", "WeightedLayerPooling", "Pooling"), None, "WeightedLayerPooling"),
        (("Transformer",), None, "without a Pooling"),
        (("Transformer", "Pooling"), {"pooling_mode_magic": True}, "pooling_mode_magic"),
        (("Transformer", "Pooling"), {"pooling_mode": "magic"}, "magic"),
    ],
)
def test_steps_that_are_not_there_are_named(tmp_path, kinds, pooling, named):
    assert named in read_pooling(write(tmp_path, kinds, pooling))[0].unsupported


@pytest.mark.parametrize("path", ["/etc", "../other", "a/../../b", "C:\\x", "a\\b", "a\0b"])
def test_paths_that_lead_out(tmp_path, path):
    write(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = path
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointUnsafeError, match="modules.json"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    "name, content",
    [
        ("modules.json", "{}"), ("modules.json", "[3]"), ("modules.json", "[{}]"), ("modules.json", ""),
        ("modules.json", '[{"path": 3, "type": "x"}]'), ("modules.json", '[{"path": ""}]'),
        ("1_Pooling/config.json", "[]"), ("1_Pooling/config.json", "{"),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": 1}'),
        ("1_Pooling/config.json", '{"pooling_mode": {"mean": true}}'),
        ("1_Pooling/config.json", '{"pooling_mode": [3]}'),
        ("1_Pooling/config.json", '{"pooling_mode": []}'),
        ("sentence_bert_config.json", '{"max_seq_length": "256"}'),
        ("sentence_bert_config.json", '{"max_seq_length": 0}'),
        ("sentence_bert_config.json", '{"do_lower_case": 1}'),
        ("sentence_bert_config.json", "null"),
    ],
)  # fmt: skip
def test_broken_files_are_named(tmp_path, name, content):
    write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_pooling(tmp_path)
    assert caught.value.path == str(tmp_path / name)


def test_a_file_that_is_named_and_missing(tmp_path):
    write(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="1_Pooling"):
        read_pooling(tmp_path)


def test_errors_are_format_errors(tmp_path):
    write(tmp_path, pooling={"pooling_mode_mean_tokens": "yes"})
    with pytest.raises(CheckpointFormatError, match="pooling_mode_mean_tokens"):
        read_pooling(tmp_path)
