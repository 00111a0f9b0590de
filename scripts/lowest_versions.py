"""The lowest versions that pyproject.toml allows, as constraints for pip: `python scripts/lowest_versions.py`."""

import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

if __name__ == "__main__":
    with PROJECT.open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    for one in dependencies:
        print(one.split(",")[0].replace(">=", "=="))
