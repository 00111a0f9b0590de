"""Floor 7. ``python -m maxjax`` is ``maxjax``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
