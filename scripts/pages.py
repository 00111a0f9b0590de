"""Runs README and the pages of docs as a reader would: `python -m scripts.pages [PAGE …]`.

Each page gets a fresh process, an empty folder, and a machine with one device. Its ``python`` blocks run one
after another in one namespace, as pasted into a kernel; the shell blocks (``sh``, and what follows ``$`` in
``console``) run in between, in the same folder. Nothing else is prepared: a page that needs a file, a name or
eight devices makes them itself. A ``text`` block directly below a block that runs is its output, and must be
equal to it. Other kinds (``py transformers``, ``yaml``) are for other programs and do not run. Comments on the line
above a block make exceptions:

    <!-- not run: needs the hub -->          the reason is one of `REASONS`
    <!-- not compared: sizes of this machine -->
    <!-- file: two.py -->                    the block is written to this file instead
    <!-- needs: torch, transformers -->      it does not run where one of these is not installed

At the end, the words of all pages, without code, are counted: at most `MOST_WORDS`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 32_300
REASONS = {
    "does not end",
    "makes an environment",
    "needs a cluster",
    "needs compilers for accelerators",
    "needs grain",
    "needs IPython",
    "needs the hub",
    "waits for input",
}
KINDS = {"python", "sh", "console", "text", "yaml"}

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|not compared|file|needs): (?P<value>[^\n]*?) -->\n\n?)?"
    r"^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: the number of its opening fence.
        kind: its language, the text after the fence.
        code: its content.
        mark: the exception in its comment: "not run", "not compared", "file", "needs" or None.
        value: what the comment says.
        adjacent: whether nothing but blank lines and its comment is between it and the block before.
    """

    line: int
    kind: str
    code: str
    mark: str | None
    value: str | None
    adjacent: bool


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    end, found = 0, []
    for match in _BLOCK.finditer(text):
        line = text[: match.start("kind")].count("\n") + 1
        adjacent = bool(found) and not text[end : match.start()].strip()
        found.append(
            Block(line, match["kind"], match["code"], match["mark"], match["value"], adjacent)
        )
        end = match.end()
    return found


def words(text: str) -> int:
    """Count the words of a page, without its code blocks and comments."""
    return len(re.sub(r"<!--.*?-->", "", _BLOCK.sub("", text), flags=re.DOTALL).split())


def missing(block: Block) -> list[str]:
    """Return the packages that a block needs and that are not installed."""
    named = (block.value or "").split(", ") if block.mark == "needs" else []
    return [name for name in named if importlib.util.find_spec(name) is None]


def follow(page: Path) -> None:
    """Run the blocks of a page in this process and the current folder.

    Raises:
        AssertionError: a command fails, or a block prints something else than the page shows.
    """
    outside = dict(os.environ)  # a terminal of the reader's, which Python does not change
    kernel = sys.modules["__main__"] = types.ModuleType("__main__")
    printed = None
    for block in blocks(page.read_text()):
        at = f"{page.name}:{block.line}"
        if block.mark == "file":
            Path(block.value or "").write_text(block.code)
        elif block.mark == "not run" or (absent := missing(block)):
            print(f"{at} was not run: {block.value if block.mark == 'not run' else absent}")
        elif block.kind == "python":
            code = compile("\n" * block.line + block.code, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, kernel.__dict__)
            printed = out.getvalue()
            continue
        elif block.kind in ("sh", "console"):
            printed = shell(block, at, outside)
            continue
        elif block.kind == "text" and block.adjacent and printed is not None and not block.mark:
            assert printed.splitlines() == block.code.splitlines(), f"{at}: printed\n{printed}"
        printed = None


def shell(block: Block, at: str, environment: dict[str, str]) -> str:
    """Run the commands of a block; return what they print."""
    code = block.code
    if block.kind == "console":
        code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
        assert code, f"{at}: no line begins with $"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", code],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{at}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run(page: Path, cache: str) -> tuple[str, str, float]:
    """Run a page in a process and a folder of its own; return "ok" or "FAILED", what it said, and the seconds."""
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"
    }
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "MAXJAX_COMPILE_CACHE": cache,
        "MAXJAX_PROGRESS": "0",
        "MPLBACKEND": "agg",
    }
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--here", str(page)], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    said = done.stdout + (done.stderr if done.returncode else "")
    return "FAILED" if done.returncode else "ok", said, seconds


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", help="names such as README or generate; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="pages at a time")
    parser.add_argument("--words", action="store_true", help="only count the words")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        sys.path[0] = ""  # as in a kernel, not the folder of this file
        follow(options.here)
        return 0
    pages = [page for page in PAGES if not options.pages or page.stem in options.pages]
    failed = 0
    if not options.words:
        with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(options.jobs) as pool:
            for page, (word, said, seconds) in zip(
                pages, pool.map(lambda page: run(page, cache), pages), strict=True
            ):
                print(f"{word:8}{page.name:32}{seconds:6.1f} s\n{said}", end="", flush=True)
                failed += word == "FAILED"
    counts = {page: words(page.read_text()) for page in pages}
    if options.words:
        print(*(f"{count:6,} {page.name}" for page, count in counts.items()), sep="\n")
    total = sum(counts.values())
    print(f"{len(pages)} pages, {failed} failed; {total:,} words, at most {MOST_WORDS:,}")
    return int(failed > 0 or total > MOST_WORDS)


if __name__ == "__main__":
    sys.exit(main())
