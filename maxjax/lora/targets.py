"""Finds the layers of a model that may have LoRA weights, and selects some of them by patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import UserInputError, closest, some
from ..models.family import PretrainedModel
from ..models.names import matcher
from ..nn.embedding import Embedding
from ..nn.layer import Module
from ..nn.layer.walk import Walk
from ..nn.low_rank import LowRank
from ..nn.moe import Experts, MoE

# The attributes that hold an output layer, which PEFT's "all-linear" leaves out too.
_HEADS = ("lm_head", "score")


class TargetLayer(NamedTuple):
    """A layer that may have LoRA weights; in a LayerStack, the layers at one position of all stacked blocks.

    Attributes:
        names: full name of each layer.
        layer: the layer, or the one that represents all stacked layers.
        base: the Weight of the base weight, or of its first tensor.
        front: prefix of "weight" in the layer's own names: "" or "q_proj.", for example.
        in_mixture: "expert" or "router" inside a mixture of experts; "" elsewhere.
    """

    names: tuple[str, ...]
    layer: Any
    base: Any
    front: str
    in_mixture: str

    @property
    def parts(self) -> dict[str, str]:
        """The names of the layer's LoRA weights within the layer, as in PEFT's files, keyed by attribute."""
        names = self.layer.update_names.items()
        return {attr: name for attr, name in names if getattr(self.layer, attr) is not None}

    @property
    def base_names(self) -> list[str]:
        """The full name of each layer's base weight."""
        local = self.base.spec.local_name.removeprefix(self.front)
        return [f"{name}.{local}".removeprefix(".") for name in self.names]


def targets(model: Module, walk: Walk | None = None) -> list[TargetLayer]:
    """All layers of a model that may have LoRA weights, in the order of its state dict.

    Args:
        walk: the model's Walk; None for one in which a single layer represents all layers of a stack.
    """
    walk = walk or Walk(model, stacked=True)
    experts, mixtures = [], []
    for path, module in zip(walk.paths, walk.modules, strict=True):
        if isinstance(module, Experts):
            experts.append(path)
            mixtures.append(path[: path[:-1].rfind(".") + 1])  # the Module that holds them
        elif isinstance(module, MoE):
            experts.append(f"{path}experts.")
            mixtures.append(path)
    found = []
    for module, prefix, path in zip(walk.modules, walk.prefixes, walk.paths, strict=True):
        base = next((w for n, w in _weights(module) if not n.startswith("lora_")), None)
        if not isinstance(module, LowRank) or base is None:
            continue
        local = base.spec.local_name
        # A linear layer with a ``name`` has that name as a prefix of its weights' names.
        front = local.removesuffix("weight") if local.endswith(".weight") else ""
        names = walk.holder(base).spec.names((prefix + front).removesuffix("."))
        kind = "router" if path.startswith(tuple(mixtures)) else ""
        kind = "expert" if path.startswith(tuple(experts)) else kind
        found.append(TargetLayer(tuple(names), module, base, front, kind))
    return found


def _weights(module: Any) -> Iterator[tuple[str, Any]]:
    return ((attr, module._mx_weights[local]) for attr, local in module._mx_locals.items())


def chosen(model: Module, patterns: str | Iterable[str] | None) -> list[str]:
    """The names of the layers that match patterns.

    Args:
        patterns: glob patterns of full names (``"*.q_proj"``) or endings of names (``"q_proj"``), as PEFT's
            ``target_modules``; None means all linear layers except those of a head, those in mixtures of
            experts and those of a layer of multi-token prediction, and no embedding tables.

    Raises:
        UserInputError: a pattern matches no layer; the message suggests the nearest name.
        NotImplementedError: a pattern matches experts, or only layers that are neither linear nor embeddings.
    """
    every = targets(model)
    if patterns is None:
        linear = [one for one in every if not isinstance(one.layer, Embedding)]
        names = [name for one in linear if not one.in_mixture for name in one.names]
        body = model.family.names.body if isinstance(model, PretrainedModel) else None
        head = matcher(() if body is None else body.head)
        names = [
            name
            for name in names
            if name.rsplit(".", 1)[-1] not in _HEADS
            and not head.fullmatch(f"{name}.weight")
            and not name.startswith(("mtp.", "vision."))
        ]
        if not names:
            raise UserInputError(
                f"{type(model).__name__} has no linear layer to add LoRA weights to"
            )
        return names
    wanted = (patterns,) if isinstance(patterns, str) else patterns
    wanted = tuple(wanted) if isinstance(wanted, Iterable) else ()
    if not wanted or not all(isinstance(pattern, str) for pattern in wanted):
        raise UserInputError(f"patterns must be names or glob patterns of layers, not {patterns!r}")
    kinds = {name: one.in_mixture for one in every for name in one.names}
    taken: dict[str, None] = {}
    for pattern in wanted:
        fitting = [name for name in kinds if fits(name, pattern)]
        if not fitting:
            raise _nothing(model, pattern, list(kinds))
        if experts := [name for name in fitting if kinds[name] == "expert"]:
            raise NotImplementedError(
                f"LoRA weights of experts are not supported, and {pattern!r} names '{experts[0]}'"
            )
        taken |= dict.fromkeys(fitting)
    return [name for name in kinds if name in taken]


def fits(name: str, pattern: str) -> bool:
    """Whether a glob pattern matches a name, or the end of a name after a dot.

    Example:
        >>> fits("layers.0.q_proj", "q_proj"), fits("layers.0.q_proj", "layers.*"), fits("a_proj", "proj")
        (True, True, False)
    """
    return any(fnmatch.fnmatchcase(name, one) for one in (pattern, f"*.{pattern}"))


def _nothing(model: Module, pattern: str, names: Sequence[str]) -> Exception:
    """The error for a pattern that matches no layer that may have LoRA weights."""
    walk = Walk(model)
    others = {
        prefix.removesuffix("."): module
        for prefix, module in zip(walk.prefixes, walk.modules, strict=True)
        if module._mx_weights
    }
    for name, module in others.items():
        if fits(name, pattern):
            return NotImplementedError(
                f"{pattern!r} names '{name}', a {type(module).__name__}: LoRA weights are for linear layers and "
                "embeddings"
            )
    ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    near = closest(pattern, names) or closest(pattern.rsplit(".", 1)[-1], ends)
    hint = f"; did you mean {near!r}?" if near else f"; there are {some(ends, 8)}"
    return UserInputError(f"no linear layer or embedding has a name like {pattern!r}{hint}")
