"""Weight: a named tensor of a model, abstract until it is loaded.

Read in this order:

* ``spec.py``: WeightSpec, all that a Weight declares, and how its value is stored; JAX compares it.
* ``weight.py``: Weight, which has a spec, a leaf (the value or a placeholder) and a name; and Shard, a view of a part.
* ``stacked.py``: StackedWeight, the Weights of equal layers as one array, of which each is a view.
* ``epoch.py``: counters of changes, which say when what is cached of a Module is out of date.
* ``running.py``: the Modules and Graphs that run in a thread, where a Weight finds its full name and its tracer.
* ``transpose.py``: the result of ``w.T``; ``rows.py``: displays.
"""

from ..placement.split import Segment as Segment
from ..placement.split import even_range as _compute_shard_range  # noqa: F401  # MAX's name
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from .weight import Shard as Shard
from .weight import Weight as Weight
