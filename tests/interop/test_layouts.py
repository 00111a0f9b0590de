"""Layouts against NumPy written out, by pieces against the whole, and there and back."""

import itertools
import random

import numpy as np
import pytest

from maxjax.errors import UserInputError
from maxjax.interop.layouts import layout
from maxjax.interop.renaming import Renaming

# Text, shape of the array, what NumPy makes of the file's tensor.
CASES = {
    "o i -> i o": ((2, 3), lambda w: w.T),
    "a b -> a b": ((2, 3), lambda w: w),
    "(h d) e -> e h d": ((5, 3, 2), lambda w: w.T.reshape(5, 3, 2)),
    "e (h d) -> h d e": ((3, 2, 5), lambda w: w.T.reshape(3, 2, 5)),
    "(h d) -> h d": ((3, 4), lambda w: w.reshape(3, 4)),
    "o i h w -> h w i o": ((2, 3, 4, 5), lambda w: w.transpose(2, 3, 1, 0)),
    "i o s0 s1 -> -s0 -s1 i o": ((2, 3, 4, 5), lambda w: w.transpose(2, 3, 0, 1)[::-1, ::-1]),
    "(1/3 h d) e -> e h d": ((5, 3, 2), lambda w: w[6:12].T.reshape(5, 3, 2)),
    "(h 2/3 d) e -> e h d": (
        (5, 4, 2),
        lambda w: w.reshape(4, 3, 2, 5)[:, 2].transpose(2, 0, 1),
    ),
    "0/1 ->": ((), lambda w: w[0]),
    "(a b c) d -> c -a d b": (
        (2, 3, 4, 5),
        lambda w: w.reshape(3, 5, 2, 4).transpose(2, 0, 3, 1)[:, ::-1],
    ),
}


def file_for(text, shape):
    turn = layout(text).of(shape)
    return turn, np.arange(np.prod(turn.file_shape, dtype=int)).reshape(turn.file_shape)


def spans(size):
    return [(a, b) for a in range(size + 1) for b in range(a, size + 1)]


@pytest.mark.parametrize("text", CASES)
def test_the_whole(text):
    shape, oracle = CASES[text]
    turn, file = file_for(text, shape)
    np.testing.assert_array_equal(turn.apply(file), oracle(file))
    assert turn.apply(file).shape == shape


@pytest.mark.parametrize("text", CASES)
def test_every_piece_is_that_of_the_whole(text):
    shape, oracle = CASES[text]
    turn, file = file_for(text, shape)
    boxes = list(itertools.islice(itertools.product(*map(spans, shape)), 20000))
    for box in random.Random(0).sample(boxes, min(len(boxes), 300)):
        part = turn.file_box(box)
        read = file[tuple(slice(*span) for span in part)].copy()
        expected = oracle(file)[tuple(slice(*span) for span in box)]
        np.testing.assert_array_equal(turn.take(read, box), expected)


@pytest.mark.parametrize("text", CASES)
def test_and_back(text):
    shape, oracle = CASES[text]
    turn, file = file_for(text, shape)
    part, parts = turn.layout.part
    arrays = []
    for k in range(parts):
        other = layout(text.replace(f"{part}/{parts}", f"{k}/{parts}")).of(shape)
        arrays.append(other.apply(file))
    np.testing.assert_array_equal(turn.back(arrays), file)


def test_a_piece_by_whole_heads_reads_nothing_else():
    turn = layout("(h d) e -> e h d").of((16, 8, 4))
    assert turn.file_box(((0, 16), (2, 4), (0, 4))) == ((8, 16), (0, 16))
    assert turn.file_box(((4, 8), (0, 8), (0, 4))) == ((0, 32), (4, 8))
    # A piece of each head is in no rectangle but that of the heads.
    assert turn.file_box(((0, 16), (2, 4), (1, 2))) == ((8, 16), (0, 16))
    assert turn.file_box(((0, 16), (2, 3), (1, 3))) == ((9, 11), (0, 16))


def test_layers():
    turn = layout("o i -> * i o").of((3, 2, 5))
    assert turn.file_shape == (5, 2)
    np.testing.assert_array_equal(turn.apply(np.arange(10).reshape(5, 2))[0, :, 4], [8, 9])
    assert layout("o i -> i * o").stacks == 1


@pytest.mark.parametrize(
    "text",
    [
        "o i", "o i -> i", "o -> o i", "o o -> o", "(o i -> i o", "o) i -> i o", "o 3/3 -> o",
        "((a b) c) -> a b c", "o* i -> i o", "* o -> o *", "-o i -> i o", "o i -> i o i",
        "(0/2 a) (1/2 b) -> a b", "a.b -> b", "a -> -*  a",
    ],
)  # fmt: skip
def test_what_is_no_layout(text):
    with pytest.raises(UserInputError, match="is not a layout"):
        layout(text)


# --- names --------------------------------------------------------------------------------------

TABLE = {
    "skip.**": None,
    "a.*.q.weight": ("b.*.query.kernel", "o i -> i o"),
    "a.0.q.bias": "b.0.special",
    "a.*.q.bias": "b.*.query.bias",
    "emb": ["x", ("y.kernel", "v e -> e v")],
    "s.*.*.w": ("t.*.w", "o -> * o"),
    "**.g": "**.scale",
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.3.q.weight", [("b.3.query.kernel", "o i -> i o", None)]),
        ("a.0.q.bias", [("b.0.special", None, None)]),
        ("a.1.q.bias", [("b.1.query.bias", None, None)]),
        ("a.1.2.q.bias", [("a.1.2.q.bias", None, None)]),
        ("skip.me.too", []),
        ("emb", [("x", None, None), ("y.kernel", "v e -> e v", None)]),
        ("s.4.k.w", [("t.k.w", "o -> * o", 4)]),
        ("s.x.k.w", [("s.x.k.w", None, None)]),
        ("p.q.g", [("p.q.scale", None, None)]),
    ],
)
def test_routes(name, expected):
    found = Renaming(TABLE).routes(name)
    assert [(r.target, r.change and str(r.change), r.index) for r in found] == expected


def test_the_way_back():
    table = Renaming(TABLE)
    for target, name in [
        ("b.7.query.kernel", "a.7.q.weight"), ("b.0.special", "a.0.q.bias"), ("x", "emb"),
        ("b.1.query.bias", "a.1.q.bias"), ("t.k.w", "s.*.k.w"), ("other", "other"),
        ("p.scale", "p.g"),
    ]:  # fmt: skip
        assert table.origin(target).name == name
    assert table.origin("t.k.w").number(12) == "s.12.k.w"
    with pytest.raises(UserInputError, match="to another array"):
        table.origin("skip.this")


def test_changes_by_the_module_s_names():
    table = Renaming({"w": "a.kernel"}, {"**.kernel": "o i -> i o"})
    assert str(table.routes("w")[0].change) == str(table.origin("a.kernel").change) == "o i -> i o"
    assert table.routes("bias")[0].change is None


@pytest.mark.parametrize(
    "table",
    [
        {"a.*": "b"}, {"a": "b.*"}, {"a.*.*": ("b", "o -> * o")}, {"a": ("b", "o -> * o")},
        {"a": 3}, {"a": ("b", 3)}, {"a": ("b", "no")}, ["a"], {"a": ("b", None, None)},
    ],
)  # fmt: skip
def test_what_is_no_table(table):
    with pytest.raises(UserInputError):
        Renaming(table)
