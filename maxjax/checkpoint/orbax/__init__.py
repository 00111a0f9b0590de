"""Saving and restoring with orbax: ``maxjax.checkpoint.save``, ``restore``, ``CheckpointManager``.

``api`` is the only file that imports orbax. ``tree`` turns a model or a pytree into orbax items,
``save`` writes a step and its checksums, ``steps`` numbers the steps of a directory. To restore,
``open`` opens what was saved, and ``restore`` compares with the example, reads, and fills it.
``streaming`` writes converted values without a model. ``checkpoint`` has the public functions and
class. Files are read by ``maxjax.storage.orbax``, which needs no orbax.
"""
