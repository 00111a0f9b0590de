"""LoRA: low-rank updates of linear layers and embedding tables, to fine-tune a model with few weights.

``add`` gives a model LoRA weights, and ``merge`` adds them to the base weights. ``save`` and ``load`` write and read
adapters in the format of Hugging Face PEFT.

Names are imported on first use.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .files import load as load
    from .files import save as save
    from .merged import merge as merge
    from .merged import unmerge as unmerge
    from .model import add as add
    from .model import remove as remove

__getattr__, __dir__, __all__ = _attributes(
    __name__, {"files": "load save", "merged": "merge unmerge", "model": "add remove"}
)
