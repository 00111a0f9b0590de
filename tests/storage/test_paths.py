"""Paths as bytes: whatever takes a path takes them, in the encoding of the file system."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import maxjax
from maxjax.checkpoint import CheckpointManager, convert, restore, save
from maxjax.errors import CheckpointMissingError
from maxjax.graph.weights import GGUFWeights, SafetensorWeights
from maxjax.interop import nnx as interop
from maxjax.storage import open_checkpoint, open_regular

NAME = "mod\u00e8le.safetensors"


class Wrapped:
    """A path whose text is bytes."""

    def __init__(self, path: bytes):
        self.path = path

    def __fspath__(self) -> bytes:
        return self.path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    model, tokenizer = maxjax.load("tiny")
    path = tmp_path_factory.mktemp("tiny")
    maxjax.save_pretrained(model, os.fsencode(path), tokenizer=tokenizer)
    return path


@pytest.fixture
def file(tmp_path) -> bytes:
    path = tmp_path / NAME
    safetensors.numpy.save_file({"weight": np.ones((2, 3), np.float32)}, path)
    return os.fsencode(path)


OPENING: list[Callable] = [
    maxjax.load_weights, lambda path: maxjax.load_weights([path]), open_checkpoint, open_regular,
    lambda path: SafetensorWeights([path]), maxjax.plan,
]  # fmt: skip


@pytest.mark.parametrize("wrap", [bytes, Wrapped])
@pytest.mark.parametrize("number", range(len(OPENING)))
def test_a_file(file, number, wrap):
    assert OPENING[number](wrap(file)) is not None


def test_messages_are_text(tmp_path):
    path = os.fsencode(tmp_path / "no.safetensors")
    with pytest.raises(FileNotFoundError) as caught:
        maxjax.load_weights(path)
    assert caught.value.path == os.fsdecode(path) and "b'" not in str(caught.value)


def test_a_model(tiny, tmp_path):
    place = os.fsencode(tiny)
    assert maxjax.load(place)[1] is not None
    assert maxjax.load_tokenizer(place) is not None
    config = os.fsencode(tiny / "config.json")
    assert maxjax.build(maxjax.load_weights(place), config) is not None
    to = os.fsencode(tmp_path / "m.gguf")
    assert os.path.isfile(convert(place, to).path)
    assert GGUFWeights(to) and maxjax.load_weights([to])


def test_steps(tmp_path):
    root = os.fsencode(tmp_path / "run")
    save(root, None, x=jnp.ones(2))
    with CheckpointManager(root) as manager:
        manager.save(5, None, x=jnp.zeros(2))
    assert restore(root, None, x=jnp.ones(2))["x"].tolist() == [0, 0]
    assert maxjax.load_weights(root).x is not None


def test_other_files(tmp_path, file):
    path = os.fsencode(tmp_path / "f.mxp")
    model = maxjax.nn.LayerNorm(2, devices=[None], dtype="float32")
    maxjax.export(model, jax.ShapeDtypeStruct((1, 2), jnp.float32), path, platforms="cpu")
    assert "LayerNorm" in repr(maxjax.load_exported(path))
    linear = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
    interop.load(linear, file, rename={"weight": ("kernel", interop.T)})
    assert linear.kernel.shape == (3, 2)


@pytest.mark.parametrize("path", [5, None, 1.5])
def test_what_is_no_path(path):
    for take in (maxjax.load, maxjax.load_tokenizer, open_regular, lambda p: save(p, None, x=1)):
        with pytest.raises(TypeError, match="path|Path"):
            take(path)


def test_a_name_that_no_file_can_have(tmp_path, tiny):
    model = maxjax.init(maxjax.nn.Sequential([maxjax.nn.Linear(2, 2)]), jax.random.key(0))
    for write in (
        lambda path: maxjax.save_pretrained(model, path),
        lambda path: save(path, model),
        lambda path: convert(tiny, path),
        lambda path: convert(tiny, f"{path}.safetensors"),
    ):
        with pytest.raises(CheckpointMissingError, match="NUL"):
            write(f"{tmp_path}/a\0b")
    with pytest.raises(CheckpointMissingError):
        maxjax.lora.load(model, tmp_path / ("a" * 300))
