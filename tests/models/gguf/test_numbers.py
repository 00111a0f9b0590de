"""Tensors of one number in each layer that a GGUF file lists in its metadata: Apertus's xIELU."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.dtype import DType
from maxjax.errors import CheckpointFormatError, CheckpointMismatchError
from maxjax.graph.weights import load_weights
from maxjax.models import Apertus, ApertusConfig
from maxjax.models.gguf import hf_tensors

CONFIG = ApertusConfig(96, 16, 24, num_hidden_layers=2, num_attention_heads=2)
KEYS = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
NAME = "model.layers.1.mlp.act_fn.alpha_n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in bfloat16."""
    rng, found = np.random.default_rng(0), tmp_path_factory.mktemp("apertus")
    weights = Apertus(CONFIG, DType.bfloat16).raw_state_dict()
    tensors = {
        name: np.array(rng.normal(0, 1, tuple(map(int, one.shape))), ml_dtypes.bfloat16)
        for name, one in weights.items()
    }
    safetensors.numpy.save_file(tensors, found / "model.safetensors")
    config = {
        "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu",
        "vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    (found / "config.json").write_text(json.dumps(config))
    return found


def test_they_keep_values_shapes_and_dtypes(folder, tmp_path):
    maxjax.convert(folder, tmp_path / "model.gguf")
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    before = {name: array for name, array in stored.items() if "act_fn" in name}
    after = hf_tensors(load_weights(tmp_path / "model.gguf"))
    assert len(before) == 8
    for name, array in before.items():
        found = after[name]
        assert (found.dtype, tuple(found.shape)) == (DType.bfloat16, array.shape), name
        np.testing.assert_array_equal(np.asarray(found.data), array)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert all(len(reader.fields[key].contents()) == 2 for key in KEYS)
    assert not any("act_fn" in one.name or "xielu" in one.name for one in reader.tensors)


@pytest.mark.parametrize(
    "value", [[0.5], [0.5] * 3, [0.5, float("nan")], [0.5, float("inf")], [1, 2], 0.5, "x", None]
)
def test_lists_that_do_not_fit(folder, tmp_path, monkeypatch, value):
    maxjax.convert(folder, tmp_path / "model.gguf")
    weights = load_weights(tmp_path / "model.gguf")
    changed = {**weights.metadata, "xielu.beta": value}
    changed = {key: one for key, one in changed.items() if one is not None}
    monkeypatch.setattr(type(weights), "metadata", property(lambda self: changed))
    with pytest.raises(CheckpointFormatError, match="'xielu.beta'"):
        hf_tensors(weights)


@pytest.mark.parametrize("wrong", ["missing", "shape"])
def test_tensors_that_do_not_fit(folder, tmp_path, wrong):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    if wrong == "missing":
        del tensors[NAME]
    else:
        tensors[NAME] = np.zeros(3, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises((CheckpointFormatError, CheckpointMismatchError), match=NAME):
        maxjax.convert(tmp_path, tmp_path / "model.gguf")


def test_a_plain_rope_stays_plain(folder, tmp_path):
    """A configuration without settings of RoPE means that of Llama 3.1."""
    safetensors.numpy.save_file(
        safetensors.numpy.load_file(folder / "model.safetensors"), tmp_path / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "gguf" / "model.gguf"
    file.parent.mkdir()
    maxjax.convert(tmp_path, file)
    before, after = (maxjax.load(one)[0].config.rope_parameters for one in (tmp_path, file))
    assert before == after and before.scaling is None
