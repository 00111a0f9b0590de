"""load(): a path → a model that runs, or one clear error."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from maxjax.dtype import DType
from maxjax.engine.embed import embed
from maxjax.engine.load import load
from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.graph.placement.mesh import make_mesh
from maxjax.models import BertConfig, BertModel
from maxjax.models.pooling import Pooling

WORDS = 4000
SIZES = {
    "vocab_size": WORDS, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
CONFIG = {"architectures": ["BertModel"], "model_type": "bert", **SIZES}
IDS = np.array([[3, 1, 2]], np.int32)


@pytest.fixture(scope="module")
def original(minilm, tmp_path_factory):
    """A directory as of MiniLM with few of its words and a tiny random model in it."""
    directory = tmp_path_factory.mktemp("original")
    for name in ("tokenizer_config.json", "modules.json", "sentence_bert_config.json"):
        shutil.copy(minilm / name, directory)
    shutil.copytree(minilm / "1_Pooling", directory / "1_Pooling")
    tokenizer = json.loads((minilm / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: i for word, i in vocab.items() if i < WORDS}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(values(), directory / "model.safetensors")
    return directory


@pytest.fixture
def small(original, tmp_path):
    return shutil.copytree(original, tmp_path / "small")


def values(dtype=np.float32):
    rng = np.random.default_rng(0)
    weights = BertModel(BertConfig.from_dict(CONFIG)).raw_state_dict()
    found = {
        name: rng.standard_normal([int(d) for d in w.shape]).astype(dtype)
        for name, w in weights.items()
    }
    return {**found, "embeddings.position_ids": np.arange(16)[None]}


def change(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


run = jax.jit(lambda model: model(IDS).last_hidden_state)


def states(model):
    return np.asarray(run(model))


# --- what it does ---------------------------------------------------------------------------


def test_a_directory(small):
    model, tokenizer = load(small)
    assert isinstance(model, BertModel) and tokenizer.vocab_size == WORDS
    assert model.pooling == Pooling(("mean",), True, 256, False)
    found = {name: np.asarray(value) for name, value in model.state_dict().items()}
    expected = load_file(small / "model.safetensors")
    del expected["embeddings.position_ids"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_path_of_any_kind(small):
    expected = states(load(small)[0])
    for path in (str(small), small / "model.safetensors", str(small / "model.safetensors")):
        model, tokenizer = load(path)
        assert tokenizer is not None
        np.testing.assert_array_equal(states(model), expected)


def test_a_sharded_checkpoint(small):
    expected = states(load(small)[0])
    tensors = load_file(small / "model.safetensors")
    (small / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for i in (0, 1):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[i::2]}
        save_file(part, small / file)
        index |= dict.fromkeys(part, file)
    file = small / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for path in (small, file):
        np.testing.assert_array_equal(states(load(path)[0]), expected)


def test_no_tokenizer_is_none(small):
    (small / "tokenizer.json").unlink()
    model, tokenizer = load(small)
    assert tokenizer is None and states(model).shape == (1, 3, 4)


def test_no_tokenizer_wanted(small):
    (small / "tokenizer.json").write_text("{")
    model, tokenizer = load(small, tokenizer=False)
    assert tokenizer is None and states(model).shape == (1, 3, 4)


def test_a_plain_transformers_directory_has_no_pooling(small):
    (small / "modules.json").unlink()
    assert not hasattr(load(small)[0], "pooling")


def test_a_transformer_in_a_folder_of_its_own(small):
    expected = states(load(small)[0])
    modules = json.loads((small / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (small / "modules.json").write_text(json.dumps(modules))
    (small / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (small / name).rename(small / "0_Transformer" / name)
    model, tokenizer = load(small)
    assert tokenizer is not None and model.pooling.normalize
    np.testing.assert_array_equal(states(model), expected)


def test_another_config(small):
    expected = states(load(small)[0])
    (small / "config.json").rename(small / "other.json")
    for config in (CONFIG, small / "other.json", str(small / "other.json")):
        np.testing.assert_array_equal(states(load(small, config=config)[0]), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", DType.bfloat16, np.float16])
def test_dtype(small, dtype):
    model, _ = load(small, dtype=dtype)
    assert model.embeddings.word_embeddings.weight.dtype is DType.of(dtype)
    assert states(model).dtype == DType.of(dtype).np
    assert model.embeddings.LayerNorm.weight.dtype is DType.float32  # norms stay wide
    np.testing.assert_allclose(
        states(model).astype(np.float32), states(load(small)[0]), rtol=0.1, atol=0.1
    )


def test_everything_in_sixteen_bits(small):
    model, _ = load(small, dtype="bfloat16", reduce_dtype="bfloat16")
    assert {w.dtype for w in model.raw_state_dict().values()} == {DType.bfloat16}
    assert model.embeddings.LayerNorm.compute_dtype is DType.bfloat16
    assert model.encoder.layer[0].attention.self.softmax_dtype is DType.bfloat16


def test_auto_keeps_the_dtype_of_the_file(small):
    save_file(values(np.float16), small / "model.safetensors")
    model, _ = load(small)
    assert {w.dtype for w in model.raw_state_dict().values()} == {DType.float16}


def test_the_files_are_closed_and_may_change_afterwards(small):
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    model, _ = load(small)
    expected = states(model)
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before
    file = small / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    np.testing.assert_array_equal(states(model), expected)


# --- what can be wrong ----------------------------------------------------------------------


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointMissingError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_a_path_that_is_none(path):
    with pytest.raises((UserInputError, CheckpointMissingError)):
        load(path)


@pytest.mark.parametrize("path", [None, 3, ["a"]])
def test_a_path_of_another_type(path):
    with pytest.raises(TypeError, match="path"):
        load(path)


def test_an_empty_directory(tmp_path):
    with pytest.raises(CheckpointMissingError, match=r"config\.json"):
        load(tmp_path)


def test_no_weights(small):
    (small / "model.safetensors").unlink()
    with pytest.raises(CheckpointMissingError, match="safetensors"):
        load(small)


def test_no_config(small):
    (small / "config.json").unlink()
    with pytest.raises(CheckpointMissingError, match=r"config\.json"):
        load(small)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 90868376\n"


@pytest.mark.parametrize(
    "content, error",
    [
        (LFS, CheckpointFormatError),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", CheckpointFormatError),
        (b"\x80\x02}q\x00.", CheckpointUnsafeError),
        (b"", CheckpointTruncatedError),
    ],
)
def test_something_else_in_place_of_weights(small, content, error):
    (small / "model.safetensors").write_bytes(content)
    with pytest.raises(error, match=r"model\.safetensors"):
        load(small)


def test_a_file_that_is_no_checkpoint(small):
    (small / "config.json").unlink()
    for content in (b"root:x:0:0:root:/root:/bin/bash\n", bytes(64)):
        (small / "passwd").write_bytes(content)
        with pytest.raises(CheckpointFormatError, match=r"passwd: not a checkpoint .*\.gguf"):
            load(small / "passwd")


def test_a_cut_file(small):
    content = (small / "model.safetensors").read_bytes()
    (small / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(CheckpointTruncatedError, match=r"model\.safetensors"):
        load(small)


def test_an_architecture_we_do_not_have(small):
    change(small / "config.json", architectures=["RwkvForCausalLM"], model_type="rwkv")
    with pytest.raises(UnsupportedModelError, match="RwkvForCausalLM.*families"):
        load(small)


def test_weights_that_are_not_those_of_the_config(small):
    change(small / "config.json", hidden_size=6)
    with pytest.raises(CheckpointMismatchError, match=r"encoder\.layer\.0\.") as caught:
        load(small)
    assert "(4000, 6)" in str(caught.value) and "(4000, 4)" in str(caught.value)
    change(small / "config.json", num_hidden_layers=2)
    with pytest.raises(CheckpointMismatchError, match="'num_hidden_layers'.* at most 1.* found 2"):
        load(small)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "modules.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[[", b'"x"', b'{"a": 1, "a": 2}', b"[" * 10_000])
def test_broken_files_beside_the_weights(small, name, content):
    (small / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(small)
    assert caught.value.path == str(small / name)


def test_float64_is_not_narrowed_in_silence(small):
    save_file(values(np.float64), small / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="float64.*dtype='float32'"):
        load(small)
    model, _ = load(small, dtype="float32")
    assert states(model).dtype == np.float32
    with jax.enable_x64(True):
        assert states(load(small)[0]).dtype == np.float64


@pytest.mark.parametrize("option", ["dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", ["nonsense", "int8", "float8_e4m3fn", 3.5, None, "float64"])
def test_dtypes_that_are_none(small, option, value):
    with pytest.raises(UserInputError, match=option):
        load(small, **{option: value})


def test_compiled_while_it_is_read(small):
    specs = [jax.ShapeDtypeStruct((1, 3), np.int32), jax.ShapeDtypeStruct((1, 3), np.int32)]
    model, _, program = load(small, compile=specs)
    mask = np.ones((1, 3), np.int32)
    want = jax.jit(lambda m, *rows: m(*rows))(model, IDS, mask)
    got = program(IDS, mask)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_cut_file_while_it_compiles(small):
    file = small / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointTruncatedError):
        load(small, compile=[jax.ShapeDtypeStruct((1, 3), np.int32)])


def test_specs_that_do_not_go_with_the_model(small):
    with pytest.raises(TypeError, match="compile is a list with a spec for each argument"):
        load(small, compile=jax.ShapeDtypeStruct((1, 3), np.int32))
    with pytest.raises((TypeError, ValueError)):
        load(small, compile=[jax.ShapeDtypeStruct((1, 3), np.float32)] * 9)


def test_onto_a_mesh(small):
    model, tokenizer = load(small)
    placed, _ = load(small, mesh=make_mesh(data=2, model=4))
    assert len(placed.embeddings.word_embeddings.weight.value.sharding.device_set) == 8
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(placed), strict=True):
        np.testing.assert_array_equal(one, other)
    texts = ["one", "two words", "three of them"]
    np.testing.assert_allclose(
        embed(placed, tokenizer, texts), embed(model, tokenizer, texts), atol=1e-5
    )


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_onto_a_mesh_whose_only_axis_has_any_name(small, kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    placed, _ = load(small, mesh=mesh)
    moved = load(small)[0].to(mesh)
    expected = load(small, mesh=make_mesh(model=2))[0]
    found = [expected, placed, moved]
    for one, *others in zip(*(model.raw_state_dict().values() for model in found), strict=True):
        spec = [None if entry is None else "x" for entry in one.sharding.spec]
        assert all(other.sharding == NamedSharding(mesh, PartitionSpec(*spec)) for other in others)
    assert not placed.embeddings.word_embeddings.weight.value.is_fully_replicated


def test_onto_a_mesh_with_rules_of_the_callers_own(small):
    rules = {"*query.weight": PartitionSpec(None, "model"), "*.dense.weight": None}
    placed, _ = load(small, mesh=make_mesh(data=2, model=4), rules=rules)
    layer = placed.encoder.layer[0]
    assert tuple(layer.attention.self.query.weight.sharding.spec) == (None, "model")
    assert layer.output.dense.weight.value.is_fully_replicated
    assert not layer.attention.self.query.weight.value.is_fully_replicated
    with pytest.raises(UserInputError, match=r"rules= need a mesh"):
        load(small, rules=rules)
    with pytest.raises(UserInputError, match=r"no weight has a name like 'nothing'"):
        load(small, mesh=make_mesh(model=2), rules={"nothing": None})


def test_compiled_for_a_mesh_while_it_is_read(small):
    ids = jax.ShapeDtypeStruct(IDS.shape, np.int32)
    mesh = make_mesh(model=2)
    model, _, program = load(small, mesh=mesh, compile=[ids])
    want = jax.jit(lambda m: m(IDS).last_hidden_state)(model)
    np.testing.assert_allclose(program(IDS).last_hidden_state, want, atol=1e-5)


def test_onto_something_else(small):
    with pytest.raises(TypeError, match="or a DeviceRef, not object"):
        load(small, mesh=object())
