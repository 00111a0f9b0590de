"""Tab completion in IPython past the first dot of a model, a list of layers or a checkpoint.

IPython evaluates what stands before the last dot only as far as it knows that nothing happens: it
knows ``[…]`` of dicts and lists, and attributes of classes without a ``__getattr__`` of their own. Here it is told
which classes of maxjax it may ask too: to look up a layer or a place in a checkpoint reads
nothing and changes nothing.
"""

from __future__ import annotations

import sys
from typing import Any

_LISTS = "maxjax.nn.layer.layer_list"
_STACKS = "maxjax.nn.layer.stack.layer_stack"
_PLACES = "maxjax.graph.weights.cursor"
_GGUF = "maxjax.graph.weights.load"
# Module and class.
_INDEXED = (
    (_LISTS, "LayerList"), (_LISTS, "LayerTuple"), (_LISTS, "Sequential"), (_STACKS, "LayerStack"),
    ("maxjax.nn.layer.stack.expert_stack", "ExpertStack"),
    (_PLACES, "Weights"), (_PLACES, "SafetensorWeights"), (_GGUF, "GGUFWeights"),
)  # fmt: skip
_WITH_ATTRIBUTES = (
    (_STACKS, "LayerStack"), ("maxjax.nn.layer.stack.expert_stack", "ExpertStack"),
    (_PLACES, "Weights"), (_PLACES, "SafetensorWeights"), (_GGUF, "GGUFWeights"),
)  # fmt: skip


def register() -> bool:
    """Tells IPython which classes it may ask, if it runs; returns whether it does.

    Example:
        >>> register() or "IPython" not in sys.modules
        True
    """
    policy: Any = None
    if "IPython" in sys.modules:
        try:
            from IPython.core.guarded_eval import EVALUATION_POLICIES

            policy = EVALUATION_POLICIES["limited"]
        except (ImportError, KeyError):  # a version that completes otherwise
            return False
    for allowed, classes in (
        ("allowed_getitem_external", _INDEXED),
        ("allowed_getattr_external", _WITH_ATTRIBUTES),
    ):
        names = getattr(policy, allowed, None)
        if not isinstance(names, set):
            return False
        names.update(classes)
    return True
