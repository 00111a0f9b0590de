"""Recorded answers in every format of calls: whole, and cut at every character and at random places.

``answers/`` has 50 of each; the first line of a file says which models write them and who has read them.
"""

import json
from pathlib import Path

import pytest

from maxjax.text.formats import FORMATS
from maxjax.text.reasoning import parts_of
from tests.text.test_reasoning import cuts, joined

FOLDER = Path(__file__).parent / "answers"
TOOLS = json.loads((FOLDER / "tools.json").read_text())
FILES = {path.stem: path.read_text().splitlines() for path in sorted(FOLDER.glob("*.jsonl"))}
HEADS = {name: json.loads(lines[0]) for name, lines in FILES.items()}


def records(name):
    return [json.loads(line) for line in FILES[name][1:]]


@pytest.mark.parametrize("name", FILES)
def test_recorded_answers_have_their_calls_and_content(name):
    assert len(records(name)) == 50
    for record in records(name):
        found = parts_of(record["text"], "", HEADS[name]["format"], TOOLS)
        assert [[one["name"], one["arguments"]] for one in found.tool_calls] == record["calls"], (
            record
        )
        if "content" in record:  # without the whitespace around calls
            assert found.content.split() == record["content"].split()


@pytest.mark.parametrize("name", FILES)
def test_recorded_answers_in_pieces_have_the_deltas_of_the_whole(name):
    arguments = HEADS[name]["format"], "", TOOLS
    for i, record in enumerate(records(name)):
        whole = joined([record["text"]], *arguments)
        for pieces in cuts(record["text"], seed=i, two=False):
            assert joined(pieces, *arguments) == whole


@pytest.mark.parametrize("name", FILES)
def test_formats_with_marks_are_read_without_their_name(name):
    """Values without quotes get no types from schemas then: only calls whose values have them are compared."""
    if HEADS[name]["format"] in ("llama3_json", "llama4_pythonic"):
        return
    for record in records(name):
        found = parts_of(record["text"])
        assert [one["name"] for one in found.tool_calls] == [one[0] for one in record["calls"]], (
            record
        )


def test_every_format_has_recorded_answers():
    names = {head["format"] for head in HEADS.values()}
    # Those without any are written as others are: the syntaxes are the same.
    tested = {syntax for one in FORMATS if names & {*one.names} for syntax in one.syntaxes}
    assert all({*one.syntaxes} <= tested for one in FORMATS)
