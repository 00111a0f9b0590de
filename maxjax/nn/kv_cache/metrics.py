"""MAX's path of metrics of caches: using a name of it raises NotImplementedError with advice."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
