"""Arithmetic that XLA does badly by itself; the jnp form of each is its definition."""

from .decode_attention import decode_attention as decode_attention
from .embed import embed as embed
from .matmul import matmul as matmul
from .quant_array import QuantArray as QuantArray
from .stack_slice import StackSlice as StackSlice
