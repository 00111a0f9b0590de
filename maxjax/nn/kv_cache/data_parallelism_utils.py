"""MAX's path of batches split over caches: using a name of it raises NotImplementedError with advice."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
