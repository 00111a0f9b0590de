"""gpt-oss in MXFP4: packed in memory, and the same bits in every file."""

import json

import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.errors import CheckpointFormatError
from maxjax.graph.weights import load_weights
from maxjax.models import build
from tests.models.decoders import call, ids_of, same
from tests.models.families.known.gpt_oss import CASES
from tests.oracles.models import opened
from tests.oracles.recorded import torch

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


def checkpoint(folder):
    """A checkpoint whose experts are in MXFP4, and the values of these."""
    CASES[0].model(folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    rng, packed, floats = np.random.default_rng(0), {}, {}
    for name, array in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = array
            continue
        experts, inner, out = array.shape
        blocks = rng.integers(0, 256, (experts, out, inner // 32, 16), np.uint8)
        scales = rng.integers(121, 125, (experts, out, inner // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], -1)
        values = pairs.reshape(*scales.shape, 32) * np.exp2(scales[..., None] - np.float32(127))
        floats[name] = values.reshape(experts, out, inner).swapaxes(1, 2)
    safetensors.numpy.save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    return packed, floats


def is_same(folder, tensors):
    found = safetensors.numpy.load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def kinds(model):
    weights = model.raw_state_dict().items()
    return {str(w.quantization_encoding) for n, w in weights if "experts." in n and "weight" in n}


def test_experts_stay_packed_and_files_keep_their_bits(tmp_path):
    packed, floats = checkpoint(tmp_path / "hf")
    model, _ = maxjax.load(tmp_path / "hf", activations="float")
    assert kinds(model) == {"QuantizationEncoding.MXFP4"}
    ids = ids_of(2, 12)
    decoded = build(load_weights(tmp_path / "hf"), dtype="float32")
    decoded.load_state_dict(load_weights(tmp_path / "hf"), cast=True)
    assert kinds(decoded) == {"None"}
    same(call(model, ids), np.asarray(call(decoded, ids)), atol=2e-4)
    # The values of one expert, of which gate and up are in turn in the file.
    mine, name = decoded.state_dict(), "model.layers.1.mlp.experts"
    for number, (part, rows) in enumerate((("gate_proj", 0), ("up_proj", 1))):
        expected = floats[f"{name}.gate_up_proj"][number + 1].T[rows::2]
        np.testing.assert_array_equal(mine[f"{name}.{number + 1}.{part}.weight"], expected)
    maxjax.save_pretrained(model, tmp_path / "again")
    is_same(tmp_path / "again", packed)
    maxjax.convert(tmp_path / "hf", tmp_path / "x.gguf")
    of_gguf, _ = maxjax.load(tmp_path / "x.gguf")
    assert kinds(of_gguf) == {"QuantizationEncoding.MXFP4"}
    maxjax.convert(tmp_path / "x.gguf", tmp_path / "back")
    is_same(tmp_path / "back", packed)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    maxjax.save_pretrained(decoded, tmp_path / "floats")
    found = safetensors.numpy.load_file(tmp_path / "floats" / "model.safetensors")
    assert all(np.array_equal(found[name], array) for name, array in floats.items())
    config = json.loads((tmp_path / "floats" / "config.json").read_text())
    assert "quantization_config" not in config


def test_what_does_not_fit_is_named(tmp_path):
    packed, _ = checkpoint(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    wrong = [
        {f"{name}_scales": None},
        {f"{name}_scales": packed[f"{name}_scales"][:, :-1]},
        {f"{name}_blocks": None},
        {f"{name}_blocks": packed[f"{name}_blocks"][..., :8]},
        {f"{name}_blocks": packed[f"{name}_blocks"][:0]},
    ]
    for changes in wrong:
        tensors = {n: a for n, a in {**packed, **changes}.items() if a is not None}
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointFormatError, match=r"layers\.0\.mlp\.experts\.down_proj_"):
            maxjax.load(tmp_path)


@pytest.mark.extra
@pytest.mark.oracle
def test_transformers_reads_the_same_values(tmp_path):
    checkpoint(tmp_path)
    ids = ids_of(2, 12)
    with torch.no_grad():
        theirs = opened("GptOssForCausalLM", tmp_path)(torch.tensor(ids).long()).logits.numpy()
    model = build(load_weights(tmp_path))
    model.load_state_dict(load_weights(tmp_path))
    np.testing.assert_allclose(call(model, ids), theirs, rtol=0, atol=1e-4 * theirs.std() * 5)
