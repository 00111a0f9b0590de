"""Everything that only reads a checkpoint, as a function for each kind of directory, and as a program.

    python -m tests.checkpoint.reads KIND DIRECTORY ...

The program prints a line for each directory: the mean of a weight of what was read, or the error.
"""

import sys

import numpy as np

import maxjax
from maxjax import checkpoint
from maxjax.cli.application import main
from maxjax.errors import CheckpointError


def read_model(path):
    """Reads a directory of safetensors files in every way; the mean of a weight."""
    model, _ = maxjax.load(path, verify=True)
    maxjax.load_tokenizer(path)
    maxjax.plan(path)
    with maxjax.load_weights(path, verify=True) as weights:
        for _, one in weights.items():
            _ = one.data().data
    for command in ("inspect", "verify", "plan"):
        assert main([command, str(path)]) == 0
    return mean(model)


def read_steps(path):
    """Reads a directory of orbax steps; the mean of a weight of the newest one."""
    manager = checkpoint.CheckpointManager(path)
    assert manager.all_steps() and manager.latest_step() is not None and repr(manager)
    model, _ = maxjax.load(path, verify=True)
    manager.restore(model)
    checkpoint.restore(path, model)
    for command in ("inspect", "verify"):
        assert main([command, str(path)]) == 0
    return mean(model)


def read_adapter(path):
    """Reads a directory with an adapter, of the model beside it; the mean of its update."""
    model, _ = maxjax.load(path / ".." / "base")
    return mean(maxjax.lora.load(model, path), "lora_A")


def mean(model, part="weight"):
    return float(np.mean([np.abs(w).mean() for n, w in model.state_dict().items() if part in n]))


READS = {"model": read_model, "steps": read_steps, "adapter": read_adapter}


if __name__ == "__main__":
    from pathlib import Path

    for kind, place in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        try:
            print("read:", kind, READS[kind](Path(place)))
        except CheckpointError as error:
            print("read:", kind, type(error).__name__)
