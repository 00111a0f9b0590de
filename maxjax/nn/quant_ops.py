"""MAX\'s path of quantised products, which raises NotImplementedError with advice when it is used."""

from ..absent import absent as _absent

__getattr__ = _absent(__name__)
