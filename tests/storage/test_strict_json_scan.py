"""What a JSON text shows without being parsed."""

import json
import random

import pytest

from maxjax.storage.strict_json import (
    LONE_SURROGATE,
    foreign_encoding,
    structure,
    without_escaped_quotes,
)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_foreign_encoding(encoding):
    assert foreign_encoding('{"a": 1}'.encode(encoding))
    assert foreign_encoding('{"ä": 1}'.encode()) is None


def test_structure_of_nested_text():
    assert structure(b"[" * 1000 + b"]" * 1000) == (1000, 1000, False)
    assert structure(b'{"a": [[], {}], "]]": "[["}') == (3, 4, False)
    assert structure(b"") == (0, 0, False)


@pytest.mark.parametrize("before", [0, 1, 255])
def test_long_digits_are_seen_wherever_they_begin(before):
    assert structure(b" " * before + b"7" * 600)[2]
    assert not structure(b" " * before + b"7" * 200 + b" " + b"7" * 200)[2]


def test_structure_agrees_across_chunks():
    rng = random.Random(3)
    for _ in range(200):
        text = bytes(rng.choice(b'[]{}",x\n5') for _ in range(rng.randrange(1, 200)))
        assert structure(text, chunk=rng.randrange(1, 64)) == structure(text)


@pytest.mark.parametrize(
    ("text", "lone"),
    [
        (rb"\ud83d\ude42", None),
        (rb"\ud83d", rb"\ud83d"),
        (rb"\uDE42", rb"\uDE42"),
        (rb"\ud83d\ud83d\ude42", rb"\ud83d"),
        (rb"\ud83d\ude42\ude42", rb"\ude42"),
        (rb"\\ud83d", None),
        (rb"\\\ud83d", rb"\ud83d"),
    ],
)
def test_lone_surrogates(text, lone):
    found = LONE_SURROGATE.search(without_escaped_quotes(text))
    assert (found and found.group()) == lone


def test_lone_surrogates_are_those_of_a_parser():
    rng = random.Random(4)
    pieces = (rb"\ud83d", rb"\uDE42", rb"\u0041", rb"\\", rb"\"", b"u", b"d83d", b"x")
    lone = 0
    for _ in range(2000):
        text = b'"' + b"".join(rng.choices(pieces, k=rng.randrange(1, 7))) + b'"'
        theirs = any(0xD800 <= ord(character) < 0xE000 for character in json.loads(text))
        assert bool(LONE_SURROGATE.search(without_escaped_quotes(text))) == theirs, text
        lone += theirs
    assert 200 < lone < 1800
