"""Links of a built site: every file and anchor that a page of it names is there.

Links to other sites are listed and not followed. What a browser would fetch from another site by itself
(a script, a style, a font, a picture) is an error: the site is read without a network too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
}


class Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[tuple[str, str, str]] = []  # tag, attribute, target
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for every tag."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found and tag != "meta"}
        for key in ("href", "src"):
            if key in found and found.get("rel") not in ("canonical", "prev", "next"):
                self.links.append((tag, key, found[key]))


@dataclass
class Links:
    """What was found.

    Attributes:
        count: links within the site.
        dead: "page: link" of those that lead nowhere.
        fetched: "page: link" of what a browser would fetch from elsewhere.
        external: addresses of other sites.
    """

    count: int = 0
    dead: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    external: set[str] = field(default_factory=set)


def check(site: Path) -> Links:
    """Reads every page of a site. The page for errors is left out: a server shows it at any address."""
    pages = {
        path.resolve(): Page(path.read_text())
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"
    }
    found = Links()
    for path, page in pages.items():
        for tag, key, target in page.links:
            parts = urlsplit(target)
            name = f"{path.relative_to(site.resolve())}: {target}"
            if parts.scheme in ("http", "https") or parts.netloc:
                (found.fetched.append if (tag, key) in FETCHED else found.external.add)(
                    name if (tag, key) in FETCHED else target
                )
            elif parts.scheme in ("data", "mailto"):
                continue
            else:
                found.count += 1
                to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                to = to / "index.html" if to.is_dir() else to
                anchors = pages[to].anchors if to in pages else {""}
                if not to.exists() or unquote(parts.fragment) not in anchors:
                    found.dead.append(name)
    for path in sorted(site.rglob("*.css")):
        for target in re.findall(
            r"url\(['\"]?(https?:[^)'\"]+)|@import ['\"](https?:[^'\"]+)", path.read_text()
        ):
            found.fetched.append(f"{path.relative_to(site)}: {''.join(target)}")
    return found
