"""Floor 5. GGUF files as Hugging Face's checkpoints: names, layouts, configuration, tokenizer.

llama.cpp's converter gives tensors and settings other names, and moves or shifts the values of
some. Tables here say for each architecture what it did, and serve to undo and to do it; nothing
here reads a file. Below: the metadata and the shapes that the storage floor found.

A model that is no GGUF file needs nothing of this: names are imported when they are first used.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ...lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .checkpoint import config_of as config_of
    from .checkpoint import hf_tensors as hf_tensors
    from .config import hf_config as hf_config
    from .config import pooling as pooling
    from .layouts import Expert as Expert
    from .layouts import Layout as Layout
    from .layouts import Matrix as Matrix
    from .layouts import Permuted as Permuted
    from .layouts import Plus as Plus
    from .layouts import Transposed as Transposed
    from .names import ARCHITECTURES as ARCHITECTURES
    from .names import Source as Source
    from .names import hf_names as hf_names
    from .tokenizer import chat_template as chat_template
    from .tokenizer import tokenizer_json as tokenizer_json
    from .write_metadata import gguf_metadata as gguf_metadata
    from .write_tensors import GGUFTensors as GGUFTensors
    from .write_tensors import gguf_tensors as gguf_tensors
    from .write_tokenizer import gguf_tokenizer_metadata as gguf_tokenizer_metadata
    from .write_types import encoding_for as encoding_for
    from .write_types import is_wide as is_wide

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "checkpoint": "config_of hf_tensors",
        "config": "hf_config pooling",
        "layouts": "Expert Layout Matrix Permuted Plus Transposed",
        "names": "ARCHITECTURES Source hf_names",
        "tokenizer": "chat_template tokenizer_json",
        "write_metadata": "gguf_metadata",
        "write_tensors": "GGUFTensors gguf_tensors",
        "write_tokenizer": "gguf_tokenizer_metadata",
        "write_types": "encoding_for is_wide",
    },
)
