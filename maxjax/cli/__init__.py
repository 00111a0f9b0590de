"""The command line: ``maxjax inspect``, ``verify``, ``embed``, ``generate``, ``chat`` and more.

Each command has a file with its arguments and its output. ``application`` lists the commands and
turns errors into one line and an exit code. ``options`` checks the values of arguments, ``model``
loads the model of a command, and ``terminal`` and ``answer`` write to the screen. Heavy imports
happen only after the arguments have been parsed, so that ``--help`` is instant.
"""

from collections.abc import Sequence as _Sequence


def main(argv: _Sequence[str] | None = None) -> int:
    """Runs ``maxjax`` with the arguments (``sys.argv`` by default), and returns the exit code."""
    from .application import main as run

    return run(argv)
