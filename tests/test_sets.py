"""Which cases of a test marked ``sampled`` are in the default set."""

import itertools
from dataclasses import dataclass

import pytest

from tests.conftest import sample


@dataclass(frozen=True)
class Spec:
    params: dict


@dataclass(frozen=True, eq=False)
class Case:
    callspec: Spec


def cases(**axes):
    return [
        Case(Spec(dict(zip(axes, row, strict=True)))) for row in itertools.product(*axes.values())
    ]


def values(chosen):
    return [tuple(case.callspec.params.values()) for case in chosen]


def test_each_value_of_each_argument_occurs():
    found = sample(cases(a="xyz", b=(1, 2)))
    assert values(found) == [("x", 1), ("y", 2), ("z", 1)]


@pytest.mark.parametrize(
    ("count", "expected"), [(1, "a"), (3, "ace"), (6, "abcdef"), (9, "abcdef")]
)
def test_a_number_of_cases_is_spread_over_a_list(count, expected):
    assert "".join(name for (name,) in values(sample(cases(a="abcdef"), count))) == expected
