"""FrozenList and FrozenDict, the lists and dicts that are static attributes of a Module."""

from __future__ import annotations

from typing import Any

import jax

from .contents import MIXED, is_item


def _refusing(example: str) -> Any:
    """A method that would change a list or dict, and says what to write instead."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a static attribute of a Module cannot be changed in place: assign a new one, "
            f"for example {example}" + (MIXED if any(map(is_item, args)) else "")
        )

    return refuse


class FrozenList(list):
    """A list that is a static attribute: it cannot be changed, but the attribute can be assigned again."""

    _refuse = _refusing("module.sizes = [*module.sizes, 3]")
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (FrozenList, (list(self),))


class FrozenDict(dict):
    """A dict that is a static attribute: it cannot be changed, but the attribute can be assigned again.

    Attributes:
        default: function that returns the frozen value of a key that is missing, as in a defaultdict; or None.
    """

    default: Any = None

    def __missing__(self, key: Any) -> Any:
        if self.default is None:
            raise KeyError(key)
        return self.default()

    _refuse = _refusing("module.options = {**module.options, 'key': 3}")
    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (FrozenDict, (dict(self),), vars(self) or None)


# JAX's functions take them as they take lists and dicts, and return those.
_plain_list: Any = lambda _, items: list(items)
_plain_dict: Any = lambda names, items: dict(zip(names, items, strict=True))
jax.tree_util.register_pytree_node(FrozenList, lambda held: (tuple(held), None), _plain_list)
jax.tree_util.register_pytree_node(
    FrozenDict, lambda held: (tuple(held.values()), tuple(held)), _plain_dict
)
