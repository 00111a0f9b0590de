"""A checkpoint that another process replaces while it is opened: the old one or the new one, sound."""

import errno
import json
import logging
import os
import shutil

import numpy as np
import pytest

import maxjax
from maxjax import checkpoint, nn
from maxjax.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointMissingError,
    OutOfMemoryError,
)
from maxjax.graph import DeviceRef
from maxjax.storage import digests, open_checkpoint
from maxjax.storage import index_file as shards
from maxjax.storage import open as index
from maxjax.storage.orbax import reader as orbax
from maxjax.storage.save import beside

KINDS = ["file", "set", "file, then a set", "a set, then a file", "alone", "gguf", "orbax"]
WIDTH = 8


def model(k):
    """One all of whose values are k."""
    made = nn.Sequential([nn.Linear(WIDTH, WIDTH, "float32", DeviceRef.CPU()) for _ in range(4)])
    made.load_state_dict({f"{i}.weight": np.full((WIDTH,) * 2, k, np.float32) for i in range(4)})
    return made


def save(kind, directory, k):
    """Replaces what is there by the k-th model; gives what is to be opened."""
    if kind == "orbax":
        checkpoint.save(directory, model(k), keep=1)
        return directory
    if kind in ("alone", "gguf"):
        return converted(kind, directory, k)
    last = kind.rsplit(" ", 1)[-1] if k > 1 else kind.replace("a ", "").split(",")[0]
    return maxjax.save_pretrained(
        model(k), directory, max_shard_size=300 if last == "set" else "5GB"
    )


def converted(kind, directory, k):
    from scripts.save_trials import save_gguf

    if kind == "gguf":
        save_gguf(str(directory), k, model(k))
        return directory / "model.gguf"
    source = directory / "source"
    shutil.rmtree(source, ignore_errors=True)
    maxjax.save_pretrained(model(k), source)
    os.makedirs(directory, exist_ok=True)
    checkpoint.convert(source, directory / "w.safetensors", overwrite=True)
    return directory / "w.safetensors"


def value(path):
    with open_checkpoint(path, verify=True) as table:
        found = {float(v) for array in table.read_many().values() for v in np.unique(array)}
    assert len(found) == 1
    return found.pop()


def before(monkeypatch, module, name, act, times=1):
    """Acts just before each of the first calls of a function."""
    real, calls = getattr(module, name), [0]

    def function(*args, **kwargs):
        calls[0] += 1
        if calls[0] <= times:
            act(calls[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, function)
    return calls


# Where in the opening another process comes between, and of which kinds.
MOMENTS = {
    "its records": (digests, "read_digests", ["file", "set", *KINDS[2:6]]),
    "the list of names": (index, "choose", ["file", "set", *KINDS[2:4], "orbax"]),
    "the files of a set": (shards._Index, "open_all", ["set", "a set, then a file"]),
    "the metadata of orbax": (orbax, "read_maxjax_metadata", ["orbax"]),
    "the arrays of orbax": (orbax, "_describe", ["orbax"]),
    "the checksums of orbax": (orbax, "read_digests", ["orbax"]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("moment, kind", [(m, k) for m, (_, _, of) in MOMENTS.items() for k in of])
def test_replaced_while_it_is_opened(kind, moment, tmp_path, monkeypatch):
    path = save(kind, tmp_path, 1)
    acting = [False]

    def act(call):
        if not acting[0]:  # not in the save itself, which looks at what is there
            acting[0] = True
            save(kind, tmp_path, 1 + call)
            acting[0] = False

    with monkeypatch.context() as patch:
        calls = before(patch, *MOMENTS[moment][:2], act, times=1)
        found = value(path)
    assert calls[0] and found in (1, 2)
    assert value(path) == 2


@pytest.mark.parametrize("kind", ["file", "set", "orbax"])
def test_replaced_again_and_again(kind, tmp_path, monkeypatch):
    """It is given up after a while, and not called damaged."""
    path = save(kind, tmp_path, 1)
    moment = {"file": "its records", "set": "the files of a set", "orbax": "the arrays of orbax"}
    acting = [False]

    def act(call):
        if not acting[0]:
            acting[0] = True
            save(kind, tmp_path, 1 + call)
            acting[0] = False

    with monkeypatch.context() as patch:
        patch.setattr(index, "RETRY_SECONDS", 0.2)
        before(patch, *MOMENTS[moment[kind]][:2], act, times=10**9)
        with pytest.raises((CheckpointChangedError, CheckpointMissingError)) as caught:
            open_checkpoint(path)
    assert not isinstance(caught.value, CheckpointCorruptError)


def test_what_is_damaged_is_said_at_once(tmp_path, monkeypatch):
    path = save("file", tmp_path, 1) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"pt"', b'"tp"'))
    calls = before(monkeypatch, digests, "read_digests", lambda call: None)
    with pytest.raises(CheckpointCorruptError):
        open_checkpoint(path)
    assert calls[0] == 1


def test_a_step_that_is_deleted_while_it_is_read(tmp_path):
    save("orbax", tmp_path, 1)
    with maxjax.load_weights(tmp_path) as weights:
        save("orbax", tmp_path, 2)
        with pytest.raises(CheckpointChangedError, match="it was deleted. Open it again"):
            weights["0.weight"].data().data
    assert value(tmp_path) == 2


def test_several_files_without_an_index_have_their_description(tmp_path):
    """A set whose index was not put into place yet: the first save was ended just then."""
    config = {"architectures": ["Of no family"]}
    maxjax.save_pretrained(model(1), tmp_path, max_shard_size=300, config=config)
    (tmp_path / "model.safetensors.index.json").unlink()
    os.mkdir(tmp_path / ".maxjax-next-0")
    os.rename(tmp_path / "config.json", tmp_path / ".maxjax-next-0" / "config.json")
    with maxjax.load_weights(tmp_path) as weights, weights._beside.files() as folder:
        assert json.loads((folder / "config.json").read_text())["architectures"]
    assert not (tmp_path / "config.json").exists()
    checkpoint.repair(tmp_path)
    assert (tmp_path / "config.json").exists()


# --- verify=True where there is nothing to compare with ------------------------------------------


def test_without_checksums_it_is_told_once(tmp_path, caplog):
    path = save("file", tmp_path, 1)
    with caplog.at_level(logging.WARNING, "maxjax"):
        value(path)
        assert not caplog.records
        (tmp_path / "maxjax_digests.json").unlink()
        for _ in range(3):
            value(path)
        with open_checkpoint(path):
            pass
    (told,) = [one.getMessage() for one in caplog.records]
    assert str(tmp_path / "model.safetensors") in told and "no checksums of its tensors" in told


def test_some_without_checksums(tmp_path, caplog):
    path = save("file", tmp_path, 1)
    record = json.loads((tmp_path / "maxjax_digests.json").read_text())
    del record["files"]["model.safetensors"][0]["tensors"]["2.weight"]
    (tmp_path / "maxjax_digests.json").write_text(json.dumps(record))
    with caplog.at_level(logging.WARNING, "maxjax"):
        value(path)
    assert "no checksums of 1 of the 4 tensors" in caplog.text


def test_a_conversion_does_not_tell_of_it(tmp_path, caplog):
    np.savez(tmp_path / "w.npz", w=np.ones(3, np.float32))
    np.save(tmp_path / "v.npy", np.ones(3, np.float32))
    with caplog.at_level(logging.WARNING, "maxjax"):
        checkpoint.convert(tmp_path / "v.npy", tmp_path / "v.safetensors")
        assert value(tmp_path / "w.npz") == 1  # archives have their own
    assert not caplog.records


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["w.safetensors", "directory", "orbax"])
def test_memory_that_runs_out_in_a_conversion(to, tmp_path, monkeypatch):
    """The tensor is named, and what was at the destination stays."""
    source, target = save("file", tmp_path / "source", 1), tmp_path / to
    options = {"to": "orbax"} if to == "orbax" else {"overwrite": True}
    checkpoint.convert(source, target, **options)
    from maxjax.graph.weights import WeightData

    def astype(self, dtype):
        raise MemoryError

    monkeypatch.setattr(WeightData, "cast", astype)
    with pytest.raises(OutOfMemoryError, match="tensor '0.weight'.*is unchanged"):
        checkpoint.convert(source, target, dtype="bfloat16", **options)
    assert value(target) == 1
    assert errno.ENOMEM  # what the system would call it


def test_the_pause_is_short():
    """A reader that waits for a writer is no slower than the writer."""
    assert index._PAUSE < 0.1 < beside.RETRY_SECONDS < 10
