"""Folding, names and sizes of rows, and their text; pictures against readers of others."""

import io
import itertools
import re

import numpy as np
import pytest

from maxjax.rendering.attention import draw_attention
from maxjax.rendering.division import Division, numbers
from maxjax.rendering.picture import bars, png
from maxjax.rendering.rendered import table, tree
from maxjax.rendering.row import Row, braced, bytes_text, flat, fold, lines, short
from maxjax.rendering.transcript import transcript


def members(name):
    """The numbers that a folded name stands for."""
    found = []
    for part in name.strip("{}").split(","):
        if ".." in part:
            first, last = map(int, part.split(".."))
            # "0,2..30": the step is from the number before.
            step = first - found[-1] if len(found) == 1 and name.count(",") == 1 else 1
            found += range(first, last + 1, step)
        else:
            found.append(int(part))
    return found


def test_folding_loses_nothing():
    """Over all lists of six of three kinds: each item is in one row of its kind, in order of rows."""
    for kinds in itertools.product("abc", repeat=6):
        rows = [Row(str(i), kind, parameters=1, nbytes=2) for i, kind in enumerate(kinds)]
        folded = fold(rows)
        seen = {i: row.kind for row in folded for i in members(row.name)}
        assert seen == dict(enumerate(kinds))
        assert (
            sum(row.parameters for row in folded) == 6 and sum(row.nbytes for row in folded) == 12
        )
        assert all(row.count == len(members(row.name)) for row in folded)
        assert len({row.kind for row in folded}) <= len(folded)


def test_long_and_irregular_lists_have_short_names():
    kinds = "aaaaab" * 40 + "aa"
    folded = fold([Row(str(i), kind) for i, kind in enumerate(kinds)])
    assert [(row.count, row.kind) for row in folded] == [(200, "a"), (40, "b"), (2, "a")]
    assert folded[0].name == "{0..4,6..10,…,234..238}" and folded[1].name == "{5,11..239}"
    assert numbers([]) == "" and braced([7]) == "7" and numbers([1, 2]) == "1..2"


def test_sizes_and_texts():
    assert [bytes_text(n) for n in (0, 1, 1023, 1024, 1536, 810 << 30, 5 << 50)] == [
        "0 bytes", "1 byte", "1,023 bytes", "1 KiB", "1.5 KiB", "810 GiB", "5 PiB",
    ]  # fmt: skip
    assert len(short("x" * 10_000, 50)) == 50 and short("\x1b[0m") == "\\x1b[0m"
    assert len(short("\x1b" * 100, 50)) == 50


def test_text_opens_the_largest_first():
    arrays = lambda n: tuple(
        Row(f"w{i}", "", "float32", (n,), n, 4 * n, is_array=True) for i in range(3)
    )
    part = lambda name, n: Row(name, "Part", "", None, 3 * n, 12 * n, children=arrays(n))
    inner = Row("big", "Inner", "", None, 3060, 12240, children=(part("x", 1000), part("y", 20)))
    shown = lines("Top", Row("", "Top", children=(part("small", 2), inner)))
    assert [line.split()[0] for line in shown.splitlines()] == ["Top", "small", "big.x", "big.y"]
    assert lines("Top", Row()) == "Top"
    assert [name for name, _ in flat((inner,))][:2] == ["big", "big.x"]


def test_a_tree_shows_what_is_near_the_top():
    leaves = tuple(Row(f"leaf{i}", "Leaf") for i in range(500))
    page = tree("T", Row("", "T", children=(Row("a", "A", children=leaves), Row("b", "B"))))
    assert ">b<" in page and "leaf0" in page and "leaf400" not in page and "and 412 more" in page
    assert len(page) < 30_000
    assert "&lt;i&gt;" in table(["name"], [["<i>"]]) and "<i>" not in table(["name"], [["<i>"]])


def test_chats_are_escaped():
    messages = [
        {"role": "user", "content": "<script>alert(1)</script>\x00\ud800"},
        {"content": [1, 2]},
    ]
    page = transcript("</b><script>", messages * 40)
    assert "<script" not in page and "40 earlier messages" in page
    page.encode("utf-8")


# --- divisions


def test_drawings_of_a_division_have_all_devices():
    rng = np.random.default_rng(0)
    for rows, columns, copies in itertools.product((1, 2, 4), (1, 3), (1, 2)):
        boxes = {}
        for number, (_, i, j) in enumerate(np.ndindex(copies, rows, columns)):
            boxes[number] = ((3 * i, 3 * i + 3), (2 * j, 2 * j + 2))
        division = Division.of((3 * rows, 2 * columns), "t", boxes)
        assert division.counts == (rows, columns)
        assert sum(map(division.size_on, boxes)) == copies * 6 * rows * columns
        assert len(set(map(len, division.text().splitlines()))) == 1  # the edges are straight
        for drawing in (
            division.text(),
            division.line(),
            re.sub(r"<title>.*?</title>", "", division.svg()),
        ):
            # The numbers of every part are in it, each part once.
            labels = [numbers(held) for _, held in division.parts]
            assert all(label in drawing for label in labels)
        device = int(rng.integers(len(boxes)))
        assert division.on_device(device).count("<rect") == 2 and "<path" in division.small()
    many = Division.of((4096,), "t", {i: ((i, i + 1),) for i in range(4096)})
    assert len(many.text()) < 2000 and len(many.small()) < 400


# --- pictures


def test_png_is_read_by_others():
    images = pytest.importorskip("PIL.Image")
    values = np.array([[0.0, 1.0, 0.5], [np.nan, -np.inf, 0.25]])
    read = np.asarray(images.open(io.BytesIO(png(values, 0, 1))).convert("RGB"))
    assert read.shape == (2, 3, 3)
    brightness = read.astype(int).sum(-1)
    assert brightness[0, 0] > brightness[1, 2] > brightness[0, 2] > brightness[0, 1]
    assert (read[1, 0] == (214, 39, 40)).all() and (read[1, 1] == (214, 39, 40)).all()
    signed = np.asarray(
        images.open(io.BytesIO(png(np.array([[-1.0, 0.0, 1.0]]), -1, 1, True))).convert("RGB")
    )
    assert (
        signed[0, 0, 2] > signed[0, 0, 0]
        and signed[0, 2, 0] > signed[0, 2, 2]
        and signed[0, 1].min() > 240
    )
    assert bars([]) == "" and bars([0, 0]) == "  "


def test_attention_maps(monkeypatch):
    rng = np.random.default_rng(0)
    weights = rng.random((2, 3, 4, 6)).astype(np.float32)
    shown = draw_attention(weights, list("abcdef"), batch=1, heads=[2, 0])
    np.testing.assert_array_equal(shown.weights, weights[1][[2, 0]])
    assert shown.query_tokens == ("c", "d", "e", "f") and shown.names == ("head 2", "head 0")
    page = shown._repr_html_()
    assert page.count("data:image/png") == 2 and page.count(">a</text>") == 2 and "head 2" in page
    assert [line.split()[0] for line in repr(shown).splitlines()[1:5]] == ["c", "d", "e", "f"]
    large = draw_attention(rng.random((64, 300, 300)))
    assert "and 32 more heads" in large._repr_html_() and len(repr(large).splitlines()) < 30
    hostile = draw_attention(np.eye(2), ["<script>", "\x1b[31m"])
    assert "<script>" not in hostile._repr_html_() and "\x1b" not in repr(hostile)
    for wrong, match in (
        ((np.zeros(3),), "shape"),
        ((np.zeros((0, 2, 2)),), "shape"),
        (([[1], [1, 2]],), "shape"),
        ((np.eye(2, dtype=complex),), "real numbers, not complex128"),
        (([["a"]],), "real numbers"),
        ((np.eye(2), ["a"]), "1 tokens for 2 keys"),
    ):
        with pytest.raises(ValueError, match=match):
            draw_attention(*wrong)
    for options in ({"batch": 2}, {"heads": [3]}, {"query_tokens": "a"}):
        with pytest.raises(ValueError, match="2 rows|no head 3|4 queries"):
            draw_attention(weights, **options)
