"""Weight: a named value of a model, abstract until it is loaded. At MAX's path.

``weight`` is the class, and the part of one device as a view; ``stored`` is what it holds, for what
loads, places and saves; ``transpose`` is what ``w.T`` gives; ``stacked`` holds the weights of equal
layers as one array; ``running`` knows what runs in a thread.
"""

from ..placement.strategy import Segment as Segment
from ..placement.strategy import ShardingStrategy as ShardingStrategy
from .weight import Shard as Shard
from .weight import Weight as Weight
