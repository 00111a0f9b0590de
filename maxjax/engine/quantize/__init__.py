"""Quantisation of a model in memory: ``maxjax.quantize`` and ``maxjax.calibrate``.

``choice`` says which weight gets which type, ``shards`` encodes a weight where it lies, ``model`` puts a
quantised model together, with the table of what was lost. ``importance`` is the importance
matrix and its file, ``calibration`` makes one.
"""
