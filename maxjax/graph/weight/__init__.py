"""Weight: a named tensor of a model, abstract until it is loaded.

``weight`` has the class, and Shard, a view of a part; ``spec`` is what a Weight declares and how its value is
stored; ``stacked`` holds the weights of equal layers as one array; ``transpose`` is the result of ``w.T``;
``running`` tracks the running Modules and Graphs of a thread.
"""

from ..placement.split import Segment as Segment
from ..placement.split import even_range as _compute_shard_range  # noqa: F401  # MAX's name
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from .weight import Shard as Shard
from .weight import Weight as Weight
