"""MAX's path of random numbers. Using one of its names raises NotImplementedError with advice."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
