"""The types of command-line options, which check their values, and the parser with short errors.

A value that can be checked by itself is checked while the arguments are parsed, before anything is
imported or opened. Wrong usage of any option gives two lines on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError, UserInputError
from ..paths import local_path
from ..rendering.row import short

TINY = "tiny"  # the same as in storage.hub, which is not imported for --help
SEEDS = 2**32
_WORDS = {"True": True, "False": False, "None": None}  # Python's spelling
_TAKEN = ("messages", "tools", "documents", "add_generation_prompt")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are two lines: the usage, and the problem."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the problem, and exits with code 2."""
        positional = [
            self._get_formatter()._format_args(action, str(action.metavar or action.dest))
            for action in self._get_positional_actions()
        ]
        usage = " ".join([self.prog, "[OPTIONS]", *positional])
        print(f"usage: {usage}   (--help lists the options)", file=sys.stderr)
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)

    def like(self, given: str) -> str:
        """A hint for an unknown option; "" if no option is similar."""
        from ..elsewhere import meant

        options = {
            name[2:].replace("-", "_")
            for name in self._option_string_actions
            if name.startswith("--")
        }
        name = given.partition("=")[0].lstrip("-").replace("-", "_")
        found = re.fullmatch(r": did you mean (\w+)=\?", meant(name, options))
        like = name if name in options else found[1] if found else ""
        if not given.startswith("-") or like not in options:
            return ""
        return f": did you mean --{like.replace('_', '-')}?"

    def option_for(self, argument: str, value: str) -> str | None:
        """Return the option that sets an argument of a Python function; None if there is none."""
        for action in self._actions:
            # model=8 is the size of an axis of a mesh; functions take the path of a model by position.
            if action.dest == argument != "model" and action.option_strings:
                if action.nargs != 0:
                    return f"{action.option_strings[0]} {value}".rstrip()
                if value in ("", str(action.const)):
                    return action.option_strings[0]
        return None


def import_jax() -> None:
    """Imports JAX and the modules that generate, with Ctrl-C deferred until afterwards.

    During the import of JAX's extension modules Ctrl-C would crash the process.
    """
    number = signal.SIGINT
    is_main = threading.current_thread() is threading.main_thread()
    if "jax" in sys.modules or not is_main or signal.getsignal(number) is signal.SIG_IGN:
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


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an integer from ``least`` to ``most``.

    Example:
        >>> integer(0)("3")
        3
    """
    expected = f"an integer of at least {least}" if most is None else (
        f"an integer from {least} to {most}"
    )  # fmt: skip

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{short(text)}: it must be {expected}")
        return number

    return read


def file_path(text: str) -> Path:
    """The type of the path of a file.

    Example:
        >>> file_path("a.txt").name
        'a.txt'
    """
    try:
        return Path(local_path(text))
    except (UserInputError, CheckpointError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def pooling(text: str) -> str:
    """The type of a mode of pooling."""
    from ..models.pooling import POOLINGS

    if text not in POOLINGS:
        known = ", ".join(POOLINGS)
        raise argparse.ArgumentTypeError(f"{short(text)}: it must be one of {known}")
    return text


positive = integer(1)
seed = integer(0, SEEDS - 1)


def power_of_two(text: str) -> int:
    """The type of a power of two."""
    number = positive(text)
    if number & (number - 1):
        raise argparse.ArgumentTypeError(f"{number} is not a power of two")
    return number


def setting(name: str) -> Callable[[str], Any]:
    """The type of a setting of Sampling, which checks the value itself."""

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
            expected = str(error).partition(": ")[2]
            raise argparse.ArgumentTypeError(f"{short(text)}: {expected}") from None
        if name == "top_p" and number == 0:
            raise argparse.ArgumentTypeError(
                f"{text}: it must be a number above 0, up to 1; for the most probable token alone,"
                " use --temperature 0"
            )
        return number

    return read


def text(found: str) -> str:
    """The type of a text that is not empty."""
    if not found:
        raise argparse.ArgumentTypeError("the text is empty")
    return found


def mesh(found: str) -> str:
    """The type of the axes of a mesh, as in model=4,data=2."""
    import_jax()
    from ..engine.plan.options import read_mesh

    return _checked(found, read_mesh, r"^mesh: ")


def device_mesh(found: str) -> str:
    """The type of the axes of a mesh of the devices that there are, of which one may have the size -1."""
    import_jax()
    from ..engine.plan.options import read_axes, read_mesh

    def check(text: str) -> None:
        read_mesh(",".join(f"{name}={abs(size)}" for name, size in read_axes(text)))

    return _checked(found, check, r"^mesh: ")


def topology(found: str) -> str:
    """The type of a kind and number of devices, such as v5e:2x4 or h200:8."""
    # XLA's compiler for GPUs says at length that there is no GPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import_jax()
    from ..engine.plan.topology import Topology

    return _checked(found, Topology.of, r"^topology ")


def size(found: str) -> str:
    """The type of a size of memory or of files, such as 80GB or 16GiB."""
    from ..storage.safetensors.writer import size_in_bytes

    _require_unit(found)
    return _checked(found, size_in_bytes, "")


def _require_unit(found: str) -> None:
    """Raise if a size is a number alone: nobody means 80 bytes of memory by "80"."""
    if re.fullmatch(r"[0-9.]+", found):
        number = short(found)
        raise argparse.ArgumentTypeError(
            f"{number} has no unit: write {number}GiB, or {number}B for bytes"
        )


def dtype(found: str) -> str:
    """The type of the name of a dtype; short names become long ones."""
    from ..dtype import DType

    try:
        return DType.of(found).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{short(found)} is not a dtype: {error}") from None


def float_type(found: str) -> str:
    """The type of the name of a float dtype."""
    from ..dtype import DType

    name = dtype(found)
    if not DType.of(name).is_float():
        raise argparse.ArgumentTypeError(
            f"{short(found)} is not a float dtype such as bf16 or float32"
        )
    return name


def quantization(found: str) -> str:
    """The type of what weights are quantised to: a type of ggml, or a mixture of llama.cpp's."""
    from ..models.gguf.tensors.types import MIXTURES

    name = found.lower()
    if name not in MIXTURES:
        raise argparse.ArgumentTypeError(
            f"{short(found)}: it must be one of {', '.join(sorted(MIXTURES))}"
        )
    return name


def auto_or_float(found: str) -> str:
    """The type of "auto" or the name of a float dtype of 16 bits or more."""
    if found == "auto":
        return found
    name = float_type(found)
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise argparse.ArgumentTypeError(
            f"{short(found)}: it must be float32, bfloat16, float16 or float64"
        )
    return name


def variable(found: str) -> tuple[str, Any]:
    """The type of a chat template's variable: NAME=VALUE, where the value is JSON or plain text.

    Example:
        >>> variable("enable_thinking=false"), variable("reasoning_effort=low")
        (('enable_thinking', False), ('reasoning_effort', 'low'))
    """
    name, equals, value = found.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"{short(found)}: it must have the form NAME=VALUE")
    if name in _TAKEN:
        raise argparse.ArgumentTypeError(f"{name} is set by maxjax itself")
    if value in _WORDS:
        return name, _WORDS[value]
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def adapter(found: str) -> tuple[str, str]:
    """An adapter of a model, as (name, path of its folder).

    Example:
        >>> adapter("formal=adapters/formal")
        ('formal', 'adapters/formal')
    """
    name, equals, path = found.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{short(found)}: it must have the form NAME=FOLDER")
    return name, path


def _checked(found: str, check: Callable[[str], Any], prefix: str) -> str:
    try:
        check(found)
    except UserInputError as error:
        raise argparse.ArgumentTypeError(re.sub(prefix, "", str(error))) from None
    return found
