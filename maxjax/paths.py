"""Paths that a caller gives: checked by one function, before anything is opened or made."""

from __future__ import annotations

import os
import re
from typing import Any

from .errors import CheckpointMissingError, UserInputError

# The scheme of a URL: two letters at least, as one letter is a drive of Windows.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")
_ADVICE = {
    "file": "Pass the path without file://.",
    "hf": "Pass the name on the hub without hf://: org/name.",
}


def local_path(path: str | bytes | os.PathLike[Any]) -> str:
    """Returns a caller's path as text; refuses what is no path of this machine's file system.

    Every function that takes a path calls this one first. A URL would otherwise be taken for a
    relative path, and be read from or made below the current directory.

    Raises:
        UserInputError: the path is empty, or a URL (``gs://…``, ``s3://…``, ``file://…``).
        CheckpointMissingError: it holds a character that no path can have.
        TypeError: it is neither text nor a ``Path``.

    Example:
        >>> local_path("models/tiny")
        'models/tiny'
        >>> local_path("gs://bucket/run")
        Traceback (most recent call last):
        ...
        maxjax.errors.UserInputError: 'gs://bucket/run': gs:// is not supported for paths (supported: local files
        and directories). Mount or copy it, and pass the local path.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path must be a str or a Path, not {type(path).__name__}")
    name = os.fsdecode(path)
    if not name:
        raise UserInputError("a path must not be empty: pass that of a file or a directory")
    # Path("gs://bucket") keeps one of the two slashes, and a local folder may be called "gs:".
    if (url := _SCHEME.match(name)) and (url[2] or not os.path.isdir(f"{url[1]}:")):
        advice = _ADVICE.get(url[1].lower(), "Mount or copy it, and pass the local path.")
        raise UserInputError(
            f"{name!r}: {url[1]}:// is not supported for paths (supported: local files and directories). {advice}"
        )
    require_name(name)
    return name


def require_name(path: str) -> None:
    """Refuses a path that no file can have.

    Raises:
        CheckpointMissingError: it holds a NUL character, or one that has no bytes (a lone surrogate).
    """
    if "\0" in path:
        raise CheckpointMissingError("a path cannot hold a NUL character", path=path)
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise CheckpointMissingError(f"a path cannot hold it: {error}", path=path) from None
