"""Saving, restoring and converting checkpoints; a save that fails leaves the old one intact.

``pretrained`` writes a directory that transformers opens (``file_set`` replaces its files as one
transaction), ``orbax/`` saves and restores steps, ``conversion/`` converts a checkpoint of one
format into another.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .conversion.run import Converted as Converted
    from .conversion.run import convert as convert
    from .file_set import repair as repair
    from .orbax.checkpoint import CheckpointManager as CheckpointManager
    from .orbax.checkpoint import restore as restore
    from .orbax.checkpoint import save as save
    from .orbax.checkpoint import save_async as save_async
    from .orbax.save import Response as Response
    from .pretrained import save_pretrained as save_pretrained

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "conversion.run": "Converted convert",
        "file_set": "repair",
        "orbax.checkpoint": "CheckpointManager restore save save_async",
        "orbax.save": "Response",
        "pretrained": "save_pretrained",
    },
)
