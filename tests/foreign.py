"""An array of another library, which gives its memory by DLPack alone."""

from typing import Any

import jax


class Foreign:
    """Around a jax.Array; ``dtype`` is what the library would call its dtype, if it has such an attribute."""

    def __init__(self, array: jax.Array, **dtype: Any):
        self._array = array
        vars(self).update(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()
