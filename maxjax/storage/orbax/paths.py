"""Resolution of a path into an orbax checkpoint: a root of steps, a step, or one of its trees.

Orbax writes each step under a temporary name that marks it as unfinished, and renames it when it is
complete.

    root/100/_CHECKPOINT_METADATA       a step
    root/100/model/_METADATA            a tree ("item") of it
    root/200.orbax-checkpoint-tmp/      a step that is being written, or was interrupted
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointMissingError,
    some,
)
from ...paths import require_name
from ..files import os_error
from ..formats import ORBAX
from ..save.staging import is_temporary, tell_leftovers
from .metadata import CHECKPOINT, INDICATOR, TREE

UNFINISHED = ".orbax-checkpoint-tmp"
# The names of trees, in order of preference, if a checkpoint has several and none is named; orbax's
# API v1 calls the tree that it loads by default "pytree".
PREFERRED = ("model", "default", "pytree", "state", "params")
# A step may be called 100, 00000100 or step_100. A file's name has at most 255 characters.
_STEP = re.compile(r"(?:(.*)_)?(\d{1,255})", re.DOTALL | re.ASCII)
# The file that orbax and flax wrote before _METADATA existed.
_LEGACY = "checkpoint"


@dataclass(frozen=True, slots=True)
class TreeLocation:
    """One tree: its ``directory``, and its name ``item`` in ``checkpoint`` ("" if it is the checkpoint)."""

    directory: str
    checkpoint: str
    item: str


def is_orbax(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a tree, a step or a root of steps that orbax wrote, finished or not.

    Example:
        >>> is_orbax("no/such/directory")
        False
    """
    path = os.fsdecode(path)
    if not os.path.isdir(path):
        return False
    if _is_checkpoint(path) or is_unfinished(os.path.basename(os.path.abspath(path))):
        return True
    try:
        return bool(step_names(path) or _unfinished(path))
    except CheckpointError:
        return False


def steps(root: str | os.PathLike[str]) -> list[int]:
    """The numbers of the complete steps in a directory, in ascending order.

    Raises:
        CheckpointMissingError, CheckpointAccessError: the directory does not exist or is unreadable.
        CheckpointFormatError: the directory holds steps of several runs ("a_1" and "b_1").

    Example:
        >>> import tempfile
        >>> root = tempfile.mkdtemp()
        >>> for name in ("100", "9", "200.orbax-checkpoint-tmp"):
        ...     os.makedirs(os.path.join(root, name))
        ...     with open(os.path.join(root, name, "_METADATA"), "w") as file:
        ...         _ = file.write("{}")
        >>> steps(root)
        [9, 100]
    """
    return sorted(step_names(os.fsdecode(root)))


def orbax_items(path: str | os.PathLike[str]) -> dict[str, str]:
    """The trees of a checkpoint: name → directory, sorted; for a root of steps, of its newest step.

    A checkpoint that is itself a tree has one tree, named "". Other content (JSON, metrics) is not
    listed.

    Raises:
        CheckpointMissingError: there is no orbax checkpoint.
        CheckpointIncompleteError: the checkpoint was never finished.
    """
    return _items(resolve(os.fsdecode(path)))


def resolve(path: str) -> str:
    """The directory of the checkpoint or tree that a path refers to.

    Raises:
        CheckpointMissingError: there is no checkpoint.
        CheckpointIncompleteError: the only checkpoint was never finished.
    """
    _check_finished(path)
    _listed(path)
    if _has_marks(path):
        return path
    found = step_names(path)
    if found:
        tell_leftovers(path)
        return os.path.join(path, found[max(found)])
    if _is_checkpoint(path):  # after the steps, beside which there may be other trees
        return path
    if broken := _unfinished(path):
        raise _incomplete(os.path.join(path, broken[-1]))
    names = _listed(path)
    if _LEGACY in names:
        raise CheckpointFormatError(
            "an old checkpoint of orbax or flax (msgpack), a format that is not supported",
            path=os.path.join(path, _LEGACY),
            expected=TREE,
            found=_LEGACY,
            hint="Restore it with the version of orbax that wrote it, and save it again.",
        )
    raise CheckpointMissingError(
        "the directory holds no orbax checkpoint",
        path=path,
        expected=f"{TREE}, {CHECKPOINT} or directories of steps",
        found=some(names, 5) or "an empty directory",
    )


def checkpoint_of(path: str) -> str:
    """The directory of the checkpoint that a path refers to, or that contains the tree it refers to.

    Raises:
        CheckpointMissingError, CheckpointIncompleteError: as for :func:`resolve`.
    """
    found = resolve(path)
    is_tree = os.path.lexists(os.path.join(found, TREE))
    return _tree_location(found).checkpoint if is_tree else found


def locate(path: str, item: str | None) -> TreeLocation:
    """The tree that a path and the name of an item refer to.

    Raises:
        CheckpointFormatError: no item is given, and of several none has a preferred name.
        CheckpointMissingError, CheckpointIncompleteError: as for :func:`resolve`; or no such item.
    """
    checkpoint = resolve(path)
    found = _items(checkpoint)
    if "" in found and item in (None, ""):
        return _tree_location(checkpoint)
    if item is None:
        item = chosen(found)
    if item is None:
        raise CheckpointFormatError(
            "the checkpoint holds several trees",
            path=checkpoint,
            expected="the name of one",
            found=shown_items(found),
            hint=f"Name the directory of the one you mean, such as {next(iter(found.values()))}.",
        )
    if item not in found:
        raise CheckpointMissingError(
            "the checkpoint holds no tree of this name",
            path=checkpoint,
            expected=item,
            found=shown_items(found),
        )
    return TreeLocation(found[item], checkpoint, item)


def chosen(items: Collection[str]) -> str | None:
    """The tree that is meant if none is named: one with a usual name, or the only one; None if unclear.

    Example:
        >>> chosen(["opt_state", "params"]), chosen(["mine"]), chosen(["left", "right"])
        ('params', 'mine', None)
    """
    usual = (name for name in PREFERRED if name in items)
    return next(usual, next(iter(items)) if len(items) == 1 else None)


def shown_items(items: Collection[str]) -> str:
    """The names of trees for a message."""
    return some([name or "a single tree without a name" for name in items], 10)


def _tree_location(directory: str) -> TreeLocation:
    """The tree in a directory with a ``_METADATA``: a checkpoint, or an item of its parent."""
    above, name = os.path.split(os.path.abspath(directory))
    marks = (CHECKPOINT, INDICATOR)
    is_step = any(os.path.lexists(os.path.join(directory, mark)) for mark in marks)
    if not is_step and any(os.path.lexists(os.path.join(above, mark)) for mark in marks):
        return TreeLocation(directory, above, name)
    return TreeLocation(directory, directory, "")


def _items(checkpoint: str) -> dict[str, str]:
    if os.path.lexists(os.path.join(checkpoint, TREE)):
        return {"": checkpoint}
    found = {name: os.path.join(checkpoint, name) for name in _listed(checkpoint)}
    trees = {
        name: path
        for name, path in found.items()
        if not is_unfinished(name) and os.path.lexists(os.path.join(path, TREE))
    }
    if not trees:
        raise CheckpointMissingError(
            "the checkpoint holds no tree",
            path=checkpoint,
            expected=f"a {TREE} in it, or in a directory of it",
            found=some(list(found), 5),
            hint=other_step(checkpoint),
        )
    return trees


def _is_checkpoint(path: str) -> bool:
    """Whether a directory is a checkpoint or a tree: it has the marks, or contains trees."""
    if _has_marks(path):
        return True
    try:
        names = os.listdir(path)
    except OSError:
        return False
    # A tree named 100 is treated as a step, which makes no difference.
    return any(
        not _STEP.fullmatch(name)
        and not is_unfinished(name)
        and os.path.lexists(os.path.join(path, name, TREE))
        for name in names[:1000]
    )


def _has_marks(path: str) -> bool:
    return any(os.path.lexists(os.path.join(path, mark)) for mark in ORBAX.marks)


def step_names(root: str) -> dict[int, str]:
    """Number → name of each complete step in a directory; the errors are those of :func:`steps`."""
    found: dict[str, dict[int, str]] = {}
    for name in _listed(root):
        match = _STEP.fullmatch(name)
        if match and _is_checkpoint(os.path.join(root, name)):
            found.setdefault(match[1] or "", {})[int(match[2])] = name
    if len(found) > 1:
        raise CheckpointFormatError(
            "the directory holds steps of several runs",
            path=root,
            expected="one",
            found=some([next(iter(one.values())) for one in found.values()], 5),
            hint="Name the step you mean.",
        )
    return next(iter(found.values()), {})


def _unfinished(root: str) -> list[str]:
    return [name for name in _listed(root) if is_unfinished(name)]


def is_unfinished(name: str) -> bool:
    """Whether a directory of that name is an unfinished or interrupted save, by orbax or maxjax.

    Example:
        >>> is_unfinished("7.orbax-checkpoint-tmp-1"), is_unfinished(".maxjax-0a-1-x.tmp")
        (True, True)
    """
    return UNFINISHED in name or is_temporary(name)


def _listed(directory: str) -> list[str]:
    require_name(directory)
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise os_error(error, directory, "listing the directory failed") from error


def _check_finished(path: str) -> None:
    """Refuses a checkpoint or item that orbax has not renamed yet."""
    head, name = os.path.split(os.path.abspath(path))
    above = os.path.basename(head)
    if (is_unfinished(name) or is_unfinished(above)) and os.path.isdir(path):
        raise _incomplete(path if is_unfinished(name) else head)


def _incomplete(path: str) -> CheckpointIncompleteError:
    return CheckpointIncompleteError(
        "the checkpoint is still being written, or writing it was interrupted",
        path=path,
        expected="the name of a step",
        found=os.path.basename(path),
        hint=other_step(path),
    )


def other_step(path: str) -> str:
    """The hint for a checkpoint that cannot be opened."""
    root = os.path.dirname(os.path.abspath(path))
    finished = os.path.abspath(path).split(UNFINISHED)[0]
    if finished != os.path.abspath(path) and _is_checkpoint(finished):
        return f"The checkpoint before it is complete: {finished}."
    try:
        found = step_names(root)
    except CheckpointError:
        found = {}
    found = {step: name for step, name in found.items() if name != os.path.basename(path)}
    if found:
        return f"The last complete step beside it is {os.path.join(root, found[max(found)])}."
    return "There is no complete step beside it."
