"""``maxjax.plan``: memory and sharding of a model before anything is allocated.

``footprint`` computes the bytes of weights and KV cache on each device; of a checkpoint only the
headers are read. ``topology`` describes devices that need not be present; ``meshes`` compares their
meshes, and finds the largest batch and context; ``compiled`` compiles the programs of generation for them.
``options`` reads the options, and ``report`` has the public function and the table that it prints.
"""
