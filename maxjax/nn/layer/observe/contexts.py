"""``capture`` and ``patch``: context managers that observe one model object while a block runs."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ....errors import some
from ....graph.weight.running import RUNNING, names_below
from ..walk import check_module
from .captures import ByName, CaptureKeyError, Captures
from .frames import enter, leave, trace
from .patches import checked_patches
from .places import Place
from .plans import ObserverPlan, Taps, passed, plan_of
from .recording import Recording


class Observer:
    """Base class of the context managers that observe a model object.

    Calls of the model, and of modules in it, are observed in the thread or task of the block, if
    they run in the trace in which the block was entered: usually none, that is eagerly. Calls under a
    transformation inside the block are not observed.

    Args:
        model: Module.
        caller: "capture" or "patch".
        patterns: pairs of a pattern and, for a patch, the new value or function.
    """

    def __init__(self, model: Any, caller: str, patterns: Collection[tuple[Any, Any]]):
        check_module(model, caller)
        self._plan, self._values = plan_of(model, caller, patterns)
        self._model: Any = weakref.ref(model)
        self._trace: Any = None  # the trace of the block, while it runs
        self.checked: set[Any] = set()  # keys of calls whose patches fit
        self.missed = 0  # calls that ran under a transformation

    def __enter__(self) -> Any:
        self._trace = trace()
        enter(self)
        return self

    def __exit__(self, *error: Any) -> None:
        leave(self)
        self._trace, self.checked = None, set()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None, "_trace": None, "checked": set()}

    def observes(self, module: Any) -> bool:
        """Return whether the call of a Module that is about to start is observed."""
        if RUNNING.graphs or self._name_of(module) is None:
            return False
        if any(self._name_of(one) is not None for one in RUNNING.modules):
            return False  # it is inside the call of another Module of the model, which is observed
        if trace() != self._trace:
            self.missed += 1
            return False
        return True

    def _name_of(self, module: Any) -> str | None:
        model = None if self._trace is None or self._model is None else self._model()
        prefix = None if model is None else names_below(model).prefixes.get(id(module))
        return None if prefix is None else prefix.rstrip(".")

    def plan(self, module: Any, level: int) -> tuple[ObserverPlan, tuple[Any, ...]]:
        """Return the plan for a Module that is about to run, and the values of its patches."""
        root = self._name_of(module) or ""
        return dataclasses.replace(self._plan, level=level, root=root), self._values

    def recording(self) -> Recording | None:
        """Return where one run of a maxjax function records its pieces; None for a patch."""
        return None

    def take(self, plan: ObserverPlan, taps: Taps) -> None:
        """Take what a call has recorded for this observer."""
        raise NotImplementedError

    def _why(self) -> str:
        """Return the reason why nothing was observed, as the end of a message."""
        if self.missed:
            return (
                "; the model ran under jax.jit or another transformation, and what the caller has "
                "compiled is not changed: maxjax.captured and maxjax.patched make functions to jit"
            )
        return (
            "; no call of this model object ran in the block (what you have jitted runs as it was compiled, "
            "and its model is another object: jit what maxjax.captured and maxjax.patched make)"
        )


class Capture(Observer, ByName):
    """The captured values of a block; made by :func:`capture`.

    ``c["layers.3.mlp"]`` is the value of the last run, and ``c["layers.*.mlp"]`` that of all layers as
    one array, as in :class:`Captures`. A run is one call of the model, or one call of a maxjax function that
    runs the model several times; the values of these calls are concatenated along the tokens
    (:class:`Recording`).

    Attributes:
        runs: a Captures or a Recording for each run, in order.
    """

    def __init__(self, model: Any, patterns: Collection[str]):
        super().__init__(model, "capture", [(pattern, None) for pattern in patterns])
        self.runs: list[Captures | Recording] = []

    @property
    def calls(self) -> list[Captures]:
        """The captured values of each call of the model, in order, as the model computed them."""
        each = [run.calls if isinstance(run, Recording) else [run] for run in self.runs]
        return [call for calls in each for call in calls]

    def recording(self) -> Recording:
        run = Recording()
        self.runs.append(run)
        return run

    def take(self, plan: ObserverPlan, taps: Taps) -> None:
        found = Captures.of(taps, plan.level)
        if found:
            self.runs.append(found)

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

    def __repr__(self) -> str:
        if not self.runs:
            patterns = [target.pattern for target in self._plan.targets]
            return f"Capture of {some(patterns, 3)}: nothing yet"
        more = f" (the last of {len(self.runs)} runs)" if len(self.runs) > 1 else ""
        return f"{self.runs[-1]!r}{more}"


class Patching(Observer):
    """Context manager that :func:`patch` returns: the patches of a block."""

    def __init__(self, model: Any, patches: Any):
        super().__init__(model, "patch", checked_patches(patches, "patch").items())
        self._passed: set[Place] = set()

    def take(self, plan: ObserverPlan, taps: Taps) -> None:
        self._passed |= passed(plan, taps)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            for target in self._plan.targets:
                if self._passed.isdisjoint(target.places):
                    message = f"patch '{target.pattern}' was not used{self._why()}"
                    warnings.warn(message, stacklevel=2)


def capture(model: Any, *patterns: str) -> Capture:
    """Capture activations of a model in a block: ``with capture(model, "layers.*") as c:``.

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
    """Replace activations of a model in a block: ``with patch(model, {...}):``.

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
