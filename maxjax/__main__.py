"""``python -m maxjax`` is ``maxjax``."""

import sys

from .cli.application import main

if __name__ == "__main__":
    sys.exit(main())
