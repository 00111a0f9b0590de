"""MAX\'s path of batches split over caches, which raises NotImplementedError with advice when it is used."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
