"""Saves disturbed by a process that is forked, or by the deletion of their directory; steps opened again."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import tensorstore

from maxjax import checkpoint
from maxjax.checkpoint.orbax import save as writing
from maxjax.errors import CheckpointSaveError
from maxjax.graph.weights import load_weights

FORKS = """
import multiprocessing, os, sys, warnings
import jax, maxjax
from maxjax import checkpoint, nn

if __name__ == "__main__":
    model = maxjax.init(nn.Linear(1000, 1000, "float32"), jax.random.key(0))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    response = checkpoint.save_async(sys.argv[1], model)
    worker = context.Process(target=queue.get)
    worker.start()
    response.result()
    checkpoint.save(sys.argv[1], model)
    queue.put("go on")
    worker.join(60)
    print(sorted(os.listdir(sys.argv[1])), worker.exitcode)
"""


def test_a_worker_that_is_forked_during_a_save_holds_nothing_and_ends(tmp_path):
    script = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['0', '1'] 0"], done.stderr


DELETES = """
import glob, os, shutil, sys, threading, time
import numpy as np
from maxjax import checkpoint
from maxjax.checkpoint.orbax import save
from maxjax.errors import CheckpointSaveError
from maxjax.graph.weights import load_weights

root, commit = sys.argv[1], save.commit
written, deleted = threading.Event(), threading.Event()

def commit_after_the_deletion(*args):
    written.set()
    deleted.wait()
    return commit(*args)

arrays = {f"a{i}": np.ones((500, 500), np.float32) for i in range(40)}
for seconds in (None, 0, 0, 0, 0.003, 0.006, 0.01, 0.02, 0.04):
    checkpoint.save(root, None, tree={"a": np.ones(1)}, step=1)
    save.commit = commit_after_the_deletion
    response = checkpoint.save_async(root, None, tree=arrays)
    while not (glob.glob(f"{root}/.maxjax-*/2*") or response.done()):
        time.sleep(0.0001)
    written.wait() if seconds is None else time.sleep(seconds)
    shutil.rmtree(f"{root}/1")  # first, so that no error calls it intact
    shutil.rmtree(root, ignore_errors=True)
    deleted.set()
    try:
        path = response.result()
        with load_weights(path) as weights:
            print("complete", all(np.all(weights[name].data().data == 1) for name in arrays))
    except CheckpointSaveError as error:
        print(error)
    save.commit = commit
    written.clear(), deleted.clear()
    shutil.rmtree(root, ignore_errors=True)
"""


def test_a_save_whose_directory_is_deleted_is_complete_or_says_so_once(tmp_path):
    """It is deleted when all is written, and at moments before; tensorstore makes what is missing again."""
    script = [sys.executable, "-c", DELETES, str(tmp_path / "run")]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Event loop" not in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 9 and "is there no longer" in lines[0]
    assert all("is there no longer" in one or one == "complete True" for one in lines), done.stdout
    assert "intact" not in done.stdout


def test_a_file_deleted_before_the_commit_is_missed_unless_nothing_needs_it(tmp_path, monkeypatch):
    """One file of the step at a time; and each is cut off."""
    commit, failed = writing.commit, set()
    tree = {"a": jax.numpy.arange(600_000.0), "b": np.arange(3), "c": {"d": 1.5}}

    def spoiled(nth, cut):
        def spoil(target, *args):
            files = [path for path in Path(target.written).rglob("*") if path.is_file()]
            # The small files of values are others in every save; the large one and all others have their places.
            files.sort(key=lambda path: (path.parent, -path.stat().st_size, path.name))
            spoilt.append(len(files))
            with contextlib.suppress(IndexError):
                spoilt.append(files[nth].name)
                os.truncate(files[nth], files[nth].stat().st_size // 2) if cut else files[
                    nth
                ].unlink()
            return commit(target, *args)

        return spoil

    for cut in (False, True):
        nth, spoilt = 0, [1]
        while nth < spoilt[0]:
            spoilt = []
            monkeypatch.setattr(writing, "commit", spoiled(nth, cut))
            root = tmp_path / f"{nth}-{cut}"
            try:
                checkpoint.save(root, None, tree=tree)
            except CheckpointSaveError as error:
                assert "is there no longer" in str(error) and not (root / "0").exists()
                failed.add((spoilt[1], cut))
            else:
                found = checkpoint.restore(root, None, tree=tree)["tree"]
                assert jax.tree.all(jax.tree.map(np.array_equal, found, tree))
            nth += 1
    needed = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}
    assert {(name, cut) for name in needed for cut in (False, True)} <= failed
    assert len(failed) >= 2 * len(needed) + 4  # the values and the tree of keys


def test_opening_a_step_again_keeps_no_more_memory(tmp_path, monkeypatch):
    """tensorstore does not free what it dumps of a database, so each database is dumped once."""
    dumped, dump = [], tensorstore.ocdbt.dump
    monkeypatch.setattr(
        tensorstore.ocdbt, "dump", lambda *args, **kw: dumped.append(args) or dump(*args, **kw)
    )
    for step in (1, 2):
        checkpoint.save(tmp_path, None, tree={"a": np.full(3, step, np.float32)}, step=step)
        counts = []
        for _ in range(3):
            dumped.clear()
            with load_weights(tmp_path) as weights:
                assert weights["a"].data().data[0] == step
            counts.append(len(dumped))
        assert counts[0] > 0 and counts[1:] == [0, 0]
