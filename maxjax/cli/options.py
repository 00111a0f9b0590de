"""The options of the command line: what their values may be, and what is said if they are not.

A value that can be judged by itself is judged while the arguments are read, before anything is
imported or opened: wrong usage is two lines on stderr and exit code 2, whichever option it is.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import UserInputError

SEEDS = 2**32
_WORDS = {"True": True, "False": False, "None": None}  # as Python writes them
_TAKEN = ("messages", "tools", "documents", "add_generation_prompt")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are two lines: how to call it, and what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong and ends the program with exit code 2."""
        positional = [
            self._get_formatter()._format_args(action, str(action.metavar or action.dest))
            for action in self._get_positional_actions()
        ]
        usage = " ".join([self.prog, "[OPTIONS]", *positional])
        print(f"usage: {usage}   (--help lists the options)", file=sys.stderr)
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)

    def like(self, given: str) -> str:
        """Which option is meant by one that is not there; "" if none is like it."""
        from ..engine.sampling.settings import meant

        options = {name[2:].replace("-", "_") for name in self._option_string_actions}
        name = given.partition("=")[0].lstrip("-").replace("-", "_")
        found = re.fullmatch(r": did you mean (\w+)=\?", meant(name, options))
        if not given.startswith("-") or found is None or found[1] not in options:
            return ""
        return f": did you mean --{found[1].replace('_', '-')}?"


def import_jax() -> None:
    """Imports JAX and what we run on it; Ctrl-C is answered after.

    Within the start of JAX's extension modules it would crash the process.
    """
    number = signal.SIGINT
    here = threading.current_thread() is threading.main_thread()
    if "jax" in sys.modules or not here or signal.getsignal(number) is signal.SIG_IGN:
        return
    pressed: list[int] = []
    before = signal.signal(number, lambda number, _: pressed.append(number))
    try:
        from ..engine.generate import texts as generate  # noqa: F401
    finally:
        signal.signal(number, before)
    if pressed:
        raise KeyboardInterrupt


# --- types of values ------------------------------------------------------------------------


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of a whole number from ``least`` to ``most``.

    Example:
        >>> whole(0)("3")
        3
    """
    wanted = f"a whole number of at least {least}" if most is None else (
        f"a whole number from {least} to {most}"
    )  # fmt: skip

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{_short(text)}: {wanted} is wanted")
        return number

    return read


positive = whole(1)
seed = whole(0, SEEDS - 1)


def power_of_two(text: str) -> int:
    """The type of a power of two."""
    number = positive(text)
    if number & (number - 1):
        raise argparse.ArgumentTypeError(f"{number} is no power of two")
    return number


def setting(name: str) -> Callable[[str], Any]:
    """The type of a setting of Sampling, which says itself what it may be."""

    def read(text: str) -> Any:
        from ..engine.sampling.settings import Sampling

        number: Any = text
        for kind in (int, float):
            try:
                number = kind(text)
                break
            except ValueError:
                continue
        try:
            Sampling(**{name: number})
        except UserInputError as error:
            wanted = str(error).partition(": ")[2]
            raise argparse.ArgumentTypeError(f"{_short(text)}: {wanted}") from None
        if name == "top_p" and number == 0:
            raise argparse.ArgumentTypeError(
                f"{text}: a number above 0, to 1, is wanted; the most probable token alone is"
                " --temperature 0"
            )
        return number

    return read


def text(found: str) -> str:
    """The type of a text that is not empty."""
    if not found:
        raise argparse.ArgumentTypeError("an empty text is none")
    return found


def mesh(found: str) -> str:
    """The type of the axes of a mesh, as model=4,data=2."""
    import_jax()
    from ..engine.plan.report import read_mesh

    return _checked(found, read_mesh, r"^mesh: ")


def size(found: str) -> str:
    """The type of a size of memory, as 80GB or 16GiB."""
    import_jax()
    from ..engine.plan.report import parse_bytes

    return _checked(found, parse_bytes, r"^hbm=")


def shard_size(found: str) -> str:
    """The type of a size of files, as 5GB."""
    from ..storage.safetensors.writer import size_in_bytes

    return _checked(found, size_in_bytes, r"^max_shard_size(?:=| is )")


_SHORT = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32",
          "fp32": "float32", "f64": "float64", "fp64": "float64"}  # fmt: skip


def dtype(found: str) -> str:
    """The type of a dtype's name; short names become long ones."""
    from ..dtype import DType

    name = _SHORT.get(found.lower(), found)
    try:
        DType.of(name)
    except (TypeError, ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{_short(found)} is not a dtype: {error}") from None
    return name


def float_type(found: str) -> str:
    """As :func:`dtype`, of floats alone."""
    from ..dtype import DType

    name = dtype(found)
    if not DType.of(name).is_float():
        raise argparse.ArgumentTypeError(
            f"{_short(found)} is no float type, as bf16 or float32 are"
        )
    return name


def auto_or_float(found: str) -> str:
    """As :func:`float_type`, or "auto"."""
    if found == "auto":
        return found
    name = float_type(found)
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise argparse.ArgumentTypeError(
            f"{_short(found)}: float32, bfloat16, float16 or float64 is wanted"
        )
    return name


def variable(found: str) -> tuple[str, Any]:
    """The type of a variable of a chat template: NAME=VALUE, the value as JSON or as it stands.

    Example:
        >>> variable("enable_thinking=false"), variable("reasoning_effort=low")
        (('enable_thinking', False), ('reasoning_effort', 'low'))
    """
    name, equals, value = found.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"{_short(found)}: NAME=VALUE is wanted")
    if name in _TAKEN:
        raise argparse.ArgumentTypeError(f"{name} is what maxjax itself gives the template")
    if value in _WORDS:
        return name, _WORDS[value]
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _checked(found: str, check: Callable[[str], Any], prefix: str) -> str:
    try:
        check(found)
    except UserInputError as error:
        raise argparse.ArgumentTypeError(re.sub(prefix, "", str(error))) from None
    return found


def _short(found: str) -> str:
    shown = found if found.isprintable() else ascii(found)[1:-1]
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
