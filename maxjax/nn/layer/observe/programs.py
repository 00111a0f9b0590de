"""The observation of maxjax's own jitted programs, which return captured values as further results.

``tapped`` runs a model inside a program, and returns the recorded values with the result. A ``ProgramObserver``
dispatches programs, and passes the recorded values to the captures and patches that observe the model at that moment.
An observed model has another treedef than the same model unobserved, and therefore other compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....errors import UnsupportedModelError, UserInputError
from .captures import Captures
from .frames import Frame, current_observers, opened
from .functions import marked_by, plans_of
from .plans import Taps, check
from .recording import Piece, Recording


def is_observed(model: Any) -> bool:
    """Return whether a model inside a program is the copy of an observed model."""
    return bool(model._mx_marks)


def tapped(model: Any, patches: Sequence[Any], function: Callable[[], Any]) -> tuple[Any, Taps]:
    """Return the result of ``function``, which runs the model, and the values that were recorded.

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
    for plan in plans:
        check(plan, frame.taps)
    return result, frame.taps


class ProgramObserver:
    """One run of a function such as ``maxjax.generate``, whose programs are observed.

    Args:
        model: model whose programs are dispatched.
    """

    def __init__(self, model: Any):
        self._model = model
        self._recordings: dict[Any, Recording | None] = {}

    @property
    def is_observed(self) -> bool:
        """Whether a capture or patch observes the model now."""
        return bool(current_observers(self._model))

    def run(
        self, together: Any, program: Any, *args: Any, rows: Sequence[int],
        counts: Callable[[Any], Any], width: int | None, keeps: bool = True, **static: Any,
    ) -> Any:  # fmt: skip
        """Dispatch ``program(model, *args, **static)``, and pass the recorded values to the observers.

        Args:
            together: lockstep call of several processes to which the dispatch belongs (``lockstep.py``).
            program: jitted function that takes ``patches=``, and returns its result and the taps.
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
        if observers and together.is_shared:
            raise UnsupportedModelError(
                "capturing and patching a model that several processes share"
            )
        plans = plans_of(observers, self._model)
        copy, patches = marked_by(self._model, plans), tuple(plans.values())
        result, taps = together.run(program, copy, *args, patches=patches, **static)
        if not observers or not keeps:
            return result
        # A capture that observes again after other dispatches begins another run.
        self._recordings = {
            one: self._recordings[one] if one in self._recordings else one.recording()
            for one in observers
        }
        for one, plan in zip(observers, plans, strict=True):
            if (recording := self._recordings[one]) is None:
                one.take(plan, taps)
            else:
                found = Captures.of(taps, plan.level)
                recording.add(Piece(found, list(rows), counts(result), width))
        return result

    def end(self, row: int, tokens: int) -> None:
        """Set the number of tokens of a row; values of later tokens are dropped."""
        for recording in self._recordings.values():
            if recording is not None:
                recording.end(row, tokens)
