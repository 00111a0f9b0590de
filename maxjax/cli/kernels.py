"""The ``maxjax kernels`` command."""

from __future__ import annotations

import argparse
from pathlib import Path


def kernels(options: argparse.Namespace) -> list[str]:
    """Compile the CPU kernels now, instead of at first use, and print the path of the library.

    An installation from source compiles them at first use, for the processor that it runs on; wheels contain them.
    For an image, which may run on other processors and have no compiler, write them to a file with --output, and let
    the environment variable MAXJAX_KERNELS_LIBRARY name the file.
    """
    from ..native_library import build, build_cached, processor_features

    if options.output is None:
        return [str(build_cached(every_level=options.all))]
    features = None if options.all else processor_features()
    return [str(build(options.output, features=features))]


def kernels_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``maxjax kernels``."""
    parser.add_argument("action", choices=["build"], help="what to do")
    parser.add_argument(
        "--all", action="store_true", help="compile for all processors of this architecture"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="path of the library (default: in the cache)"
    )
