"""Programs that run: ``maxjax.load``, ``embed``, ``generate``, ``plan``, ``export``.

``load`` makes a model and its tokenizer of a path or a name on the hub (``hub``); ``embed`` gives one
vector for each text; ``generate/`` writes texts with the tokens that ``sampling/`` chooses; ``plan/``
says what a model takes on a mesh before it is loaded; ``export/`` stores compiled programs.
``session`` is MAX's way to run a Graph.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .session import InferenceSession as InferenceSession
    from .session import Model as Model

__getattr__, __dir__, __all__ = _attributes(__name__, {"session": "InferenceSession Model"})
