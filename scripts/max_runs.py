"""Runs MAX's own model files on maxjax, and compares their numbers: `python scripts/max_files.py --max SITE --numbers`.

Each recipe of ``max_recipes`` is built twice from the same file: by MAX, whose graph ``max_oracle.py`` computes with
NumPy, and by maxjax with ``max`` changed to ``maxjax`` in the imports, as a compiled Graph. Both get the same
weights, by name, and the same inputs. The results of MAX are stored in a file if one is named.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from scripts.max_import import MaxFiles
from scripts.max_recipes import RECIPES, typed, weight_value

TOLERANCE = 1e-5


class Outcome(NamedTuple):
    """The outcome of one run.

    Attributes:
        name: the file, and what of it is run.
        difference: largest difference, divided by MAX's largest number if that is above 1; None if it did not run.
        error: why it did not run, or why the two cannot be compared.
    """

    name: str
    difference: float | None
    error: str | None


def asked(site: Path, names: list[str], kept: Path | None = None) -> dict[str, Any]:
    """The results of MAX: name of a run → its arrays, or the text of its error.

    Args:
        site: the site-packages that MAX is installed in.
        names: names of the runs.
        kept: file to read results from and to store new ones in.
    """
    found: dict[str, Any] = {}
    if kept is not None and kept.exists():
        found = _answers(kept)
    missing = [name for name in names if not isinstance(found.get(name), list)]
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "answers.npz"
            oracle = Path(__file__).with_name("max_oracle.py")
            subprocess.run([sys.executable, str(oracle), str(site), str(out), *missing], check=True,
                           env=os.environ | {"JAX_PLATFORMS": "cpu"})  # fmt: skip
            found |= _answers(out)
        if kept is not None:
            arrays = {f"{name}|{i}": one for name, all_ in found.items() if isinstance(all_, list)
                      for i, one in enumerate(all_)}  # fmt: skip
            np.savez(kept, **arrays)
    return {name: found[name] for name in names}


def _answers(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = defaultdict(list)
    with np.load(file) as arrays:
        for key in arrays.files:
            name, _, part = key.rpartition("|")
            if part == "error":
                found[name] = str(arrays[key])
            else:
                found[name].append(arrays[key])
    return dict(found)


def run(name: str) -> list[np.ndarray]:
    """The results of a recipe on maxjax."""
    from maxjax.driver import CPU
    from maxjax.engine import InferenceSession
    from maxjax.graph import Graph

    def of(path: str) -> Any:
        return importlib.import_module(f"maxjax.{path}")

    module, inputs = RECIPES[name](of)
    arrays, types = typed(inputs, of)
    layer = getattr(module, "layer", module)
    if hasattr(layer, "load_state_dict"):
        weights = {key: _held(key, one)
                   for key, one in layer.raw_state_dict().items()}  # fmt: skip
        layer.load_state_dict(weights, weight_alignment=1)
    with Graph("run", input_types=types) as graph:
        out = module(*(value.tensor for value in graph.inputs))
        graph.output(*(out if isinstance(out, list | tuple) else (out,)))
    model = InferenceSession(devices=[CPU()]).load(graph)
    return [np.asarray(one.to_numpy()) for one in model.execute(*arrays)]


def _held(name: str, weight: Any) -> Any:
    """The value of a weight, in its dtype."""
    value = weight_value(name, weight.shape, weight.dtype.name)
    return value.astype(ml_dtypes.bfloat16) if weight.dtype.name == "bfloat16" else value


def compared(name: str, expected: Any) -> Outcome:
    """The outcome of one run."""
    if isinstance(expected, str):
        return Outcome(name, None, f"MAX: {_last(expected)}")
    try:
        found = run(name)
    except Exception as error:
        if os.environ.get("MAX_RUNS_TRACE"):
            traceback.print_exc()
        return Outcome(
            name, None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
        )
    shapes = [one.shape for one in found], [one.shape for one in expected]
    if shapes[0] != shapes[1]:
        return Outcome(name, None, f"shapes {shapes[0]}, of MAX {shapes[1]}")
    if not all(np.isfinite(one).all() for one in expected if one.dtype.kind == "f"):
        return Outcome(name, None, "MAX's numbers are not finite")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.size:
            one, other = one.astype(np.float64), other.astype(np.float64)
            worst = max(worst, float(np.abs(one - other).max() / max(1.0, np.abs(other).max())))
    return Outcome(name, worst, None)


def _last(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or [""])[-1].strip()[:200]


def outcomes(site: Path, names: list[str], kept: Path | None = None) -> Iterator[Outcome]:
    """The outcomes of runs, one by one; maxjax imports MAX's files in this process."""
    expected = asked(site, names, kept)
    sys.meta_path.insert(0, MaxFiles(site / "max"))
    sys.path.append(str(site))
    for name in names:
        yield compared(name, expected[name])


def numbers(site: Path, only: str = "", kept: Path | None = None) -> int:
    """Prints a line for each run, and how many of MAX's files compute the same numbers on maxjax.

    Args:
        site: the site-packages that MAX is installed in.
        only: part of the names of the runs to make.
        kept: file that stores MAX's results.

    Returns:
        The number of files all of whose runs are equal.
    """
    good: dict[str, bool] = {}
    for one in outcomes(site, [name for name in RECIPES if only in name], kept):
        file, _, what = one.name.partition(" ")
        equal = one.difference is not None and one.difference <= TOLERANCE
        good[file] = good.get(file, True) and equal
        shown = f"{one.difference:.1e}" if one.difference is not None else one.error
        print(f"{'equal' if equal else 'NOT  '}  {file} {what}  {shown}".rstrip(), flush=True)
    count = sum(good.values())
    print(
        f"\n{count} of {len(good)} files run unchanged (imports apart) with MAX's numbers within {TOLERANCE:g}"
    )
    return count


if __name__ == "__main__":  # a debugging aid: SITE [PART OF A NAME] [FILE OF ANSWERS]
    numbers(Path(sys.argv[1]), *sys.argv[2:3], *map(Path, sys.argv[3:4]))
