"""A step of orbax is a whole model: configuration and tokenizer lie in it, whoever opens it."""

import enum
import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import maxjax
from maxjax import nn
from maxjax.checkpoint import CheckpointManager, convert, save, save_async
from maxjax.errors import (
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from maxjax.graph import DeviceRef
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
    states = [one.state_dict() for one in (found, built)]
    for name, value in model.state_dict().items():
        assert all(np.array_equal(state[name], value) for state in states), name
    assert maxjax.plan(path).total_bytes == maxjax.plan(model).total_bytes


def test_a_saved_step(tmp_path, tiny):
    model, tokenizer = tiny
    save(tmp_path, model, step=7, tokenizer=tokenizer)
    for place in ("", "7", "7/model"):
        assert_whole(tmp_path / place, tiny)


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
    with pytest.raises(TypeError, match="tokenizer is a dict"):
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


def check_round_trip(path, model, state):
    """Saves a state of this structure with random values, restores it, and compares."""
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 9, x.shape)).astype(x.dtype), state)
    maxjax.checkpoint.save(path, model, state=state)
    example = jax.tree.map(jnp.zeros_like, state)
    found = maxjax.checkpoint.restore(path, model, state=example)["state"]
    jax.tree.map(np.testing.assert_array_equal, found, state)


@pytest.mark.parametrize(
    "transform",
    [
        lambda: optax.scale_by_lbfgs(memory_size=5), optax.adafactor, lambda: optax.adamw(1e-3),
        lambda: optax.novograd(1e-3), lambda: optax.sgd(1e-3, momentum=0.9),
        lambda: optax.sm3(1e-3),
    ],
    ids=["lbfgs", "adafactor", "adamw", "novograd", "momentum", "sm3"],
)  # fmt: skip
def test_states_of_optimisers_whose_leaves_are_not_those_of_layers(tmp_path, transform):
    stack = nn.LayerStack([nn.Linear(4, 4, "float32", DeviceRef.CPU()) for _ in range(3)])
    model = maxjax.init(nn.Sequential([stack]), jax.random.key(0))
    state = transform().init(model)
    check_round_trip(tmp_path, model, state)


@pytest.mark.parametrize(
    "transform",
    [lambda: optax.adafactor(min_dim_size_to_factor=4), lambda: optax.novograd(1e-3)],
    ids=["adafactor", "novograd"],
)
def test_states_of_optimisers_with_other_shapes_on_a_mesh(tmp_path, transform):
    mesh = maxjax.make_mesh(fsdp=2)
    model = maxjax.init(nn.Sequential([nn.Linear(4, 8)]).to(mesh), jax.random.key(0))
    state = transform().init(model)
    state = jax.tree.map(lambda x: x + jnp.ones_like(x), state)
    maxjax.checkpoint.save(tmp_path, model, state=state)
    example = jax.eval_shape(transform().init, nn.Sequential([nn.Linear(4, 8)]).to(mesh))
    found = maxjax.checkpoint.restore(tmp_path, None, state=example)["state"]
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_states_of_optimisers_with_other_shapes_in_device_order(tmp_path):
    rope = nn.RotaryEmbedding(dim=16, n_heads=4, theta=10000.0, max_seq_len=64)
    layer = nn.AttentionWithRope(
        rope=rope, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, stacked_qkv=True
    ).to(maxjax.make_mesh(model=2))
    assert layer.qkv_proj.weight.spec.layout is not None
    model = maxjax.init(layer, jax.random.key(0))
    state = optax.adafactor(min_dim_size_to_factor=4).init(model)
    check_round_trip(tmp_path, model, state)


def test_random_keys_in_place_of_weights(tmp_path):
    layers = [nn.Linear(4, 4, "float32", DeviceRef.CPU()) for _ in range(2)]
    model = nn.Sequential([nn.LayerStack(layers), nn.Linear(4, 2, "float32", DeviceRef.CPU())])
    keys, example = (
        jax.tree.unflatten(jax.tree.structure(model), list(jax.random.split(jax.random.key(i))))
        for i in range(2)
    )
    maxjax.checkpoint.save(tmp_path, None, keys=keys)
    found = maxjax.checkpoint.restore(tmp_path, None, keys=example)["keys"]
    data = [jax.tree.map(jax.random.key_data, one) for one in (found, keys)]
    jax.tree.map(np.testing.assert_array_equal, *data)


def test_shardings_that_do_not_divide_leaves_are_told(tmp_path):
    state = {"a": jnp.ones(3), "keys": jax.random.split(jax.random.key(0), 3)}
    maxjax.checkpoint.save(tmp_path, None, state=state)
    where = jax.NamedSharding(maxjax.make_mesh(data=2), jax.P("data"))
    example = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        for name, leaf in state.items()
    }
    with pytest.raises(CheckpointMismatchError, match=r"'a' of shape \[3\] cannot .*'keys' of"):
        maxjax.checkpoint.restore(tmp_path, None, state=example)


def test_integers_that_do_not_fit_are_told(tmp_path):
    wide = np.array([2**40, -1])
    maxjax.checkpoint.save(tmp_path, None, data={"at": wide})
    example = {"at": np.zeros(2, np.int64)}
    np.testing.assert_array_equal(
        maxjax.checkpoint.restore(tmp_path, None, data=example)["data"]["at"], wide
    )
    for other in (
        jax.ShapeDtypeStruct((2,), np.int64),
        jnp.zeros(2, jnp.int32),
        np.zeros(2, np.uint8),
    ):
        with pytest.raises(CheckpointMismatchError, match="do not fit"):
            maxjax.checkpoint.restore(tmp_path, None, data={"at": other}, cast=True)


class Level(enum.IntEnum):
    LOW = 1


def test_leaves_of_subclasses_of_numbers_and_text_are_restored(tmp_path):
    class Text(str):
        def __str__(self):
            return "another"

    maxjax.checkpoint.save(
        tmp_path, None, data={"text": Text("four"), "level": Level.LOW, "x": np.ones(2)}
    )
    example = {"text": Text(""), "level": Level.LOW, "x": np.zeros(2)}
    found = maxjax.checkpoint.restore(tmp_path, None, data=example)["data"]
    assert (found["text"], found["level"], type(found["text"])) == ("four", 1, str)


def test_a_module_with_a_pooling_of_its_own_is_saved(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pooling, self.fc = "mean", nn.Linear(2, 2)

        def __call__(self, x):
            return self.fc(x)

    model = maxjax.init(Net(), jax.random.key(0))
    maxjax.checkpoint.save(tmp_path / "run", model)
    maxjax.save_pretrained(model, tmp_path / "hf")


def test_an_interrupted_wait_does_not_lose_the_error(tmp_path):
    class Response:
        over = False

        def result(self):
            if not self.over:
                raise KeyboardInterrupt
            raise CheckpointSaveError("the disk is full")

        def done(self):
            return self.over

    manager = CheckpointManager(tmp_path)
    manager._response = response = Response()
    with pytest.raises(KeyboardInterrupt):
        manager.wait_until_finished()
    response.over = True
    with pytest.raises(CheckpointSaveError, match="disk is full"):
        manager.wait_until_finished()
    manager.wait_until_finished()


def test_steps_that_orbax_named_are_continued(tmp_path):
    model = lambda seed: maxjax.init(nn.Linear(2, 2), jax.random.key(seed))
    save(tmp_path, model(0), step=500)
    (tmp_path / "500").rename(tmp_path / "00000500")
    save(tmp_path, model(1))
    assert (tmp_path / "501").is_dir()
    found = model(2)
    maxjax.checkpoint.restore(tmp_path, found)
    np.testing.assert_array_equal(found.weight.value, model(1).weight.value)
    # A tree of another name beside the steps is not taken for them.
    save(tmp_path / "other", model(3), step=0)
    (tmp_path / "other" / "0" / "model").rename(tmp_path / "init")
    found = model(2)
    maxjax.checkpoint.restore(tmp_path, found)
    np.testing.assert_array_equal(found.weight.value, model(1).weight.value)


def test_steps_with_prefixes_are_not_mixed(tmp_path):
    model = maxjax.init(nn.Linear(2, 2), jax.random.key(0))
    save(tmp_path, model, step=5)
    (tmp_path / "5").rename(tmp_path / "step_5")
    with pytest.raises(CheckpointSaveError, match="steps with other names: step_5"):
        save(tmp_path, model)
