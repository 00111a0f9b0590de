"""The packages of an environment by size: `python scripts/install_size.py`, with the environment's own Python.

Prints the size of the files that pip installed, without bytecode, in 10^6 bytes, and which packages need each
package. pip and setuptools are left out.
"""

import re
import sys
from importlib.metadata import Distribution, distributions

LEFT_OUT = {"pip", "setuptools", "wheel"}


def key(name: str) -> str:
    """The normalised spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def size(package: Distribution) -> int:
    """The bytes of a package's files."""
    paths = [file.locate() for file in package.files or () if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in (p.resolve() for p in paths) if path.exists())  # type: ignore[union-attr]


def main() -> int:
    """The command line."""
    packages = {key(one.name): one for one in distributions() if key(one.name) not in LEFT_OUT}
    needed: dict[str, list[str]] = {name: [] for name in packages}
    for name, package in packages.items():
        for line in package.requires or ():
            wanted = key(re.split(r"[^\w.-]", line, maxsplit=1)[0])
            if "extra ==" not in line and wanted in needed:
                needed[wanted].append(name)
    sizes = {name: size(package) for name, package in packages.items()}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        print(f"{sizes[name] / 1e6:7.1f} MB  {name:20} {', '.join(sorted(needed[name]))}")
    print(f"{sum(sizes.values()) / 1e6:7.1f} MB  in {len(sizes)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
