"""Pictures of the built site in Chromium: `python -m scripts.site.screenshots`.

It needs build/site (`python -m scripts.site`), `pip install playwright pillow`, and a Chromium of the system's
packages (`apt install chromium`; `--browser PATH` names another). It writes docs/images/site-*.png and
readme.png, each below 200 kB, and ends with exit code 1 where a page is wider than its window, says something
to the console, asks for an address elsewhere, or where the search finds nothing.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import sys
import threading
from pathlib import Path

from PIL import Image  # pyright: ignore[reportMissingImports]
from playwright.sync_api import Page, sync_playwright  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[2]
SITE, IMAGES = ROOT / "build" / "site", ROOT / "docs" / "images"
WIDE, NARROW = (1360, 900), (390, 844)
# The name of a picture, its page, the window, the scheme of colours.
SHOTS = [
    ("readme", "readme.html", (1360, 1500), "light"),
    ("site-home", "index.html", WIDE, "light"),
    ("site-reference", "reference/maxjax.html", WIDE, "dark"),
    ("site-notebook", "notebooks/01_module_and_weights.html", WIDE, "light"),
    ("site-narrow", "getting-started.html", NARROW, "dark"),
    ("site-search", "index.html", NARROW, "light"),
]
MOST = 200_000  # bytes of a picture


def search(page: Page, words: str) -> int:
    """Types words into the search; how many pages it finds."""
    if page.viewport_size and page.viewport_size["width"] < 960:
        page.click("label[for=__search].md-header__button")
    page.fill("input.md-search__input", words)
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    page.wait_for_timeout(1000)
    return page.locator(".md-search-result__item").count()


def png(picture: bytes) -> bytes:
    """The picture in 256 colours."""
    kept = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        kept, "PNG", optimize=True
    )
    return kept.getvalue()


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
        every = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
        shots = [
            ("", path, size, scheme)
            for size, scheme in ((NARROW, "dark"), (WIDE, "light"))
            for path in every
            if path != "404.html"  # its addresses are those of a server's root
        ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for name, path, (width, height), scheme in shots:
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
            if name == "site-search" and not search(page, "quantise"):
                wrong.append("search: finds nothing")
            wrong += wrong_on(page, f"{path}, {width} pixels, {scheme}", said)
            if name:
                picture = png(page.screenshot())
                if len(picture) > MOST:
                    wrong.append(f"{name}.png has {len(picture)} bytes")
                (IMAGES / f"{name}.png").write_bytes(picture)
                print(f"{name}.png: {len(picture)} bytes")
            page.close()
        browser.close()
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    print(f"{len(shots)} pages seen, {len(wrong)} things wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
