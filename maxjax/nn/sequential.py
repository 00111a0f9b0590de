"""Written for files of Modular MAX: Sequential, re-exported at MAX's path.

maxjax itself does not import it.
"""

from .layer import Sequential as Sequential
