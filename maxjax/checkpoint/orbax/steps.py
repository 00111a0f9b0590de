"""The steps of a directory, and the number and path of a new one, agreed by all processes."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...lockstep import Lockstep
from ...storage.files import closed_on_error
from ...storage.orbax.paths import is_orbax, step_names
from ...storage.orbax.store import require_unicode
from ...storage.save.durable import save_failed
from ...storage.save.staging import Staging

COMMITTED = "_CHECKPOINT_METADATA"
# Allowance for metadata, manifests and partly filled disk blocks.
_EXTRA_BYTES = 1 << 20


class NewStep:
    """The step that a save writes: the first process decides its number and temporary directory.

    Args:
        root: directory of the steps.
        step: number of the step; None for one more than the newest.
        nbytes: size of the arrays in bytes.
        beside: other files of the step: name → content.

    Raises:
        CheckpointBusyError: another process is saving there.
        CheckpointSaveError: the step exists already; the disk does not have enough space.
        CheckpointAccessError: permission to write there is denied.
    """

    def __init__(self, root: str, step: int | None, nbytes: int, beside: Mapping[str, bytes]):
        self.staging: Staging | None = None
        self.beside = beside
        self.needed = nbytes
        found: dict[str, Any] = {}
        with Lockstep("save", None) as together:
            failure: CheckpointError | None = None
            if together.is_leader:
                try:
                    self.staging = self._open(root, step)
                    found = {"step": self.number, "folder": self.staging.folder}
                except CheckpointError as error:
                    failure, found = error, {"error": str(error)}
            found = together.decide(found)
        if failure is not None:
            raise failure
        if "error" in found:
            raise save_failed(f"process 0 cannot save: {found['error']}", root)
        self.root, self.number, self.folder = root, int(found["step"]), str(found["folder"])
        self.written = os.path.join(self.folder, str(self.number))
        self.path = Path(root, str(self.number))

    def _open(self, root: str, step: int | None) -> Staging:
        require_unicode(root)
        staging = Staging(root)
        with closed_on_error([staging]):
            steps = steps_in(root)
            if steps:
                last = os.path.join(root, str(steps[-1]))
                what = f"The checkpoint that was there before is intact: {last}."
                staging.keeps(what, os.path.join(last, COMMITTED))
            # Another program may have written steps before, under names such as 00000500.
            named = [n for n in os.listdir(root) if "_" in n and n.rpartition("_")[2].isdecimal()]
            if foreign := [name for name in named if is_orbax(os.path.join(root, name))]:
                hint = "Save into another directory: steps with two kinds of names in one are not read."
                raise save_failed(
                    f"there are steps with other names: {foreign[0]}", root, errno.EEXIST, hint
                )
            names = step_names(root)
            self.number = max([*names, *steps], default=-1) + 1 if step is None else step
            path = os.path.join(root, names.get(self.number, str(self.number)))
            if os.path.lexists(path):
                hint = "Save another step, or delete this one first: steps are not overwritten."
                raise save_failed("the step exists already", path, errno.EEXIST, hint)
            staging.require_space(self.needed + _EXTRA_BYTES)
        return staging

    def close(self) -> None:
        """Delete the temporary directory, if the step was not committed."""
        if self.staging is not None:
            self.staging.close()


def steps_in(root: str | os.PathLike[str]) -> list[int]:
    """The numbers of the complete steps of a directory, in order."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [int(name) for name in names if name.isascii() and name.isdecimal()]
    return sorted(n for n in found if os.path.isfile(os.path.join(root, str(n), COMMITTED)))
