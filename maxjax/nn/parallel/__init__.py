"""MAX\'s path of operations on arrays of the host, which raises NotImplementedError with advice when it is used."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
