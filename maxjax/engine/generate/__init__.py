"""Text generation: ``maxjax.generate``, ``maxjax.stream`` and ``Conversation``.

``texts`` holds the public functions. On the way from a prompt to a text, ``request`` checks the
arguments, ``defaults`` adds those that a checkpoint recommends, ``batch`` owns the KV cache and
dispatches the two compiled ``programs`` (prefill and decode), and ``completion`` turns tokens into
text. ``conversation`` keeps a chat and its cache; ``nans`` finds the first layer whose output is
not finite. ``maxjax.engine.sampling`` decides which token is chosen.
"""
