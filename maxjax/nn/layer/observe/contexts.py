"""``capture`` and ``patch``: context managers that observe one model object while a block runs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ....errors import some
from ....graph.weight.epoch import EPOCH
from ....graph.weight.running import RUNNING
from ..calls import Wish
from ..walk import Walk, check_module
from .captures import CaptureKeyError, Captures
from .frames import Frame, Observation, Taps, enter, leave, trace
from .functions import (
    capture_plan,
    check_first,
    check_passed,
    checked_patches,
    passed_places,
    patch_plan,
)
from .places import Place, places
from .recording import Recording


class Observer:
    """Base class of the context managers that observe a model object.

    Calls of the model, and of modules in it, are observed in the thread or task of the block, if
    they run in the trace in which the block was entered: usually none, that is eagerly. Calls under a
    transformation inside the block are not observed.
    """

    what = ""

    def __init__(self, model: Any, patterns: Sequence[Any]):
        check_module(model, self.what)
        self._model: Any = model
        self._held = weakref.ref(model)
        self._found = [places(model, pattern, self.what) for pattern in patterns]
        self._patterns = [str(pattern) for pattern in patterns]
        self._names: dict[int, str] = {}
        self._modules: list[Any] = []
        self._structure = -1
        self._is_open = False
        self._passed: set[Place] = set()
        self.missed = 0  # calls that ran under a transformation

    def __enter__(self) -> Any:
        self._model = self._held and self._held()
        self._is_open, self._trace = True, trace()
        enter(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_open = False
        leave(self)
        self._names, self._modules, self._structure = {}, [], -1
        # The captured values may outlive the model: a variable in a notebook must not keep its weights alive.
        self._model = self._trace = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None, "_held": None, "_trace": None}

    def observes(self, module: Any) -> bool:
        """Whether the call of a Module that is about to start is observed."""
        if not self._is_open or RUNNING.graphs or self._name_of(module) is None:
            return False
        if any(self._name_of(one) is not None for one in RUNNING.modules):
            return (
                False  # the call is inside that of another Module of the model, which is observed
            )
        if trace() != self._trace:
            self.missed += 1
            return False
        return True

    def _name_of(self, module: Any) -> str | None:
        if self._structure != EPOCH.structure:
            # Holding the modules keeps their ids from being reused.
            walk = Walk(self._model)
            self._modules = walk.modules
            self._names = {
                id(one): prefix.rstrip(".")
                for one, prefix in zip(walk.modules, walk.prefixes, strict=True)
            }
            self._structure = EPOCH.structure
        return self._names.get(id(module))

    def plan(self, level: int) -> tuple[Observation, tuple[Any, ...]]:
        """The plan of this observer, and the values of its patches."""
        raise NotImplementedError

    def wish(self, module: Any, level: int) -> Wish:
        """The Wish of this observer for a Module that is about to run."""
        plan, values = self.plan(level)
        return Wish(plan, self._name_of(module) or "", values)

    def check(self, call: Callable[..., Any], wish: Wish, operands: Any) -> None:
        """Checks a call before it runs."""

    def take(self, plan: Observation, frame: Frame) -> None:
        """Takes the values that a call has recorded.

        Raises:
            UserInputError: a module that ran does not have the site of a pattern.
        """
        check_passed(self._found, plan, frame, self.what, strict=False)
        self._passed |= passed_places(frame.taps(), plan)

    def recording(self) -> Any:
        """A new object to which :meth:`take_taps` adds in one run of maxjax's programs, or None."""
        return None

    def take_taps(
        self, plan: Observation, taps: Taps, recording: Any, rows: Sequence[int], counts: Any,
        width: int | None,
    ) -> None:  # fmt: skip
        """Takes the values that one of maxjax's programs has recorded; see ``Recording.add`` for the arguments."""
        self._passed |= passed_places(taps, plan)

    def _why(self) -> str:
        """The reason why nothing was observed, as the end of a message."""
        if self.missed:
            return (
                "; the model ran under jax.jit or another transformation, and what the caller has "
                "compiled is not changed: maxjax.captured and maxjax.patched make functions to jit"
            )
        return (
            "; no call of this model object ran in the block (what you have jitted runs as it was compiled, "
            "and its model is another object: jit what maxjax.captured and maxjax.patched make)"
        )


class Capture(Observer, Mapping[str, Any]):
    """The captured values of a block; made by :func:`capture`.

    ``c["layers.3.mlp"]`` is the value of the last run, and ``c["layers.*.mlp"]`` that of all layers as
    one array, as in :class:`Captures`. A run is one call of the model, or one call of a maxjax function that
    runs the model several times; the values of these calls are concatenated along the tokens
    (:class:`Recording`).

    Attributes:
        runs: a Captures or a Recording for each run, in order.
    """

    what = "capture"

    # Compared by identity, because arrays do not compare to a single bool.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, model: Any, patterns: Sequence[str]):
        super().__init__(model, patterns)
        self.runs: list[Captures | Recording] = []

    @property
    def calls(self) -> list[Captures]:
        """The captured values of each call of the model, in order, as the model computed them."""
        return [
            call
            for run in self.runs
            for call in (run.calls if isinstance(run, Recording) else [run])
        ]

    def plan(self, level: int) -> tuple[Observation, tuple[Any, ...]]:
        return capture_plan(self._found, level), ()

    def take(self, plan: Observation, frame: Frame) -> None:
        super().take(plan, frame)
        found = Captures.of(frame.taps(), plan.level)
        if len(found):
            self.runs.append(found)

    def recording(self) -> Recording:
        self.runs.append(Recording())
        return self.runs[-1]  # type: ignore[return-value]

    def take_taps(
        self, plan: Observation, taps: Taps, recording: Any, rows: Sequence[int], counts: Any,
        width: int | None,
    ) -> None:  # fmt: skip
        super().take_taps(plan, taps, recording, rows, counts, width)
        recording.add(Captures.of(taps, plan.level), rows, counts, width)

    def _run(self, key: str) -> Captures | Recording | None:
        return next((run for run in reversed(self.runs) if key in run), None)

    def __getitem__(self, key: str) -> Any:
        run = self._run(key)
        if run is not None:
            return run[key]
        if self.runs:
            return self.runs[-1][key]  # raises, with the nearest name
        raise CaptureKeyError(f"nothing was captured under '{key}'{self._why()}")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._run(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for run in self.runs for key in run))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        if not self.runs:
            return f"Capture of {some(self._patterns, 3)}: nothing yet"
        more = f" (the last of {len(self.runs)} runs)" if len(self.runs) > 1 else ""
        return f"{self.runs[-1]!r}{more}"


class Patching(Observer):
    """The patches of a block; made by :func:`patch`."""

    what = "patch"

    def __init__(self, model: Any, patches: Any):
        self._given = checked_patches(patches, self.what)
        super().__init__(model, list(self._given))
        self._fit: set[Any] = set()

    def plan(self, level: int) -> tuple[Observation, tuple[Any, ...]]:
        return patch_plan(self._given, self._found, level)

    def check(self, call: Callable[..., Any], wish: Wish, operands: Any) -> None:
        check_first(call, operands, wish.plan, self._fit)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            for pattern, group in zip(self._patterns, self._found, strict=True):
                if not self._passed & set(group):
                    warnings.warn(f"patch '{pattern}' was not used{self._why()}", stacklevel=2)


def capture(model: Any, *patterns: str) -> Capture:
    """Captures activations of a model in a block: ``with capture(model, "layers.*") as c:``.

    It captures calls of this model object (and of modules in it) in this thread or task, also by
    maxjax's functions that run the model (``generate``, ``stream``, ``embed``,
    ``perplexity``). It does not capture other models, or functions that you have jitted, which run
    as they were compiled: for these, use :func:`maxjax.captured` inside ``jax.jit``.

    Args:
        model: Module.
        patterns: name patterns, as for :func:`maxjax.captured`; by default the model's own output.

    Returns:
        A context manager that gives a :class:`Capture`: ``c["layers.3.mlp"]``, during the block and after it.

    Raises:
        UserInputError: a pattern matches no module, or names a site that the module does not have.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> with maxjax.capture(model, "layers.*.mlp") as c:
        ...     logits = model(jnp.ones((2, 5), jnp.int32))
        >>> c["layers.2.mlp"].shape
        (2, 5, 8)
        >>> with maxjax.capture(model, "layers.*") as c:
        ...     text = maxjax.generate(model, None, [1, 2, 3], max_new_tokens=4)
        >>> c["layers.2"].shape  # the prompt, and all tokens of the answer but the last
        (1, 6, 8)
    """
    return Capture(model, patterns or ("",))


def patch(model: Any, patches: Mapping[str, Any]) -> Patching:
    """Replaces activations of a model in a block: ``with patch(model, {...}):``.

    It affects the same calls as :func:`capture`.

    Args:
        model: Module.
        patches: map from patterns to new values or functions, as for :func:`maxjax.patched`.

    Raises:
        UserInputError: a pattern matches no module. A call of the model raises it if the module does not have the
            site, and, before anything runs, if a new value has another shape or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2))
        >>> model = maxjax.init(model, jax.random.key(0))
        >>> with maxjax.patch(model, {"layers.1.mlp": lambda y: 2 * y}):
        ...     logits = model(jnp.ones((2, 5), jnp.int32))
    """
    return Patching(model, patches)
