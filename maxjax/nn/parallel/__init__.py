"""Written for files of Modular MAX: ``ParallelArrayOps``, which concatenates NumPy arrays in host memory.

maxjax itself does not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...driver import Buffer


class ParallelArrayOps:
    """Concatenates NumPy arrays, with MAX's interface, but without threads.

    Args:
        accelerator: device whose pinned memory holds the results in MAX; not supported, must be None.
        max_workers: ignored.

    Raises:
        ValueError: the accelerator is the host.
        NotImplementedError: another accelerator is given.

    Example:
        >>> ParallelArrayOps().concatenate([np.ones(2), np.zeros(1)]).to_numpy()
        array([1., 1., 0.])
    """

    def __init__(self, accelerator: Any = None, max_workers: int = 24):
        if accelerator is not None:
            if accelerator.is_host:
                raise ValueError("the host is no accelerator: leave it out")
            raise NotImplementedError(
                "ParallelArrayOps(accelerator=...) is not supported: arrays are joined in the host's memory"
            )

    def concatenate(
        self, arrays: Sequence[np.ndarray], axis: int = 0, min_chunk_size_mb: float = 50.0
    ) -> Buffer:
        """A new Buffer with the arrays concatenated along an axis.

        Args:
            arrays: arrays of one dtype.
            axis: axis along which the arrays are concatenated.
            min_chunk_size_mb: ignored.

        Raises:
            ValueError: ``arrays`` is empty, the dtypes differ, or the shapes do not fit.
            IndexError: ``axis`` is out of range.
        """
        if not arrays:
            raise ValueError("there is no array to join")
        if not -arrays[0].ndim <= axis < arrays[0].ndim:
            raise IndexError(f"axis {axis} is outside the {arrays[0].ndim} of the arrays")
        if len({one.dtype for one in arrays}) > 1:
            raise ValueError(
                f"arrays of {', '.join(sorted({str(a.dtype) for a in arrays}))}: one dtype only"
            )
        return Buffer.from_numpy(np.concatenate(arrays, axis=axis))

    def shutdown(self, wait: bool = True) -> None:
        """Does nothing: there are no threads to end."""
