"""The decoder-only language model that the families share: token ids → logits of the next token.

``model(ids)`` returns logits; ``model(ids, cache)`` returns logits and the next cache.

Shapes: L layers, B sequences, T tokens, K KV heads, S slots of the cache, head width D,
hidden size E, vocabulary size V.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable
from typing import Any, ClassVar, Self, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from ...dtype import DType
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.arrays import platform_of
from ...graph.placement.specs import Split, axis_of
from ...graph.placement.strategy import ShardingStrategy
from ...graph.value import unwrap
from ...kernels import explicit
from ...nn.embedding import Embedding
from ...nn.kv_cache.cache import KVCache
from ...nn.kv_cache.kinds import Group, KeysValues, Place, numbers_of
from ...nn.layer import LayerList, LayerStack, Module
from ...nn.linear import ColumnParallelLinear
from ..family import Family, PretrainedModel, matcher
from ..multimodal import PLACES
from ..weights import beside
from .aliases import spelling
from .attention import Cached, Step
from .block import DecoderLayer
from .config import DecoderConfig, groups_of_config, pattern, shares
from .norm import norm
from .rope import NO_LIMIT, is_dynamic, same_until
from .score import Scored
from .step import nan_beyond

# Tables of RoPE frequencies, which old files hold and maxjax computes.
KNOWN = ("*rotary_emb.inv_freq",)
# Files of a model without its head (an embedding model, for example) leave out this prefix.
BARE = ("model.", ("embed_tokens.", "layers.", "norm."))

# JAX's platforms that are GPUs.
_GPUS = ("gpu", "cuda", "rocm")


class DecoderModel(Module):
    """Embedding, layers and final norm: ``model`` in Hugging Face's checkpoints."""

    _mx_carries = True

    def __init__(self, config: DecoderConfig, dtype: DType, layer_class: Any):
        super().__init__()
        self.dtype, self.embedding_scale = dtype, config.embedding_scale
        self.make_embeddings(config, dtype)
        self.layers: Any = LayerList(
            layer_class(config, i, dtype) for i in range(config.num_hidden_layers)
        )
        self.norm = norm(config, dtype)

    def make_embeddings(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the embedding table that :meth:`embed` uses."""
        width, cpu = config.embedding_size, DeviceRef.CPU()
        self.embed_tokens = Embedding(config.vocab_size, width, dtype, cpu)

    def __call__(
        self, ids: jax.Array, step: Step, cached: Cached, at: jax.Array | None = None
    ) -> tuple[jax.Array, Cached]:
        """Token ids ``[B, T]``, or ``[B]`` (one for each sequence) → hidden states.

        Args:
            ids: integers ``[B, T]`` or ``[B]``.
            step: positions of the tokens.
            cached: the states of the cache by the names of its groups; empty without a cache.
            at: index ``[B]`` of the one token in each row whose state is returned; None: all tokens.

        Returns:
            Hidden states ``[B, T, E]`` (``[B, E]`` for ids ``[B]`` or with ``at``), and the cache
            with these tokens.
        """
        x, cached = self.run_layers(self.embed(ids, step), step, cached)
        if at is not None and x.ndim == 3:
            x = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        return self.output(x), cached

    def output(self, x: jax.Array) -> jax.Array:
        """Hidden states after the last layer → hidden states for the head."""
        return self.norm(x)

    def run_layers(self, x: Any, step: Step, cached: Cached) -> tuple[Any, Cached]:
        """Runs all layers in order; returns the hidden states after the last one, and the cache."""
        carry = (x, cached)
        if isinstance(self.layers, LayerStack):
            carry = self.layers.scan(carry, index="layer", step=step)
        else:
            for i, layer in enumerate(self.layers):
                # The barrier hides the number from XLA, which would otherwise compile each layer's
                # kernels anew, and could turn writes to one layer of the cache into copies.
                carry = layer(carry, step=step, layer=jax.lax.optimization_barrier(jnp.int32(i)))
        return carry

    def embed(self, ids: jax.Array, step: Step) -> jax.Array:
        """The token embeddings that enter the first layer, ``[B, T, E]`` or ``[B, E]``."""
        x = self.embed_tokens(ids).astype(self.dtype.np)
        if self.embedding_scale != 1.0:
            x = x * jnp.asarray(self.embedding_scale, x.dtype)
        return x


class Decoder(Scored, PretrainedModel):
    """A decoder-only language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Attributes:
        model: the model without its head.
        lm_head: linear layer that computes the logits; it shares the embedding's weight if the two
            are tied.

    Example:
        >>> config = DecoderConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = Decoder(config)
        >>> ids = jnp.zeros((3, 5), jnp.int32)
        >>> jax.eval_shape(lambda m, ids: m(ids), model, ids).shape
        (3, 5, 100)
        >>> call = lambda m, ids: m(ids, m.cache(3, 16), last=True)
        >>> logits, cache = jax.eval_shape(call, model, ids)
        >>> logits.shape, cache.keys.shape
        ((3, 100), (2, 3, 2, 16, 4))
    """

    layer_class: ClassVar[Any] = DecoderLayer
    model_class: ClassVar[Any] = DecoderModel
    # Whether `stack_for` makes the layers separate on GPUs.
    separate_on_gpus: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__()
        kind = DType.of(dtype)
        self.config, self.dtype = config, kind
        self.model = self.model_class(config, kind, self.layer_class)
        self.lm_head: Any = ColumnParallelLinear(
            config.embedding_size, config.vocab_size, kind, [DeviceRef.CPU()],
            has_bias=config.head_bias,
        )  # fmt: skip
        if config.tie_word_embeddings:
            self.lm_head.set_shared_weight("weight", self.model.embed_tokens.weight)
        if stacked:
            self.stack()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_logits" in vars(cls) and "logits" not in vars(cls):
            cls.logits = vars(cls)["_logits"]  # its former name

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """:meth:`PretrainedModel.of_checkpoint`.

        The layers are not stacked yet, because their dtypes may differ in the checkpoint.
        """
        return cls(config, dtype, stacked=False)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the head along the vocabulary, or by columns if the vocabulary does not divide evenly.

        A tied head is split as the embedding table is.
        """
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        return {f"{spelling(self, 'lm_head')}.weight": Split(rows, fallback=columns)}

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence, from the configuration.

        Dynamic NTK is for any length, so for a model with it this is the largest int32.
        """
        is_bounded = not is_dynamic(self.config.ropes_by_length)
        return self.config.max_position_embeddings if is_bounded else NO_LIMIT

    def stack(self) -> Decoder:
        """Stacks the layers in a LayerStack, in place: equal layers (or a repeating pattern) are compiled once.

        Returns:
            The model itself.
        """
        layers = self.model.layers
        if not isinstance(layers, LayerStack):
            first, period = pattern([_kind(layer) for layer in layers])
            self.model.layers = layers.stack(period=period, first=first)
        return self

    def unstack(self) -> Self:
        """Gives each layer its own weights again, in place, with the same values bit for bit.

        Returns:
            The model itself.
        """
        if isinstance(self.model.layers, LayerStack):
            self.model.layers = self.model.layers.unstack()
        return self

    def stack_for(self, place: Any = None) -> Decoder:
        """Stacks the layers or separates them, in place, whichever is faster on the devices.

        On a GPU, XLA cannot multiply by a slice of a stack in place: a loop over stacked
        layers copies every weight out of its stack for every token, which triples memory
        traffic. Separate weights are read in place, in a program that takes a fraction of a
        second longer to compile for each layer. On TPUs the matmul reads the slice in place, and on CPUs
        maxjax's kernels take the stack, so there the loop is as fast, and compiled once.

        Where weights are sharded over ``fsdp``, the loop is better on GPUs too: each weight is gathered, and
        so copied, for every token in any case, and without a loop XLA gathers those of all layers at once.

        Args:
            place: mesh, Sharding or device that the model is for; None for the default device.

        Returns:
            The model itself.
        """
        fsdp = axis_of(place, "fsdp") if isinstance(place, Mesh) else None
        gathered = fsdp is not None and place.shape[fsdp] > 1
        separate = platform_of(place) in _GPUS and self.separate_on_gpus and not gathered
        return self.unstack() if separate else self.stack()

    def cache(
        self, batch: int, capacity: int, dtype: Any = None, *, abstract: bool = False
    ) -> KVCache:
        """Makes an empty KV cache on the model's devices, with KV heads sharded as the projections are.

        Layers with a sliding window have at most as many slots as the window has tokens.

        Args:
            batch: B, the number of sequences. They are split over the mesh's batch axes if they
                divide evenly.
            capacity: S, the maximum number of tokens in a sequence.
            dtype: dtype of keys and values, a float or int8; the model's dtype by default.
            abstract: whether to make placeholders, ``jax.ShapeDtypeStruct`` with shardings, for lowering
                a program.

        Raises:
            UserInputError: a number is not positive, or the dtype is neither a float nor int8.
        """
        # KVCache.of refuses a batch that is not a positive number.
        rows = batch if isinstance(batch, int) and batch > 0 else 1
        groups = {
            name: (group.layers, group.kind, self._place(group, rows))
            for name, group in self._groups.items()
        }
        if "full" not in groups:
            group = next(iter(self._groups.values()))
            place = next(iter(groups.values()))[2]
            kind = group.kind if isinstance(group.kind, KeysValues) else KeysValues(1, 1)
            groups["full"] = (0, dataclasses.replace(kind, window=None), place)
        options = {
            "dtype": self.dtype if dtype is None else dtype, "abstract": abstract,
            "has_text_lengths": bool(self.config.ropes_by_length),
        }  # fmt: skip
        with beside(self):
            return KVCache.of(groups, batch=batch, capacity=capacity, **options)

    @property
    def _groups(self) -> dict[str, Group]:
        """The groups of layers with the same kind of state in the cache, by name."""
        return groups_of_config(self.config)

    def _place(self, group: Group, batch: int) -> Place:
        """The sharding of the state of a group of layers, as the first of its layers gives it."""
        below = (layer for _, layer in self.model.layers[group.first].named_modules())
        mixer = next(layer for layer in below if callable(getattr(layer, "cache_place", None)))
        return mixer.cache_place(batch)

    @overload
    def __call__(
        self, ids: Any, cache: None = None, *, lengths: Any = None, last: bool = False
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, ids: Any, cache: KVCache, *, lengths: Any = None, last: bool = False
    ) -> tuple[jax.Array, KVCache]: ...
    def __call__(
        self, ids: Any, cache: KVCache | None = None, *, lengths: Any = None, last: bool = False
    ) -> Any:
        """Token ids ``[B, T]`` → logits in float32, and the next cache if one is given.

        Args:
            ids: integers ``[B, T]``. With T = 1 and a cache this is a decode step.
            cache: cache of the tokens before these; donate it if it is not used again.
            lengths: number of real tokens in each row, integers ``[B]``; by default all are real.
                The others are padding on the right: they do not affect real tokens, and their
                logits are meaningless.
            last: whether to return only the logits of each row's last real token, ``[B, V]``.

        Returns:
            Logits ``[B, T, V]``; with a cache ``(logits, cache)``. Inside ``jax.jit``, logits of
            tokens beyond the cache's capacity are NaN, and so are those of a text that has outgrown the
            RoPE of its keys in the cache (see ``KVCache.for_texts``).

        Raises:
            UserInputError: ``ids`` are not integers ``[B, T]`` or do not fit the cache. Outside of
                ``jax.jit``, where values are known, it is also raised if a token id is not in the
                vocabulary, if the tokens exceed the cache's capacity, or if a text outgrows the RoPE of
                its keys in the cache.
        """
        ids = self._checked(ids, cache)
        batch, length = ids.shape
        counts, keeps = self._counts(lengths, batch), cache is not None
        if not keeps:
            cache = self._inner_cache(batch, length)
        if cache is not None:
            cache.check_room(length if counts is None else counts)
        starts = jnp.zeros(1, jnp.int32) if cache is None else cache.lengths
        if cache is not None:
            ids, counts = jax.tree.map(lambda a: _sharded_as_rows(cache, a), (ids, counts))
        step = self._step(starts, counts, length, cache)
        after = starts + (length if counts is None else counts)
        outgrown = None if cache is None else self._outgrown(cache, after)
        cached: Cached = {} if cache is None else cache.states
        is_step = cache is not None and length == 1
        at = None
        if last:
            at = jnp.full(batch, length) if counts is None else counts
            at = jnp.maximum(at - 1, 0).astype(jnp.int32)
        x, cached = self.model(ids[:, 0] if is_step else ids, step, cached, at)
        logits = self.logits(x)
        if is_step and not last:
            logits = logits[:, None]
        if cache is None or not keeps:
            return logits
        step = step._replace(counts=counts)
        logits = nan_beyond(cache.capacity, logits, step, length, at)
        if outgrown is not None:
            logits = jnp.where(outgrown.reshape(-1, *(1,) * (logits.ndim - 1)), jnp.nan, logits)
        return logits, cache.with_states(cached, after)

    def _outgrown(self, cache: KVCache, lengths: jax.Array) -> jax.Array | None:
        """Return which texts of these lengths are too long for the RoPE of their keys in the cache, bools ``[B]``.

        Raises:
            UserInputError: a text is, and lengths are known.
        """
        if cache.text_lengths is None:
            return None
        limits = same_until(self.config.ropes_by_length, cache.read_for(lengths))
        found = lengths > limits
        if isinstance(found, Tracer) or not found.is_fully_addressable or not found.any():
            return found
        row = int(found.argmax())
        raise UserInputError(
            f"cannot continue the text of row {row} to {lengths[row]} tokens: beyond {limits[row]}, the RoPE of "
            f"this {type(self).__name__} rotates its earlier tokens otherwise; read the text again from its "
            "beginning, with cache.emptied(rows).for_texts(lengths)"
        )

    def states(self, ids: Any, *, lengths: Any = None) -> jax.Array:
        """Token ids ``[B, T]`` → hidden states ``[B, T, E]`` after the last norm, the inputs of the head.

        Args:
            ids: integers ``[B, T]``.
            lengths: number of real tokens in each row, integers ``[B]``; by default all are real.
                The others are padding on the right, and their states are meaningless.

        Raises:
            UserInputError: as for a call of the model.

        Example:
            >>> model = Decoder(DecoderConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
            >>> ids = jnp.zeros((3, 5), jnp.int32)
            >>> jax.eval_shape(lambda m, ids: m.states(ids), model, ids).shape
            (3, 5, 8)
        """
        ids = self._checked(ids, None)
        counts = self._counts(lengths, ids.shape[0])
        if counts is not None:  # the padding must not affect anything, not even with NaN
            real = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :] < counts[:, None]
            ids = jnp.where(real, ids, 0)
        cache = self._inner_cache(*ids.shape)
        starts = jnp.zeros(1, jnp.int32) if cache is None else cache.lengths
        step = self._step(starts, counts, ids.shape[1], cache)
        if cache is None:
            return self.model(ids, step, {}, None)[0]
        is_step = ids.shape[1] == 1
        x = self.model(ids[:, 0] if is_step else ids, step, cache.states, None)[0]
        return x[:, None] if is_step else x

    def _inner_cache(self, batch: int, length: int) -> KVCache | None:
        """A cache for a call without one, if layers read the keys and values of other layers; else None."""
        return self.cache(batch, length) if shares(self.config) else None

    def _counts(self, lengths: Any, batch: int) -> jax.Array | None:
        counts = None if lengths is None else jnp.asarray(unwrap(lengths)).astype(jnp.int32)
        if counts is not None and counts.shape != (batch,):
            raise UserInputError(f"lengths must be [{batch}], one for each row, not {counts.shape}")
        return counts

    def _checked(self, ids: Any, cache: KVCache | None) -> jax.Array:
        given, size = unwrap(ids), self.config.vocab_size
        if not isinstance(given, jax.Array):
            given = np.asarray(given)
        if given.ndim != 2 or not jnp.issubdtype(given.dtype, jnp.integer) or 0 in given.shape:
            found = f"{given.dtype} of shape {given.shape}"
            if given.dtype.kind in "US":
                found = "text: maxjax.generate(model, tokenizer, text) answers it"
            elif given.ndim == 1:
                found += ": put one sequence in brackets, [ids]"
            raise UserInputError(
                f"expected integer token ids of shape [batch, tokens], at least one, got {found}"
            )
        if cache is not None and cache.batch != given.shape[0]:
            raise UserInputError(
                f"{given.shape[0]} rows of token ids do not fit a cache of {cache.batch} rows"
            )
        if cache is not None:
            self._check_layers(cache)
            if cache.text_lengths is None and self.config.ropes_by_length:
                raise UserInputError(
                    f"the cache has no text_lengths, which the RoPE of this {type(self).__name__} depends on: "
                    "make the cache with model.cache(...)"
                )
        if not isinstance(given, Tracer) and getattr(given, "is_fully_addressable", True):
            found = np.asarray(given)
            low, high = int(found.min()), int(found.max())
            if low < 0 or high >= size:
                wrong = low if low < 0 else high
                raise UserInputError(f"token id {wrong} is outside the vocabulary of {size} tokens")
        return jnp.asarray(given)

    def _check_layers(self, cache: KVCache) -> None:
        expected = {name: group.layers for name, group in self._groups.items()}
        found = {name: state.layers for name, state in cache.states.items() if state.layers}
        if found == expected:
            return
        # A cache may keep all tokens of sliding layers, in "full".
        every = {**expected, "full": expected.get("full", 0) + expected.pop("sliding", 0)}
        if found != {name: every[name] for name in every if name != "sliding"}:
            text = lambda counts: " and ".join(f"{n} layers {name}" for name, n in counts.items())
            wanted = {name: group.layers for name, group in self._groups.items()}
            raise UserInputError(
                f"the cache has {text(found)}, and this model {text(wanted)}: make the cache with "
                "model.cache(...)"
            )

    def _step(
        self, starts: jax.Array, counts: jax.Array | None, length: int, cache: KVCache | None
    ) -> Step:
        config, numbers = self.config, None
        after = starts + (length if counts is None else counts)  # [B]
        text_lengths = after if cache is None else cache.read_for(after)
        if cache is not None and cache.sliding is not None:
            # In a rotating cache, tokens beyond the capacity would overwrite other tokens.
            room = jnp.maximum(cache.capacity - starts, 0)
            counts = jnp.minimum(length if counts is None else counts, room)
        # In a cache without the group "sliding", all layers may be in "full", in their order.
        own = cache is not None and (cache.sliding is not None or cache.more)
        if own or (cache is not None and set(self._groups) == {"full"}):
            numbers = jax.tree.map(jnp.asarray, numbers_of(self._groups))
        step = Step(starts, counts, {}, numbers=numbers)
        if cache is not None and counts is not None:
            step = step._replace(tokens=jnp.where(counts > 0, starts, -1))
        ropes = {"global": config.rope, "local": config.local_rope}
        rotations = {
            name: rope.cos_sin(step.positions(length), text_lengths, width)
            for (name, rope), width in zip(ropes.items(), config.rope_widths, strict=True)
            if rope is not None
        }
        if config.query_scaling is not None:
            factors = config.query_scaling.factors(step.positions(length))
            step = step._replace(query_scales=factors)
        return step._replace(rotations=rotations)

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states after the last norm ``[..., E]`` → logits ``[..., V]`` in float32.

        Raises:
            UserInputError: the model has no head.
        """
        if self.lm_head is None:
            raise UserInputError(
                "the checkpoint has no language-model head, so there are no logits, only hidden states "
                "(model.states(ids), maxjax.embed). Load a checkpoint that has the head"
            )
        logits = self.lm_head(x).astype(jnp.float32)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _kind(layer: Module) -> Hashable:
    """The structure, settings, shapes and dtypes of a layer; equal layers can be stacked."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def _sharded_as_rows(cache: KVCache, array: jax.Array) -> jax.Array:
    """``array`` with its rows sharded as those of the cache, if the cache's mesh has Explicit axes."""
    mesh = explicit.mesh_of(cache.keys)
    if mesh is None:
        return array
    rows = [explicit.entries(cache.keys)[1], *[()] * (array.ndim - 1)]
    return jax.sharding.reshard(array, explicit.sharding(mesh, rows))


@dataclasses.dataclass(frozen=True)
class DecoderFamily(Family):
    """A Family of decoders with the tensor names of Llama's files.

    Files without the head may leave out "model.", and tables of RoPE frequencies are ignored.

    Attributes:
        sight: patterns of the tensors for images and audio (``multimodal.SIGHT``), for families that are
            also text models of multimodal models. These tensors are ignored, and the prefixes of the
            text model are replaced.
    """

    bare: tuple[str, tuple[str, ...]] = BARE
    ignored: tuple[str, ...] = KNOWN
    sight: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignored", (*self.ignored, *self.sight))

    def left_out(self, names: Iterable[str]) -> list[str]:
        """:meth:`Family.left_out`; of a multimodal model also the other parts."""
        seen = matcher(self.sight)
        names = list(names)
        return [*super().left_out(names), *(name for name in names if seen.fullmatch(name))]

    def name(self, tensor: str) -> str | None:
        """:meth:`Family.name`, after the prefix of a multimodal model's text model is replaced."""
        for place, instead in PLACES if self.sight else ():
            if tensor.startswith(place):
                return super().name(instead + tensor[len(place) :])
        return super().name(tensor)


# The family of models that are made in code; no checkpoint names it.
Decoder.family = Family("decoder", ("Decoder",), DecoderConfig, Decoder.of_checkpoint)
