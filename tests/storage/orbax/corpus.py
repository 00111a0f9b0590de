"""Checkpoints as orbax writes them, of every kind it has; small, and the same each time."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# Types that both orbax (with zarr 3) and maxjax have.
DTYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz, ml_dtypes.int4,
]  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Orbax warns of itself; and keeps loops and threads that die with warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sharded() -> np.ndarray:
    """What `tree` has as "sh": saved in eight pieces."""
    return np.arange(32 * 24, dtype=np.float32).reshape(32, 24)


def tree() -> dict[str, Any]:
    """Arrays of several types, in several pieces, below keys of every kind; empty containers."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, PartitionSpec("a", "b"))
    put = jax.numpy.asarray
    return {
        "a": put(np.arange(12, dtype=np.int16).reshape(3, 4)),
        "n": {"b": put(np.full(5, 1.5, ml_dtypes.bfloat16)), "c.d": put(np.array([True, False]))},
        "l": [put(np.arange(4, dtype=np.int8)), {"x": put(np.ones(3, ml_dtypes.float8_e4m3fn))}],
        "t": (put(np.int32(5)),),
        "sh": jax.device_put(sharded(), spread),
        "np": np.arange(6, dtype=np.float64).reshape(2, 3),
        "i": 7,
        "f": 2.5,
        "empty": {},
        "none": None,
        "no list": [],
    }


# The same by the names of the tensors.
def tensors() -> dict[str, np.ndarray]:
    return {
        "a": np.arange(12, dtype=np.int16).reshape(3, 4),
        "n.b": np.full(5, 1.5, ml_dtypes.bfloat16),
        "n.c.d": np.array([True, False]),
        "l.0": np.arange(4, dtype=np.int8),
        "l.1.x": np.ones(3, ml_dtypes.float8_e4m3fn),
        "t.0": np.array(5, np.int32),
        "sh": sharded(),
        "np": np.arange(6, dtype=np.float64).reshape(2, 3),
        "i": np.array(7, np.int64),
        "f": np.array(2.5, np.float64),
    }


def _pytree(**options: Any) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        import orbax.checkpoint as ocp

        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(path, {**tree(), "text": "hello"})

    return save


def _standard(path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree())


def _manager(path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path) as manager:
        for step in (3, 20):
            manager.save(step, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()


def _composite(path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path, item_names=("model", "opt_state", "notes")) as manager:
        items = {
            "model": ocp.args.StandardSave(tree()),
            "opt_state": ocp.args.StandardSave({"mu": np.zeros(3, np.float32)}),
            "notes": ocp.args.JsonSave({"lr": 1}),
        }
        manager.save(7, args=ocp.args.Composite(**items), custom_metadata={"who": "me", "n": [1]})
        manager.wait_until_finished()


def v1() -> Any:
    """The newer interface, wherever this version of orbax has it."""
    import orbax.checkpoint as ocp

    if hasattr(ocp, "v1"):
        return ocp.v1
    from orbax.checkpoint.experimental import v1 as found

    return found


def _save(path: Path) -> None:
    v1().save(path, tree(), custom_metadata={"who": "me", "n": [1]})


def _checkpointables(path: Path) -> None:
    v1().save_checkpointables(path, {"model": tree(), "opt_state": {"mu": np.zeros(3, np.float32)}})


def _training(path: Path) -> None:
    checkpointer = v1().training.Checkpointer(path)
    checkpointer.save(5, {"old": np.zeros(2, np.float32)})
    checkpointer.save(6, tree())
    checkpointer.close()


KINDS: dict[str, Callable[[Path], None]] = {
    "pytree": _pytree(),
    "zarr3": _pytree(use_zarr3=True),
    "files": _pytree(use_ocdbt=False),
    "files_zarr3": _pytree(use_ocdbt=False, use_zarr3=True),
    "plain": _pytree(use_compression=False),
    "plain_zarr3": _pytree(use_compression=False, use_zarr3=True),
    "standard": _standard,
    "manager": _manager,
    "composite": _composite,
    "v1_save": _save,
    "v1_checkpointables": _checkpointables,
    "v1_training": _training,
}
"""Every way in which orbax writes a tree."""


def build(kind: str, path: Path) -> Path:
    """Writes the checkpoint of a kind; gives its path."""
    with quiet():
        KINDS[kind](path)
    return path


def save(path: Path, pytree: Any, **options: Any) -> Path:
    """Writes any pytree by the newer interface."""
    with quiet():
        v1().save(path, pytree, **options)
    return path


def copied(source: Path, target: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(source, target)
    return target


def files(path: Path) -> list[Path]:
    """All files of a checkpoint."""
    return sorted(Path(folder) / name for folder, _, names in os.walk(path) for name in names)


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Puts what a function makes of a JSON file back into it."""
    value = json.loads(path.read_text())
    changed = change(value)
    path.write_text(json.dumps(value if changed is None else changed))
