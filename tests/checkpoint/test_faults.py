"""A sample of the campaigns of scripts/kill_saves.py, fault_saves.py and reader_writer.py."""

import random
import shutil
import sys

import pytest

from scripts import fault_saves, kill_saves, reader_writer
from scripts.save_trials import Problem, Server, which_save

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cc") or shutil.which("gcc")),
    reason="needs Linux and a C compiler",
)


@pytest.fixture(scope="module")
def server():
    with Server() as found:
        yield found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["turns", "gguf", "orbax"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_ended_at_random(server, kind, how):
    trials = 1 if kind == "orbax" else 3
    row = kill_saves.at_random(server, kind, how, trials, random.Random(f"{kind} {how}"))
    assert row.trials == trials and not row.problems


@pytest.mark.parametrize("kind", ["turns", pytest.param("orbax", marks=pytest.mark.extra)])
def test_killed_at_calls(server, kind, monkeypatch):
    killed = kill_saves._killed_at
    monkeypatch.setattr(  # one in thirteen of the calls
        kill_saves, "_killed_at", lambda s, k, p, save, n: killed(s, k, p, save, 13 * n - 8)
    )
    row = kill_saves.at_each_call(server, kind, 30)
    assert 3 < row.trials < 30 and row.leftovers and not row.problems


FAULTS = [("ENOSPC", False), ("EIO", True), ("short", True)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["turns", "orbax"])
@pytest.mark.parametrize(("fault", "forever"), FAULTS)
def test_calls_that_fail(server, kind, fault, forever):
    row = fault_saves.campaign(server, kind, fault, forever=forever, calls=[2, 9, 19, 27])
    assert row.trials == 4 and not row.problems
    assert (row.raised, row.saved)[fault == "short"] >= 3


READS = 24  # 200 of each kind: ``scripts/reader_writer.py``


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["set", "gguf", "orbax", "file", "alone"])
def test_read_beside_a_writer(kind):
    row = reader_writer.campaign(kind, READS)
    assert row.which.total() >= READS and not row.problems
    assert len(row.which) == 2, "the writer was never seen to write"


@pytest.mark.extra
def test_what_is_wrong_is_seen(server, tmp_path, monkeypatch):
    """The campaigns would tell if a save did not keep its word."""
    path = tmp_path / "checkpoint"
    fault_saves._save(server, "set", str(path), 4)
    assert which_save("set", str(path)) == 4
    part = sorted(path.glob("model-*.safetensors"))[0]
    good = part.read_bytes()
    part.write_bytes(good[:-4] + b"\0\0\0\0")
    with pytest.raises(Problem, match="CheckpointCorruptError|mixed"):
        which_save("set", str(path))
    part.write_bytes(good[:-1])
    with pytest.raises(Problem, match="Checkpoint"):
        which_save("set", str(path))
    part.write_bytes(good)
    row = kill_saves.Row("set", "?")
    assert row.look(str(path), 5) == 5 and row.lost == 1
    (path / "config.json").write_text("{}")
    with pytest.raises(Problem, match="mixed: .*config"):
        which_save("set", str(path))
