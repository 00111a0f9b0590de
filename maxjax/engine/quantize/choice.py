"""Chooses which weights of a model are quantised, and to which type."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import UserInputError, closest, some
from ...models.family import block_weights
from ...models.gguf.config.families import has_architecture
from ...models.gguf.tensors.types import MIXTURES, encodings, takes_blocks
from ...models.gguf.tensors.write import gguf_shapes
from ...nn.layer import Module
from ...nn.linear import Linear
from ...nn.moe import Experts, MoEGate
from ...storage.blocks import ENCODERS, KEPT, LAYOUTS

Patterns = Mapping[str, str | None] | Iterable[tuple[str, str | None]]
# The type for rows that cannot be divided into complete blocks of the type that was asked for.
_SMALLEST = "Q8_0"
_OTHERS = "int8 and fp8 cannot: there is no kernel yet for weights with one scale for each row"


def chosen_types(
    model: Module, to: str | None, patterns: Patterns | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The type of each weight to quantise, and the reason why each other one that could be is not.

    Args:
        to: a type or a mixture; None quantises what ``patterns`` name.
        patterns: (glob pattern over names, type or None) in order; the first that matches is used.

    Raises:
        UserInputError: a pattern matches no weight of a linear layer or embedding table; a mixture needs the
            model's configuration; a weight is quantised already, as another type.
        NotImplementedError: weights of this type cannot stay quantised in memory.
    """
    able = block_weights(model)
    weights = {n: w for n, w in model.raw_state_dict().items() if id(w) in able}
    shapes = {name: tuple(map(int, w.logical_shape)) for name, w in weights.items()}
    small = _small_tables(model, shapes)
    seeing = {name for name in shapes if name.startswith("vision.")}
    usual = {n: shape for n, shape in shapes.items() if n not in small | seeing}
    wanted = _wanted(model, usual, to)
    for name, kind in _by_pattern(shapes, patterns):
        wanted[name] = kind
    types: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, weight in weights.items():
        kind = wanted.get(name)
        if kind is None:
            what = "a router or a small table" if name in small else "not asked for"
            kept[name] = "of the vision part" if name in seeing else what
            continue
        packed = weight.spec.packing
        if packed is not None:
            if packed.value != kind:
                raise UserInputError(
                    f"weight '{name}' is {packed.value} already: quantise a model that was loaded with "
                    'dtype="float32" or another float, or keep it with the pattern '
                    f'("{name}", None)'
                )
            kept[name] = f"{kind} already"
            continue
        fits = next(
            (k for k in (kind, _SMALLEST) if shapes[name][-1] % LAYOUTS[k].elements == 0), None
        )
        if fits is None:
            kept[name] = f"rows of {shapes[name][-1]} values are not complete blocks"
        else:
            types[name] = fits
    return types, kept


def _small_tables(model: Module, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Weights that llama.cpp does not quantise: routers, embeddings of positions and token types."""
    modules = [module for _, module in model.named_modules()]
    routers = {id(layer.weight) for module in modules for layer in _routers(module)}
    routers |= {id(module.gate_score.weight) for module in modules if isinstance(module, MoEGate)}
    found = {n for n, weight in model.raw_state_dict().items() if id(weight) in routers}
    config = getattr(model, "hf_config", None)
    if config is not None and has_architecture(config):
        names, _, _ = gguf_shapes(config, shapes)
        found |= {name for name, other in names.items() if not takes_blocks(other, shapes[name])}
    return found


def _routers(module: Module) -> Iterator[Linear]:
    """The linear layers with one output for each expert, beside the experts that a Module holds."""
    children = module._mx_children.values()
    counts = {len(child) for child in children if isinstance(child, Experts)}
    for child in children if counts else ():
        if not isinstance(child, Experts):
            found = (layer for _, layer in child.named_modules() if isinstance(layer, Linear))
            yield from (layer for layer in found if int(layer.weight.shape[0]) in counts)


def _wanted(model: Module, shapes: Mapping[str, Sequence[int]], to: str | None) -> dict[str, Any]:
    if to is None:
        return {}
    choice = to.lower() if isinstance(to, str) else ""
    if choice in MIXTURES and MIXTURES[choice].rules is not None and choice not in ("q6_k",):
        config = getattr(model, "hf_config", None)
        if config is None:
            raise UserInputError(
                f"{to!r} chooses types by the model's configuration, and {type(model).__name__} has none: "
                "name a type such as 'q4_k', or give patterns"
            )
        names, found, traits = gguf_shapes(config, shapes)
        by_name = encodings(found, choice, traits)
        types = {name: by_name[other] for name, other in names.items()}
        for kind in types.values():
            _check(kind, to)
        return types
    return dict.fromkeys(shapes, type_of(to))


def type_of(name: str) -> str:
    """The quantisation type with a name such as "q4_k".

    Raises:
        NotImplementedError: weights of this type cannot stay quantised in memory, or there is none.
        TypeError: it is not a str.

    Example:
        >>> type_of("q4_k")
        'Q4_K'
    """
    if not isinstance(name, str):
        raise TypeError(
            f"what weights are quantised to is a str such as 'q4_k', or None, not {type(name).__name__}"
        )
    _check(name.upper(), name)
    return name.upper()


def _check(kind: str | None, name: str) -> None:
    kept = [one for one in KEPT if one in ENCODERS]
    if kind is None or kind in kept:
        return
    types = ", ".join(one.lower() for one in kept)
    if kind not in LAYOUTS and (like := closest(name.lower(), [*MIXTURES, *types.split(", ")])):
        raise UserInputError(f"there is no quantisation type {name!r}: did you mean {like!r}?")
    raise NotImplementedError(
        f"weights cannot stay quantised in memory as {name!r}"
        + (f", which uses {kind}" if kind != name.upper() else "")
        + f": {types} can, and llama.cpp's mixtures of them ({_OTHERS}). maxjax convert --quantize writes "
        f"GGUF files of {', '.join(sorted(MIXTURES))}"
    )


def _by_pattern(
    names: Iterable[str], patterns: Patterns | None
) -> Iterable[tuple[str, str | None]]:
    """The names that a pattern matches, each with the type of the first such pattern."""
    if patterns is None:
        return
    pairs: Any = patterns.items() if isinstance(patterns, Mapping) else patterns
    rules = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    if isinstance(pairs, str) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
        for pair in rules
    ):
        raise UserInputError(
            f"patterns map names to types, as {{'*.mlp.*': 'q8_0'}}, or are such pairs, not {patterns!r}"
        )
    kinds = [None if kind is None else type_of(kind) for _, kind in rules]
    for name in names:
        for number, (pattern, _) in enumerate(rules):
            if fnmatch.fnmatchcase(name, pattern):
                yield name, kinds[number]
                break
    fitting = {
        number
        for number, (pattern, _) in enumerate(rules)
        if any(fnmatch.fnmatchcase(name, pattern) for name in names)
    }
    if unused := [rules[number][0] for number in range(len(rules)) if number not in fitting]:
        raise UserInputError(
            f"no weight of a linear layer or an embedding table has a name like {some(unused)}; there are "
            f"{some(list(names), 3)}"
        )
