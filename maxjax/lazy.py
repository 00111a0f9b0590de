"""Lazy imports: names of a package that are imported when they are first used.

Importing one file of a package runs its ``__init__``, which exports the names of all its files:
with plain imports there, a user of one layer would import all of them. Each ``__init__`` lists its
names twice, under ``TYPE_CHECKING`` for type checkers and as a table for :func:`attributes`;
tests/test_facade.py compares the two.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .errors import closest


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """A context without Python's garbage collector, for code that makes many objects but no reference cycles.

    Objects that an import makes are kept, yet the collector would scan all of JAX's objects for garbage,
    which takes a third of the time of the imports. It would also scan a growing table of tensors
    repeatedly, which takes half of the time for 100,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def attributes(
    package: str, homes: Mapping[str, str], missing: Callable[[str], Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package (PEP 562).

    Args:
        package: name of the package.
        homes: file → its names, separated by spaces; "" for submodules themselves.
        missing: function for names that are not in ``homes``, from :func:`maxjax.absent.absent`.

    Submodules that are not in ``homes`` are found too, as after plain imports. A name that is also
    the name of a file in the package must be imported eagerly: otherwise importing the file would
    replace it with the submodule.
    """
    places = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        home = places.get(name, "")
        if not home and name not in places:
            known = not name.startswith("__") and importlib.util.find_spec(f"{package}.{name}")
            if not known:
                if missing is not None:
                    with contextlib.suppress(AttributeError):
                        return missing(name)
                like = None if name.startswith("_") else closest(name, places)
                hint = f": did you mean {like!r}?" if like else ""
                raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        with without_collector():
            found = importlib.import_module(f"{package}.{home or name}")
        value = getattr(found, name) if home else found
        setattr(sys.modules[package], name, value)
        return value

    given = vars(sys.modules[package]).items()
    eager = {
        name for name, value in given if not (name[0] == "_" or isinstance(value, types.ModuleType))
    }
    return find, lambda: sorted({*vars(sys.modules[package]), *places}), sorted(eager | {*places})
