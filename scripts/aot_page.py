"""Writes the table of docs/accelerators.md anew, from scripts/aot.txt: `python scripts/aot_page.py`.

For packed models it has the bytes that a decode step reads, divided by those that it must read, and in brackets
the bytes that it reads and writes.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, PROGRAMS = ROOT / "docs" / "accelerators.md", ROOT / "scripts" / "aot.txt"
HEAD = "| weights | model | H200: 1 sequence | 64 sequences | TPU: 1 sequence | 64 sequences |"
# How the page calls the models and formats of aot.txt.
MODELS = {
    "llama70": "Llama 70 B", "qwen235": "Qwen3-235B", "deepseek3": "DeepSeek V3", "kimi2": "Kimi K2",
    "gptoss120": "gpt-oss 120 B",
}  # fmt: skip
FORMATS = {
    "FP8": "FP8, blocks of 128 × 128", "AWQ": "AWQ", "GPTQ": "GPTQ", "INT8": "int8, a scale for each row", "NF4": "nf4",
    "INT4": "int4, groups of 32", "MXFP4": "MXFP4", "Q4_K": "GGUF Q4_K", "Q8_0": "GGUF Q8_0", "IQ4_XS": "GGUF IQ4_XS",
}  # fmt: skip
_PROGRAM = re.compile(r"(\S+):\S+ decode ([a-z0-9]+?)x\d+ \S+ B=(1|64) \S+ (\S+)$")


def cells(text: str) -> dict[tuple[str, str], dict[tuple[str, str], str]]:
    """(format, model) → (kind of device, sequences) → what a step reads, for the decode programs of packed models."""
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for program in text.split("\n\n"):
        head, *lines = program.strip().splitlines()
        match = _PROGRAM.match(head)
        if not match or match[4] not in FORMATS:
            continue
        times = {
            name: float(number)
            for name, number in re.findall(r"(reads|writes) .*, ([0-9.]+) x need", "\n".join(lines))
        }
        kind, model, sequences = match[1], match[2], match[3]
        cell = "not counted"
        if times:
            cell = f"{times['reads']:.2f} ({times['reads'] + times['writes']:.2f})"
        place = "H200" if kind == "h200" else "TPU"
        # A model that fits on one device and on eight has two programs for one sequence: the last one counts.
        found.setdefault((match[4], model), {})[place, sequences] = cell
    return found


def table(text: str) -> list[str]:
    """The lines of the page's table."""
    rows = [HEAD, "|---|---|---|---|---|---|"]
    found = cells(text)
    for (name, model), own in sorted(found.items(), key=lambda one: [*FORMATS].index(one[0][0])):
        each = [own.get((place, n), "–") for place in ("H200", "TPU") for n in ("1", "64")]
        rows.append(f"| {FORMATS[name]} | {MODELS[model]} | {' | '.join(each)} |")
    return rows


def page(text: str, programs: str) -> str:
    """The page with the table of these programs."""
    begin = text.index("| weights | model")
    end = text.index("\n\n", begin)
    return text[:begin] + "\n".join(table(programs)) + text[end:]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), PROGRAMS.read_text()))
