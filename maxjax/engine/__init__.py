"""What a user runs: ``maxjax.load``, ``embed``, ``generate``, ``plan`` and ``export``.

``load`` opens a checkpoint, given as a path or as a name on the hub (``hub``), and returns a model and
its tokenizer. ``embed`` computes one vector for each text, ``rerank`` one score for each document; ``fill_mask``,
``tag``, ``classify`` and ``answer`` use the other heads of encoders; all run on ``rows`` of tokens.
``perplexity`` measures how well a model predicts a text, ``score`` how probable its tokens are. ``generate/``
generates text from the tokens that ``sampling/`` chooses. ``plan/`` shows what memory a model needs on a mesh,
before it is loaded. ``export/`` stores compiled programs. ``session`` runs a Graph through MAX's interface.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..absent import absent as _absent
from ..lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .session import InferenceSession as InferenceSession
    from .session import Model as Model

__getattr__, __dir__, __all__ = _attributes(
    __name__, {"session": "InferenceSession Model"}, _absent(__name__)
)
