"""Results of scenarios: as plain JSON data, expected, and compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
# MAX computes some float32 products at lower precision.
ATOL, RTOL = 2e-3, 1e-3


def recorded() -> dict[str, dict]:
    """Scenario -> what MAX 26.7 gave."""
    return json.loads((HERE / "expected_max.json").read_text())["scenarios"]


def mended() -> dict[str, dict]:
    """Scenario marked `quirk` -> what maxjax gives instead."""
    return json.loads((HERE / "expected_maxjax.json").read_text())["scenarios"]


def plain(x: Any) -> Any:
    """A JSON-serialisable copy; NaN and infinities become text so that the JSON stays strict."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    if isinstance(x, bool | str) or x is None:
        return x
    if isinstance(x, int | np.integer):
        return int(x)
    if isinstance(x, float | np.floating):
        return float(x) if math.isfinite(x) else str(float(x))
    if isinstance(x, np.ndarray):
        return plain(x.tolist())
    return f"<{type(x).__name__}>"


def differences(want: Any, got: Any, path: str = "") -> list[str]:
    """One line for each place where `got` differs; keys that start with "_" are not compared."""
    if isinstance(want, dict) and isinstance(got, dict):
        return _dict_differences(want, got, path)
    if isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            return [f"{path}: length {len(want)} wanted, {len(got)} found"]
        pairs = enumerate(zip(want, got, strict=True))
        return [line for i, (w, g) in pairs for line in differences(w, g, f"{path}[{i}]")]
    if _is_number(want) and _is_number(got):
        same = math.isclose(want, got, rel_tol=RTOL, abs_tol=ATOL)
    else:
        same = type(want) is type(got) and want == got
    return [] if same else [f"{path}: {want!r} wanted, {got!r} found"]


def _dict_differences(want: dict, got: dict, path: str) -> list[str]:
    out = []
    for key in sorted(set(want) | set(got)):
        if key.startswith("_"):
            continue
        if key not in got:
            out.append(f"{path}/{key}: missing")
        elif key not in want:
            out.append(f"{path}/{key}: not wanted, found {got[key]!r}")
        else:
            out += differences(want[key], got[key], f"{path}/{key}")
    return out


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
