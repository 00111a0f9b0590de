"""Operations that XLA compiles badly for CPUs: matmul, decode attention, embedding lookup.

Each has a form in jnp, which is its definition and runs on every platform, in exported programs
and under differentiation. On a CPU a C++ kernel of ``cpu/`` computes the same (not for ``embed``); attention
has kernels for NVIDIA GPUs (``gpu/``, ``decode/``) and TPUs (``tpu/``) as well.
"""

from .decode_attention import decode_attention as decode_attention
from .embed import embed as embed
from .matmul import matmul as matmul
from .quant_array import QuantArray as QuantArray
from .quant_tensors import QuantTensors as QuantTensors
from .stack_slice import StackSlice as StackSlice
