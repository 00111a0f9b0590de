"""Quantisation of a model in memory: ``maxjax.quantize`` and ``maxjax.calibrate``.

``choice`` chooses the type of each weight, ``shards`` encodes a weight on its devices, and ``model`` makes
the quantised model and the report of its errors. ``importance`` is the importance matrix and its file,
``calibration`` computes one.
"""
