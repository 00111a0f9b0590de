"""What torch and transformers answer, kept beside the tests, which so run without either.

    expected = recorded(lambda: torch.nn.functional.gelu(torch.tensor(x)).numpy())

``pytest`` reads the answers from ``tests/oracles/recorded/``, one file for each file of tests.
``pytest --oracles=check`` asks the library itself, compares its answer with the one kept, and goes on
with it; ``pytest --oracles=write FILE`` keeps its answers. Where answers are read, torch and transformers
cannot be imported at all: what needs more of them than answers is marked ``oracle``. Such a test asks the
library, and with ``--all`` every test does, as there are answers for the default set only.
"""

import copy
import importlib
import importlib.abc
import json
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parent / "recorded"
LIBRARIES = ("torch", "transformers")
SHARED = "tests/shared.py"  # no file: its answers have names of their own
# Between machines the last bits of a float32 differ, and of a sum more than those.
RTOL, ATOL = 1e-4, 2e-5
# What writes a file puts its own version into it.
_VERSION = re.compile(r'"transformers_version": "[^"]*"')

_mode = "read"
_asks = False  # the running test is marked oracle, and nothing of it is kept
_calls: Counter[str] = Counter()
_new: dict[str, dict[str, Any]] = {}


def recorded(compute: Callable[[], Any], name: str = "", *, is_compared: bool = True) -> Any:
    """What ``compute`` returns: arrays, or dicts, lists, texts, bytes and numbers with arrays in them.

    The answer's key is the running test's name, case and number of the call. A fixture that several
    tests share, or a helper that is called in changing order, gives a ``name``, which is the key
    then; ``file::key`` is in a file of its own. ``is_compared`` is False where another version may
    differ, as in the bytes of a file.
    """
    if _asks or _mode == "ask":
        return compute()
    if name:
        file, _, key = name.rpartition("::")
        file = file or SHARED
    else:
        file, test = _test()
        _calls[test] += 1
        key = f"{test}/{_calls[test]}"
    if _mode == "read":
        kept = _kept(file)
        if key not in kept:
            pytest.fail(f"no answer is kept as '{key}': run pytest --oracles=write {file}")
        return _decoded(key, kept)
    value = compute()
    if _mode == "write":
        _new.setdefault(file, {})[key] = copy.deepcopy(value)  # the test may change its own
    elif is_compared and key in (kept := _kept(file)):
        _assert_near(value, _decoded(key, kept), key)
    return value


def is_kept(name: str) -> bool:
    """Whether there is an answer of this name to read: also outside of tests, as in a script."""
    return not is_live() and name in _kept(SHARED)


def recorded_files(directory: Path, write: Callable[[], Any], name: str = "") -> None:
    """What ``write`` puts into a directory, which must be empty before: files, as torch saves them."""

    def contents() -> dict[str, bytes]:
        write()
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}

    for file, content in recorded(contents, name, is_compared=False).items():
        (directory / file).write_bytes(content)


class Library:
    """torch or transformers, imported when something of it is called: so with answers kept, never.

    ``torch.nn.functional.gelu`` can be named anywhere; what it gives is for ``recorded`` to keep.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.__name__ = path.rsplit(".", 1)[-1]

    def _found(self) -> Any:
        above, _, name = self._path.rpartition(".")
        if not above:
            return importlib.import_module(name)
        found = Library(above)._found()
        return getattr(found, name) if hasattr(found, name) else importlib.import_module(self._path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = Library(f"{self._path}.{name}")
        found = inner._found() if is_live() else inner
        return inner if isinstance(found, types.ModuleType) else found

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._found()(*args, **options)


torch, transformers = Library("torch"), Library("transformers")


def is_live() -> bool:
    """Whether the libraries themselves answer."""
    return _asks or _mode != "read"


def start(mode: str, *, is_all: bool) -> None:
    """Sets what answers: ``read``, ``check`` or ``write``; with ``is_all`` the libraries in place of kept answers.

    Where answers are read, the libraries are hidden, so that the same tests pass where they are not installed.
    """
    global _mode
    _mode = "ask" if is_all and mode == "read" else mode
    if _mode == "read":
        sys.meta_path.insert(0, _Absent())


def begin(item: pytest.Item) -> None:
    """A test begins: the number of its next answer is 1."""
    global _asks
    _asks = item.get_closest_marker("oracle") is not None
    _calls.pop(item.nodeid.split("::", 1)[-1], None)


def finish() -> None:
    """Writes the new answers, beside those of tests that did not run."""
    for file, values in _new.items():
        ran = {key.rsplit("/", 1)[0] for key in values}
        arrays = {
            key: array
            for key, array in _kept(file).items()
            if key.rsplit("/", 1)[0] not in ran and key.rpartition("#")[0] not in values
        }
        for key, value in values.items():
            parts: list[np.ndarray] = []
            text = json.dumps(_encoded(value, parts))
            arrays[key] = np.frombuffer(text.encode(), np.uint8)
            arrays |= {f"{key}#{i}": part for i, part in enumerate(parts)}
        FOLDER.mkdir(exist_ok=True)
        np.savez_compressed(_path(file), **arrays)  # pyright: ignore


def _test() -> tuple[str, str]:
    """The file of the running test, and its name with its case."""
    nodeid = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
    file, _, test = nodeid.partition("::")
    return file, test


def _path(file: str) -> Path:
    return FOLDER / (file.removeprefix("tests/").removesuffix(".py").replace("/", ".") + ".npz")


@cache
def _kept(file: str) -> dict[str, np.ndarray]:
    if not _path(file).exists():
        return {}
    with np.load(_path(file), allow_pickle=False) as found:
        return dict(found)


def _encoded(value: Any, parts: list[np.ndarray]) -> Any:
    if isinstance(value, (np.ndarray, np.generic, bytes)):
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
        assert array.dtype.kind in "biufc", f"an array of {array.dtype} cannot be kept: view it"
        parts.append(array)
        return {"bytes" if isinstance(value, bytes) else "array": len(parts) - 1}
    if isinstance(value, dict):
        return {"dict": [[_encoded(k, parts), _encoded(v, parts)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(item, parts) for item in value]}
    assert value is None or isinstance(value, (str, int, float, bool)), type(value)
    return value


def _decoded(key: str, kept: dict[str, np.ndarray]) -> Any:
    def value(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind in ("array", "bytes"):
            array = kept[f"{key}#{content}"]
            return array.tobytes() if kind == "bytes" else array.copy()
        if kind == "dict":
            return {value(k): value(v) for k, v in content}
        items = [value(item) for item in content]
        return tuple(items) if kind == "tuple" else items

    return value(json.loads(kept[key].tobytes()))


def _assert_near(live: Any, kept: Any, key: str) -> None:
    if isinstance(kept, np.ndarray):
        live = np.asarray(live)
        assert (live.shape, live.dtype) == (kept.shape, kept.dtype), key
        if kept.dtype.kind in "fc":
            scale = max(
                float(np.nanmax(np.abs(np.where(np.isfinite(kept), kept, 0)), initial=0)), 1.0
            )
            np.testing.assert_allclose(live, kept, rtol=RTOL, atol=ATOL * scale, err_msg=key)
        else:
            np.testing.assert_array_equal(live, kept, err_msg=key)
    elif isinstance(kept, dict):
        assert list(live) == list(kept), key
        for item in kept:
            _assert_near(live[item], kept[item], key)
    elif isinstance(kept, (list, tuple)):
        assert len(live) == len(kept), key
        for one, other in zip(live, kept, strict=True):
            _assert_near(one, other, key)
    elif isinstance(kept, float):
        np.testing.assert_allclose(live, kept, rtol=RTOL, atol=ATOL, err_msg=key)
    elif isinstance(kept, str):
        assert _VERSION.sub("", live) == _VERSION.sub("", kept), key
    else:
        assert live == kept, key


class _Absent(importlib.abc.MetaPathFinder):
    """Refuses to import the libraries, as where they are not installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.split(".")[0] in LIBRARIES:
            raise ImportError(
                f"{fullname} is not there for tests that read kept answers: give recorded(...) what "
                "needs it, or mark the test with @pytest.mark.oracle"
            )
