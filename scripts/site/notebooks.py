"""Notebooks as pages: their text, their code, and the outputs that are stored in them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def page(notebook: Path, pictures: Path) -> str:
    """The Markdown of a notebook; its pictures are written into a folder beside the page.

    Raises:
        ValueError: a code cell has no stored output and no stored number: the notebook was never run.
    """
    parts = []
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        if source.strip() and cell["execution_count"] is None:
            raise ValueError(f"{notebook.name}: cell {number} has not been run")
        parts.append(_fenced("python", source))
        for place, output in enumerate(cell["outputs"]):
            parts.append(_output(output, pictures, f"{notebook.stem}-{number}-{place}"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any], pictures: Path, name: str) -> str:
    if output["output_type"] == "stream":
        return _fenced("text", _text(output["text"]))
    data = output["data"]
    if "text/html" in data:
        # No blank line: Markdown would begin a paragraph there.
        html = "\n".join(line for line in _text(data["text/html"]).split("\n") if line.strip())
        return f'<div class="mx-output">\n{html}\n</div>'
    if "image/png" in data:
        pictures.mkdir(parents=True, exist_ok=True)
        (pictures / f"{name}.png").write_bytes(base64.b64decode(_text(data["image/png"])))
        return f"![What the cell above draws]({pictures.name}/{name}.png){{ .mx-plot }}"
    return _fenced("text", _text(data["text/plain"]))


def _fenced(kind: str, text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{kind}\n{text.rstrip()}\n{fence}" if text.strip() else ""


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)
