"""Orbax checkpoints: a model and what belongs to it, saved as steps of a directory.

    root/100/model/…          the weights, by their names in a state dict
    root/100/opt_state/…      any other tree
    root/100/maxjax_digests.json

Any tool that knows orbax opens them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, CheckpointMissingError, UserInputError, some
from ...models.family import main_dtype
from ...nn.layer import Module
from ...storage.limits import Limits, allowing
from ...storage.orbax.paths import resolve
from ...text.tokenizer.tokenizer import Tokenizer
from ..pretrained import flat_name, model_files, tokenizer_files
from .open import Saved, open_saved
from .restore import Fitting, mismatch, model_problems
from .save import MODEL, Keep, Response, start
from .steps import steps_in, whole_number
from .tree import Item, model_item, tree_item

PathLike = str | bytes | os.PathLike
# How often a restore begins again because the step it was reading was deleted.
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
    """Saves a model, and other trees beside it, as a new step of a directory.

    The weights have their names, shapes and dtypes of the state dict, however they are held:
    stacked, split over a mesh, in the order of the devices. Several processes call it together;
    each writes what its devices hold. What was there before counts until the new step is whole
    and on the disk, and nothing is ever written over.

    Args:
        path: The directory of the steps; made if it is not there.
        model: Every weight must have a value; packed weights stay packed.
        step: The number of the step; by default one more than the newest.
        keep: So many of the newest steps are kept, this one among them; older ones are deleted
            when it is durable. By default all are kept.
        tokenizer: Written into the step as well, where ``maxjax.load`` finds it.
        items: Other pytrees by name (``opt_state=...``): arrays, random keys, numbers, text.

    Returns:
        The directory of the step.

    Raises:
        UserInputError: A leaf that cannot be saved, a weight without a value.
        CheckpointBusyError: Another process is saving there.
        CheckpointSaveError: The step is there already, the disk is full, …; ``errno`` is the
            system's, and what was there before is intact.
        CheckpointAccessError: It cannot be written there.
        PeerLostError: Another process is gone.

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
    return _begin(path, model, step, newest(keep), items, tokenizer, copy=False, wait=True).result()


def save_async(
    path: PathLike,
    model: Module | None,
    *,
    step: int | None = None,
    keep: int | None = None,
    tokenizer: Tokenizer | None = None,
    **items: Any,
) -> Response:
    """As :func:`save`, but it returns when the values may be changed, donated or deleted.

    What goes wrong afterwards is raised by ``result()`` of what is returned; ``done()`` tells
    whether it is over. A program that ends waits for it.

    Example:
        >>> import tempfile, jax, maxjax
        >>> from maxjax import nn
        >>> model = maxjax.init(nn.LayerNorm(4, devices=[None], dtype="float32"), jax.random.key(0))
        >>> response = save_async(tempfile.mkdtemp(), model)
        >>> response.result().name, response.done()
        ('0', True)
    """
    return _begin(path, model, step, newest(keep), items, tokenizer, copy=True, wait=False)


def newest(count: int | None) -> Keep:
    """Which steps to keep: so many of the newest."""
    if count is None:
        return lambda steps: steps
    number = whole_number("keep", count, 1)
    return lambda steps: sorted(steps)[-number:]


def _begin(
    path: PathLike,
    model: Module | None,
    step: int | None,
    keep: Keep,
    items: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    *,
    copy: bool,
    wait: bool,
) -> Response:
    step = None if step is None else whole_number("step", step, 0)
    trees = _trees(model, items, copy)
    beside: dict[str, bytes] = {}
    if tokenizer is not None:
        if not isinstance(tokenizer, Tokenizer):
            kind = type(tokenizer).__name__
            raise UserInputError(
                f"the tokenizer is a {kind}: give what maxjax.load_tokenizer gives"
            )
        beside |= tokenizer_files(tokenizer)
    if model is not None:
        dtype = main_dtype(model.raw_state_dict())
        files = model_files(model, dtype=dtype)
        beside |= {flat_name(name): found for name, found in files.items()}
    response = start(os.path.abspath(os.fsdecode(path)), step, trees, keep, beside)
    del trees
    if wait:
        response._wait_over()
    return response


def _trees(model: Module | None, items: Mapping[str, Any], copy: bool) -> dict[str, Item]:
    trees: dict[str, Item] = {}
    if isinstance(model, Module):
        trees[MODEL] = model_item(model)
    elif model is not None:
        kind = type(model).__name__
        raise UserInputError(f"the model is a {kind}: give a Module, and other trees by a name")
    for name, tree in items.items():
        if name == MODEL or not name.isidentifier():
            raise UserInputError(f"no tree can be called '{name}'")
        trees[name] = tree_item(name, tree, copy=copy)
    if not any(tree.nested for tree in trees.values()):
        raise UserInputError("there is nothing to save: no model, and no array beside it")
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
    """Gives a model the weights of a checkpoint, and returns the other trees of it.

    Everything goes to where it is placed now: on one device or any mesh, in a stack or layer by
    layer, whatever it was saved from; each device reads its own part.

    Args:
        path: What :func:`save` was given, or a single orbax checkpoint of another program.
        model: Its weights need no values. None restores the other trees alone.
        step: By default the newest that is complete.
        strict: Refuse names that are only on one side. Otherwise the model, and the leaves of the
            trees, keep what the checkpoint does not have.
        cast: Convert between float widths, and between integers that fit.
        verify: Compare checksums: "auto" does where it costs little, True always, False never.
        limits: As of ``maxjax.load``.
        items: For each other tree an example, of values or of ``jax.ShapeDtypeStruct`` (of
            ``jax.eval_shape``, for example): its structure, types and placement are those of the
            result. Modules in it are matched by the names of their weights.

    Returns:
        The trees by name; empty if none was asked for.

    Raises:
        CheckpointMismatchError: Names, shapes or dtypes do not fit; all that differs is named: of
            the other trees, or else of the model. Nothing was read.
        CheckpointMissingError, CheckpointIncompleteError: There is no such step, or no complete one.
        CheckpointCorruptError: A checksum does not match; the tensor is named.
        CheckpointError: It cannot be read.
        OutOfMemoryError: The devices, or the host, cannot hold it.
    """
    root = os.fsdecode(path)
    step = None if step is None else whole_number("step", step, 0)
    for attempt in range(_RETRIES + 1):
        directory = _directory(root, step)
        try:
            with allowing(limits):
                return _restore(directory, model, items, strict, cast, verify)
        except CheckpointError:
            # A writer may delete old steps at any time: then there is a newer one.
            if step is not None or os.path.isdir(directory) or attempt == _RETRIES:
                raise
    raise AssertionError


def _directory(root: str, step: int | None) -> str:
    if step is None:
        return resolve(root)
    directory = os.path.join(root, str(step))
    if not os.path.isdir(directory):
        there = some(steps_in(root)) or "no steps"
        raise CheckpointMissingError(
            "no such step", path=directory, expected=str(step), found=there
        )
    return directory


def _restore(
    directory: str,
    model: Module | None,
    items: Mapping[str, Any],
    strict: bool,
    cast: bool,
    verify: Any,
) -> dict[str, Any]:
    opened: list[Saved] = []

    def saved(name: str) -> Saved | None:
        found = open_saved(directory, name, verify)
        if found is not None:
            opened.append(found)
        return found

    try:
        problems: list[str] = []
        fittings: dict[str, Fitting] = {}
        weights: Any = None if model is None else _of_model(saved, model, problems)
        for name, example in items.items():
            found = saved(name)
            if found is None:
                problems.append(f"the checkpoint has no tree called '{name}'")
                continue
            fittings[name] = fitting = Fitting(found, cast, strict)
            fitting.hold(example)
            problems += [f"{name}: {problem}" for problem in fitting.problems]
        if problems:
            raise mismatch(directory, problems)
        # The model last: a tree that is found damaged leaves it as it was.
        found = {name: fitting.read() for name, fitting in fittings.items()}
        if model is not None:
            model.load_state_dict(weights, strict=strict, cast=cast)
        return found
    finally:
        for one in opened:
            one.close()


def _of_model(saved: Callable[[str], Saved | None], model: Module, problems: list[str]) -> Any:
    found = saved(MODEL)
    if found is None:
        problems.append("the checkpoint has no tree called 'model'")
        return None
    problems += model_problems(found, model)
    return found.weights
