"""Kernels in Pallas for TPUs (Mosaic), and which TPUs they run on."""
