"""Text generation: ``maxjax.generate``, ``maxjax.stream`` and ``Conversation``.

From a prompt to a text: ``request`` checks the arguments, ``defaults`` adds those that a
checkpoint recommends, ``batch`` owns the KV cache and dispatches the two compiled ``programs``
(prefill and decode), ``completion`` turns tokens into text, and ``texts`` holds the public
functions. ``conversation`` keeps a chat and its cache; ``nans`` finds the first layer that gives
NaN. Which token is chosen is decided in ``maxjax.engine.sampling``.
"""
