"""Runs chat templates written to hang, to fill memory or to escape their sandbox, and measures their effect.

Bombs are rendered in processes, a batch in each. Measured are the CPU time of `render` and the growth of the
process's memory at its peak (VmHWM, reset before each bomb); checked are that no thread is left, and that the
caller's thread then renders an ordinary template and still has its trace function. An escape is rendered with a
canary in the environment: it must reveal none of Python's internals, change nothing, and write no file.

    python scripts/template_bombs.py             # all of them; minutes
    python scripts/template_bombs.py --every 10  # a sample

The exit code is 1 if a bomb takes more than --seconds or --mb, something is left, or an escape succeeds.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.template_attacks import bombs, escapes  # noqa: E402

SECONDS, MB = 3.5, 300
_BATCH = 20
_HANGS = 60.0  # seconds after which the process is ended from outside

_INSIDES = ("<class", "<module", "<frame", "<code", "CANARY-SECRET", "root:", "wrapper_descriptor", "mappingproxy",
            "Sandbox object", "runtime.Context", "slot wrapper", "method-wrapper", "gi_frame at")  # fmt: skip


# --- in the process of a batch --------------------------------------------------------------------


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise OSError(field)


def _values() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", "image": object()}], "bos_token": "<s>"}


def bomb(text: str) -> dict[str, Any]:
    """The result of a bomb: how long it took, how much memory, and what is wrong afterwards."""
    from maxjax.errors import UserInputError
    from maxjax.text.template.render import render

    calls = []
    trace = lambda frame, event, argument: calls.append(event)
    traced = sys.gettrace()
    before, threads = _memory("VmRSS:"), threading.active_count()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the memory
    sys.settrace(trace)
    start = time.process_time()
    try:
        said = f"made {len(render(text, _values()))} characters"
    except UserInputError as error:
        said = str(error)
    seconds = time.process_time() - start
    kept = sys.gettrace() is trace
    sys.settrace(traced)
    grown = _memory("VmHWM:") - before
    left = threading.active_count() - threads
    usable = render("{{ messages[0].content }}!", _values()) == "Hi!"
    wrong = [
        what
        for what, is_so in {
            "a thread is left": left != 0,
            "the trace function is gone": not kept or not calls,
            "the caller's thread is not usable": not usable,
        }.items()
        if is_so
    ]
    return {"seconds": seconds, "mb": grown / 1e6, "said": said[:100], "wrong": wrong}


def escape(text: str) -> dict[str, Any]:
    """The result of an escape, and what is wrong with it."""
    import jinja2.debug  # noqa: F401  # at its first error jinja2 imports it, which is no change by a template
    from jinja2.utils import Cycler, Joiner

    from maxjax.errors import UserInputError
    from maxjax.text.template.render import render

    state = lambda: (
        dict(os.environ),
        sorted(sys.modules),
        sorted(vars(Cycler)),
        sorted(vars(Joiner)),
    )
    with tempfile.TemporaryDirectory() as directory:
        canary, values = Path(directory) / "canary", _values()
        image = values["messages"][0]["image"]
        start, before = time.perf_counter(), state()
        try:
            said = render(text.replace("CANARY", str(canary)), values)
        except UserInputError as error:
            said = str(error)
        changed = values != {
            **_values(),
            "messages": [{"role": "user", "content": "Hi", "image": image}],
        }
        wrong = [f"it says {word}" for word in _INSIDES if word in said]
        wrong += ["it wrote a file"] if canary.exists() else []
        wrong += ["it changed the messages"] if changed else []
        wrong += ["it changed the process"] if state() != before else []
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "mb": 0.0, "said": said[:100], "wrong": wrong}


def _work() -> None:
    """Runs the templates on stdin, one JSON object a line, and prints the results."""
    import maxjax  # noqa: F401 (JAX's callbacks are there as in a user's process)
    from maxjax.text.template.render import render

    os.environ["CANARY"] = "CANARY-SECRET"
    render("{{ messages[0].content|trim ~ [1, 2]|tojson }}", _values())
    escape("{{ 1 / 0 }}")
    escape("{{ strftime_now('%d') }}{{ 'a.com'|urlize|wordwrap|striptags }}{{ [1]|pprint }}")
    for line in sys.stdin:
        kind, text = json.loads(line)
        print(json.dumps((bomb if kind == "bomb" else escape)(text)), flush=True)


def _tried(kind: str, texts: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, result) of each template; each batch has a new process, one at a time."""
    todo = list(texts)
    while todo:
        command = [sys.executable, __file__, "--work"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            for name in todo[:_BATCH]:
                todo.remove(name)
                process.stdin.write(json.dumps([kind, texts[name]]).encode() + b"\n")
                process.stdin.flush()
                ready, _, _ = select.select([process.stdout], [], [], _HANGS)
                line = process.stdout.readline() if ready else b""
                if not line:
                    process.kill()
                    what = f"it hangs after {_HANGS:g} s" if not ready else "the process died"
                    yield name, {"seconds": _HANGS, "mb": 0.0, "said": what, "wrong": [what]}
                    break
                yield name, json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="of a sample: every n-th")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--mb", type=float, default=MB)
    parser.add_argument("--only", default="", help="those with this in their name")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work()
        return 0
    failed = 0
    for kind, texts in (("bomb", bombs()), ("escape", escapes())):
        names = [name for name in texts if options.only in name][:: options.every]
        found = {}
        for name, result in _tried(kind, {name: texts[name] for name in names}):
            found[name] = result
            wrong = list(result["wrong"])
            wrong += ["too long"] if result["seconds"] > options.seconds else []
            wrong += ["too large"] if result["mb"] > options.mb else []
            failed += bool(wrong)
            if wrong or options.verbose:
                row = f"{result['seconds']:7.2f} s {result['mb']:6.0f} MB"
                print(f"{row}  {name}: {', '.join(wrong) or 'held'}: {result['said']}", flush=True)
        if not found:
            continue
        slowest = max(found, key=lambda name: found[name]["seconds"])
        largest = max(found, key=lambda name: found[name]["mb"])
        print(
            f"{len(found)} {kind}s, {sum(bool(r['wrong']) for r in found.values())} with something wrong"
        )
        print(f"  slowest {found[slowest]['seconds']:.2f} s ({slowest})")
        if kind == "bomb":
            print(f"  largest {found[largest]['mb']:.0f} MB ({largest})")
    print("missed" if failed else "held", failed or "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
