"""Names of MAX that there are none of say so; other names are attribute errors."""

import inspect

import pytest

from maxjax.graph import ops
from maxjax.graph.ops.absent import REASONS


@pytest.mark.fast(
    "allgather", "broadcast", "reduce_scatter_rms_norm", "buffer", "parallel", "roi_align"
)
@pytest.mark.parametrize("name", REASONS)
def test_what_max_has_and_we_have_not(name):
    with pytest.raises(NotImplementedError, match=rf"MAX's ops\.{name} does not exist"):
        getattr(ops, name)


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
