"""Continuous batching: ``maxjax.Engine``, and what ``maxjax.generate`` runs on.

Read ``running`` first: a text from the queue to its last token. ``scheduler`` decides what the devices do next,
``pages`` which memory is whose, ``programs`` are what the devices run; users see ``engine`` and ``answer``.
"""
