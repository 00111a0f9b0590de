"""MAX's path of rejection samplers for speculative decoding: using one raises NotImplementedError with advice."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
