"""MAX\'s path of sampling that rejects drafts, which raises NotImplementedError with advice when it is used."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
