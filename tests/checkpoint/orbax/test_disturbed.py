"""Saves disturbed by a process that is forked, or by the deletion of their directory; steps opened again."""

import subprocess
import sys

import numpy as np
import tensorstore

from maxjax import checkpoint
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
import os, shutil, sys, time
import numpy as np
from maxjax import checkpoint
from maxjax.errors import CheckpointSaveError

arrays = {f"a{i}": np.ones((500, 500), np.float32) for i in range(40)}
for milliseconds in (0, 0, 0, 10, 20, 40):
    checkpoint.save(sys.argv[1], None, tree={"a": np.ones(1)}, step=1)
    response = checkpoint.save_async(sys.argv[1], None, tree=arrays)
    while not response.done() and os.listdir(sys.argv[1]) == ["1"]:
        pass
    time.sleep(milliseconds / 1000)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    try:
        response.result()
    except CheckpointSaveError as error:
        print(error)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def test_a_save_whose_directory_is_deleted_says_so_once(tmp_path):
    script = [sys.executable, "-c", DELETES, str(tmp_path / "run")]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout
    assert "Traceback" not in done.stderr and "Event loop" not in done.stderr
    assert any("is there no longer" in line for line in done.stdout.splitlines())
    assert not any("intact" in line for line in done.stdout.splitlines())


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
