"""How maxjax's own jitted programs are observed: what they capture is among their results.

``tapped`` runs a model inside of a program, and gives what was recorded; a ``Watch`` dispatches programs
for those who observe the model at that moment, and hands them what the programs give. A program
of an observed model is another one than that of the same model unobserved, because the treedef is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....errors import UnsupportedModelError, UserInputError
from ..definition import marked
from .frames import Frame, Observation, Taps, current_observers, next_level, opened
from .places import Place, unseen


def is_observed(model: Any) -> bool:
    """Whether the model, inside of a program, is the copy of one that is observed."""
    return bool(model._mx_marks)


def tapped(model: Any, patches: Sequence[Any], function: Callable[[], Any]) -> tuple[Any, Taps]:
    """The result of ``function``, which runs the model, and what was recorded in it.

    Args:
        model: the model as the program got it.
        patches: the values of the patches of each plan.

    Raises:
        UserInputError: a site that is wanted is not one of the model's.
    """
    if not is_observed(model):
        return function(), {}
    plans = [plan for plan, _ in model._mx_marks]
    with opened(Frame(dict(zip(plans, patches, strict=True)))) as frame:
        result = function()
    for plan in plans:
        _check_sites(plan, frame)
    return result, frame.taps()


def _check_sites(plan: Observation, frame: Frame) -> None:
    seen: set[Place] = {(name, site) for level, name, site in frame.seen if level == plan.level}
    wanted = {*plan.captures, *(place for patch in plan.patches for place in patch.places)}
    for site in sorted({site for _, site in wanted}):
        group = [place for place in sorted(wanted) if place[1] == site]
        what = "patch" if plan.patches else "capture"
        if error := unseen(group, seen, seen, what, strict=False):
            raise error


class Watch:
    """One run of a function of maxjax, for those who observe its model meanwhile.

    Args:
        model: the model whose programs are dispatched.
    """

    def __init__(self, model: Any):
        self._model = model
        self._recordings: dict[int, tuple[Any, Any]] = {}

    @property
    def is_watched(self) -> bool:
        """Whether anyone observes the model now."""
        return bool(current_observers(self._model))

    def run(
        self,
        together: Any,
        program: Any,
        *args: Any,
        rows: Sequence[int],
        counts: Callable[[Any], Any],
        width: int | None,
        **static: Any,
    ) -> Any:
        """Dispatches ``program(model, *args, **static)`` and hands on what it records.

        Args:
            together: the call of several processes that it belongs to (``lockstep.py``).
            program: a jitted function that takes ``patches=`` and, for an observed model, returns
                its result and the taps.
            rows, width: as in :class:`Piece`.
            counts: function from the result to the number of tokens of each row.

        Raises:
            UserInputError: it runs in a function of ``captured`` or ``patched``, which gets no more than what
                programs of maxjax return.
            UnsupportedModelError: the model is observed, and several processes share it.
        """
        if is_observed(self._model):
            raise UserInputError(
                "captured and patched observe calls of the model, not maxjax.generate, embed and their like, which "
                "run programs of their own: write `with maxjax.capture(model, …):` or `with maxjax.patch(model, …):` "
                "around them"
            )
        observers = current_observers(self._model)
        if not observers:
            return together.run(program, self._model, *args, **static)
        if together.is_shared:
            raise UnsupportedModelError(
                "capturing and patching a model that several processes share"
            )
        level = next_level()
        wishes = [one.wish(self._model, level + i) for i, one in enumerate(observers)]
        copy = self._model
        for plan, name, _ in wishes:
            copy = marked(copy, plan, name)
        patches = tuple(wish.values for wish in wishes)
        result, taps = together.run(program, copy, *args, patches=patches, **static)
        # Who has left is forgotten: the model of a conversation is watched for as long as that lasts.
        now = set(map(id, observers))
        self._recordings = {key: kept for key, kept in self._recordings.items() if key in now}
        for one, wish in zip(observers, wishes, strict=True):
            if id(one) not in self._recordings:
                self._recordings[id(one)] = one, one.recording()
            one.take_taps(
                wish.plan, taps, self._recordings[id(one)][1], rows, counts(result), width
            )
        return result

    def end(self, row: int, tokens: int) -> None:
        """Says how many tokens of a text count: what was computed after them is dropped."""
        for _, recording in self._recordings.values():
            if recording is not None:
                recording.end(row, tokens)
