"""docs/families.md names public names only. ``python -m scripts.pages families`` runs the page."""

import re

from scripts import pages

PAGE = (pages.ROOT / "docs" / "families.md").read_text()


def test_no_private_name_is_needed():
    code = "".join(block.code for block in pages.blocks(PAGE) if block.kind == "python")
    private = set(re.findall(r"\b_[a-z]\w*", code)) | set(re.findall(r"`_[a-z]\w*`", PAGE))
    assert not private
