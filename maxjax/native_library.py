"""Where the library of compiled functions lies.

``kernels/cpu`` is compiled when the package is installed. Storage uses it for checksums and
kernels for arithmetic; both find it here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# "off": nothing compiled is used.
VARIABLE = "MAXJAX_KERNELS"
# Another file than the one that installing made.
FILE_VARIABLE = "MAXJAX_KERNELS_LIBRARY"


def library_path() -> Path:
    """Where the library of compiled functions is, if it was built."""
    if given := os.environ.get(FILE_VARIABLE):
        return Path(given)
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(__file__).parent / "kernels" / "cpu" / f"libmaxjax_cpu.{suffix}"
