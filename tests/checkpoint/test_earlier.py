"""Checkpoints that maxjax 0.1 wrote before weights carried the digests of what describes them.

``fixtures/`` holds one of each format, of one model, written by that state of the library, and one
that torch wrote. They are never written anew: what was saved once opens for good.
"""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import maxjax
from maxjax import checkpoint
from maxjax.storage import open_checkpoint
from maxjax.storage.verify import verify

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = {
    "single": "single",
    "set": "set",
    "file": "file/weights.safetensors",
    "gguf": "gguf/model.gguf",
    "orbax": "orbax",
    "bin": "bin",
}
SHAPES = {
    "lm_head.weight": (12, 8),
    "model.embed_tokens.weight": (12, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.layers.0.mlp.gate_proj.weight": (16, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.norm.weight": (8,),
}


def values(number, shape):
    """What the tensor of this number in the order of the names was given."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + number) % 64 / 64).astype(np.float32).reshape(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_it_still_loads(kind):
    given = {"config": FIXTURES / "single/config.json"} if kind == "file" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, tokenizer = maxjax.load(FIXTURES / KINDS[kind], **given)
    found = model.state_dict()
    assert found.keys() == SHAPES.keys()
    for number, (name, shape) in enumerate(SHAPES.items()):
        np.testing.assert_array_equal(np.asarray(found[name]), values(number, shape), name)
    assert model.hf_config["num_attention_heads"] == 2
    if kind in ("single", "set", "bin"):
        assert tokenizer.encode("w3 w9") == [5, 11]
    with open_checkpoint(FIXTURES / KINDS[kind]) as table:
        assert verify(table).tensors == len(SHAPES)


@pytest.mark.parametrize("kind", ["single", "set", "orbax", "bin"])
def test_another_is_saved_in_its_place(kind, tmp_path):
    directory = tmp_path / kind
    shutil.copytree(FIXTURES / kind, directory)
    model, _ = maxjax.load(directory)
    model.load_state_dict({n: np.full(s, 2, np.float32) for n, s in SHAPES.items()})
    if kind == "orbax":
        checkpoint.save(directory, model)
    else:
        maxjax.save_pretrained(model, directory)
    again, _ = maxjax.load(directory, verify=True)
    for name, one in again.state_dict().items():
        np.testing.assert_array_equal(np.asarray(one), np.full(SHAPES[name], 2, np.float32))
