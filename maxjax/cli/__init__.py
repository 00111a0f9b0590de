"""The command line: ``maxjax inspect``, ``verify``, ``embed``, ``generate``, ``chat`` and more.

One file per command, with its arguments and its output; ``application`` lists the commands and
turns errors into one line and an exit code. ``options`` checks the values of arguments,
``model`` loads what a command runs, ``terminal`` and ``answer`` write to the screen. Nothing
heavy is imported before the arguments have been read, so that ``--help`` is instant.
"""

from collections.abc import Sequence as _Sequence


def main(argv: _Sequence[str] | None = None) -> int:
    """Runs ``maxjax`` with the arguments (``sys.argv`` by default); gives the exit code."""
    from .application import main as run

    return run(argv)
