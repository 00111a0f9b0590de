"""Storage reads and writes checkpoint files as tables of named tensors. It knows no device and no Module.

``open_checkpoint`` opens a path of any format and returns a ``TensorTable``: validated entries and open
files, no data yet. ``files`` does every read, ``table`` reads tensors, ``parts`` reads rectangular parts
of them, and ``limits`` bounds what a file may make this process allocate. Each format is a folder and a
record in ``formats``: ``safetensors/``, ``gguf/`` (with ``blocks/``, its quantised blocks), ``pytorch/``,
``numpy/``, ``orbax/``; PyTorch and NumPy files share the archive reader ``zip/``.
``checksums``, ``digests`` and ``verify`` detect bytes that differ from those that were written; ``save/``
replaces old files by new ones in one transaction, so that nothing is lost.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .entry import TensorEntry as TensorEntry
    from .files import OpenFile as OpenFile
    from .files import aligned_empty as aligned_empty
    from .files import open_regular as open_regular
    from .index_file import open_index as open_index
    from .limits import Limits as Limits
    from .open import open_checkpoint as open_checkpoint
    from .safetensors.reader import open_safetensors as open_safetensors
    from .signatures import sniff as sniff
    from .strict_json import load_json as load_json
    from .table import TensorTable as TensorTable

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "entry": "TensorEntry",
        "files": "OpenFile aligned_empty open_regular",
        "index_file": "open_index",
        "limits": "Limits",
        "open": "open_checkpoint",
        "safetensors.reader": "open_safetensors",
        "signatures": "sniff",
        "strict_json": "load_json",
        "table": "TensorTable",
    },
)
