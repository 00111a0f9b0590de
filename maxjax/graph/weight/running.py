"""What runs in this thread: the Modules that are called, and the Graphs that are written.

The one place where floors above leave what floors below ask for: a Weight asks here what it is
called and what stands for it in a Graph, a subgraph asks for the Weights of some names. Modules and
Graphs put themselves on the stacks while they run and take themselves off; nothing is registered
when a file is imported.
"""

from __future__ import annotations

import threading
from typing import Any

from .epoch import EPOCH


class Running(threading.local):
    """What runs in this thread.

    Attributes:
        modules: The Modules whose ``__call__`` is running, outermost first. Each makes the names
            below it when it is asked (``nn/layer/call_stack.py``).
        graphs: The Graphs being written, innermost last.
        traced: Whether the outermost of them was called under a trace.
        known: id(Module) → names below one of the Modules, made when they are asked for.
    """

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.graphs: list[Any] = []
        self.traced = False
        self.known: dict[int, Any] = {}

    def names_below(self, module: Any) -> Any:
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
