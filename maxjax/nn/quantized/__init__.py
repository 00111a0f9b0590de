"""Linear layers whose weight is quantised in one of Hugging Face's formats, and these formats.

A format stores a weight ``[out, in]`` as several tensors: numbers of few bits, scales, zero points.
A ``QuantizedLinear`` keeps these tensors as they are in the file, each as a Weight under the file's name. A
:class:`QuantLayout` lists the tensors, and a function of ``kernels/formats.py`` computes the weight from them.
``models/quantized.py`` finds out which format a checkpoint has.
"""

from ...kernels.formats import QuantLayout as QuantLayout
from ...kernels.formats import QuantTensor as QuantTensor
from .forms import Exactly as Exactly
from .forms import Groups as Groups
from .forms import QuantState as QuantState
from .forms import Reshaped as Reshaped
from .linear import QuantizedLinear as QuantizedLinear
