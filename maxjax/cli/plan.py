"""``maxjax plan``: what a checkpoint takes on the devices of a mesh."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from .options import dtype, float_type, mesh, positive, size


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("path", help="a file, a directory or an index")
    parser.add_argument(
        "--mesh", type=mesh, metavar="AXIS=N,…", help="as model=8 or model=8,data=2"
    )
    parser.add_argument(
        "--dtype",
        type=float_type,
        metavar="TYPE",
        help="of floats, as bf16 or float32 (default: as they are)",
    )
    parser.add_argument("--batch", type=positive, metavar="N", help="with --length: add a KV cache")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens of each sequence")
    parser.add_argument(
        "--cache-dtype", type=dtype, metavar="TYPE", help="default: that of most weights"
    )
    parser.add_argument(
        "--hbm", type=size, metavar="SIZE", help="memory of a device, as 80GB or 16GiB"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def plan(options: argparse.Namespace) -> Iterable[str]:
    """Shows what weights and cache take on each device, and whether it fits; reads headers only.

    The exit code is 1, with the result on stdout, when it does not fit.
    """
    if (options.batch is None) != (options.length is None):
        options.error("the size of a cache takes both --batch and --length")
    from ..engine.plan.report import plan as plan_of

    found = plan_of(
        options.path, options.mesh, dtype=options.dtype, batch=options.batch,
        length=options.length, cache_dtype=options.cache_dtype, hbm=options.hbm,
    )  # fmt: skip
    options.code = int(found.fits is False)
    return [json.dumps(found.as_dict(), indent=1)] if options.json else str(found).split("\n")
