"""Orbax checkpoints: a model and other pytrees, saved as numbered steps of a directory.

    root/100/model/…          the weights, by their names in a state dict
    root/100/opt_state/…      any other tree
    root/100/maxjax_digests.json

Any program that reads orbax checkpoints can open them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ...errors import (
    CheckpointError,
    CheckpointMissingError,
    UserInputError,
    checked_integer,
    releasing,
    some,
)
from ...models.weights import main_dtype
from ...nn.layer import Module
from ...nn.layer.walk import check_module
from ...paths import local_path
from ...progress import last_part, task
from ...rendering.division import numbers
from ...rendering.rendered import Rendered
from ...rendering.row import Row, counted, short
from ...storage.limits import Limits, allowing
from ...storage.orbax.paths import orbax_items, resolve, shown_items, step_names, steps
from ...storage.save.durable import absolute
from ...text.tokenizer.arguments import check_is_tokenizer
from ...text.tokenizer.tokenizer import Tokenizer
from ..pretrained import flat_name, model_files, tokenizer_files
from .open import Saved, open_saved
from .restore import Fitting, mismatch, model_problems
from .save import MODEL, Keep, Response, start
from .tree import Item, model_item, tree_item

PathLike = str | bytes | os.PathLike
# Names in a step that orbax uses itself.
_RESERVED = ("metrics", "AUTO", "_CHECKPOINT_DELETION", "_CHECKPOINT_METADATA", "_METADATA")
# How often a restore starts again because the step that it was reading was deleted.
_RETRIES = 3


def save(
    path: PathLike,
    model: Module | None,
    *,
    step: int | None = None,
    keep: int | None = None,
    tokenizer: Tokenizer | None = None,
    **items: Any,
) -> Path:
    """Saves a model, and other pytrees, as a new step of a directory.

    Names, shapes and dtypes are those of the state dict, whether weights are stacked, sharded over
    a mesh or stored in device-major order. Several processes call it together; each writes what its
    devices hold. The previous step stays the newest until the new one is complete and on the disk;
    nothing is ever overwritten.

    Args:
        path: path of the directory of the steps, made if it does not exist.
        model: model whose weights all have values, or None; quantised weights stay quantised.
        step: number of the step; by default one more than the newest.
        keep: number of newest steps to keep, this one included; older ones are deleted when it is
            durable. By default all are kept.
        tokenizer: tokenizer that is written into the step as well, where ``maxjax.load`` finds it.
        items: other pytrees by name (``opt_state=...``): arrays, random keys, numbers, text.

    Returns:
        The path of the step.

    Raises:
        UserInputError: a leaf cannot be saved, a weight has no value, or an argument is invalid.
        CheckpointBusyError: another process is saving there.
        CheckpointSaveError: the step exists already, the disk is full, …; ``errno`` is the
            system's, and earlier steps are intact.
        CheckpointAccessError: permission to write there is denied.
        PeerLostError: another process has ended.

    Example:
        >>> import tempfile, jax, maxjax
        >>> from maxjax import nn
        >>> model = maxjax.init(nn.LayerNorm(4, devices=[None], dtype="float32"), jax.random.key(0))
        >>> root = tempfile.mkdtemp()
        >>> save(root, model, step=100, note="hello").name
        '100'
        >>> restore(root, model, note="")
        {'note': 'hello'}
    """
    return _begin(path, model, step, newest(keep), items, tokenizer, wait=True).result()


def save_async(
    path: PathLike,
    model: Module | None,
    *,
    step: int | None = None,
    keep: int | None = None,
    tokenizer: Tokenizer | None = None,
    **items: Any,
) -> Response:
    """Saves as :func:`save` does, but returns as soon as the values may be changed or donated.

    The save continues in the background. ``result()`` of the returned Response waits for it and
    raises its errors; ``done()`` tells whether it has ended. A program waits for it before it exits.

    Example:
        >>> import tempfile, jax, maxjax
        >>> from maxjax import nn
        >>> model = maxjax.init(nn.LayerNorm(4, devices=[None], dtype="float32"), jax.random.key(0))
        >>> response = save_async(tempfile.mkdtemp(), model)
        >>> response.result().name, response.done()
        ('0', True)
    """
    return _begin(path, model, step, newest(keep), items, tokenizer, wait=False)


def newest(count: int | None, name: str = "keep") -> Keep:
    """The rule that keeps the ``count`` newest steps; None keeps all. ``name`` is that of the argument."""
    if count is None:
        return lambda steps: steps
    number = checked_integer(name, count)
    return lambda steps: sorted(steps)[-number:]


def _begin(
    path: PathLike,
    model: Module | None,
    step: int | None,
    keep: Keep,
    items: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    *,
    wait: bool,
) -> Response:
    """Starts a save; a caller that does not wait for it may change its NumPy arrays, which are copied."""
    step = None if step is None else checked_integer("step", step, 0)
    trees = _trees(model, items, copy=not wait)
    check_is_tokenizer(tokenizer, "files")
    beside = {} if tokenizer is None else tokenizer_files(tokenizer)
    if model is not None:
        dtype = main_dtype(model.raw_state_dict())
        files = model_files(model, dtype=dtype, tokenizer=tokenizer, required=False)
        beside |= {flat_name(name): found for name, found in files.items()}
    root = absolute(path)
    with task(f"saving {last_part(root)}") if wait else contextlib.nullcontext():
        return start(root, step, trees, keep, beside, wait=wait)


def _trees(model: Module | None, items: Mapping[str, Any], *, copy: bool) -> dict[str, Item]:
    trees: dict[str, Item] = {}
    if isinstance(model, Module):
        trees[MODEL] = model_item(model)
    elif model is not None:
        kind = type(model).__name__
        raise UserInputError(
            f"the model is a {kind}: pass a Module, and other pytrees as keyword arguments"
        )
    for name, tree in items.items():
        if name in _RESERVED:
            raise UserInputError(
                f"'{name}' cannot be the name of a tree: orbax uses it itself; use another name"
            )
        if name == MODEL or not name.isidentifier():
            raise UserInputError(
                f"'{name}' cannot be the name of a tree: use an identifier other than '{MODEL}'"
            )
        trees[name] = tree_item(name, tree, copy=copy)
    if not any(tree.nested for tree in trees.values()):
        if any(tree.names for tree in trees.values()):
            raise UserInputError(
                "orbax saves no tree without an array that has elements, a number of at most 64 bits or text: add one"
            )
        raise UserInputError("there is nothing to save: pass a model, or a pytree with arrays")
    return trees


def restore(
    path: PathLike,
    model: Module | None,
    *,
    step: int | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: Any = "auto",
    limits: Limits | None = None,
    **items: Any,
) -> dict[str, Any]:
    """Restores the weights of a model from a checkpoint, in place; returns the checkpoint's other pytrees.

    Values get the sharding of the model and of the examples, on one device or any mesh, in a stack
    or layer by layer, independently of how they were saved; each device reads only its own part.

    Args:
        path: path that :func:`save` was given, or a single orbax checkpoint of another program.
        model: model to fill; its weights need no values. None restores the other trees alone. In a
            checkpoint of another program its tree may be called "default", "pytree", "state" or
            "params", or be the only one.
        step: number of the step; by default the newest complete one.
        strict: whether to refuse names that are only on one side. If not, weights and leaves that
            the checkpoint does not have keep their values.
        cast: whether to convert between float widths, and between integers that fit.
        verify: whether to compare checksums: "auto" does where it costs little, True always,
            False never.
        limits: limits of what is read, as in ``maxjax.load``.
        items: an example for each other tree, of values or of ``jax.ShapeDtypeStruct`` (from
            ``jax.eval_shape``, for example): the result has its structure, dtypes and sharding.
            Modules in it are matched by the names of their weights.

    Returns:
        The trees by name; empty if none was asked for.

    Raises:
        CheckpointMismatchError: names, shapes or dtypes do not fit; the message lists all that
            differs in the other trees, or else in the model. Nothing was read.
        CheckpointMissingError, CheckpointIncompleteError: there is no such step, or no complete one.
        CheckpointCorruptError: a checksum does not match; the tensor is named.
        CheckpointError: the checkpoint cannot be read.
        OutOfMemoryError: the devices, or the host, cannot hold the values.
        UserInputError: the model is not a Module, or ``verify`` is not "auto", True or False.
    """
    if model is not None:
        check_module(model, "checkpoint.restore", reads=False)
    root = local_path(path)
    step = None if step is None else checked_integer("step", step, 0)
    attempts = 0
    while True:
        directory = _directory(root, step)
        try:
            with (
                releasing(),
                allowing(limits),
                task(f"restoring {last_part(directory)}", reads=True),
            ):
                return _restore(directory, model, items, strict, cast, verify)
        except CheckpointError:
            # A writer may delete old steps at any time; then there is a newer step to restore.
            attempts += 1
            if step is not None or os.path.isdir(directory) or attempts > _RETRIES:
                raise


def _directory(root: str, step: int | None) -> str:
    if step is None:
        return resolve(root)
    directory = os.path.join(root, str(step))
    if os.path.isdir(directory):
        return directory
    names = step_names(root)
    if step not in names:
        raise CheckpointMissingError(
            "no such step",
            path=directory,
            expected=str(step),
            found=some(sorted(names)) or "no steps",
            hint="Pass an existing step.",
        )
    return os.path.join(root, names[step])


def _restore(
    directory: str,
    model: Module | None,
    items: Mapping[str, Any],
    strict: bool,
    cast: bool,
    verify: Any,
) -> dict[str, Any]:
    opened: list[Saved] = []
    problems: list[str] = []

    def saved(name: str) -> Saved | None:
        found = open_saved(directory, name, verify)
        if found is not None:
            opened.append(found)
        else:
            others = shown_items(orbax_items(directory))
            problems.append(f"the checkpoint has no tree called '{name}', only {others}")
        return found

    try:
        fittings: dict[str, Fitting] = {}
        weights: Any = None
        if model is not None and (found := saved(MODEL)) is not None:
            problems += model_problems(found, model)
            weights = found.weights
        for name, example in items.items():
            if (found := saved(name)) is not None:
                fittings[name] = fitting = Fitting(found, cast, strict)
                fitting.compare(example)
                problems += [f"{name}: {problem}" for problem in fitting.problems]
        if problems:
            raise mismatch(directory, problems)
        # The model is filled last, so that a damaged tree leaves it unchanged.
        trees = {name: fitting.read() for name, fitting in fittings.items()}
        if model is not None:
            model.load_state_dict(weights, strict=strict, cast=cast)
        return trees
    finally:
        for one in opened:
            one.close()


class CheckpointManager(Rendered):
    """Saves and restores the steps of a directory; a context manager that waits at its end.

    Args:
        path: path of the directory, made by the first save.
        max_to_keep: number of newest steps to keep; by default all.
        keep_every: interval: steps whose number is a multiple of it are always kept.

    One save runs at a time: the next one waits for it, and raises its error if it failed.

    Example:
        >>> import tempfile, jax, maxjax
        >>> from maxjax import nn
        >>> model = maxjax.init(nn.LayerNorm(4, devices=[None], dtype="float32"), jax.random.key(0))
        >>> with CheckpointManager(tempfile.mkdtemp(), max_to_keep=2, keep_every=10) as manager:
        ...     for step in range(8, 14):
        ...         _ = manager.save_async(step, model)
        ...     manager.wait_until_finished()
        ...     manager.all_steps(), manager.latest_step()
        ([10, 12, 13], 13)
    """

    def __init__(
        self, path: PathLike, *, max_to_keep: int | None = None, keep_every: int | None = None
    ):
        self.path = Path(absolute(path))
        self._newest = newest(max_to_keep, "max_to_keep")
        self._every = None if keep_every is None else checked_integer("keep_every", keep_every)
        self._response: Response | None = None

    def _keep(self, steps: list[int]) -> list[int]:
        every = self._every
        return [*self._newest(steps), *(step for step in steps if every and step % every == 0)]

    def save(
        self,
        step: int | None,
        model: Module | None,
        *,
        tokenizer: Tokenizer | None = None,
        **items: Any,
    ) -> Path:
        """Save a step and wait for it; see :func:`maxjax.checkpoint.save`."""
        self.wait_until_finished()
        return _begin(self.path, model, step, self._keep, items, tokenizer, wait=True).result()

    def save_async(
        self,
        step: int | None,
        model: Module | None,
        *,
        tokenizer: Tokenizer | None = None,
        **items: Any,
    ) -> Response:
        """Start to save a step; see :func:`maxjax.checkpoint.save_async`."""
        self.wait_until_finished()
        self._response = response = _begin(
            self.path, model, step, self._keep, items, tokenizer, wait=False
        )
        return response

    def restore(
        self, model: Module | None, step: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Restore a step into the model, in place, by default the newest; see :func:`maxjax.checkpoint.restore`."""
        self.wait_until_finished()
        return restore(self.path, model, step=step, **options)

    def all_steps(self) -> list[int]:
        """The complete steps in order, also those that orbax named (``step_00000500``)."""
        return steps(self.path) if self.path.is_dir() else []

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.all_steps(), default=None)

    def wait_until_finished(self) -> None:
        """Wait for the save that is running, if there is one.

        Raises:
            CheckpointError: the step could not be saved.
        """
        response = self._response
        if response is not None:
            try:
                response.result()
            finally:  # after an interrupt it is not over, and the next call tells how it ended
                if response.done():
                    self._response = None

    def _mx_title(self, row: Row) -> str:
        try:
            steps = self.all_steps()
            found = f"{counted(len(steps), 'step')}: {numbers(steps)}" if steps else "no steps"
        except Exception as error:
            found = f"steps that cannot be listed: {short(error)}"
        saving = self._response is not None and not self._response.done()
        return f"CheckpointManager({str(self.path)!r}, {found}{', saving' * saving})"

    def close(self) -> None:
        """Wait for the running save; there is nothing else to release."""
        self.wait_until_finished()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
