"""Written for files of Modular MAX: RMSNorm, re-exported at MAX's path.

maxjax itself does not import it.
"""

from .norms import RMSNorm as RMSNorm
