"""Weight: a named value of a model, abstract until it is loaded. At MAX's path.

``weight`` is the class; ``transpose`` is what ``w.T`` gives; ``shard`` gives the part of one
device, as a view; ``stacked`` is one layer's view of a weight that is stored stacked.
"""

from ..placement.strategy import Segment as Segment
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from .shard import Shard as Shard
from .weight import Weight as Weight
