"""Pictures of the built site in Chromium, to look at: `python -m scripts.site.screenshots`.

It needs build/site (`python -m scripts.site`), `pip install playwright`, and a Chromium of the system's packages
(`apt install chromium`; `--browser PATH` names another). It writes pictures of some pages into build/pictures,
wide and narrow, light and dark, and ends with exit code 1 where a page is wider than its window, says something
to the console, asks for an address elsewhere, or where the search finds nothing.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[2]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "pictures"
WIDE, NARROW = (1360, 900), (390, 844)
# The page, the window, the scheme of colours.
SHOTS = [
    (page, window, scheme)
    for page in (
        "index.html",
        "models.html",
        "coming-from-max.html",
        "notebooks/01_module_and_weights.html",
        "reference/maxjax.html",
    )
    for window, scheme in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark"))
]


def search(page: Page, words: str) -> int:
    """Types words into the search; how many pages it finds."""
    if page.viewport_size and page.viewport_size["width"] < 960:
        page.click("label[for=__search].md-header__button")
    page.fill("input.md-search__input", words)
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    page.wait_for_timeout(1000)
    return page.locator(".md-search-result__item").count()


def wrong_on(page: Page, name: str, said: list[str]) -> list[str]:
    """What is wrong with a page that is shown."""
    wrong = [f"{name}: {line}" for line in said]
    wide, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    if wide > window:
        wrong.append(f"{name}: {wide} pixels wide in a window of {window}")
    return wrong


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--browser", default="/usr/bin/chromium", metavar="PATH")
    parser.add_argument("--check-all", action="store_true", help="open every page, narrow and wide")
    options = parser.parse_args()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a window that is closed before its files have come

    server = Server(("localhost", 0), functools.partial(Handler, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base, wrong = f"http://localhost:{server.server_port}/", []
    shots = list(SHOTS)
    if options.check_all:
        shots = [
            (str(path.relative_to(SITE)), size, scheme)
            for size, scheme in ((NARROW, "dark"), (WIDE, "light"))
            for path in sorted(SITE.rglob("*.html"))
            if path.name != "404.html"  # its addresses are those of a server's root
        ]
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for path, (width, height), scheme in shots:
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,  # pyright: ignore[reportArgumentType]
            )
            said: list[str] = []
            page.on("console", lambda line, said=said: said.append(line.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on(
                "request",
                lambda request, said=said: (
                    request.url.startswith((base, "data:", "blob:"))
                    or said.append(f"asks for {request.url}")
                ),
            )
            page.goto(base + path)
            wrong += wrong_on(page, f"{path}, {width} pixels, {scheme}", said)
            if not options.check_all:
                name = f"{path.replace('/', '-').removesuffix('.html')}-{width}-{scheme}.png"
                page.screenshot(path=PICTURES / name)
                if path == "index.html" and not search(page, "quantise"):
                    wrong.append("search: finds nothing")
            page.close()
        browser.close()
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    print(f"{len(shots)} pages seen, {len(wrong)} things wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
