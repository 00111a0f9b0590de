"""Written for files of Modular MAX: metrics of caches, at MAX's path.

maxjax itself does not import it. Using a name of it raises NotImplementedError with advice.
"""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
