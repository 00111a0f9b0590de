"""Linear layers whose weight is quantised in one of Hugging Face's formats, and these formats.

A format stores a weight ``[out, in]`` as several tensors: numbers of few bits, scales, zero points.
They stay as they are in the file, each a Weight under the file's name (``QuantizedLinear``); a
:class:`QuantLayout` says which tensors they are, and a format computes the weight from them
(``formats.py``). ``models/quantized.py`` reads which format a checkpoint has.
"""

from .formats import QuantLayout as QuantLayout
from .formats import QuantTensor as QuantTensor
from .forms import Consecutive as Consecutive
from .forms import Exactly as Exactly
from .forms import QuantState as QuantState
from .linear import QuantizedLinear as QuantizedLinear
