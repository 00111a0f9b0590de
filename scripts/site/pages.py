"""The pages of the site, gathered into one folder: docs, README, notebooks and the reference.

Sources link to one another by their places in the repository, as readers of the repository want it; in the
folder they have other places, so links are written anew. A file that is no page (a script, the licence)
is copied and can be read as it is.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from scripts.site import notebooks, reference

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(\]\(|\bsrc=\"|\bhref=\"|^\[[^\]]+\]: )([^)\s\"]+)", re.MULTILINE)
TITLE = re.compile(r"\A(`{3,}\w+) (\S.*)$", re.MULTILINE)  # ```py transformers
FENCE = re.compile(r"(^ *(`{3,}).*?^ *\2 *$)", re.DOTALL | re.MULTILINE)


def sources() -> dict[Path, str]:
    """File of the repository → its page."""
    found = {path: path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    found |= {ROOT / name: page for name, page in OTHERS.items() if (ROOT / name).exists()}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        found[path] = f"notebooks/{path.stem}.md"
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        if (ROOT / name).exists():
            found[ROOT / name] = name.lower()
    return found


def gather(to: Path) -> list[str]:
    """Writes all pages into a folder; links that lead nowhere, as "file: link"."""
    if to.exists():
        shutil.rmtree(to)
    to.mkdir(parents=True)
    for name in ("images", "site"):
        if (ROOT / "docs" / name).is_dir():
            shutil.copytree(ROOT / "docs" / name, to / name)
    places = sources()
    wrong: list[str] = []
    for path, page in places.items():
        target = to / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            text = notebooks.page(path, target.parent / "images")
        else:
            text = path.read_text()
        target.write_text(_relinked(text, path, page, places, to, wrong))
    home = to / "index.md"  # the navigation beside it would hold nothing but itself
    home.write_text(f"---\nhide: [navigation]\n---\n{home.read_text()}")
    names = reference.package()
    (to / "reference").mkdir()
    (to / "reference/index.md").write_text(reference.index(names))
    for module in names.public:
        (to / reference.page_name(module)).write_text(reference.page(names, module))
    return wrong


def _relinked(
    text: str, path: Path, page: str, places: dict[Path, str], to: Path, wrong: list[str]
) -> str:
    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target or re.match(r"[a-z]+:|images/", target):
            return found[0]
        there = (path.parent / target).resolve()
        if there not in places and not there.is_file():
            wrong.append(f"{path.relative_to(ROOT)}: {found[2]}")
            return found[0]
        if there.is_relative_to(ROOT / "docs/images"):
            new = str(there.relative_to(ROOT / "docs"))
        elif there in places:
            new = places[there]
        else:
            new = f"files/{there.relative_to(ROOT)}"
            new = new if there.suffix else f"{new}.txt"
            (to / new).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(there, to / new)
        return found[1] + os.path.relpath(new, Path(page).parent) + (f"#{anchor}" if anchor else "")

    parts = FENCE.split(text)
    # Three parts by turns: text, a fenced block, and the block's fence once more.
    parts[::3] = [LINK.sub(link, part) for part in parts[::3]]
    parts[1::3] = [TITLE.sub(r'\1 title="\2"', part) for part in parts[1::3]]
    del parts[2::3]
    return "".join(parts)
