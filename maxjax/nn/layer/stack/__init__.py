"""LayerStack: equal layers stored stacked, compiled once and run under ``jax.lax.scan``.

``layer_stack`` is the container; ``scanning`` runs it; ``per_layer`` holds values that differ from
layer to layer.
"""
