"""``init`` fills a lazy Module with random values; ``partition`` splits off what is trained."""

from __future__ import annotations

import fnmatch
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import UserInputError, closest, releasing, some
from ..graph.placement.arrays import out_of_memory
from ..graph.placement.device_major import DeviceMajor
from ..graph.weight.weight import Weight
from ..progress import compiling
from .layer.module import Module
from .layer.walk import Walk, check_module
from .low_rank import note_trained
from .random_key import checked_key

Initializer = Callable[..., jax.Array]
# Up to this many random numbers take less time on a CPU than XLA would take to optimise the program that draws them.
_FEW = 1 << 21
# How XLA compiles such a program: not optimised, and by the older of its two code generators for CPUs, which takes
# a third of the time. All of these draw the same bits.
_UNOPTIMISED = {"xla_backend_optimization_level": 0}
_QUICK = {
    **_UNOPTIMISED,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# JAX's errors for options that this version of XLA does not have, and for those of a jitted function inside another.
_REFUSED = re.compile("No such compile option|`compiler_options` can only be passed to top-level")
M = TypeVar("M", bound=Module)


def init(
    model: M, key: jax.Array, *, initializer: Callable[[str], Initializer | None] | None = None
) -> M:
    """Gives a random value to every weight of the model that has none, in place; returns the model.

    Each weight is created with the sharding that ``Module.to`` gave it. Its key is derived from
    ``key`` and its name, so adding a layer does not change the others' values. Weights of one shape,
    dtype, sharding and initializer share a compiled program, and so do the weights of a stack. Programs of
    initializers of JAX and of maxjax are kept for the next call.

    Args:
        model: Module that is changed in place and returned. Weights that have a value keep it. After
            an error none has a new one.
        key: random key from ``jax.random.key``.
        initializer: function from a weight's full name to an initializer (key, shape, dtype), as in
            ``jax.nn.initializers``, or to None for the layer's own choice
            (``Module.initializer``): matrices scaled by their fan-in, norms one, biases zero.

    Raises:
        UserInputError: ``model`` is no Module, or ``key`` no random key.
        ValueError: a lazy weight has symbolic dimensions.
        TypeError: a lazy weight's integer type has no initializer.
        OutOfMemoryError: a device has no memory for its part of a weight.

    Example:
        >>> import jax
        >>> from maxjax import init, nn
        >>> from maxjax.graph import DeviceRef
        >>> model = init(nn.Linear(3, 2, "float32", DeviceRef.CPU()), jax.random.key(0))
        >>> model.weight.value.shape
        (2, 3)
    """
    check_module(model, "init", reads=False)
    key = checked_key(key)
    if initializer is not None and not callable(initializer):
        raise UserInputError(
            "initializer is a function from a weight's name to an initializer, or to None, not "
            f"{type(initializer).__name__}"
        )
    groups: list[_Draw] = []
    stacks: dict[int, _Draw] = {}
    for name, (weight, layer) in _owners(model):
        if not weight.is_lazy:
            continue
        if weight.leaf is None:
            raise ValueError(
                f"weight '{name}' has symbolic dimensions {weight.shape!r}: load a value"
            )
        fill = _Fill(_choose(name, weight, layer, initializer))
        home = weight.home
        group = None if home is None else stacks.get(id(home[0]))
        if group is None or group.fill != fill:
            group = _Draw(fill, weight.leaf, [], [])
            groups.append(group)
            if home is not None:
                stacks[id(home[0])] = group
        group.names.append(name)
        group.weights.append(weight)

    runs, drawn = [], []
    jitted = cache(_Program.jitted)  # for this call
    with releasing(), compiling("init"):
        # XLA needs no lock of Python's: it compiles a program while the next is traced.
        with ThreadPoolExecutor(1, "maxjax-compile") as pool:
            for group in groups:
                program = group.program
                run = _kept(program) if program.fill.is_fixed else jitted(program)
                run.compile_in(pool, key, group.codes)
                runs.append(run)
            for group, run in zip(groups, runs, strict=True):
                try:
                    drawn.append(run(key, group.codes))
                except jax.errors.JaxRuntimeError as error:
                    leaf = group.leaf
                    raise out_of_memory(
                        error, group.names[0], leaf.shape, leaf.dtype, group.sharding
                    ) from error
    for group, values in zip(groups, drawn, strict=True):
        group.store(values)
    return model


class _Fill:
    """An initializer. Those that one function made of equal numbers, as layers make them, are equal."""

    def __init__(self, run: Initializer):
        self.run = run
        self.identity, self.is_fixed = run, False
        if isinstance(run, FunctionType):
            values = [cell.cell_contents for cell in run.__closure__ or ()]
            values += [*(run.__defaults__ or ()), *(run.__kwdefaults__ or {}).items()]
            if all(map(_cannot_change, values)):
                # As 1 is 1.0, and 0.0 is -0.0, but not as a value to fill with.
                exact = tuple(map(repr, values))
                self.identity = (run.__code__, id(run.__globals__), tuple(values), exact)
                # Others may read variables that change before the next call.
                self.is_fixed = run.__module__.partition(".")[0] in ("jax", "maxjax")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fill) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity) if isinstance(self.identity, tuple) else id(self.identity)


def _cannot_change(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_cannot_change, value))
    return value is None or isinstance(value, int | float | complex | str | type | np.dtype)


class _Program(NamedTuple):
    """What one compiled program draws from a key and the codes of names.

    Attributes:
        fill: the initializer.
        shape: logical shape of a weight.
        dtype: its dtype.
        layout: order in which it is stored, if that is not the logical one.
        lead: leading sizes of the result where it is that of several weights, None for one.
        sharding: where the result is created.
    """

    fill: _Fill
    shape: tuple[int, ...]
    dtype: Any
    layout: DeviceMajor | None
    lead: tuple[int, ...] | None
    sharding: Any

    def jitted(self) -> _JittedRun:
        """Return a function of a key and of the codes ``[n]``, or of the code of one weight."""
        choices: list[Any] = [None]
        if jax.default_backend() == "cpu" and math.prod((*(self.lead or ()), *self.shape)) <= _FEW:
            choices = [_QUICK, _UNOPTIMISED, None]
        jit = partial(jax.jit, self._draw, out_shardings=self.sharding)
        return _JittedRun([jit(compiler_options=options) for options in choices])

    def _draw(self, key: jax.Array, codes: jax.Array) -> jax.Array:
        def draw(code: jax.Array) -> jax.Array:
            if 0 in self.shape:  # initializers divide by the sizes
                value = jnp.zeros(self.shape, self.dtype)
            else:
                value = self.fill.run(jax.random.fold_in(key, code), self.shape, self.dtype)
            return value if self.layout is None else self.layout.arrange(value)

        if self.lead is None:
            return draw(codes)
        drawn = jax.lax.map(draw, codes)
        return drawn.reshape(*self.lead, *drawn.shape[1:])


class _JittedRun:
    """A jitted function.

    Args:
        choices: the function with several options. The first is called that XLA knows, and that may be called
            here: inside another jitted function, only one without options.
    """

    def __init__(self, choices: Sequence[Any]):
        self._choices = choices
        self._compiling: Future[Any] | None = None

    def compile_in(self, pool: ThreadPoolExecutor, *args: Any) -> None:
        """Compiles it in another thread; an error is raised by the call."""
        if self._compiling is None and not any(isinstance(one, Tracer) for one in args):
            self._compiling = pool.submit(self._choices[0].lower(*args).compile)

    def __call__(self, *args: Any) -> jax.Array:
        if self._compiling is not None:
            self._compiling.exception()
        *others, last = self._choices
        for choice in others:
            try:
                return choice(*args)
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                if not _REFUSED.search(str(error)):
                    raise
        return last(*args)


_kept = lru_cache(maxsize=256)(_Program.jitted)


class _Draw(NamedTuple):
    """What one call of an initializer draws: one weight, or the weights of several layers of a stack."""

    fill: _Fill
    leaf: jax.ShapeDtypeStruct
    names: list[str]
    weights: list[Weight]

    @property
    def is_whole(self) -> bool:
        """Whether it draws all weights of a stack."""
        home = self.weights[0].home
        places = [weight.home[1] for weight in self.weights if weight.home is not None]
        return home is not None and places == list(range(home[0].spec.count))

    @property
    def sharding(self) -> Any:
        first = self.weights[0]
        holder = first if first.home is None else first.home[0]
        where = holder.spec.leaf_sharding
        if first.home is None or self.is_whole or not isinstance(where, NamedSharding):
            return where
        spec = PartitionSpec(None, *where.spec[len(holder.spec.spans) :])
        return NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)

    @property
    def codes(self) -> np.ndarray:
        """The codes of the names, with which the keys are derived."""
        codes = np.array([zlib.crc32(name.encode()) for name in self.names], np.uint32)
        return codes[0] if self.weights[0].home is None else codes

    @property
    def program(self) -> _Program:
        """Draws ``[n, ...]`` for a stack: exactly the values that each weight would have on its own."""
        weight = self.weights[0]
        layout, home = weight.spec.layout, weight.home
        shape = self.leaf.shape if layout is None else tuple(map(int, weight.shape))
        lead = None
        if home is not None:
            lead = home[0].spec.lead if self.is_whole else (len(self.names),)
        return _Program(self.fill, shape, self.leaf.dtype, layout, lead, self.sharding)

    def store(self, values: jax.Array) -> None:
        home = self.weights[0].home
        if home is None:
            self.weights[0].put(values)
        else:
            places = [weight.home[1] for weight in self.weights if weight.home is not None]
            if self.is_whole:
                home[0].put(values)
            else:  # the draw covers only part of a stack: a weight is tied, or some have values
                home[0].put_many(dict(zip(places, values, strict=True)))
        for name, weight in zip(self.names, self.weights, strict=True):
            weight.source = None
            weight.finalise(name)


def _owners(model: Module) -> list[tuple[str, tuple[Weight, Module | None]]]:
    """Every weight of the model with its full name and the layer that owns it, if any."""
    weights = model.raw_state_dict()
    owner = {}
    for _, module in model.named_modules():
        for weight in module._mx_weights.values():
            owner.setdefault(id(weight), module)
    return [(name, (weight, owner.get(id(weight)))) for name, weight in weights.items()]


def _choose(name: str, weight: Weight, layer: Module | None, initializer: Any) -> Initializer:
    chosen = initializer(name) if initializer is not None else None
    if chosen is None and layer is not None:
        chosen = layer.initializer(weight.spec.local_name)
    if chosen is not None:
        return chosen
    if not weight.dtype.is_float():
        raise TypeError(
            f"weight '{name}' is {weight.dtype}, which has no default initializer: "
            "load a value, or pass an initializer"
        )
    if name.rsplit(".", 1)[-1] == "bias":
        return jax.nn.initializers.zeros
    if weight.rank < 2:
        return jax.nn.initializers.ones
    return linear_weight


def linear_weight(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """A normal matrix ``[out, in]`` of variance 1/in (LeCun et al., "Efficient BackProp", 1998)."""
    fan_in_last = jax.nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
    return fan_in_last(key, tuple(shape), dtype)


def partition(
    model: M, trainable: str | Sequence[str] | Callable[[str, Any], bool] | None = None
) -> tuple[M, M]:
    """Returns two new Modules: one with the weights to differentiate, one with the rest.

    Args:
        trainable: name patterns as in a shell (``"layers.*.bias"``), or a function of
            (full name, value); None selects every weight of a floating type but running statistics. The weights of a
            LayerStack are one value, whose name is ``"layers.*.bias"``.

    Returns:
        Two Modules of the same class, each with None where the other has the value;
        ``merge`` combines them. No array is copied. If the model has LoRA weights, they and what
        ``merge`` makes of them record which other weights are trained, so that
        ``maxjax.lora.save`` writes these too.

    Raises:
        UserInputError: ``model`` is no Module; a pattern names no weight, or takes some of the layers of a
            LayerStack only; ``trainable`` is neither patterns nor a function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from maxjax import init, merge, nn, partition
        >>> from maxjax.graph import DeviceRef
        >>> model = init(nn.Linear(3, 2, "float32", DeviceRef.CPU(), has_bias=True), jax.random.key(0))
        >>> bias, rest = partition(model, "bias")
        >>> grads = jax.grad(lambda b: merge(b, rest)(jnp.ones(3)).sum())(bias)
        >>> [leaf.shape for leaf in jax.tree.leaves(grads)]
        [(2,)]
    """
    check_module(model, "partition")
    if trainable is None or callable(trainable):
        fixed = _untrained(model) if trainable is None else ()
        rule: Any = trainable or (
            lambda name, value: jnp.issubdtype(value.dtype, jnp.floating) and name not in fixed
        )
        flags = jax.tree.map_with_path(
            lambda path, v: bool(rule(jax.tree_util.keystr(path, simple=True), v)), model
        )
    else:
        patterns = [trainable] if isinstance(trainable, str) else trainable
        if not isinstance(patterns, Collection) or not all(isinstance(p, str) for p in patterns):
            raise UserInputError(
                "trainable is one or more name patterns, or a function of a name and a value, not "
                f"{trainable!r}"
            )
        flags = labels(dict.fromkeys(patterns, True), default=False)(model)
    trained = jax.tree.map(lambda flag, v: v if flag else None, flags, model)
    rest = jax.tree.map(lambda flag, v: None if flag else v, flags, model)
    chosen = jax.tree.leaves(flags, is_leaf=lambda flag: flag is None)
    names = {
        name for flag, of in zip(chosen, _names(model).values(), strict=True) if flag for name in of
    }
    for half in (trained, rest):
        note_trained(half, names)
    return trained, rest


def _untrained(model: Module) -> set[str]:
    """The names of the pytree leaves that their layers compute otherwise, as running statistics."""
    walk = Walk(model, stacked=True)
    return {
        prefix + name
        for module, prefix in zip(walk.modules, walk.prefixes, strict=True)
        for name in getattr(module, "untrained", ())
    }


def labels(rules: Mapping[str, Any], default: Any) -> Callable[[M], M]:
    """Makes a function that returns a Module with labels instead of values.

    ``optax.multi_transform`` takes it as labels, ``optax.masked`` with bools as a mask. They call whatever
    can be called, as a Module can, so that they take the function and not the Module.

    Args:
        rules: name patterns as in a shell (``"*.bias"``) and the labels of weights with such names; the first that
            fits counts.
        default: label of the other weights.

    Returns:
        A function of a Module, or of one of the two that :func:`partition` returned. It raises a UserInputError
        if a pattern names no weight, or the layers of a LayerStack, whose weights are one value, get
        different labels.

    Raises:
        UserInputError: ``rules`` is no mapping from patterns.

    Example:
        >>> from maxjax import labels, nn
        >>> model = nn.Linear(3, 2, has_bias=True)
        >>> found = labels({"*bias": "no decay"}, default="decay")(model)
        >>> found.weight.value, found.bias.value
        ('decay', 'no decay')
    """
    if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
        raise UserInputError(
            "maxjax.labels takes a mapping from name patterns to labels, and the label of the other "
            f"weights, not {type(rules).__name__}: its result is a function of a Module"
        )
    return partial(_labelled, dict(rules), default)


def _labelled(rules: Mapping[str, Any], default: Any, model: M) -> M:
    check_module(model, "labels(…)")
    names = _names(model)
    every = [name for of in names.values() for name in of]
    for pattern in rules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in every):
            near = closest(pattern, every)
            raise UserInputError(
                f"no weight has a name like {pattern!r}"
                + (f"; did you mean {near!r}?" if near else f"; there are {some(every, 3)}")
            )

    def label(path: Any, value: Any) -> Any:
        of = names[jax.tree_util.keystr(path, simple=True)]
        found = [
            next((rules[p] for p in rules if fnmatch.fnmatchcase(name, p)), default) for name in of
        ]
        if any(one != found[0] for one in found):
            raise UserInputError(
                f"{', '.join(map(repr, rules))} takes some of the layers of a LayerStack and not others: "
                f"{of[0]} and so on are one array. Take all of them, or unstack() first"
            )
        return found[0]

    return jax.tree.map_with_path(label, model)


def _names(model: Module) -> dict[str, list[str]]:
    """For the name of each pytree leaf, the names it has in a state dict."""
    definition, holders = model._mx_definition()
    return {
        name: holder.spec.names(name)
        for name, holder in zip(definition.names, holders, strict=True)
    }


def merge(first: M, second: M) -> M:
    """Returns a new Module of the two that :func:`partition` returned.

    Raises:
        UserInputError: they are not halves of one Module; or both halves, or neither, have a value for a weight.
    """
    check_module(first, "merge")
    check_module(second, "merge")
    if first._mx_definition()[0] != second._mx_definition()[0]:
        kinds = f"{type(first).__name__} and {type(second).__name__}"
        raise UserInputError(
            f"maxjax.merge takes the two halves of one model, and these have different weights or layers: {kinds}"
        )

    def pick(path: Any, a: Any, b: Any) -> Any:
        if (a is None) == (b is None):
            name = _names(first)[jax.tree_util.keystr(path, simple=True)][0]
            raise UserInputError(
                f"{'neither' if a is None else 'each'} half has a value for weight '{name}'"
            )
        return b if a is None else a

    return jax.tree.map_with_path(pick, first, second, is_leaf=lambda v: v is None)
