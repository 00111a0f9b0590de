"""The path of the compiled shared library.

``kernels/cpu`` is compiled when the package is installed. ``storage`` uses the library for
checksums, ``kernels`` for arithmetic; both find it with this file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Environment variable: "off" disables compiled code, the name of a level selects its kernels.
VARIABLE = "MAXJAX_KERNELS"
# Environment variable: path of a library to use instead of the installed one.
FILE_VARIABLE = "MAXJAX_KERNELS_LIBRARY"


def library_path() -> Path:
    """The path of the shared library; the file exists only if it was built."""
    if given := os.environ.get(FILE_VARIABLE):
        return Path(given)
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(__file__).parent / "kernels" / "cpu" / f"libmaxjax_cpu.{suffix}"
