"""Cartesian products of options as test cases: all of them, or the few that have every pair of values.

Most mistakes depend on one value or on two together, so a list in which each value of an axis
occurs with each value of every other axis finds nearly what all cases find, with a fraction of them.
With MAXJAX_ALL_PRODUCTS=1 in the environment, tests that take their cases from here run all cases.
"""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get("MAXJAX_ALL_PRODUCTS", "") not in ("", "0")

# Parts of arrays of different sizes are equal bit for bit with XLA's usual flags; without LLVM's
# optimiser, as in these tests, loops of different lengths may differ in the last bit.
EXACT = {"rtol": 0.0, "atol": 0.0} if ALL else {"rtol": 1e-6, "atol": 1e-7}


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases of a product, each a tuple with one value of each axis, in the product's order.

    The choice is greedy: the next case is the first one with the most pairs that are not covered yet.

    Example:
        >>> len(pairwise("abc", range(2), range(2), range(4))), 3 * 2 * 2 * 4
        (12, 48)
    """
    values = [list(axis) for axis in axes]
    every = list(itertools.product(*(range(len(axis)) for axis in values)))
    chosen = every if ALL else _covering(every)
    return [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in chosen]


def _pairs(case: tuple[int, ...]) -> set[tuple[Any, Any]]:
    return set(itertools.combinations(enumerate(case), 2))


def _covering(every: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    missing = set().union(*map(_pairs, every))
    chosen: list[tuple[int, ...]] = []
    while missing:
        best = max(every, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return sorted(chosen)


def each_value(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The fewest cases of a product in which each value of each axis occurs at least once.

    For tests that take many seconds each.

    Example:
        >>> each_value("abc", (1, 2))
        [('a', 1), ('b', 2), ('c', 1)]
    """
    values = [list(axis) for axis in axes]
    if ALL:
        return list(itertools.product(*values))
    longest = max(map(len, values))
    return [tuple(axis[i % len(axis)] for axis in values) for i in range(longest)]


def fast_and_slow(fast: Iterable[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: the cases of the fast set, and the other cases, marked slow.

    Example:
        >>> [case.values for case in fast_and_slow([(1, 2)], each_value((0, 1), (3, 2)))]
        [(1, 2), (0, 3)]
    """
    first = list(fast)
    rest = [case for case in cases if case not in first]
    marked = [pytest.param(*case, marks=pytest.mark.slow) for case in rest]
    return [*(pytest.param(*case) for case in first), *marked]


def campaign_but(
    count: int, cases: Iterable[tuple[Any, ...]], *, oracle: bool = False
) -> list[Any]:
    """Parameters of a test: the first ``count`` are in the default set, the others only in a campaign.

    With ``oracle``, the others call the oracle itself, as its answers are recorded for the first ones only.

    Example:
        >>> [len(case.marks) for case in campaign_but(1, [(0,), (1,), (2,)])]
        [0, 1, 1]
    """
    marks = [pytest.mark.campaign, *([pytest.mark.oracle] if oracle else [])]
    return [
        pytest.param(*case, marks=marks if number >= count else [])
        for number, case in enumerate(cases)
    ]


def first(few: Iterable[tuple[Any, ...]], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases, with those of ``few`` before the others.

    Example:
        >>> first([(2,)], [(1,), (2,), (3,)])
        [(2,), (1,), (3,)]
    """
    begin = list(few)
    return [*begin, *(case for case in cases if case not in begin)]


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """``count`` of a list of cases, spread evenly over it.

    Example:
        >>> some("abcdef", 3)
        ['a', 'c', 'e']
    """
    every = list(cases)
    return every if ALL or count >= len(every) else every[:: len(every) // count][:count]
