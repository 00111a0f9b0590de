"""Conversion between GGUF files and Hugging Face's checkpoints: names, layouts, configuration, tokenizer.

llama.cpp's converter renames tensors and settings, and permutes or shifts the values of some. Tables
in this package describe these changes for each architecture, and are used in both directions. No
module in it opens a file.

Other formats do not need this package, so its names are imported when they are first used.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ...lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .config.read import hf_config as hf_config
    from .config.read import pooling as pooling
    from .layouts import Expert as Expert
    from .layouts import Layout as Layout
    from .layouts import Matrix as Matrix
    from .layouts import Permuted as Permuted
    from .layouts import Plus as Plus
    from .layouts import Transposed as Transposed
    from .names import ARCHITECTURES as ARCHITECTURES
    from .names import Source as Source
    from .names import hf_names as hf_names
    from .tensors.read import config_of as config_of
    from .tensors.read import hf_tensors as hf_tensors
    from .tensors.types import encodings as encodings
    from .tensors.types import is_wide as is_wide
    from .tensors.write import GGUFTensors as GGUFTensors
    from .tensors.write import gguf_tensors as gguf_tensors
    from .tokenizer.read import chat_template as chat_template
    from .tokenizer.read import tokenizer_json as tokenizer_json
    from .tokenizer.write import gguf_tokenizer_metadata as gguf_tokenizer_metadata
    from .write_metadata import gguf_metadata as gguf_metadata
    from .write_metadata import gguf_settings as gguf_settings

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "tensors.read": "config_of hf_tensors",
        "config.read": "hf_config pooling",
        "layouts": "Expert Layout Matrix Permuted Plus Transposed",
        "names": "ARCHITECTURES Source hf_names",
        "tokenizer.read": "chat_template tokenizer_json",
        "write_metadata": "gguf_metadata gguf_settings",
        "tensors.write": "GGUFTensors gguf_tensors",
        "tokenizer.write": "gguf_tokenizer_metadata",
        "tensors.types": "encodings is_wide",
    },
)
