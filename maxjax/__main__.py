"""``python -m maxjax``: the same as the command ``maxjax``."""

import sys

from .cli.application import main

if __name__ == "__main__":
    sys.exit(main())
