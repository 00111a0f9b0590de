"""The observation of maxjax's own jitted programs, which return captured values as further results.

``tapped`` runs a model inside a program, and returns the recorded values with the result. A ``Watch`` dispatches
programs, and passes the recorded values to the captures and patches that observe the model at that moment. An
observed model has another treedef than the same model unobserved, and therefore other compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....errors import UnsupportedModelError, UserInputError
from ..definition import marked
from .frames import (
    Frame,
    Observation,
    Taps,
    current_observers,
    marked_places,
    next_level,
    opened,
)
from .places import Place, unseen


def is_observed(model: Any) -> bool:
    """Whether a model inside a program is the copy of an observed model."""
    return bool(model._mx_marks)


def tapped(model: Any, patches: Sequence[Any], function: Callable[[], Any]) -> tuple[Any, Taps]:
    """The result of ``function``, which runs the model, and the values that were recorded.

    Args:
        model: model in the argument of the program.
        patches: values of the patches of each plan.

    Raises:
        UserInputError: a plan names a site that the model does not have.
    """
    if not is_observed(model):
        return function(), {}
    plans = [plan for plan, _ in model._mx_marks]
    with opened(Frame(dict(zip(plans, patches, strict=True)))) as frame:
        result = function()
    taps = frame.taps()
    for plan in plans:
        _check_sites(plan, marked_places(taps, plan, "seen"))
    return result, {key: values for key, values in taps.items() if key[3] != "seen"}


def _check_sites(plan: Observation, seen: set[Place]) -> None:
    for site in sorted({site for _, site in plan.places}):
        group = [place for place in sorted(plan.places) if place[1] == site]
        what = "patch" if plan.patches else "capture"
        if error := unseen(group, seen, seen, what, strict=False):
            raise error


class Watch:
    """One run of a function such as ``maxjax.generate``, whose programs are observed.

    Args:
        model: model whose programs are dispatched.
    """

    def __init__(self, model: Any):
        self._model = model
        self._recordings: dict[int, tuple[Any, Any]] = {}

    @property
    def is_watched(self) -> bool:
        """Whether a capture or patch observes the model now."""
        return bool(current_observers(self._model))

    def run(
        self,
        together: Any,
        program: Any,
        *args: Any,
        rows: Sequence[int],
        counts: Callable[[Any], Any],
        width: int | None,
        keeps: bool = True,
        **static: Any,
    ) -> Any:
        """Dispatches ``program(model, *args, **static)``, and passes the recorded values to the observers.

        Args:
            together: lockstep call of several processes to which the dispatch belongs (``lockstep.py``).
            program: jitted function that takes ``patches=`` and, for an observed model, returns
                its result and the taps.
            rows, width: attributes of the :class:`Piece`.
            counts: function from the result to the number of tokens of each row.
            keeps: whether the recorded values are passed on; not those of tokens that are read again.

        Raises:
            UserInputError: the call is inside a function of ``captured`` or ``patched``, which cannot observe
                maxjax's programs.
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
        if not keeps:
            return result
        # Recordings of observers that have left are dropped: a Watch may live as long as a conversation.
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
        """Sets the number of tokens of a row; values of later tokens are dropped."""
        for _, recording in self._recordings.values():
            if recording is not None:
                recording.end(row, tokens)
