"""The Modules being called and the Graphs being built in this thread.

Weights and subgraphs, which cannot import Module or Graph, look names and tracers up here: a Weight
its full name and its tracer in a Graph, a subgraph the Weights of some names. Modules and Graphs
push themselves on the stacks while they run; nothing is registered at import.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

from jax.core import Tracer


def names_below(module: Any, stacked: bool = False) -> Any:
    """Return the names below a Module (``ModuleNames`` in ``nn/layer/walk.py``), computed once for its structure.

    Args:
        stacked: whether all equal layers of a LayerStack have one name.
    """
    return module._mx_names_below(stacked)


class Running(threading.local):
    """The running Modules and Graphs of this thread.

    Attributes:
        modules: Modules whose ``__call__`` is running, outermost first. Each computes the names
            below it on demand.
        graphs: graphs being built, innermost last.
        traced: whether the outermost Module was called under a trace.
    """

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.graphs: list[Any] = []
        self.traced = False

    def path_of(self, weight: Any) -> str | None:
        """The path of a Weight below the outermost running Module; None if it is not below it."""
        return names_below(self.modules[0]).names.get(id(weight)) if self.modules else None

    def warn_of_lost(self, weight: Any, value: Any) -> None:
        """Warns if a Weight below a running Module gets a traced value, which is lost after the trace."""
        if isinstance(value, Tracer) and (path := self.path_of(weight)) is not None:
            warnings.warn(
                f"weight '{path}' gets a value while its module runs: under jax.jit it is lost after the trace. "
                "Return the new value instead",
                stacklevel=3,
            )

    def name_of(self, weight: Any) -> str:
        """The name of a Weight in a program.

        It is the path below the outermost running Module. If that is only the end of the Weight's own name, it is the
        whole name: a child that is called alone keeps the names of its parent's state dict. A renamed Weight has its
        new name.
        """
        name, path = weight.name, self.path_of(weight)
        if path is None or name.endswith(f".{path}") or weight.is_renamed:
            return name
        return path

    def names_of(self, weight: Any) -> list[str]:
        """The names by which a Weight may be looked up with :meth:`find`, in the order in which that searches."""
        paths = [names_below(m).names.get(id(weight)) for m in reversed(self.modules)]
        found = [path for path in paths if path is not None]
        # Below the outermost Module, a new name of the Weight comes before its path.
        return [*found[:-1], self.name_of(weight), *found[-1:]]

    def is_below(self, stack: Any) -> bool:
        """Whether a StackedWeight is below the outermost running Module."""
        return bool(self.modules) and id(stack) in names_below(self.modules[0], stacked=True).stacks

    def find(self, names: list[str], templates: list[Any]) -> list[Any] | None:
        """The Weights of these names; ``templates`` has a similar Weight for each.

        They come from the innermost running Module that has them all, otherwise from the Graph being
        built, which creates those that it lacks; None if there is neither.
        """
        for module in reversed(self.modules):
            known = names_below(module).weights
            if not all(name in known for name in names):
                known = {self.name_of(weight): weight for weight in known.values()}
            if all(name in known for name in names):
                return [known[name] for name in names]
        if not self.graphs:
            return None
        graph = self.graphs[-1]
        return [graph.placeholder(n, t) for n, t in zip(names, templates, strict=True)]


RUNNING = Running()
