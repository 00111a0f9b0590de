"""The rendering of Modules: rows for layers and weights, and a first line with totals.

Nothing is read from a device, and nothing about the Module is assumed: its ``__init__`` may have
failed half-way, and its leaves may be tracers, or any objects that ``jax.tree.map`` returned.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...graph.placement.division import place_text
from ...graph.placement.rows import PlacedRow
from ...graph.weight.rows import weight_row
from ...rendering.rendered import Rendered, guarded
from ...rendering.row import Row, bytes_text, counted, flat, fold, lines, merged, short

# The maximum number of a layer's settings that are shown, and their types.
_MOST_SETTINGS = 8
_PLAIN = frozenset({bool, int, float, str})
_MOST_VALUES = 3
# The maximum depth to which a tree is followed: by mistake, a Module may contain itself.
_DEEPEST = 60


class OfModule(Rendered):
    """The rendering of a Module."""

    def _mx_row(self) -> Row:
        return ModuleTree(self).row

    def _mx_title(self, row: Row) -> str:
        # A row made by `_mx_row` carries its title as the name.
        return row.name

    def __repr__(self) -> str:
        return guarded(self, self._mx_text)

    def _mx_text(self) -> str:
        row = self._mx_row()
        # The first line names the weights if they are few.
        return row.name if _few(row) is not None else lines(row.name, row)


class ModuleTree:
    """The rows of a Module, and sums over its weights, each counted once.

    Attributes:
        row: row of the Module, with its title as its name.
    """

    def __init__(self, root: Any):
        self._owners: dict[int, str] = {}
        self._shown: dict[int, str] = {}
        self._loose = 0, 0  # elements and bytes of weights that are in no stack, so far
        self._dtypes: Counter[str] = Counter()
        self._states: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        self._foreign: dict[str, Counter[str]] = {}
        self._weights = self._parameters = self._nbytes = self._per_device = 0
        self._layers = _layer_count(root)
        self._find_owners(root, "", set(), 0)
        self.row = self._module(root, "", "", 1, 0)
        self.row.name = self._title(root)

    # -- the rows

    def _find_owners(self, module: Any, path: str, seen: set[int], depth: int) -> None:
        """Finds the owner of each weight: the first attribute that is not marked as another layer's weight."""
        if id(module) in seen or depth > _DEEPEST:
            return
        seen.add(id(module))
        shared = getattr(module, "_mx_shared", ())
        for attr, _, weight in _weights(module):
            if attr not in shared:
                self._owners.setdefault(id(weight), path + attr)
        for attr, child in _children(module):
            self._find_owners(child, f"{path}{attr}.", seen, depth + 1)

    def _module(self, module: Any, name: str, path: str, times: int, depth: int) -> Row:
        """The row of a Module that represents ``times`` equal Modules."""
        row = Row(name, type(module).__name__, settings=_settings(module))
        if (first := self._shown.get(id(module))) is not None:
            row.notes = (f"the same as {short(first, 40)}",)
            return row
        self._shown[id(module)] = path.rstrip(".") or type(module).__name__
        if depth > _DEEPEST:
            row.notes = ("nested too deeply to be shown",)
            return row
        rows = [
            self._weight(attr, weight, path + attr, times) for attr, _, weight in _weights(module)
        ]
        rows += [_shard(attr, shard) for attr, shard in _shards(module)]
        below = list(_children(module))
        if getattr(module, "_mx_is_stack", False):
            rows += merged(list(self._stack(module, below, path, times, depth)))
            made = []
        else:
            made = [self._module(c, a, f"{path}{a}.", times, depth + 1) for a, c in below]
        for numbered, group in itertools.groupby(made, lambda one: one.name.isdecimal()):
            same = list(group)
            rows += fold(same) if numbered else same
        row.parameters = sum(one.parameters for one in rows)
        row.nbytes = sum(one.nbytes for one in rows)
        row.children = tuple(rows)
        return row

    def _stack(
        self, stack: Any, below: Any, path: str, times: int, depth: int
    ) -> Iterator[tuple[list[int], Row]]:
        """For each position in the pattern of a LayerStack, the indices of its layers and their row."""
        pattern = vars(stack).get("_layout")
        for attr, child in below:
            members = _members(pattern, attr)
            before = self._loose
            row = self._module(child, attr, f"{path}{attr}.", times * len(members), depth + 1)
            count, nbytes = (now - then for now, then in zip(self._loose, before, strict=True))
            # Weights that all layers share are counted once.
            row.count = len(members)
            row.parameters = row.parameters * len(members) - count * (len(members) - 1)
            row.nbytes = row.nbytes * len(members) - nbytes * (len(members) - 1)
            yield members, row

    def _weight(self, name: str, weight: Any, path: str, times: int) -> Row:
        owner = self._owners.get(id(weight), path)
        if owner != path and id(weight) in self._owners:
            return Row(name, is_array=True, notes=(f"tied to {short(owner, 60)}",))
        try:
            one = weight_row(weight, name, times > 1)
        except Exception as error:
            return Row(name, is_array=True, notes=(f"cannot be shown: {short(error, 60)}",))
        self._add(one, weight, times if weight.home is not None else 1)
        return one.row

    def _add(self, one: PlacedRow, weight: Any, times: int) -> None:
        row = one.row
        if weight.home is None:
            self._loose = self._loose[0] + row.parameters, self._loose[1] + row.nbytes
        self._weights += times
        self._parameters += times * row.parameters
        self._nbytes += times * row.nbytes
        self._per_device += times * one.per_device
        if one.state.foreign:
            self._foreign.setdefault(one.state.foreign, Counter())[one.state.text] += times
            return
        self._dtypes[row.dtype] += times * max(row.nbytes, 1)
        if one.state.note:
            self._states[one.state.note] += times
        if one.sharding is not None:
            self._places[place_text(one.sharding)] += times

    # -- the first line

    def _title(self, root: Any) -> str:
        kind = type(root).__name__
        pattern = vars(root).get("_layout") if getattr(root, "_mx_is_stack", False) else None
        parts = [] if self._layers is None else [str(pattern or counted(self._layers, "layer"))]
        weights = counted(self._weights, "weight")
        if self._foreign:
            parts += _trees(self._foreign, self._weights)
        elif self._weights:
            few = _few(self.row)
            if few is None:
                parts.append(counted(self._parameters, "parameter"))
            else:
                parts += [short(f"{name} {one.type_text}".rstrip()) for name, one in few]
            parts.append(bytes_text(self._nbytes))
            if few is None:
                dtypes = [name for name, _ in self._dtypes.most_common(_MOST_VALUES)]
                more = "…" if len(self._dtypes) > _MOST_VALUES else ""
                parts.append(" and ".join(dtypes) + more)
            if set(self._dtypes) == {"bool"}:
                parts.append(f"a mask of {weights}")
            if set(self._dtypes) == {"float0"}:
                parts.append("derivatives of integers")
        for state, count in self._states.items():
            parts.append(state if count == self._weights else f"{count:,} of {weights} {state}")
        places = [place for place, _ in self._places.most_common(2)]
        if places:
            more = f" and {len(self._places) - 2} more" if len(self._places) > 2 else ""
            parts.append(f"on {' and '.join(places)}{more}")
        if self._per_device < self._nbytes:
            parts.append(f"{bytes_text(self._per_device)} on each")
        return f"{kind}({', '.join(parts)})"


def _few(row: Row) -> list[tuple[str, Row]] | None:
    """The weights by name; None if there are too many or layers are folded."""
    found = list(flat(row.children))
    arrays = [(name, one) for name, one in found if one.is_array]
    if len(arrays) > _MOST_VALUES or any(one.count > 1 for _, one in found):
        return None
    return arrays


def _trees(foreign: dict[str, Counter[str]], weights: int) -> list[str]:
    """Descriptions of a tree whose leaves are not arrays: a mask, labels, or shardings, for example."""
    found = []
    for kind, values in foreign.items():
        count = sum(values.values())
        of = counted(weights, "weight") if count == weights else f"{count:,} of {weights:,} weights"
        what = {"bool": "mask", "str": "labels", "NoneType": "None", "P": "PartitionSpecs"}.get(
            kind, f"{kind} leaves"
        )
        text = f"{what} in place of {of}"
        if kind in ("bool", "str", "int", "float"):
            named = [f"{n:,} {text}" for text, n in values.most_common(_MOST_VALUES)]
            text += f": {' and '.join(named)}{' …' if len(values) > _MOST_VALUES else ''}"
        found.append(text)
    return found


# --- reading a Module that may be incomplete ------------------------------------------------


def _weights(module: Any) -> list[tuple[str, str, Any]]:
    """(attribute, local name, Weight) of a Module's own weights."""
    state = vars(module)
    held = state.get("_mx_weights", {})
    return [
        (a, local, held[local]) for a, local in state.get("_mx_locals", {}).items() if local in held
    ]


def _shards(module: Any) -> list[tuple[str, Any]]:
    return list(vars(module).get("_mx_shards", {}).items())


def _children(module: Any) -> list[tuple[str, Any]]:
    return list(vars(module).get("_mx_children", {}).items())


def _shard(name: str, shard: Any) -> Row:
    host = getattr(shard, "host", None)
    of = "" if host is None else f" of {short(host.name, 40)}"
    sizes = tuple(str(size) for size in shard.shape)
    return Row(
        name, "", shard.dtype.name, sizes, notes=(f"part {shard.shard_idx}{of}",), is_array=True
    )


def _members(pattern: Any, attr: str) -> list[int]:
    """The indices of the layers that a child of a LayerStack represents."""
    if attr.isdecimal() or pattern is None:
        return [int(attr)] if attr.isdecimal() else []
    for slot in range(pattern.slots):
        if pattern.span(slot).pattern == attr:
            return list(pattern.members(slot))
    return []


def _layer_count(root: Any) -> int | None:
    """The number of layers in the lists that are nearest to the root; None if there is no list."""
    seen: set[int] = set()
    level = [root]
    while level and len(seen) < 100_000:
        lists = [one for one in level if isinstance(one, Sequence)]
        if lists:
            layouts = [(one, vars(one).get("_layout")) for one in lists]
            return sum(len(_children(m)) if of is None else of.count for m, of in layouts)
        seen.update(map(id, level))
        children = {id(c): c for module in level for _, c in _children(module)}
        level = [child for key, child in children.items() if key not in seen]
    return None


def _settings(module: Any) -> dict[str, Any]:
    """The static attributes that are shown: public numbers and strings."""
    state, found = vars(module), {}
    for name in state.get("_mx_statics", ()):
        value = state.get(name)
        if type(value) in _PLAIN and name[0] != "_":
            found[name] = value
            if len(found) == _MOST_SETTINGS:
                break
    return found
