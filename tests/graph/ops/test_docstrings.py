"""Every op says what it is; names that neither MAX nor maxjax has are attribute errors."""

import inspect

import pytest

from maxjax.graph import ops


def test_what_neither_has():
    with pytest.raises(AttributeError, match="softmaxx"):
        ops.softmaxx  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(ops, "conv9d")


def test_every_op_says_what_it_is():
    functions = [
        f for _, f in inspect.getmembers(ops, inspect.isfunction) if not f.__name__.startswith("_")
    ]
    assert len(functions) > 100
    assert [f.__name__ for f in functions if not f.__doc__] == []
