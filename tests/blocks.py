"""The code blocks of README and docs: finds them, and runs them.

Every fenced block of a page has a language. Blocks of code are run: the ``python`` blocks of a page one after
another in one namespace, the commands after ``$`` of its ``console`` blocks by a shell in between. A ``text``
block is not code; directly after a block that runs, it is that block's output. Two comments make exceptions,
each on the line above the block:

    <!-- not run: makes an environment -->
    <!-- not compared: sizes of this machine -->

The accepted reasons are in tests/test_walk.py. Code must be fenced: an indented block is not allowed.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- not (?P<what>run|compared): (?P<why>[^\n]*?) -->\n\n?)?"
    r"^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file.
        line: the number of its first line.
        kind: its language, the text after the opening fence.
        code: its content.
        not_run, not_compared: the reason in its comment, or None.
        adjacent: whether only blank lines and its comment separate it from the block before.
    """

    page: Path
    line: int
    kind: str
    code: str
    not_run: str | None
    not_compared: str | None
    adjacent: bool

    @property
    def name(self) -> str:
        """Its page and line, for a message."""
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text, end, found = page.read_text(), 0, []
    for match in _BLOCK.finditer(text):
        why = {"run": None, "compared": None} | {match["what"]: match["why"]}
        line = text[: match.start("kind")].count("\n") + 1
        adjacent = bool(found) and not text[end : match.start()].strip()
        found.append(
            Block(page, line, match["kind"], match["code"], why["run"], why["compared"], adjacent)
        )
        end = match.end()
    return found


def code_of(page: Path) -> list[str]:
    """The Python blocks of a page that are run."""
    found = [b.code for b in blocks(page) if b.kind == "python" and b.not_run is None]
    assert found, f"{page.name} has no Python"
    return found


def run(page: Path, /, **names):
    """Runs the blocks of a page in the current folder; returns its namespace afterwards.

    Args:
        page: path of the page.
        names: names that the page uses without defining them, such as ``path``.
    """
    printed = None
    for block in blocks(page):
        if block.kind == "text":
            if block.adjacent and printed is not None and block.not_compared is None:
                assert printed.splitlines() == block.code.splitlines(), block.name
        elif block.not_run is None and block.kind == "python":
            place = "\n" * block.line + block.code  # so that errors name the page's line
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(place, str(page), "exec"), names)
            printed = out.getvalue()
            continue
        elif block.not_run is None and block.kind == "console":
            printed = shell(block)
            continue
        printed = None
    return names


def shell(block: Block, seconds: int = 300) -> str:
    """Runs the commands of a console block; returns what they print on stdout."""
    commands = [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
    assert commands, f"{block.name} has no line that begins with $"
    Path(".commands").mkdir(exist_ok=True)
    program = Path(".commands/maxjax")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m maxjax "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{Path('.commands').resolve()}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "8",
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(commands)],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.name}: {done.stderr}"
    return done.stdout
