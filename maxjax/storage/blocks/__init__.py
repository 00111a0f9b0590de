"""ggml's quantised blocks: their layouts, and conversion from and to float32."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ...lazy import attributes as _attributes
from .codings import Decoded as Decoded
from .decoders import DECODERS as DECODERS
from .decoders import decode as decode
from .decoders import decode_into as decode_into
from .layout import KEPT as KEPT
from .layout import LAYOUTS as LAYOUTS
from .layout import BlockLayout as BlockLayout
from .layout import Field as Field
from .layout import layout_of as layout_of
from .layout import swap_blocks as swap_blocks

if _TYPE_CHECKING:
    from .encoders import ENCODERS as ENCODERS
    from .encoders import encode as encode

__getattr__, __dir__, _ = _attributes(__name__, {"encoders": "ENCODERS encode"})
