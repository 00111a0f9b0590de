"""The records of the formats: each names functions that are there, and no name means two formats."""

import pytest

from maxjax.storage.formats import FORMATS, SUFFIXES, UNREADABLE


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_what_a_record_names_is_there(format):
    assert format.open.__module__.startswith("maxjax.storage.")
    assert bool(format.stem) == bool(format.reads)
    assert not format.reads or callable(format.read)
    assert {*format.single} <= {*format.suffixes}
    assert format.suffixes or format.marks


def test_no_suffix_means_two_formats():
    listed = [suffix for format in FORMATS for suffix in format.suffixes]
    assert len(listed) == len(SUFFIXES) and not {*SUFFIXES} & {*UNREADABLE}
