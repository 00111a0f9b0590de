"""Compiled programs as files: ``maxjax.export`` and ``maxjax.load_exported``.

``signature`` describes the inputs and outputs, ``file`` is the file format, ``write`` exports, and
``program`` loads and runs. The programs themselves are those of ``jax.export``.
"""
