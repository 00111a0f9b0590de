"""Runs the scenarios against one library and compares them with what is expected.

    python -m tests.conformance.run --target maxjax
    python -m tests.conformance.run --target max --json expected_max.json

Also as `python tests/conformance/run.py`. A scenario that lets an exception escape has failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance import adapters, compare, scenarios
from tests.conformance.pending import PENDING

TARGETS = {"max": adapters.namespace_max, "maxjax": adapters.namespace_maxjax}


def run_one(M: SimpleNamespace, name: str) -> dict:
    """The record of one scenario: `result`, and `error` or `quirk` where there is one."""
    function = scenarios.REGISTRY[name]
    record: dict = {"result": None}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        M.tmpdir = Path(folder)
        try:
            record["result"] = compare.plain(function(M))
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
    record["_seconds"] = round(time.perf_counter() - start, 2)
    if function.quirk:
        record["quirk"] = function.quirk
    if M.clear_hooks:
        M.clear_hooks()
    return record


def report(results: dict[str, dict], target: str, pending: dict[str, int]) -> int:
    """Prints what differs and a line of totals; the number of scenarios that failed."""
    expected = compare.recorded() | (compare.mended() if target == "maxjax" else {})
    counts = dict.fromkeys(("same", "differ", "pending"), 0)
    for name, record in results.items():
        if "error" in record:
            lines = [f"error: {record['error']}"]
        else:
            lines = compare.differences(expected[name]["result"], record["result"])
        verdict = "same" if not lines else "pending" if name in pending else "differ"
        counts[verdict] += 1
        if lines:
            print(f"{verdict.upper():8}{name}")
            print(*(f"        {line}" for line in lines[:8]), sep="\n")
    print(f"{len(results)} scenarios:", ", ".join(f"{n} {what}" for what, n in counts.items()))
    return counts["differ"]


def main() -> int:
    """Runs what the command line asks for; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, default="maxjax")
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--no-compile", action="store_true", help="leave out what MAX compiles")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--list", action="store_true", help="only list the scenarios")
    options = parser.parse_args()
    names = [name for name in scenarios.REGISTRY if re.search(options.only, name)]
    if options.no_compile:
        names = [name for name in names if not scenarios.REGISTRY[name].needs_compile]
    if options.list:
        print(*names, sep="\n")
        return 0
    M = TARGETS[options.target]()
    results = {name: run_one(M, name) for name in names}
    if options.json:
        document = {"_target": options.target, "_missing": M.missing, "scenarios": results}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    pending = PENDING if options.target == "maxjax" else {}
    return int(report(results, options.target, pending) > 0)


if __name__ == "__main__":
    sys.exit(main())
