"""Which libraries a benchmark can compare with here."""

from __future__ import annotations

import importlib.util

WHERE = "scripts/setup.sh --oracles installs it"


def installed(*names: str) -> bool:
    """Whether all of these can be imported; otherwise prints that they are left out of the comparison."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        print(f"without {' and '.join(absent)}: {WHERE}")
    return not absent
