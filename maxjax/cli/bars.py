"""Progress of a command, drawn by rich."""

from __future__ import annotations

from typing import Any

from ..progress import Task, line


class RichBar:
    """A progress bar, or a line with the elapsed seconds, on stderr. rich is imported by the first.

    Args:
        stream: stderr, a terminal.
    """

    def __init__(self, stream: Any):
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream, markup=False, emoji=False, highlight=False)
        # Redirected streams would lose what the command writes meanwhile.
        self._live = Live(
            console=console, auto_refresh=False, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def draw(self, one: Task) -> None:
        """Shows the task as it is now."""
        self._live.update(_bar(one) if one.total else _line(one), refresh=True)

    def close(self) -> None:
        """Removes the bar from the screen."""
        self._live.stop()


def _line(one: Task) -> Any:
    from rich.text import Text

    return Text(line(one), style="dim", overflow="ellipsis", no_wrap=True)


def _bar(one: Task) -> Any:
    """A task of known size: what it is, a bar, how much is done, how fast, and how long it will take."""
    import time

    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    seconds = max(time.monotonic() - one.began, 1e-9)
    total, done = one.total or 0, min(one.done, one.total or 0)
    rate = done / seconds
    left = f"{(total - done) / rate:.0f} s left" if done else ""
    row = Table.grid(padding=(0, 1), expand=False)
    row.add_row(
        Text(one.title, overflow="ellipsis", no_wrap=True),
        ProgressBar(total=total, completed=done, width=24),
        Text(f"{done / max(total, 1):4.0%}"),
        Text(f"{amount(done, one.unit)}/{amount(total, one.unit)}", no_wrap=True),
        Text(f"{amount(rate, one.unit)}/s {left}", style="dim", no_wrap=True, overflow="ellipsis"),
    )
    return row


def amount(count: float, unit: str) -> str:
    """A number of bytes, or of something else, as text.

    Example:
        >>> amount(4_200_000_000, "B"), amount(12, " texts")
        ('4.20 GB', '12')
    """
    if unit != "B":
        return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"
    for scale, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.2f} {name}"
    return f"{count:.0f} B"
