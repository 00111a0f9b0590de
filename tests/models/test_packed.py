"""Decoders whose weights stay packed in blocks, against the same decoded when they are loaded."""

import numpy as np
import pytest

import maxjax
from maxjax.checkpoint import convert
from tests.models import decoders
from tests.models.decoders import call, ids_of

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama")
    decoders.oracle("Llama", place, **WIDE)
    return place


def both(directory, quantize, tmp_path, devices=1):
    """(the model packed, the model decoded) of a GGUF file in these blocks."""
    file = tmp_path / f"{quantize}.gguf"
    convert(directory, file, quantize=quantize)
    mesh = maxjax.make_mesh(model=devices) if devices > 1 else None
    packed, _ = maxjax.load(file, mesh=mesh, tokenizer=False, activations="float")
    decoded, _ = maxjax.load(file, dtype="float32", tokenizer=False)
    return packed, decoded


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("quantize", "devices"),
    [("q8_0", 1), ("q4_k", 4), ("q6_k", 4), ("q4_0", 1), ("q4_k", 1)],
)
def test_logits_and_tokens(llama, quantize, devices, tmp_path):
    packed, decoded = both(llama, quantize, tmp_path, devices)
    encodings = [w.quantization_encoding for w in packed.raw_state_dict().values()]
    assert sum(e is not None for e in encodings) > len(encodings) / 2
    ids = ids_of(2, 20)
    found, expected = (np.asarray(call(model, ids)) for model in (packed, decoded))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * expected.std())
    if quantize in ("q6_k", "q4_0"):
        return  # tokens are those of the logits
    prompts = [ids[0, :12].tolist(), ids[1, :7].tolist()]
    texts = [one.tokens for one in maxjax.generate(packed, None, prompts, max_new_tokens=8)]
    assert decoders.chosen(decoded, prompts, texts, ids.shape[1]) == texts


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_other_families(family, tmp_path):
    more = {"query_pre_attn_scalar": 32} if family == "Gemma2" else {}
    decoders.oracle(family, tmp_path, head_dim=32, **WIDE, **more)
    packed, decoded = both(tmp_path, "q8_0", tmp_path)
    assert any(w.quantization_encoding is not None for w in packed.raw_state_dict().values())
    ids = ids_of(2, 20)
    found, expected = (np.asarray(call(model, ids)) for model in (packed, decoded))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * expected.std())
