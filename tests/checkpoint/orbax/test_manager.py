"""CheckpointManager: which steps stay, and that errors come out."""

import errno

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.checkpoint.orbax import save as saving
from maxjax.checkpoint.orbax.checkpoint import CheckpointManager, restore
from maxjax.errors import (
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointSaveError,
    UserInputError,
)
from tests.storage.orbax.corpus import quiet

from .worker import Net, filled, values


def test_steps_that_stay(tmp_path):
    with CheckpointManager(tmp_path / "run", max_to_keep=2, keep_every=4) as manager:
        assert (manager.latest_step(), manager.all_steps()) == (None, [])
        seen = []
        for step in range(1, 10):
            (manager.save if step % 2 else manager.save_async)(step, None, x=jnp.full(2, step))
            manager.wait_until_finished()
            seen.append(manager.all_steps())
        assert seen[-4:] == [[4, 5, 6], [4, 6, 7], [4, 7, 8], [4, 8, 9]]
        assert manager.latest_step() == 9
        assert manager.restore(None, 4, x=np.zeros(2, np.int32))["x"].tolist() == [4, 4]


def test_all_steps_stay_unless_told(tmp_path):
    manager = CheckpointManager(tmp_path)
    for _ in range(3):
        manager.save(None, None, x=jnp.ones(2))
    assert manager.all_steps() == [0, 1, 2]
    manager.close()


def test_a_model(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_async(5, filled(Net()), note="five")
        model = Net(True)
        assert manager.restore(model, note="") == {"note": "five"}
    for name, value in values(model).items():
        assert np.array_equal(model.state_dict()[name], value)


@pytest.mark.parametrize("name", ["00000003", "run_3", "run_0003"])
def test_the_steps_of_a_run_that_orbax_named(tmp_path, name):
    manager = CheckpointManager(tmp_path)
    for made in [manager.save(step, None, x=jnp.full(2, step)) for step in (3, 12)]:
        made.rename(tmp_path / name.replace("3", made.name))
    assert (manager.all_steps(), manager.latest_step()) == ([3, 12], 12)
    assert manager.restore(None, 3, x=np.zeros(2, np.int32))["x"].tolist() == [3, 3]
    with pytest.raises(CheckpointMissingError, match=r"no such step \(expected 4, found 3, 12\)"):
        manager.restore(None, 4)
    with pytest.raises(CheckpointSaveError, match="the step exists already|steps with other names"):
        manager.save(3, None, x=jnp.ones(2))


def test_text_and_random_keys_that_orbax_wrote(tmp_path):
    import orbax.checkpoint as ocp

    written = {"s": "txt", "n": [3, "x"], "k": jax.random.key(3, impl="rbg")}
    with quiet(), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1" / "tree", written)
    example = {"s": "", "n": [0, ""], "k": jax.random.key(0, impl="rbg")}
    found = restore(tmp_path, None, tree=example)["tree"]
    assert (found["s"], found["n"]) == ("txt", [3, "x"])
    assert jnp.array_equal(jax.random.key_data(found["k"]), jax.random.key_data(written["k"]))
    example["k"] = jax.random.key(0, impl="unsafe_rbg")
    with pytest.raises(CheckpointMismatchError, match="'k' is a random key of unsafe_rbg, .* rbg"):
        restore(tmp_path, None, tree=example)


@pytest.mark.parametrize("title", ["params", "default", "pytree", "state"])
def test_a_model_under_another_usual_name(tmp_path, title):
    model = filled(Net())
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, None, opt_state=jnp.ones(2), **{title: model})
        found = Net()
        manager.restore(found)
    for name, value in values(model).items():
        assert np.array_equal(found.state_dict()[name], value)


def test_a_model_under_a_name_of_its_own(tmp_path):
    model, found = filled(Net()), Net()
    with CheckpointManager(tmp_path) as manager:
        step = manager.save(5, None, left=model, right=jnp.ones(2))
        with pytest.raises(
            CheckpointMismatchError, match="no tree called 'model', only left, right"
        ):
            manager.restore(found)
    restore(step / "left", found)
    for name, value in values(model).items():
        assert np.array_equal(found.state_dict()[name], value)


def test_what_goes_wrong_comes_out_once(tmp_path, monkeypatch):
    def fail(self):
        raise OSError(errno.EIO, "no")

    manager = CheckpointManager(tmp_path)
    manager.save(1, None, x=jnp.ones(2))
    monkeypatch.setattr(saving.Writing, "wait", fail)
    manager.save_async(2, None, x=jnp.ones(2))
    with pytest.raises(CheckpointSaveError):
        manager.save_async(3, None, x=jnp.ones(2))
    manager.close()
    monkeypatch.undo()
    assert manager.save(3, None, x=jnp.ones(2)).name == "3"
    assert manager.all_steps() == [1, 3]


@pytest.mark.parametrize("number", [np.int64(40), np.uint8(40), jnp.int32(40)])
def test_numbers_of_numpy_and_jax_are_steps(tmp_path, number):
    with CheckpointManager(tmp_path, max_to_keep=number, keep_every=number) as manager:
        assert manager.save(number, None, x=jnp.ones(2)).name == "40"
        manager.save_async(number + 1, None, x=jnp.zeros(2))
        manager.wait_until_finished()
        assert manager.restore(None, number, x=np.zeros(2, np.float32))["x"].tolist() == [1, 1]
        assert manager.all_steps() == [40, 41]
        assert all(type(step) is int for step in manager.all_steps())


@pytest.mark.parametrize("step", [True, np.True_, -1, np.int64(-1), 1.0, "1", np.ones(1, np.int32)])
def test_what_is_no_number_of_a_step(tmp_path, step):
    manager = CheckpointManager(tmp_path)
    manager.save(1, None, x=jnp.ones(2))
    for act in (manager.save, manager.save_async):
        with pytest.raises(UserInputError, match=r"step is .*integer of at least 0"):
            act(step, None, x=jnp.ones(2))
    with pytest.raises(UserInputError, match=r"step is .*integer of at least 0"):
        manager.restore(None, step, x=jnp.ones(2))
    assert manager.all_steps() == [1]


@pytest.mark.parametrize("options", [{"max_to_keep": 0}, {"max_to_keep": True}, {"keep_every": 0}])
def test_wrong_arguments(tmp_path, options):
    with pytest.raises(UserInputError, match=f"{next(iter(options))} is"):
        CheckpointManager(tmp_path, **options)
