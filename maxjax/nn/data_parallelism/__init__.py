"""Functions that split a ragged batch over devices, under the names and paths of ``max.nn.data_parallelism``."""

from .split_batch import split_batch as split_batch
from .split_batch import split_batch_replicated as split_batch_replicated
