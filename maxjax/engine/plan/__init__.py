"""Memory and placement before anything is allocated: ``maxjax.plan``.

``footprint`` computes the bytes of weights, cache and activations for each device; ``planned``
holds the result and prints it; ``report`` is the public function. Only headers are read.
"""
