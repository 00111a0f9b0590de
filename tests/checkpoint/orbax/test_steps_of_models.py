"""A step of orbax is a whole model: configuration and tokenizer lie in it, whoever opens it."""

import logging
import os
from pathlib import Path

import jax.numpy as jnp
import pytest

import maxjax
from maxjax.checkpoint import CheckpointManager, convert, save, save_async
from maxjax.errors import CheckpointMissingError, UserInputError
from maxjax.storage.open import orbax_checkpoint

TEXT = "12 + 34 = "


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny")


def assert_whole(path: Path | str, tiny) -> None:
    """What `load` gives and what `build` gives are the model and the tokenizer of before."""
    model, tokenizer = tiny
    found, text = maxjax.load(path)
    assert text is not None and text.encode(TEXT) == tokenizer.encode(TEXT)
    assert text.chat_template == tokenizer.chat_template
    with maxjax.load_weights(path) as weights:
        built = maxjax.build(weights)
        built.load_state_dict(weights)
    for name, value in model.state_dict().items():
        assert jnp.array_equal(found.state_dict()[name], value)
        assert jnp.array_equal(built.state_dict()[name], value)
    assert maxjax.plan(path).total_bytes == maxjax.plan(model).total_bytes


@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "7", "7/model"])
def test_a_saved_step(tmp_path, tiny, place):
    model, tokenizer = tiny
    save(tmp_path, model, step=7, tokenizer=tokenizer)
    assert_whole(tmp_path / place, tiny)


@pytest.mark.slow
def test_the_other_ways_to_save(tmp_path, tiny):
    model, tokenizer = tiny
    save_async(tmp_path / "async", model, tokenizer=tokenizer).result()
    with CheckpointManager(tmp_path / "manager") as manager:
        manager.save(1, model, tokenizer=tokenizer)
        manager.save_async(2, model, tokenizer=tokenizer)
    directory = maxjax.save_pretrained(model, tmp_path / "hf", tokenizer=tokenizer)
    convert(directory, tmp_path / "converted", to="orbax")
    back = convert(tmp_path / "converted", tmp_path / "back.safetensors").path
    for path in ("async", "manager/1", "manager/2", "converted", "converted/0"):
        assert (tmp_path / path).is_dir()
        assert maxjax.load_tokenizer(Path(orbax_checkpoint(tmp_path / path))) is not None
    assert_whole(tmp_path / "converted", tiny)
    assert back.is_file()
    names = set(os.listdir(tmp_path / "converted" / "0"))
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names


@pytest.mark.slow
def test_a_step_keeps_its_files_on_the_way_to_another_format(tmp_path, tiny):
    model, tokenizer = tiny
    save(tmp_path / "run", model, tokenizer=tokenizer)
    for place in ("run", "run/0", "run/0/model"):
        convert(tmp_path / place, tmp_path / "hf" / place)
        assert_whole(tmp_path / "hf" / place, tiny)


def test_without_a_tokenizer_there_is_none(tmp_path, tiny):
    save(tmp_path, tiny[0])
    assert maxjax.load(tmp_path)[1] is None


def test_what_is_no_tokenizer(tmp_path, tiny):
    with pytest.raises(UserInputError, match="tokenizer is a dict"):
        save(tmp_path, tiny[0], tokenizer={"a": jnp.ones(2)})
    assert not os.listdir(tmp_path)


def test_a_directory_opens_as_the_same_thing_everywhere(tmp_path, tiny, caplog):
    """Of a safetensors checkpoint with steps beside it `load` and `load_weights` take the same."""
    model, tokenizer = tiny
    maxjax.save_pretrained(model, tmp_path, tokenizer=tokenizer)
    save(tmp_path, model, step=3)
    with caplog.at_level(logging.INFO, "maxjax"):
        assert maxjax.load_weights(tmp_path)._format() == "safetensors"
    assert orbax_checkpoint(tmp_path) is None
    assert maxjax.load(tmp_path)[1] is not None


def test_a_step_without_a_configuration(tmp_path):
    save(tmp_path, None, x=jnp.ones(2))
    with pytest.raises(CheckpointMissingError, match=r"config\.json") as caught:
        maxjax.build(maxjax.load_weights(tmp_path))
    assert str(tmp_path / "0") in str(caught.value)
