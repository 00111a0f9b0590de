"""Folders in the user's cache directory, for code that is compiled once and executed later."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return ``maxjax/NAME`` in the user's cache directory, which need not exist yet.

    The cache directory is ``$XDG_CACHE_HOME``, or ``~/.cache``, or ``~/Library/Caches`` on macOS.

    Raises:
        RuntimeError: there is no home directory, or it is a relative path.

    Example:
        >>> cache_folder("kernels").parts[-2:]
        ('maxjax', 'kernels')
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():
        home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    if not home.is_absolute():
        raise RuntimeError(f"the home directory is a relative path: {Path.home()}")
    return (home / "maxjax" / name).resolve()


def make_private(folder: Path) -> None:
    """Create a folder, and those above it that are missing, with mode 0700.

    Raises:
        PermissionError: the first folder above it that exists belongs to another user, as under ``sudo``, whose
            folders the user could not use later.
    """
    above = next(path for path in folder.parents if path.exists())
    if not folder.exists() and (owner := above.stat().st_uid) not in (0, os.geteuid()):
        raise PermissionError(f"{above} belongs to uid {owner}, this process to {os.geteuid()}")
    for path in reversed((folder, *folder.parents)):
        path.mkdir(mode=0o700, exist_ok=True)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")


def unsafe_reason(path: Path) -> str | None:
    """Return the reason why others could put code into the folder, or None."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"{path} belongs to uid {status.st_uid}, this process to uid {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {path}; chmod go-w prevents it"
    return None
