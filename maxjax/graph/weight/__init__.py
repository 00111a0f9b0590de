"""Weight: a named tensor of a model, abstract until it is loaded.

``weight`` has the class, and Shard, a view of a part; ``stored`` is the interface for code that
loads, places and saves weights; ``transpose`` is the result of ``w.T``; ``stacked`` holds the weights
of equal layers as one array; ``running`` tracks the running Modules and Graphs of a thread.
"""

from ..placement.split import Segment as Segment
from ..placement.split import even_range as _compute_shard_range  # noqa: F401  # MAX's name
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from .weight import Shard as Shard
from .weight import Weight as Weight
