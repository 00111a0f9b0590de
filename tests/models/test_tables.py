"""Embedding tables and heads whose rows a mesh does not divide: split along their columns, not whole on each device."""

import dataclasses

import jax
import numpy as np
import pytest

import maxjax
from maxjax.graph import DeviceRef
from maxjax.graph.placement.mesh import abstract_mesh
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.models import build
from maxjax.nn import Embedding
from maxjax.nn.layer.place import plan_places
from tests.models.test_copies import CASES, ENCODERS, heads_of

ROWS = 32001
# Tied and untied heads, heads with a bias and without, tables of positions beside that of the tokens.
RUN = (
    "llama",
    "gpt2",
    "phi",
    *(pytest.param(k, marks=pytest.mark.extra) for k in ("gemma2", "falcon", "mamba2")),
)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 24}
BERT = {**SMALL, "vocab_size": ROWS, "hidden_size": 16, "intermediate_size": 24}
DISTIL = {"vocab_size": ROWS, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}


def widened(kind, directory):
    """The small model of a family of decoders, with ROWS rows in its table."""
    CASES[kind].model(directory)
    model = build(maxjax.load_weights(directory))
    return type(model)(dataclasses.replace(model.config, vocab_size=ROWS))


def whole_tables(model):
    """The names of tables and heads that each of 8 devices holds completely."""
    places = plan_places(model, abstract_mesh({"model": 8}))
    tables = [one for one in places if ROWS in one.shape and len(one.shape) > 1]
    assert tables, "the model has no table of tokens"
    return [one.name for one in tables if not any(one.placed.spec)]


@pytest.mark.parametrize("kind", CASES)
def test_no_table_of_a_decoder_is_whole(kind, tmp_path):
    assert whole_tables(widened(kind, tmp_path)) == []


@pytest.mark.parametrize("kind", ENCODERS)
def test_no_table_of_an_encoder_is_whole(kind):
    name, settings = ENCODERS[kind]
    sizes = DISTIL if kind == "distilbert" else BERT
    config = getattr(maxjax.models, f"{name}Config")(**sizes, **settings)
    for head in heads_of(kind):
        is_v3 = head.__name__.startswith("DebertaV3")
        own = dataclasses.replace(config, legacy=False) if is_v3 else config
        assert whole_tables(head(own)) == []


@pytest.mark.parametrize("kind", RUN)
def test_logits_and_files_are_those_of_one_device(kind, tmp_path):
    model = maxjax.init(widened(kind, tmp_path / "hf"), jax.random.key(0))
    ids = np.array([[5, ROWS - 1, 7, 0, 31999]], np.int32)
    run = jax.jit(lambda m, x: m(x)[:, -1])
    expected = np.asarray(run(model, ids), np.float32)
    maxjax.save_pretrained(model, tmp_path / "one")
    model.to(maxjax.make_mesh(model=8))
    for weight in model.raw_state_dict().values():
        if ROWS in map(int, weight.shape) and len(weight.shape) > 1:
            assert weight.value.addressable_shards[0].data.nbytes == weight.value.nbytes // 8
    found = np.asarray(run(model, ids), np.float32)
    assert found.argmax() == expected.argmax()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    maxjax.save_pretrained(model, tmp_path / "eight")
    one, eight = (tmp_path / name / "model.safetensors" for name in ("one", "eight"))
    assert one.read_bytes() == eight.read_bytes()


def test_a_table_whose_blocks_do_not_divide_is_warned_of():
    table = Embedding(33, 20 * 256, "uint8", DeviceRef.CPU(), QuantizationEncoding.Q6_K)
    says = (
        r"replicates 1 weight over model=8, .*: weight \[33, 4200\] \(.*: the 33 values of axis 0 do not divide by "
        r"model=8; the 20 blocks of axis 1 do not divide by model=8\)"
    )
    with pytest.warns(UserWarning, match=says):
        table.to(maxjax.make_mesh(model=8))
    table.to(maxjax.make_mesh(model=4))
    assert tuple(table.weight.sharding.spec) == (None, "model")
