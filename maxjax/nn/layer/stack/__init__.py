"""LayerStack: equal layers with stacked weights, compiled once and run by ``jax.lax.scan``.

``layer_stack`` has the container, ``scanning`` runs it, and ``per_layer`` holds values that differ from
layer to layer.
"""
