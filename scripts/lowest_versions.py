"""The lowest versions that pyproject.toml allows, as constraints for pip: `python scripts/lowest_versions.py`."""

import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

if __name__ == "__main__":
    with PROJECT.open("rb") as file:
        project = tomllib.load(file)["project"]
    # Those of training are installed by `version_matrix.sh` too.
    for one in [*project["dependencies"], *project["optional-dependencies"]["train"]]:
        print(one.split(",")[0].replace(">=", "=="))
