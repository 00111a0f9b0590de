"""MAX\'s path of the promotion of dtypes, which raises NotImplementedError with advice when it is used."""

from ..absent import absent as _absent

__getattr__ = _absent(__name__)
