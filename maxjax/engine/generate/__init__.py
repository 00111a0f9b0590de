"""Text generation: ``maxjax.generate``, ``maxjax.stream`` and ``Conversation``.

``texts`` holds the public functions. On the way from a prompt to a text, ``request`` checks the
arguments, ``defaults`` adds those that a checkpoint recommends, ``maxjax.engine.batching`` reads and
writes, and ``completion`` turns tokens into text. ``stream`` yields the pieces of one answer,
``conversation`` keeps a chat and its cache, ``beams`` searches; ``nans`` finds the first layer whose
output is not finite. ``maxjax.engine.sampling`` decides which token is chosen.
"""
