"""Kernels in Pallas for Triton, and which NVIDIA GPUs they run on."""
