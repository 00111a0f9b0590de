"""CheckpointManager: saves the steps of a training run, and deletes old ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from ...nn.layer import Module
from ...rendering.division import numbers
from ...rendering.rendered import Rendered
from ...rendering.row import Row, counted, short
from ...text.tokenizer.tokenizer import Tokenizer
from .checkpoint import PathLike, _begin, newest, restore
from .save import Response
from .steps import steps_in, whole_number


class CheckpointManager(Rendered):
    """Saves and restores the steps of a directory; a context manager that waits at its end.

    Args:
        path: path of the directory, made by the first save.
        max_to_keep: number of newest steps to keep; by default all.
        keep_every: number whose multiples are steps that are always kept.

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
        self.path = Path(os.path.abspath(os.fsdecode(path)))
        self._newest = newest(max_to_keep)
        self._every = None if keep_every is None else whole_number("keep_every", keep_every, 1)
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
        return _begin(
            self.path, model, step, self._keep, items, tokenizer, copy=False, wait=True
        ).result()

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
        self._response = _begin(
            self.path, model, step, self._keep, items, tokenizer, copy=True, wait=False
        )
        return self._response

    def restore(
        self, model: Module | None, step: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Restore a step, by default the newest; see :func:`maxjax.checkpoint.restore`."""
        self.wait_until_finished()
        return restore(self.path, model, step=step, **options)

    def all_steps(self) -> list[int]:
        """The complete steps in order."""
        return steps_in(self.path)

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.all_steps(), default=None)

    def wait_until_finished(self) -> None:
        """Wait for the save that is running, if there is one.

        Raises:
            CheckpointError: the step could not be saved.
        """
        response, self._response = self._response, None
        if response is not None:
            response.result()

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
