"""`python -m scripts.pages`, and what it asks of the pages before it runs them."""

import pytest

from scripts import pages

PAGE = """# A page

Two words.

```python
import os
os.environ["SEEN_BY_PYTHON"] = "1"
a = 1
print(a)
```

```text
1
```

<!-- file: b.py -->
```python
print("never run here")
```

<!-- not run: needs the hub -->
```python
raise SystemExit
```

<!-- needs: no_such_package -->
```python
import no_such_package
```

```console
$ cat b.py; echo "[$SEEN_BY_PYTHON]"
print("never run here")
```

<!-- not compared: it is another time -->
```text
12:00
```

```py another library
import another_library
```
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_page_is_followed_in_a_process_and_a_folder_of_its_own(page, tmp_path):
    word, said, _ = pages.run(page, str(tmp_path))
    assert word == "ok", said
    assert said.splitlines() == [
        "page.md:22 was not run: needs the hub",
        "page.md:27 was not run: ['no_such_package']",
    ]
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("print(a)", "print(2)", "page.md:12: printed\n2"),
        ("a = 1", "a = path", "name 'path' is not defined"),
        ("cat b.py", "cat c.py", "page.md:31: exit code 1"),
        ("no_such_package -->", "os -->", "No module named 'no_such_package'"),
    ],
)
def test_a_page_that_does_not_run_fails(page, tmp_path, old, new, message):
    page.write_text(PAGE.replace(old, new))
    word, said, _ = pages.run(page, str(tmp_path))
    assert word == "FAILED" and message in said, said


def test_words_are_those_outside_of_code(tmp_path):
    assert pages.words(PAGE) == len("# A page Two words.".split())


def test_the_pages_are_short():
    assert sum(pages.words(page.read_text()) for page in pages.PAGES) <= pages.MOST_WORDS


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_every_block_is_run_or_says_why(page):
    for block in pages.blocks(page.read_text()):
        at = f"{page.name}:{block.line}"
        if block.mark == "not run":
            assert block.value in pages.REASONS, at
        assert block.kind in pages.KINDS or block.kind.startswith(("py ", "sh ")), at


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_no_code_is_without_a_fence(page):
    """A paragraph that is indented by four spaces is code in Markdown, and nothing would run it."""
    before, fenced, listed = "", False, False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            assert not line.startswith(" "), f"{page.name}:{number}: an indented fence"
            fenced = not fenced
        listed = line.lstrip()[:2] in ("* ", "- ") or (listed and (not line or line[:1] == " "))
        code = not fenced and not before.strip() and line.startswith("    ") and not listed
        assert not code, f"{page.name}:{number}: code without a fence"
        before = line
