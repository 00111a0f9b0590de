"""Written for files of Modular MAX: ragged batches split over devices, as in ``max.nn.data_parallelism``.

maxjax itself does not import it: ``Module.to`` and a mesh split batches.
"""

from .split_batch import split_batch as split_batch
from .split_batch import split_batch_replicated as split_batch_replicated
