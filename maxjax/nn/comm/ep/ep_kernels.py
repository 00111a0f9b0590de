"""MAX\'s path of kernels of expert parallelism, which raises NotImplementedError with advice when it is used."""

from ....absent import absent as _absent

__getattr__ = _absent(__name__)
