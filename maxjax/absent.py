"""Names that MAX has and maxjax does not: they can be imported, and say what to do instead when they are used.

A file of MAX's imports many names for the few that run. So a name without a counterpart is a class that can
stand in annotations, defaults and among bases; to call it, to make an instance of it or of a class derived
from it, or to iterate over it raises NotImplementedError with the advice of ``maxjax.max_names``.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .max_names import ADVICE


class Refused(ABCMeta):
    """The class of names that maxjax does not have; each of them is a class itself.

    Example:
        >>> Signals = refused("nn.comm.Signals", "XLA inserts the communication")
        >>> class Mine(Signals): ...
        >>> Mine()
        Traceback (most recent call last):
        NotImplementedError: maxjax has no nn.comm.Signals, which MAX has: XLA inserts the communication
    """

    _mx_refused: tuple[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        name, advice = cls._mx_refused
        raise NotImplementedError(f"maxjax has no {name}, which MAX has: {advice}")

    def __iter__(cls) -> Any:
        return cls()

    def __getitem__(cls, key: Any) -> type:
        return cls  # Generic[T] in annotations and among bases

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        if name in ("setter", "getter", "deleter"):
            return getattr(property(), name)  # @Base.attribute.setter in a class derived from it
        # A member of an enumeration or a class method: in a default it passes, when it is called it raises.
        owner, advice = cls._mx_refused
        member = refused(f"{owner}.{name}", advice)
        setattr(cls, name, member)
        return member

    def __repr__(cls) -> str:
        return f"<{cls._mx_refused[0]}, which maxjax does not have>"


def refused(name: str, advice: str) -> Any:
    """The class that stands for a name maxjax does not have.

    Args:
        name: path and name below ``max``.
        advice: what to do instead.
    """
    return Refused(
        name.rpartition(".")[2],
        (),
        {"_mx_refused": (name, advice), "__doc__": f"Not in maxjax: {advice}."},
    )


def is_refused(value: Any) -> bool:
    """Whether a value stands for a name that maxjax does not have."""
    return isinstance(value, Refused)


def absent(module: str, names: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for the names that MAX has there and maxjax does not.

    Args:
        module: name of the module.
        names: table of names, separated by spaces → advice; that of ``maxjax.max_names`` by default.

    Raises:
        AttributeError: by the function: MAX does not have the name either.
    """
    path = module.partition(".")[2]
    table = ADVICE.get(path, {}) if names is None else names
    known = {name: advice for names, advice in table.items() for name in names.split()}
    made: dict[str, Any] = {}

    def __getattr__(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in made:
            made[name] = refused(f"{path}.{name}", known[name])
        return made[name]

    return __getattr__
