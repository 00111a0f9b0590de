"""MAX's path of Kimi's delta rule: using a name of it raises NotImplementedError with advice."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
