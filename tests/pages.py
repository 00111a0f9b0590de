"""Reads the HTML that objects show in notebooks, with a parser that is strict about tags."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """The tags and the text of an HTML page; raises if tags do not match."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.words = [], [], ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [tag] * (tag != "br")
        assert not any(
            name.startswith("on") or "://" in (value or "")
            for name, value in attrs
            if name != "xmlns"
        )

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data if self.open and self.open[-1] != "style" else ""


def page_of(shown):
    """The HTML page of an object; checks that it has no script and loads nothing."""
    page = Page(shown._repr_html_())
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    return page
