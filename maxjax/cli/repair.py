"""``maxjax repair`` finishes an interrupted save, or removes what it left."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ..errors import printable


def repair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("directory", help="a directory that maxjax saved to, or that of its steps")


def repair(options: argparse.Namespace) -> Iterable[str]:
    """Finishes an interrupted save in a directory, and removes what it left; nothing else is touched.

    Reading a checkpoint never changes it. The next save into the directory does the same.
    """
    from ..checkpoint.file_set import repair as repair_directory

    done = list(map(printable, repair_directory(options.directory)))
    where = printable(options.directory)
    if not done:
        return [f"{where}: there was nothing to repair"]
    return [f"{where}: put into place or removed {len(done)}: {', '.join(done)}"]
