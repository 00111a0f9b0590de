"""The documentation as a site: `python -m scripts.site`, and what it is made of.

    python -m scripts.site            builds it in build/site and checks its links
    python -m scripts.site --serve    the same, then shows it on http://localhost:8000

It needs `pip install -e ".[docs]"` and no network. Anything that is wrong ends it with exit code 1: a warning
of mkdocs, a dead link, a link to a file that is not there, a page that the navigation lacks, a public name
without a docstring. Pages that the navigation of docs/mkdocs.yml names and that are not written yet are
listed and left out.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import logging
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from mkdocs.commands.build import build as mkdocs_build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402

from scripts.site import links, pages, reference  # noqa: E402

PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"


def navigation(entries: list[Any], missing: list[str]) -> list[Any]:
    """The navigation without pages that are not there, and with those of the reference."""
    kept: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            title, value = None, entry
        else:
            ((title, value),) = entry.items()
        if isinstance(value, list):
            value = navigation(value, missing)
        elif value == "reference/":
            value = ["reference/index.md", *_reference()]
        elif not (PAGES / value).exists():
            missing.append(value)
            continue
        kept.append(value if title is None else {title: value})
    return kept


def _reference() -> list[Any]:
    """The pages of the reference: a package with its parts below it."""
    groups: dict[str, list[Any]] = {}
    for module in reference.package().public:
        name = ".".join(module.split(".")[:2])
        groups.setdefault(name, []).append({module: reference.page_name(module)})
    found: list[Any] = []
    for name, group in groups.items():
        found += group if len(group) == 1 else [{name: group}]
    return found


def _files(entries: list[Any]) -> set[str]:
    found: set[str] = set()
    for entry in entries:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        found |= _files(value) if isinstance(value, list) else {value}
    return found


def build() -> list[str]:
    """Builds the site; what is wrong with it."""
    wrong = [f"no such file: {link}" for link in pages.gather(PAGES)]
    names = [name for found in reference.package().public.values() for name in found]
    wrong += [f"no docstring: {name.path}" for name in names if not name.docstring]
    config = load_config(str(ROOT / "docs" / "mkdocs.yml"))
    missing: list[str] = []
    config["nav"] = navigation(config["nav"], missing)
    for page in missing:
        print(f"not written yet, left out of the navigation: {page}")
    every = {str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")}
    wrong += [f"not in the navigation: {page}" for page in sorted(every - _files(config["nav"]))]
    seen = _Warnings()
    logging.getLogger("mkdocs").addHandler(seen)
    config.plugins.on_startup(command="build", dirty=False)
    mkdocs_build(config)
    wrong += seen.said
    found = links.check(SITE)
    wrong += [f"dead link: {link}" for link in found.dead]
    wrong += [f"needs a network: {link}" for link in found.fetched]
    built = {
        path: links.Page(path.read_text()).anchors for path in (SITE / "reference").glob("*.html")
    }
    for name in names:
        if name.path not in built[SITE / "reference" / f"{name.module}.html"]:
            wrong.append(f"no entry: {name.path}")
    print(
        f"{len(list(SITE.rglob('*.html')))} pages, {found.count} links within, {len(found.dead)} dead; "
        f"{len(found.external)} addresses elsewhere, not followed; {len(names)} public names"
    )
    return wrong


class _Warnings(logging.Handler):
    """Keeps what mkdocs and its plugins warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", nargs="?", type=int, const=8000, metavar="PORT")
    options = parser.parse_args()
    start = time.perf_counter()
    wrong = build()
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    print(
        f"{'FAILED: ' + str(len(wrong)) if wrong else 'ok'}, {time.perf_counter() - start:.0f} s: {SITE}/index.html"
    )
    if options.serve:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
        http.server.ThreadingHTTPServer(("localhost", options.serve), handler).serve_forever()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
