"""``maxjax.plan``: memory and sharding of a model before anything is allocated.

``footprint`` computes the bytes of weights and KV cache on each device; ``report`` has the public
function and the table that it prints. Of a checkpoint only the headers are read.
"""
