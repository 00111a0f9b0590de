"""MAX\'s path of hyper-connections, which raises NotImplementedError with advice when it is used."""

from ..absent import absent as _absent

__getattr__ = _absent(__name__)
