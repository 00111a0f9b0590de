"""Checkpoints as trees of names: ``load_weights`` opens one, Weights is a cursor, WeightData a tensor."""

from .cursor import RESERVED_NAMES as RESERVED_NAMES
from .cursor import FileWeights as FileWeights
from .cursor import SafetensorWeights as SafetensorWeights
from .load import GGUFWeights as GGUFWeights
from .load import WeightsAdapter as WeightsAdapter
from .load import WeightsFormat as WeightsFormat
from .load import load_weights as load_weights
from .load import weights_format as weights_format
from .weight_data import WeightData as WeightData
from .weight_data import read_all as read_all
from .weights import Weights as Weights
