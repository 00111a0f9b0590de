"""Whether the libraries that benchmarks compare with are installed."""

from __future__ import annotations

import importlib.util

WHERE = "scripts/setup.sh --oracles installs it"


def installed(*names: str) -> bool:
    """Whether all of these libraries can be imported; prints the missing ones, which are not compared."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        print(f"without {' and '.join(absent)}: {WHERE}")
    return not absent
