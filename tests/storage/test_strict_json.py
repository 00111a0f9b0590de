"""Strict JSON: equal to Python's json on good text, one clear error on the rest."""

import gc
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMissingError,
    CheckpointTruncatedError,
)
from maxjax.storage import Limits, load_json, open_safetensors
from tests.properties import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(
        st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(VALUES, st.booleans())
@examples(40)
def test_reads_what_json_writes(value, ascii_only):
    assert load_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_reads_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 384, "layers": [1, 2.5, null, true]}\n')
    for given_path in (path, str(path)):
        assert load_json(given_path) == {"hidden_size": 384, "layers": [1, 2.5, None, True]}
    with pytest.raises(CheckpointMissingError, match="no such file"):
        load_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "error", "offset", "says"),
    [
        (b"", CheckpointTruncatedError, 0, "empty"),
        (b" \n", CheckpointTruncatedError, 0, "empty"),
        (b'{"a": ', CheckpointTruncatedError, 6, "too early"),
        (b'{"a": 1', CheckpointTruncatedError, 7, "too early"),
        (b'{"a', CheckpointTruncatedError, 1, "too early"),
        (b'{"a": fal', CheckpointTruncatedError, 6, "too early"),
        (b'{"a": 1}x', CheckpointFormatError, 8, "Extra data"),
        (b'{"a": 01}', CheckpointFormatError, 7, "delimiter"),
        (b"{'a': 1}", CheckpointFormatError, 1, "property name"),
        ('{"é": 1, 2}'.encode(), CheckpointFormatError, 10, "property name"),
        (b'{"a": "\x01"}', CheckpointFormatError, 7, "control character"),
        (b'{"a": "\xff"}', CheckpointFormatError, 7, "FF"),
        (b'\xef\xbb\xbf{"a": 1}', CheckpointFormatError, 0, "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), CheckpointFormatError, 0, "UTF-16"),
        ('{"a": 1}'.encode("utf-16-be"), CheckpointFormatError, 0, "UTF-16"),
        (rb'{"a": "\ud83d"}', CheckpointFormatError, 7, "surrogate"),
        (rb'{"a": "\ude42\ud83d"}', CheckpointFormatError, 7, "surrogate"),
        (b'{"a": 1, "b": 2, "a": 3}', CheckpointFormatError, 17, "'a' occurs twice"),
        (b'{"x": {"a": 1, "a": 1}}', CheckpointFormatError, 15, "'a' occurs twice"),
        (b'{"a": [1, NaN]}', CheckpointFormatError, 1, "'a.1' is not a JSON number"),
        (b'{"a": -Infinity}', CheckpointFormatError, 1, "-inf"),
        (b"[" * 65 + b"]" * 65, CheckpointLimitError, None, "json_depth"),
        (b"[" * 10**6, CheckpointLimitError, None, "json_depth"),
        (b'{"a":' * 10**5, CheckpointLimitError, None, "json_depth"),
        (b"[" + b"7" * 5000 + b"]", CheckpointLimitError, 1, "json_digits"),
    ],
)
def test_bad_text_gives_one_clear_error(text, error, offset, says):
    with pytest.raises(CheckpointError) as caught:
        load_json(text, name="config.json")
    assert type(caught.value) is error
    assert caught.value.offset == offset
    assert says in str(caught.value) and str(caught.value).startswith("config.json: ")


def test_pairs_of_surrogates_and_escaped_backslashes_are_text():
    assert load_json(rb'["\ud83d\ude42", "\\ud83d", "\\\ud83d\ude42"]') == ["🙂", r"\ud83d", "\\🙂"]


def test_brackets_and_digits_inside_strings_count_for_nothing():
    text = json.dumps({"[" * 500 + '\\"[': "9" * 6000, "x-0": -1})
    assert load_json(text.encode()) == json.loads(text)


def test_nan_where_it_is_allowed():
    value = load_json(b'{"a": [NaN, Infinity, -Infinity]}', allow_nan=True)["a"]
    assert math.isnan(value[0]) and value[1:] == [math.inf, -math.inf]
    assert {type(one) for one in value} == {float}


def test_limits_can_be_raised_and_lowered():
    deep = b"[" * 70 + b"]" * 70
    assert load_json(deep, limits=Limits(json_depth=70))
    digits = b"[" + b"7" * 4300 + b"]"
    assert load_json(digits) == [int("7" * 4300)]
    with pytest.raises(CheckpointLimitError, match="json_digits"):
        load_json(b"[123456]", limits=Limits(json_digits=5))
    with pytest.raises(CheckpointLimitError, match="json_depth"):  # no RecursionError
        load_json(b"[" * 10**5 + b"]" * 10**5, limits=Limits(json_depth=10**6))


def test_size_limit(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b" " * 100 + b"]")
    with pytest.raises(CheckpointLimitError, match="json_bytes"):
        load_json(path, limits=Limits(json_bytes=50))


def test_many_small_containers_are_refused():
    text = b"[" + b",".join([b"{}"] * 400) + b"]"
    with pytest.raises(CheckpointLimitError, match="tensors"):
        load_json(text, limits=Limits(tensors=100))


def test_minus_zero_is_a_float():
    value = load_json(b"[-0, 0, -10]")
    assert [type(one) for one in value] == [float, int, int]


def test_collector_is_on_again(tmp_path):
    assert gc.isenabled()
    (tmp_path / "m.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{]")
    with pytest.raises(CheckpointFormatError):
        open_safetensors(tmp_path / "m.safetensors")
    assert gc.isenabled()


def test_mutated_texts_agree_with_json_or_are_refused():
    """What is read equals what Python's json reads; no exception of another class."""
    rng = random.Random(5)
    seed = rb'{"a": [1, -2.5e3, true, null], "b\u00e9": {"x": "y\\\"", "z": [[], {}]}}'
    for _ in range(2000):
        data = bytearray(seed)
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(2)] = bytes([rng.choice(seed + b"\0\xff")])
        try:
            value = load_json(bytes(data))
        except CheckpointError:
            continue
        assert value == json.loads(bytes(data))


def test_too_many_values_are_refused_before_the_parser_starts(monkeypatch):
    data = b"[" + b"1," * 50 + b"1]"
    assert len(load_json(data, name="x.json")) == 51
    monkeypatch.setattr(json.JSONDecoder, "decode", None)
    with pytest.raises(CheckpointLimitError, match="too many values.*json_values"):
        load_json(data, name="x.json", limits=Limits(json_values=49))
