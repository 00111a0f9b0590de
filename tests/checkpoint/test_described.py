"""Weights and what describes them: of one save, whatever happens to a save, and whoever reads."""

import contextlib
import json
import logging
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import maxjax
from maxjax import checkpoint
from maxjax.checkpoint import file_set as writing
from maxjax.errors import (
    CheckpointBusyError,
    CheckpointChangedError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from maxjax.models import build
from maxjax.storage.save import beside
from maxjax.storage.save.staging import Staging
from tests.storage.watch import snapshot

SOURCE = Path(__file__).parent / "fixtures" / "bin"
SINGLE, INDEX, DIGESTS = "model.safetensors", "model.safetensors.index.json", "maxjax_digests.json"
SIZES = {"file": ("5GB", "5GB"), "set": (1500, 1500), "one, then a set": ("5GB", 1500),
         "a set, then one": (1500, "5GB")}  # fmt: skip


class Killed(BaseException):
    """Nothing is tidied up after it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of equal shapes, all of whose values, configuration and tokenizer say 1, or 2."""
    return {k: made(tmp_path_factory.mktemp("source"), k) for k in (1, 2)}


def made(directory, k):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "pytorch_model.bin"):
        text = (SOURCE / name).read_bytes().replace(b'"w5"', b'"v%d"' % k)
        (directory / name).write_bytes(text.replace(b"1e-05", b"%de-05" % k))
    if k == 1:  # one that the other has not
        (directory / "chat_template.jinja").write_text("{{ 'first' }}")
    model, tokenizer = maxjax.load(directory)
    model.load_state_dict(
        {n: np.full(w.shape, k, np.float32) for n, w in model.state_dict().items()}
    )
    return model, tokenizer


def save(models, k, directory, size="5GB"):
    model, tokenizer = models[k]
    maxjax.save_pretrained(model, directory, tokenizer=tokenizer, max_shard_size=size)


def which(directory):
    """Which model is there: the same one by all that can be read."""
    model, tokenizer = maxjax.load(directory, verify=True)
    (value,) = {float(v) for w in model.state_dict().values() for v in np.unique(w)}
    said = round(model.hf_config["rms_norm_eps"] * 1e5), tokenizer.encode("v1 v2")
    assert said == (value, {1: [7, 1], 2: [1, 7]}[value])
    assert ("first" in str(tokenizer.chat_template)) == (value == 1)
    alone = maxjax.load_tokenizer(directory)
    assert alone.encode("v1 v2") == said[1] and alone.chat_template == tokenizer.chat_template
    with maxjax.load_weights(directory) as weights:
        assert round(build(weights).hf_config["rms_norm_eps"] * 1e5) == value
    return int(value)


def plain(directory):
    """What a program sees that knows of nothing but the names of files."""
    config = json.loads((directory / "config.json").read_text())
    return round(config["rms_norm_eps"] * 1e5), (directory / "chat_template.jinja").exists()


def waits(directory):
    return [name for name in os.listdir(directory) if name.startswith(".maxjax-next-")]


@contextlib.contextmanager
def killed(monkeypatch, at):
    """Inside, the ``at``-th renaming is the end of the process, which tidies up nothing."""
    real, count = os.rename, [0]

    def rename(start, end, **folders):
        count[0] += 1
        if count[0] == at:
            raise Killed
        real(start, end, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(Staging, "_undo", lambda self, undo: None)
        patch.setattr(Staging, "_clear", lambda self: None)
        patch.setattr(writing, "_end_interrupted", lambda staging: [])
        with contextlib.suppress(Killed):
            yield count


@contextlib.contextmanager
def deleted(monkeypatch, directory, at):
    """Inside, the directory is deleted before the ``at``-th file is written."""
    write, count, commit, commits = Staging.write, [0], Staging.commit, []

    def writing(self, *args, **options):
        count[0] += 1
        if count[0] == at:
            shutil.rmtree(directory)
        write(self, *args, **options)

    def committing(self, *args, **options):
        commit(self, *args, **options)
        commits.append(count[0])

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "write", writing)
        patch.setattr(Staging, "commit", committing)
        yield commits


@pytest.mark.parametrize("size", ["5GB", 1500])
@pytest.mark.parametrize("before", [False, True])
def test_a_directory_that_is_deleted_during_a_save(models, tmp_path, monkeypatch, size, before):
    """Before each file that is written: the save fails, though it need not write some again."""
    for at in range(1, 99):
        directory = tmp_path / str(at)
        if before:
            save(models, 1, directory, size)
        with deleted(monkeypatch, directory, at) as commits:
            try:
                save(models, 1, directory, size)
            except CheckpointSaveError as error:
                assert "is there no longer" in str(error) and not commits and not directory.exists()
                continue
        assert at > commits[0]  # only afterwards
        break
    assert at > 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", SIZES)
def test_killed_at_every_renaming(models, tmp_path, monkeypatch, sizes):
    before, after = SIZES[sizes]
    found = []
    for at in range(1, 99):
        directory = tmp_path / str(at)
        save(models, 1, directory, before)
        with killed(monkeypatch, at) as count:
            save(models, 2, directory, after)
        copy = tmp_path / "copy"
        shutil.copytree(directory, copy)
        before_reading = snapshot(copy)
        found.append(which(copy))
        assert snapshot(copy) == before_reading
        checkpoint.repair(copy)
        assert which(copy) == found[-1] and checkpoint.repair(copy) == []
        assert plain(copy) == (found[-1], found[-1] == 1)
        assert not [name for name in os.listdir(copy) if name.startswith(".")]
        shutil.rmtree(copy)
        save(models, 2, directory, before)
        with maxjax.load_weights(directory, verify=True) as weights:
            assert {float(v) for _, w in weights.items() for v in np.unique(w.data().data)} == {2}
        assert plain(directory) == (2, False)
        assert maxjax.load_tokenizer(directory).encode("v1 v2") == [1, 7]
        assert not [name for name in os.listdir(directory) if name.startswith(".")]
        if count[0] < at:
            break
    assert found == sorted(found) and found[0] == 1 and found[-1] == 2 and len(found) > 4


def interrupted(models, directory, monkeypatch, *, late):
    """Leaves what a kill leaves before (``late``: just after) the weights are renamed."""
    save(models, 1, directory)
    for at in range(1, 20):
        copy = directory.with_name(f"at {at}")
        shutil.copytree(directory, copy)
        with killed(monkeypatch, at):
            save(models, 2, copy)
        weights = (copy / SINGLE).read_bytes()
        if weights != (directory / SINGLE).read_bytes():
            shutil.rmtree(directory)
            os.rename(copy if late else directory.with_name(f"at {at - 1}"), directory)
            return
    raise AssertionError


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_save_is_read_where_it_lies_until_it_is_repaired(
    models, tmp_path, monkeypatch, caplog, late
):
    directory = tmp_path / "checkpoint"
    interrupted(models, directory, monkeypatch, late=late)
    before = snapshot(directory)
    with caplog.at_level(logging.WARNING, "maxjax"):
        assert which(directory) == which(directory) == 1 + late
    (told,) = [one.getMessage() for one in caplog.records]
    assert f"maxjax repair {directory}" in told
    assert snapshot(directory) == before and plain(directory) == (1, True)
    done = checkpoint.repair(directory)
    assert ("config.json" in done) == late
    assert which(directory) == 1 + late
    assert plain(directory) == (1 + late, not late) and not waits(directory)
    assert checkpoint.repair(directory) == []


def test_a_directory_that_is_being_written_to_is_not_repaired(models, tmp_path):
    save(models, 1, tmp_path)
    with Staging(tmp_path), pytest.raises(CheckpointBusyError, match="of this process"):
        checkpoint.repair(tmp_path)
    with pytest.raises(CheckpointMissingError, match="no such directory"):
        checkpoint.repair(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_what_is_converted_is_of_one_save(models, tmp_path, monkeypatch):
    interrupted(models, tmp_path / "checkpoint", monkeypatch, late=True)
    checkpoint.convert(tmp_path / "checkpoint", tmp_path / "converted", dtype="bfloat16")
    assert which(tmp_path / "converted") == 2


def test_a_save_of_the_same_weights(models, tmp_path, monkeypatch):
    """Then either configuration is right, but not a part of each."""
    model, tokenizer = models[1]
    for at in range(1, 99):
        directory = tmp_path / str(at)
        save(models, 1, directory)
        with killed(monkeypatch, at) as count:
            config = {**model.hf_config, "rms_norm_eps": 2e-5}
            maxjax.save_pretrained(model, directory, tokenizer=models[2][1], config=config)
        found, tokenizer = maxjax.load(directory)
        said = round(found.hf_config["rms_norm_eps"] * 1e5), tokenizer.encode("v1 v2")
        assert said in ((1, [7, 1]), (2, [1, 7])), at
        if count[0] < at:
            break
    assert at > 4 and said[0] == 2


def test_weights_of_another_program_are_not_held_against_the_new_sums(
    models, tmp_path, monkeypatch
):
    """They may have the same size and header, and then no record says what they are."""
    for at in range(1, 99):
        directory = tmp_path / str(at)
        save(models, 1, directory)
        (directory / DIGESTS).unlink()
        with killed(monkeypatch, at) as count:
            save(models, 2, directory)
        with maxjax.load_weights(directory, verify=True) as weights:
            (value,) = np.unique(weights.model.norm.weight.data().data)
            model = build(weights)
            model.load_state_dict(weights)
        assert round(model.hf_config["rms_norm_eps"] * 1e5) == value, at
        if count[0] < at:
            break
    assert at > 4 and value == 2


def test_a_configuration_changed_by_hand_is_told_of_once(models, tmp_path, caplog):
    save(models, 1, tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("1e-05", "0.25"))
    with caplog.at_level(logging.WARNING, "maxjax"):
        for _ in range(3):
            model, _ = maxjax.load(tmp_path)
            assert model.hf_config["rms_norm_eps"] == 0.25
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 1
    assert str(tmp_path / "config.json") in told[0] and "differs from" in told[0]
    (tmp_path / "chat_template.jinja").unlink()  # and what is taken away is gone
    assert "first" not in str(maxjax.load(tmp_path)[1].chat_template)


def test_a_file_that_was_added_by_hand_is_read(models, tmp_path):
    save(models, 1, tmp_path)
    save(models, 2, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'first' }}")
    assert "first" in maxjax.load(tmp_path)[1].chat_template


def test_without_a_tokenizer_that_of_before_stays(models, tmp_path):
    save(models, 1, tmp_path)
    maxjax.save_pretrained(models[2][0], tmp_path)
    assert maxjax.load_tokenizer(tmp_path).encode("v1 v2") == [7, 1]
    assert (tmp_path / "chat_template.jinja").exists()


@pytest.mark.parametrize("size", ["5GB", 1500])
def test_replaced_between_opening_and_building(models, tmp_path, size):
    save(models, 1, tmp_path, size)
    with maxjax.load_weights(tmp_path) as weights:
        save(models, 2, tmp_path, size)
        with pytest.raises(CheckpointChangedError, match="Open it again") as caught:
            build(weights)
        assert caught.value.replaced
        # what it holds open is still whole
        assert float(weights.model.norm.weight.data().data[0]) == 1
    assert which(tmp_path) == 2


@pytest.mark.parametrize("size", ["5GB", 1500])
def test_replaced_while_it_is_loaded(models, tmp_path, monkeypatch, size):
    save(models, 1, tmp_path, size)
    real, times = beside.Beside.path, [0]

    def in_order(self, name):
        times[0] += 1
        found = real(self, name)
        if times[0] == 1:
            save(models, 2, tmp_path, size)
        return found

    monkeypatch.setattr(beside.Beside, "path", in_order)
    assert which(tmp_path) == 2
    assert times[0] > 1


def test_a_record_leads_to_no_other_directory(models, tmp_path):
    save(models, 1, tmp_path)
    record = json.loads((tmp_path / DIGESTS).read_text())
    for name in ("/etc/passwd", "../config.json", "a/../../b", "", "a\\b", ".maxjax-next-1/x"):
        record["files"][SINGLE][0]["beside"] = {name: "00000000"}
        (tmp_path / DIGESTS).write_text(json.dumps(record))
        with pytest.raises(maxjax.errors.CheckpointFormatError, match=re.escape(DIGESTS)):
            maxjax.load(tmp_path)
