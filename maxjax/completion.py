"""Tab completion in IPython past the first dot of a model, a list of layers or a checkpoint.

To complete a name, IPython evaluates the text before the last dot only if that has no side effects, as far as it
knows: ``[…]`` of dicts and lists, and attributes of classes without a ``__getattr__`` of their own. This file adds
maxjax's classes to that list, because looking up a layer or a name in a checkpoint reads nothing and changes
nothing.

Where jedi is installed, IPython asks it first. jedi reads code, not values, and so takes
``layers[0]`` for a list. So after a bracket the value itself is completed first, if its class is maxjax's.
"""

from __future__ import annotations

import re
import sys
from typing import Any

# Module and class.
_WITH_ATTRIBUTES = (
    ("maxjax.nn.layer.stack.layer_stack", "LayerStack"),
    ("maxjax.nn.layer.stack.expert_stack", "ExpertStack"),
    ("maxjax.graph.weights.cursor", "FileWeights"),
    ("maxjax.graph.weights.cursor", "SafetensorWeights"),
    ("maxjax.graph.weights.load", "GGUFWeights"),
)
_LISTS = [
    ("maxjax.nn.layer.layer_list", name) for name in ("LayerList", "LayerTuple", "Sequential")
]


def register() -> bool:
    """Tells IPython which classes it may evaluate, if it runs; returns whether it could.

    Example:
        >>> register() or "IPython" not in sys.modules
        True
    """
    policy: Any = None
    running: Any = None
    if "IPython" in sys.modules:
        try:
            from IPython.core.getipython import get_ipython
            from IPython.core.guarded_eval import EVALUATION_POLICIES

            policy = EVALUATION_POLICIES["limited"]
            running = get_ipython()
        except (ImportError, KeyError):  # a version that completes otherwise
            return False
    for allowed, classes in (
        ("allowed_getitem_external", [*_LISTS, *_WITH_ATTRIBUTES]),
        ("allowed_getattr_external", [*_WITH_ATTRIBUTES, ("maxjax.nn.layer.module", "Module")]),
    ):
        names = getattr(policy, allowed, None)
        if not isinstance(names, set):
            return False
        names.update(classes)
    _ask_values(running)
    return True


# Names, attributes and brackets before the name that is being written.
_BEFORE = re.compile(r"([A-Za-z_](?:[\w.]|\[[^\[\]]*\])*)\.\w*\Z")


def _ask_values(shell: Any) -> None:
    """Adds a matcher to the shell, if there is one, that takes precedence over jedi after brackets."""
    from IPython.core.completer import context_matcher
    from IPython.core.guarded_eval import EvaluationContext, guarded_eval

    completer: Any = getattr(shell, "Completer", None)
    matchers = getattr(completer, "custom_matchers", None)
    if not hasattr(completer, "python_matcher") or not isinstance(matchers, list):
        return

    @context_matcher(identifier="maxjax")  # type: ignore[arg-type]
    def after_brackets(context: Any) -> Any:
        none: dict[str, Any] = {"completions": [], "suppress": False}
        found = _BEFORE.search(context.text_until_cursor) if completer.use_jedi else None
        if found is None or "[" not in found[1]:
            return none
        names = {**completer.global_namespace, **completer.namespace}
        try:
            ask = EvaluationContext(globals=names, locals={}, evaluation=completer.evaluation)
            value = guarded_eval(found[1], ask)
        except Exception:  # a refusal of the policy, or whatever the text does when it is evaluated
            return none
        if not any(kind.__module__.startswith("maxjax.") for kind in type(value).__mro__):
            return none
        matched = completer.python_matcher(context)
        return {**matched, "suppress": bool(matched["completions"])}

    others = [one for one in matchers if getattr(one, "matcher_identifier", "") != "maxjax"]
    matchers[:] = [*others, after_brackets]
