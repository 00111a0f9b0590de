"""Floor 1. Storage: bytes on disk to named arrays. It knows no device and no Module.

``open_checkpoint`` is the way in; a ``TensorTable`` is what comes out.
"""

from .entry import TensorEntry as TensorEntry
from .files import OpenFile as OpenFile
from .files import aligned_empty as aligned_empty
from .files import open_regular as open_regular
from .index import open_checkpoint as open_checkpoint
from .jsontext import load_json as load_json
from .limits import Limits as Limits
from .safetensors import open_safetensors as open_safetensors
from .shards import open_index as open_index
from .sniff import sniff as sniff
from .table import TensorTable as TensorTable
