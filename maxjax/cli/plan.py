"""``maxjax plan``: the memory that a checkpoint takes on the devices of a mesh."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from ..columns import Table
from .options import dtype, float_type, mesh, positive, size, topology
from .terminal import as_options


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("path", help="a file, a directory, an index, or tiny")
    parser.add_argument(
        "--mesh", type=mesh, metavar="AXIS=N,…", help="such as model=8 or model=8,data=2"
    )
    parser.add_argument(
        "--dtype",
        type=float_type,
        metavar="TYPE",
        help="dtype of floats, such as bf16 or float32 (default: as stored)",
    )
    parser.add_argument("--batch", type=positive, metavar="N", help="with --length: add a KV cache")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens of each sequence")
    parser.add_argument(
        "--cache-dtype",
        type=dtype,
        metavar="TYPE",
        help="dtype of the KV cache (default: that of most weights)",
    )
    parser.add_argument(
        "--hbm", type=size, metavar="SIZE", help="memory of a device, such as 80GB or 16GiB"
    )
    parser.add_argument(
        "--device", type=topology, metavar="KIND:N",
        help="plan for v5e:2x4, v5p:2x2x2, h200:8, … and compare its meshes",
    )  # fmt: skip
    parser.add_argument(
        "--compile", type=topology, metavar="KIND:N",
        help="also compile the programs for it, without the hardware, and count their temporaries",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document")


def plan(options: argparse.Namespace) -> Iterable[str | Table]:
    """Shows the memory of weights and KV cache on each device, and whether they fit.

    Only headers are read. With --compile, temporary buffers are counted too. If they do not fit,
    the exit code is 1, with the result on stdout.
    """
    if (options.batch is None) != (options.length is None):
        options.error("--batch and --length belong together: give both, or neither")
    import jax

    from ..engine.plan.report import parts
    from ..engine.plan.report import plan as plan_of

    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        # No device is needed; JAX would otherwise look for those whose plugins are installed.
        jax.config.update("jax_platforms", "cpu")
    found = plan_of(
        options.path, options.mesh, dtype=options.dtype, batch=options.batch,
        length=options.length, cache_dtype=options.cache_dtype, hbm=options.hbm,
        device=options.device, compile=options.compile,
    )  # fmt: skip
    options.code = int(found.fits is False)
    if options.json:
        return [json.dumps(found.as_dict(), indent=1)]
    return [as_options(part, options.option_for) if isinstance(part, str) else part
            for part in parts(found)]  # fmt: skip
