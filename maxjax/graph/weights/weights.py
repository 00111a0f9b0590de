"""Re-exports of the cursor and its values under MAX's path."""

from ..shape import Shape as Shape
from .cursor import Weights as Weights
from .load import WeightsAdapter as WeightsAdapter
from .weight_data import WeightData as WeightData
