"""An index and its files: what the corpus does not say."""

import json
import logging
import os

import pytest

from maxjax.errors import CheckpointError, CheckpointUnsafeError
from maxjax.storage import Limits, open_checkpoint, open_index
from tests.storage.corpus import D16, A, file_bytes
from tests.storage.index_corpus import INDEX, S1, S2, mapped


def built(name, tmp_path):
    return next(case for case in INDEX if case.name == name).build(tmp_path)


def test_files_and_entries(tmp_path):
    path = built("ok_basic", tmp_path)
    with open_index(path) as table:
        assert [os.path.basename(file.path) for file in table.files] == [S1, S2]
        assert [(entry.name, entry.file) for entry in table.entries.values()] == [
            ("a", 0),
            ("b", 1),
        ]


def test_wrong_total_is_logged_only(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "maxjax"):
        open_index(built("ok_total_size_wrong", tmp_path)).close()
    assert ["total_size is 999 but the tensors have 32 bytes" in m for m in caplog.messages] == [
        True
    ]
    caplog.clear()
    (tmp_path / "right").mkdir()
    with caplog.at_level(logging.WARNING, "maxjax"):
        open_index(built("ok_basic", tmp_path / "right")).close()
    assert not caplog.messages


def test_unlisted_tensor_is_left_out_and_logged(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "maxjax"),
        open_index(built("tensor_unlisted", tmp_path)) as t,
    ):
        assert list(t.entries) == ["a", "b"]
    assert any(S2 in message and message.endswith("left out: d") for message in caplog.messages)


def test_relative_paths_and_the_working_directory(tmp_path, monkeypatch):
    path = built("ok_basic", tmp_path)
    monkeypatch.chdir(path.parent)
    assert open_index(path.name).read("b").tolist() == [10.0, 11.0, 12.0, 13.0]
    monkeypatch.chdir(tmp_path)
    assert open_index("model/model.safetensors.index.json").read("a").tolist() == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]


@pytest.mark.parametrize("target", ["..", "a/../../b.safetensors", "/b.safetensors", "~", "file:b",
                                    "\\\\host\\b.safetensors", "c:b.safetensors", "../b\n"])  # fmt: skip
def test_no_name_leads_outside(target, tmp_path):
    path = built("ok_basic", tmp_path)
    path.write_text(json.dumps(mapped(b=target)))
    with pytest.raises(CheckpointUnsafeError) as caught:
        open_index(path)
    assert caught.value.tensor == "b"


@pytest.mark.parametrize(
    "target", ["..b.safetensors", "b..safetensors", "a b.safetensors", "é.safetensors"]
)
def test_odd_but_plain_names_are_fine(target, tmp_path):
    path = built("ok_basic", tmp_path)
    path.write_text(json.dumps(mapped(b=target)))
    os.rename(path.parent / S2, path.parent / target)
    assert open_index(path).read("b").tolist() == [10.0, 11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    "target", ["a\n.safetensors", "./b.safetensors", "s//b.safetensors", "b.gguf", "b"]
)
def test_other_names_are_refused(target, tmp_path):
    path = built("ok_basic", tmp_path)
    path.write_text(json.dumps(mapped(b=target)))
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        open_index(path)


def test_refusal_by_name_opens_no_shard(tmp_path, monkeypatch):
    path = built("trav_dotdot", tmp_path)
    opened = []
    whole = os.open
    monkeypatch.setattr(
        os, "open", lambda name, *a, **k: opened.append(str(name)) or whole(name, *a, **k)
    )
    with pytest.raises(CheckpointUnsafeError):
        open_index(path)
    assert opened == [str(path)]


def test_limits_reach_the_shards(tmp_path):
    path = built("ok_basic", tmp_path)
    with pytest.raises(CheckpointError, match="header_bytes"):
        open_index(path, limits=Limits(header_bytes=20))
    with pytest.raises(CheckpointError, match="json_bytes"):
        open_checkpoint(path, limits=Limits(json_bytes=20))


def test_many_shards(tmp_path):
    names = {f"t{i}": f"part-{i}.safetensors" for i in range(50)}
    for name, file in names.items():
        (tmp_path / file).write_bytes(file_bytes({name: A}, D16))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with open_checkpoint(tmp_path) as table:
        arrays = table.read_many()
    assert list(arrays) == list(names)
    assert {array.tobytes() for array in arrays.values()} == {D16}
