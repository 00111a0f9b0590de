"""What runs in this thread: the Modules that are called, and the Graphs that are written.

The one place where floors above leave what floors below ask for: a Weight asks here what it is
called and what stands for it in a Graph, a subgraph asks for the Weights of some names. Modules and
Graphs put themselves on the stacks while they run and take themselves off; nothing is registered
when a file is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from typing import Any, Protocol

from .epoch import EPOCH


class Names(Protocol):
    """The names below a Module, good for one count of structures.

    Attributes:
        structure: That count.
        names: id(Weight) → first full name.
        weights: Full name → Weight.
        stacks: ids of the StackedWeights.
    """

    structure: int

    @property
    def names(self) -> Mapping[int, str]: ...
    @property
    def weights(self) -> Mapping[str, Any]: ...
    @property
    def stacks(self) -> Set[int]: ...


class Module(Protocol):
    """What is asked of a Module that runs."""

    def _mx_names_below(self) -> Any: ...


class Graph(Protocol):
    """What is asked of a Graph that is written."""

    def stand_in(self, weight: Any) -> Any: ...
    def placeholder(self, name: str, template: Any) -> Any: ...


class Running(threading.local):
    """What runs in this thread.

    Attributes:
        modules: The Modules whose ``__call__`` is running, outermost first.
        graphs: The Graphs being written, innermost last.
        traced: Whether the outermost of them was called under a trace.
        known: id(Module) → names below one of the Modules, made when they are asked for.
    """

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.graphs: list[Any] = []
        self.traced = False
        self.known: dict[int, Any] = {}

    def names_below(self, module: Module) -> Any:
        """The names below a Module that runs; made anew when a structure has changed."""
        known = self.known.get(id(module))
        if known is None or known.structure != EPOCH.structure:
            known = self.known[id(module)] = module._mx_names_below()
        return known

    def name_of(self, weight: Any) -> str | None:
        """The full name of a Weight below the outermost Module that runs."""
        return self.names_below(self.modules[0]).names.get(id(weight)) if self.modules else None

    def is_below(self, stack: Any) -> bool:
        """Whether a StackedWeight is below the outermost Module that runs."""
        return bool(self.modules) and id(stack) in self.names_below(self.modules[0]).stacks

    def find(self, names: list[str], templates: list[Any]) -> list[Any] | None:
        """The Weights of these names, given one like each.

        They are those of the innermost running Module that has them all, else of the Graph being
        written, which makes those it has none of; None where there is neither.
        """
        for module in reversed(self.modules):
            known = self.names_below(module).weights
            if all(name in known for name in names):
                return [known[name] for name in names]
        if not self.graphs:
            return None
        graph = self.graphs[-1]
        return [graph.placeholder(n, t) for n, t in zip(names, templates, strict=True)]


RUNNING = Running()
