"""Tables in a terminal and in pipes, and what the command imports for them."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from maxjax.cli import answer, bars, tables
from maxjax.columns import Table
from maxjax.progress import Task
from maxjax.storage.hub import find_model

from .models import here

ROWS = [["name", "bytes"], ["model.embed_tokens.weight", "360,448"], ["[b]w", "4"]]
PLAIN = [
    "name                         bytes",
    "model.embed_tokens.weight  360,448",
    "[b]w                             4",
]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal of so many columns."""

    def make(columns, term="xterm"):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    return make


def test_elsewhere_it_is_plain_text(capsys):
    tables.show(["before", Table(ROWS, right={1}), "after"])
    assert capsys.readouterr().out.split("\n") == ["before", *PLAIN, "after", ""]


def test_a_terminal_gets_titles_in_bold(capsys, terminal):
    terminal(80)
    tables.show(["before", Table(ROWS, right={1})])
    shown = capsys.readouterr().out
    assert "\x1b[1mname" in shown
    before, titles, rule, *rows = CODES.sub("", shown).rstrip("\n").split("\n")
    assert before == "before" and titles.split() == ["name", "bytes"] and set(rule.strip()) == {"─"}
    assert [row.split() for row in rows] == ROWS[1:]  # no markup of rich's is in a name


def test_a_dumb_terminal_gets_plain_text(capsys, terminal):
    terminal(80, "dumb")
    tables.show([Table(ROWS, right={1})])
    assert capsys.readouterr().out.split("\n") == [*PLAIN, ""]


def test_a_narrow_terminal_gets_a_paragraph_for_each_row(capsys, terminal):
    """Names are not folded, so that they can be copied."""
    terminal(30)
    rows = [["name", "bytes", "file"], [ROWS[1][0], "360,448", "model.safetensors"], ["w", "4", ""]]
    tables.show(["text that is longer than the line", Table(rows, right={1})])
    assert capsys.readouterr().out.split("\n") == [
        "text that is longer than the line",
        "model.embed_tokens.weight",
        "  bytes 360,448  file",
        "    model.safetensors",
        "w",
        "  bytes 4",
        "",
    ]


class Screen:
    """What a terminal shows of text with newlines, spaces and the two codes that WordWrap writes."""

    def __init__(self, columns):
        self.columns, self.lines, self.column = columns, [""], 0

    def write(self, text):
        for code, count, character in re.findall(r"(\x1b\[(\d*)[DK])|(?s:(.))", text):
            if code.endswith("D"):
                self.column -= int(count)
            elif code:
                self.lines[-1] = self.lines[-1][: self.column]
            elif character == "\n" or self.column == self.columns:
                self.lines.append("" if character == "\n" else character)
                self.column = len(self.lines[-1])
            else:
                assert self.column == len(self.lines[-1])
                self.lines[-1] += character
                self.column += 1


@pytest.mark.parametrize("size", [1, 3, 100])
def test_answers_break_between_words(size):
    """As textwrap does it, whatever the pieces; newlines, indents and long words stay."""
    text = (
        "The quick brown fox jumps over the lazy dog.\n\n    for word in words: print(word)\n"
        "https://example.com/a/word/longer/than/the/line and more  text"
    )
    wrap, screen = answer.WordWrap(lambda: 21), Screen(21)
    for i in range(0, len(text), size):
        screen.write(wrap(text[i : i + size]))
    assert [line.rstrip() for line in screen.lines] == [
        "The quick brown fox",
        "jumps over the lazy",
        "dog.",
        "",
        "    for word in",
        "words: print(word)",
        "https://example.com/a",
        "/word/longer/than/the",
        "/line",
        "and more  text",
    ]


def test_control_characters_of_answers_are_escaped_and_wide_ones_break_anywhere():
    assert answer.WordWrap(lambda: 80)("a\x1b[2J") == "a\\x1b[2J"
    assert answer.WordWrap(lambda: 7)("猫猫猫猫") == "猫猫猫\n猫"


def test_a_bar_of_a_command():
    from rich.console import Console

    one = Task("loading model.gguf", 4_000_000)
    one.add(1_000_000)
    one.note, one.began = "compiling prefill, XLA", one.began - 2
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(bars._bar(one))
    shown = console.export_text()
    assert "loading model.gguf (compiling prefill, XLA)" in shown and " 25%" in shown
    assert "1.00 MB/4.00 MB" in shown and re.search(
        r"4[0-9]{2}\.\d\d kB/s 6 s left|500.00 kB/s 6 s left", shown
    )


def heavy(*arguments):
    """Which heavy modules a command imports whose output goes to a pipe."""
    code = (
        "import sys\nfrom maxjax.cli import application\n"
        "try: application.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([m for m in ('rich', 'tqdm', 'jax', 'pygments') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


def test_pipes_import_nothing_for_terminals():
    assert heavy("--help") == "[]" and heavy("inspect", str(find_model("tiny"))) == "[]"


def test_inspect_in_a_terminal_says_what_it_says_in_a_pipe():
    command = [sys.executable, "-m", "maxjax", "inspect", str(find_model("tiny"))]
    piped = here("inspect", find_model("tiny")).stdout
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)  # the terminal's size counts
    subprocess.run(command, stdout=inner, check=True, env=environment)
    os.close(inner)
    shown = b""
    try:
        while piece := os.read(outer, 1 << 16):
            shown += piece
    except OSError:  # all is read
        pass
    os.close(outer)
    text = CODES.sub("", shown.decode())
    assert "\x1b[1m" in shown.decode()
    words = [line.split() for line in text.replace("─", "").splitlines() if line.split()]
    assert words == [line.split() for line in piped.splitlines() if line.split()]


@pytest.mark.parametrize("text", ["é", "a\x1b[2J", "\x7f\x9b\u202e\ud800", "\U000e0001\n\t"])
def test_what_is_printed_as_json_is_read_back(text, capsys):
    tables.show([tables.json_line({"text": text})])
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"text": text} and shown.isascii() == (text != "é")
    assert shown.rstrip("\n").isprintable()
