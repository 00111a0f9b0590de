"""Model families, and :func:`build`, which makes a lazy Module from a checkpoint's headers.

There is one file per architecture. ``registry`` lists them, and has the classes that are names of this
package: ``maxjax.models.Llama`` is ``maxjax.models.llama.Llama``. For type checkers, ``__init__.pyi`` has
them too (``python scripts/models_stub.py`` writes it). ``construct`` has ``build``.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..lazy import attributes as _attributes
from .registry import classes as _classes

if _TYPE_CHECKING:
    from .config import ModelConfig as ModelConfig
    from .config import read_object as read_object
    from .construct import build as build
    from .construct import config_beside as config_beside
    from .family import Family as Family
    from .family import PretrainedModel as PretrainedModel
    from .family import one_head as one_head
    from .family import tensors as tensors
    from .find import find_family as find_family
    from .gguf.table import GGUFTable as GGUFTable
    from .parts.config import LanguageModelConfig as LanguageModelConfig
    from .parts.encoder import Encoder as Encoder
    from .parts.encoder import EncoderConfig as EncoderConfig
    from .parts.encoder import EncoderOutput as EncoderOutput
    from .parts.language_model import LanguageModel as LanguageModel
    from .registry import FamilyNames as FamilyNames
    from .registry import all_families as all_families
    from .registry import families as families
    from .registry import register as register
    from .source import source_of as source_of
    from .ties import is_tied as is_tied
    from .ties import with_tie as with_tie
    from .vision.part import VisionPart as VisionPart
    from .weights import main_dtype as main_dtype

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        **_classes(),
        "config": "ModelConfig read_object",
        "construct": "build config_beside",
        "parts.config": "LanguageModelConfig",
        "parts.encoder": "Encoder EncoderConfig EncoderOutput",
        "family": "Family PretrainedModel one_head tensors",
        "find": "find_family",
        "gguf.table": "GGUFTable",
        "parts.language_model": "LanguageModel",
        "registry": "FamilyNames all_families families register",
        "source": "source_of",
        "ties": "is_tied with_tie",
        "vision.part": "VisionPart",
        "weights": "main_dtype",
    },
)
