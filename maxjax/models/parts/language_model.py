"""``LanguageModel``: what generating text needs of a decoder, around the mathematics of an architecture.

``model(ids)`` returns logits; ``model(ids, cache)`` returns logits and the next cache. An architecture defines its
modules in ``__init__`` and their mathematics in their ``__call__``s. Of this class it may override
:meth:`~LanguageModel.hidden_states`, :meth:`~LanguageModel.logits`, :attr:`~LanguageModel.max_length` and
:attr:`~LanguageModel.position_limit`.

Shapes: L layers, B sequences, T tokens, K KV heads, S slots of the cache, hidden size E, vocabulary size V.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from ...dtype import DType
from ...errors import OutOfMemoryError, UserInputError, checked_integer
from ...graph.device import DeviceRef
from ...graph.kind import as_array
from ...graph.placement.specs import batch_axes, held_bytes, mesh_of, spec_of
from ...graph.placement.split import TABLE
from ...kernels import explicit
from ...kernels.explicit import parts_over
from ...nn.kv_cache.cache import KVCache, check_cache_dtype, placeholder
from ...nn.kv_cache.kinds import Group, KeysValues, Place, States, numbers_of
from ...nn.kv_cache.layout import cache_layout, page_layout
from ...nn.kv_cache.pages import MTPPool, PagedCache, PagePool
from ...nn.layer import LayerStack
from ...nn.linear import ColumnParallelLinear
from ...rendering.row import bytes_text
from ..family import PretrainedModel
from ..names import Names
from ..weights import beside
from .aliases import spelling
from .cache import Features, ForwardContext, LayerCache, no_cache, recurrent_place
from .config import groups_of_config, shares
from .layer_loop import is_faster_separate, kind_of, pattern, stack_layers, unstack_layers
from .mtp import KEPT, PredictsMore
from .rotary import NO_LIMIT, is_dynamic, same_until
from .score import Scored

C = TypeVar("C", KVCache, PagedCache)


class LanguageModel(PredictsMore, Scored, PretrainedModel):
    """A decoder-only language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.

    Attributes:
        model: the model without its head; it has ``embed_tokens`` and ``layers``.
        lm_head: linear layer that computes the logits; None in a checkpoint without it.
        vision: what turns pictures into features, ``models.vision.part.VisionPart``; None for a model of text alone.
    """

    model: Any
    lm_head: Any
    vision: Any = None
    # Whether `stack_for` makes the layers separate on GPUs.
    separate_on_gpus: ClassVar[bool] = True

    def __init__(self, config: Any, dtype: Any = DType.float32):
        super().__init__()
        self.config, self.dtype = config, DType.of(dtype)

    # --- what an architecture may override

    def hidden_states(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Return the hidden states after the last norm, the inputs of the head, and the cache.

        Args:
            ids: integers ``[B, T]``, or ``[B]`` for one token per sequence.
            cache: positions of the tokens, and what earlier calls left.

        Returns:
            Hidden states ``[B, T, E]``, or ``[B, E]``, and the cache with these tokens.
        """
        return self.model(ids, cache)

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` in float32 of hidden states ``[..., E]`` after the last norm.

        Raises:
            UserInputError: the model has no head.
        """
        if self.lm_head is None:
            raise UserInputError(
                "the checkpoint has no language-model head, so there are no logits, only hidden states "
                "(model.states(ids), maxjax.embed). Load a checkpoint that has the head"
            )
        return self.lm_head(x).astype(jnp.float32)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens in a sequence, from the configuration.

        Dynamic NTK is for any length, so for a model with it this is the largest int32.
        """
        is_bounded = not is_dynamic(self.config.ropes_by_length)
        return self.config.max_position_embeddings if is_bounded else NO_LIMIT

    @property
    def position_limit(self) -> int | None:
        """The number of positions that the model has learned; None for a model without learned positions.

        A longer text is refused where lengths are known; inside ``jax.jit`` its logits are NaN.
        """
        return None

    @property
    def tensor_names(self) -> Names:
        """The names of tensors in files, with those of the optional parts that the model has."""
        names = super().tensor_names
        return names if self.vision is None else self.vision.names_with(names)

    # --- parts that most architectures share

    def make_head(self, size: int, *, tied: bool, has_bias: bool = False) -> Any:
        """Make the linear layer from hidden states of this size to logits, which becomes ``lm_head``.

        Args:
            size: length E of the hidden states.
            tied: whether its weight is the embedding table.
            has_bias: whether it has a bias.
        """
        cpu = [DeviceRef.CPU()]
        head: Any = ColumnParallelLinear(
            size, self.config.vocab_size, self.dtype, cpu, has_bias=has_bias
        )
        if tied:
            head.set_shared_weight("weight", self.model.embed_tokens.weight)
        return head

    @classmethod
    def of_checkpoint(
        cls, config: Any, names: Collection[str], dtype: DType, reduce_dtype: DType
    ) -> Self:
        """:meth:`PretrainedModel.of_checkpoint`.

        The layers are not stacked yet, because their dtypes may differ in the checkpoint.
        """
        return cls(config, dtype, stacked=False)  # type: ignore[call-arg]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the head along the vocabulary, or by columns if the vocabulary does not divide evenly.

        A tied head is split as the embedding table is.
        """
        return {f"{spelling(self, 'lm_head')}.weight": TABLE}

    def stack(self) -> Self:
        """Stacks the layers in a LayerStack, in place: equal layers (or a repeating pattern) are compiled once.

        Returns:
            The model itself.
        """
        layers = self.model.layers
        if not isinstance(layers, LayerStack):
            first, period = pattern([kind_of(layer) for layer in layers])
            self.model.layers = layers.stack(period=period, first=first)
        if self.vision is not None:
            stack_layers(self.vision)
        return self

    def unstack(self) -> Self:
        """Gives each layer its own weights again, in place, with the same values bit for bit.

        Returns:
            The model itself.
        """
        if isinstance(self.model.layers, LayerStack):
            self.model.layers = self.model.layers.unstack()
        if self.vision is not None:
            unstack_layers(self.vision)
        return self

    def stack_for(self, place: Any = None) -> Self:
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
        separate = self.separate_on_gpus and is_faster_separate(place)
        return self.unstack() if separate else self.stack()

    # --- the cache

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
            name: (group.layers, group.kind, self._place(group.kind, rows))
            for name, group in self._groups.items()
        }
        if "full" not in groups:
            group = next(iter(self._groups.values()))
            place = next(iter(groups.values()))[2]
            kind = group.kind if isinstance(group.kind, KeysValues) else KeysValues(1, 1)
            groups["full"] = (0, dataclasses.replace(kind, window=None), place)
        options = {
            "dtype": self.dtype if dtype is None else dtype, "abstract": abstract,
            "has_text_lengths": bool(self.config.ropes_by_length), "has_offsets": self.config.has_axes,
        }  # fmt: skip
        with beside(self):
            return KVCache.of(groups, batch=batch, capacity=capacity, **options)

    def page_pool(
        self, pages: int, page_size: int, rows: int, dtype: Any = None, *, abstract: bool = False,
        mtp: bool = False, window_pages: int = 0,
    ) -> PagePool:  # fmt: skip
        """Makes an empty pool of pages on the model's devices, for ``PagedCache``.

        KV heads are sharded as the projections are; the pages are split over the mesh's batch axes, and the tokens of
        each page over devices with the same heads (``page_layout``). Devices have all KV heads only where their number
        divides neither the heads nor ``page_size``.

        Args:
            pages, page_size: N, the number of pages, which :meth:`row_parts` of ``rows`` must divide, and P, the number
                of tokens of a page.
            rows: R, the number of sequences that have pages and recurrent states at once.
            dtype, abstract: as for :meth:`cache`.
            mtp: whether it has what the model's layer of multi-token prediction needs.
            window_pages: number of pages of layers with a sliding window, which ``row_parts`` must divide too; 0: these
                layers have the pages of the others.

        Raises:
            UserInputError: a number is not positive, or the dtype is neither a float nor int8.
            OutOfMemoryError: a device has not so much memory.
        """
        for name, size in {"pages": pages, "page_size": page_size, "rows": rows}.items():
            checked_integer(name, size)
        kind = DType.of(self.dtype if dtype is None else dtype)
        check_cache_dtype(kind, [group.kind for group in self._groups.values()])
        places = lambda groups: {
            name: (group.layers, group.kind, self._place_of_pages(group.kind, rows, page_size))
            for name, group in groups.items()
        }
        zeros: Any = placeholder if abstract else jnp.zeros
        sizes = {
            "pages": pages,
            "page_size": page_size,
            "rows": rows,
            "parts": self.row_parts(rows),
            "window_pages": window_pages,
        }

        def make(zeros: Any) -> PagePool:
            pool = PagePool.of(places(self._groups), dtype=kind.np, zeros=zeros, **sizes)
            if not mtp:
                return pool
            own = PagePool.of(places(self._mtp_groups), dtype=kind.np, zeros=zeros, **sizes)
            mesh, shape = mesh_of([self._sharding]), (rows, KEPT, self.config.hidden_size)
            where = self._sharding if mesh is None else NamedSharding(mesh, spec_of([]))
            states = zeros(shape, self.dtype.np, device=where)
            return dataclasses.replace(pool, mtp=MTPPool(own, states))

        try:
            with beside(self):
                return make(zeros)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            leaves = jax.tree.leaves(make(placeholder))
            size = sum(held_bytes(a.sharding, a.shape, a.dtype.itemsize) for a in leaves)
            raise OutOfMemoryError(
                f"a cache of {pages:,} pages of {page_size} tokens takes {bytes_text(size)} on a device, which has not "
                "so much free: make it smaller"
            ) from error

    def row_parts(self, rows: int) -> int:
        """The number of parts into which the mesh splits ``rows`` sequences; each has its part of a pool of pages."""
        mesh = mesh_of([self._sharding])
        return 1 if mesh is None else parts_over(mesh, batch_axes(mesh, rows))

    def _place_of_pages(self, kind: Any, rows: int, page_size: int) -> Place:
        """The sharding of a pool."""
        mesh = mesh_of([self._sharding])
        if mesh is None or not isinstance(kind, KeysValues):
            return self._place(kind, rows)
        heads = kind.query_heads or kind.heads
        layout = page_layout(mesh, rows, heads, kind.heads, page_size)
        if layout is not None:
            return Place(layout.sharding, 1, layout.slots)
        layout = cache_layout(mesh, 1, heads, kind.heads)
        over = layout.over if layout.group == 1 else ()
        return Place(NamedSharding(mesh, spec_of([(), (), over])))

    @property
    def _groups(self) -> dict[str, Group]:
        """The groups of layers with the same kind of state in the cache, by name."""
        return groups_of_config(self.config)

    @property
    def _sharding(self) -> Any:
        """The sharding of the embedding table: the model's mesh or device; None if it has no values yet."""
        return self.model.embed_tokens.weight.sharding

    def _place(self, kind: Any, batch: int) -> Place:
        """The sharding of the states of ``batch`` sequences in the cache."""
        mesh = mesh_of([self._sharding])
        if mesh is None:
            return Place(self._sharding)
        if isinstance(kind, KeysValues):
            layout = cache_layout(mesh, batch, kind.query_heads or kind.heads, kind.heads)
            return Place(layout.sharding, layout.rows, layout.slots)
        return recurrent_place(mesh, batch)

    # --- a call

    @overload
    def __call__(
        self, ids: Any, cache: None = None, *, lengths: Any = None, last: bool = False,
        features: Any = None, at: Any = None, positions: Any = None, deepstack: Any = None, blocks: Any = None,
    ) -> jax.Array: ...  # fmt: skip
    @overload
    def __call__(
        self, ids: Any, cache: C, *, lengths: Any = None, last: bool | jax.Array = False,
        features: Any = None, at: Any = None, positions: Any = None, deepstack: Any = None, blocks: Any = None,
    ) -> tuple[jax.Array, C]: ...  # fmt: skip
    def __call__(
        self, ids: Any, cache: Any = None, *, lengths: Any = None, last: bool | jax.Array = False,
        features: Any = None, at: Any = None, positions: Any = None, deepstack: Any = None, blocks: Any = None,
    ) -> Any:  # fmt: skip
        """Token ids ``[B, T]`` → logits in float32, and the next cache if one is given.

        Args:
            ids: integers ``[B, T]``. With T = 1 and a cache this is a decode step.
            cache: cache of the tokens before these, a ``KVCache`` or, inside of ``jax.jit``, a ``PagedCache``;
                donate it if it is not used again.
            lengths: number of real tokens in each row, integers ``[B]``; by default all are real.
                The others are padding on the right: they do not affect real tokens, and their
                logits are meaningless.
            last: whether to return only the logits of each row's last real token, ``[B, V]``; or the numbers
                ``[n]`` of the rows whose last real token's logits are returned, ``[n, V]``.
            features: vectors ``[N, E]`` that stand in place of the embeddings of some tokens, such as those of
                pictures (``model.vision``).
            at: the row of ``features`` that stands in place of each token, integers ``[B, T]``; -1 for a token that has
                its own embedding. All tokens of a picture must be in one call.
            positions: positions of the tokens for RoPE, integers ``[B, T]`` or ``[B, T, 3]`` (a time, a row and a
                column); by default they are numbered. The next call goes on after the largest of them.
            deepstack: features ``[n, N, E]`` that are added after each of the first n layers (Qwen3-VL).
            blocks: the number of the block of each token, integers ``[B, T]``, -1 for none. In Gemma's models those
                of a block attend to all of it, later ones too. By default the tokens with features are blocks where
                the vision part has a picture seen as a whole, and all tokens of the call in PaliGemma.

        Returns:
            Logits ``[B, T, V]``; with a cache ``(logits, cache)``. Inside ``jax.jit``, logits of
            tokens beyond the cache's capacity or the learned positions are NaN, and so are those of a text
            that has outgrown the RoPE of its keys in the cache (see ``KVCache.for_texts``).

        Raises:
            UserInputError: ``ids`` are not integers ``[B, T]`` or do not fit the cache. Outside of
                ``jax.jit``, where values are known, it is also raised if a token id is not in the
                vocabulary, if the tokens exceed the cache's capacity or the learned positions, or if a text
                outgrows the RoPE of its keys in the cache.
        """
        ids = self._checked(ids, cache)
        batch, length = ids.shape
        counts, keeps = self._counts(lengths, batch), cache is not None
        given = self._features(features, at, deepstack, ids)
        if not keeps:
            cache = self._inner_cache(batch, length)
        if cache is not None:
            cache.check_room(length if counts is None else counts)
            ids, counts = jax.tree.map(lambda a: _sharded_as_rows(cache, a), (ids, counts))
        axes, blocks = self._axes(positions, cache, ids), self._blocks(blocks, given, ids)
        view = self._view(cache, counts, length).with_inputs(given, axes, blocks)
        after = view.context.starts + (length if counts is None else counts)
        self._check_positions(after, length if cache is None and counts is None else None)
        outgrown = None if cache is None else self._outgrown(cache, after)
        is_step = view.context.is_step
        x, view = self.hidden_states(ids[:, 0] if is_step else ids, view)
        mtp = None
        if keeps and isinstance(cache, PagedCache) and cache.pool.mtp is not None:
            mtp = self._follow(x, ids, cache, counts)
        at, context = None, dataclasses.replace(view.context, counts=counts)
        if last is not False:
            at = jnp.full(batch, length) if counts is None else counts
            at = jnp.maximum(at - 1, 0).astype(jnp.int32)
            x = x if is_step else jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        if not isinstance(last, bool):
            x, at, outgrown = jax.tree.map(lambda a: a[last], (x, at, outgrown))
            starts = jnp.broadcast_to(context.starts, batch)[last]
            chosen = None if counts is None else counts[last]
            context = dataclasses.replace(context, starts=starts, counts=chosen)
        logits = self.logits(x)
        if is_step and last is False:
            logits = logits[:, None]
        if self.position_limit is not None:
            logits = _nan_beyond(self.position_limit, logits, context, at)
        if cache is None or not keeps:
            return logits
        logits = _nan_beyond(cache.capacity, logits, context, at)
        if outgrown is not None:
            logits = jnp.where(outgrown.reshape(-1, *(1,) * (logits.ndim - 1)), jnp.nan, logits)
        cache = cache.with_states(view.states, after)
        if positions is not None and cache.offsets is not None:
            cache = dataclasses.replace(cache, offsets=_offsets(axes, counts, after))
        return logits, cache if mtp is None else cache.with_mtp(mtp, after)

    def states(
        self, ids: Any, *, lengths: Any = None, features: Any = None, at: Any = None, positions: Any = None,
        deepstack: Any = None, blocks: Any = None,
    ) -> jax.Array:  # fmt: skip
        """Token ids ``[B, T]`` → hidden states ``[B, T, E]`` after the last norm, the inputs of the head.

        Args:
            ids: integers ``[B, T]``.
            lengths: number of real tokens in each row, integers ``[B]``; by default all are real.
                The others are padding on the right, and their states are meaningless.
            features, at, positions, deepstack, blocks: as for a call of the model.

        Raises:
            UserInputError: as for a call of the model.

        Example:
            >>> from maxjax.models import Llama, LlamaConfig
            >>> config = LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
            >>> ids = jnp.zeros((3, 5), jnp.int32)
            >>> jax.eval_shape(lambda m, ids: m.states(ids), Llama(config), ids).shape
            (3, 5, 8)
        """
        ids = self._checked(ids, None)
        counts = self._counts(lengths, ids.shape[0])
        given, axes = self._features(features, at, deepstack, ids), self._axes(positions, None, ids)
        view = self._view(self._inner_cache(*ids.shape), counts, ids.shape[1])
        view = view.with_inputs(given, axes, self._blocks(blocks, given, ids))
        if view.context.real is not None:  # the padding must not affect anything, not even with NaN
            ids = jnp.where(view.context.real, ids, 0)
        self._check_positions(view.context.ends, ids.shape[1] if counts is None else None)
        is_step = view.context.is_step
        x = self.hidden_states(ids[:, 0] if is_step else ids, view)[0]
        if self.position_limit is not None:
            x = _nan_beyond(self.position_limit, x, view.context, None)
        return x[:, None] if is_step else x

    def _view(
        self, cache: KVCache | None, counts: jax.Array | None, length: int, groups: Any = None
    ) -> LayerCache:
        """The tokens of a call and the states of its cache, as the first layer of these groups sees them."""
        mesh, numbers, tokens = mesh_of([self._sharding]), None, None
        groups = self._groups if groups is None else groups
        if cache is None:
            return no_cache(length, mesh, counts)
        starts = cache.lengths
        texts = cache.read_for(starts + (length if counts is None else counts))
        pages = isinstance(cache, PagedCache)
        if not pages and cache.sliding is not None:
            # In a rotating cache, tokens beyond the capacity would overwrite other tokens.
            room = jnp.maximum(cache.capacity - starts, 0)
            counts = jnp.minimum(length if counts is None else counts, room)
        # In a cache without the group "sliding", all layers may be in "full", in their order.
        has_others = pages or cache.sliding is not None or cache.more
        if has_others or set(groups) == {"full"}:
            numbers = jax.tree.map(jnp.asarray, numbers_of(groups))
        if counts is not None:
            tokens = jnp.where(counts > 0, starts, -1)
        kinds = {name: group.kind for name, group in groups.items()}
        heads = {name: k.heads for name, k in kinds.items() if isinstance(k, KeysValues)}
        heads.setdefault("full", heads.get("sliding", 1))
        recurrent = tuple((name, kind) for name, kind in kinds.items() if isinstance(kind, States))
        context = ForwardContext(
            starts, counts, texts, tokens, numbers, length, length == 1, cache.capacity, mesh,
            tuple(heads.items()), recurrent,
        )  # fmt: skip
        if pages:
            if cache.pool.window_pages and cache.window_table is None:
                raise ValueError(
                    "layers with a window have pages of their own: window_table is missing"
                )
            context = dataclasses.replace(
                context, table=cache.table, window_table=cache.window_table,
                is_ragged=cache.is_ragged, parts=cache.pool.parts,
            )  # fmt: skip
        return LayerCache(context, cache.states)

    def _features(self, features: Any, at: Any, deepstack: Any, ids: jax.Array) -> Features | None:
        """What stands in place of tokens, checked."""
        if features is None and at is None and deepstack is None:
            return None
        if features is None or at is None:
            raise UserInputError(
                "features need at=, the row of features for each token, and at needs features"
            )
        rows, at = jnp.asarray(as_array(features)), jnp.asarray(as_array(at))
        width = self.config.hidden_size
        if rows.ndim != 2 or rows.shape[1] != width or not jnp.issubdtype(rows.dtype, jnp.floating):
            raise UserInputError(
                f"features must be floats [N, {width}], not {rows.dtype} of shape {rows.shape}"
            )
        if at.shape != ids.shape or not jnp.issubdtype(at.dtype, jnp.integer):
            raise UserInputError(
                f"at must be integers {list(ids.shape)}, one for each token, not {at.dtype} of shape {at.shape}"
            )
        if not isinstance(at, Tracer) and at.is_fully_addressable and int(at.max()) >= len(rows):
            raise UserInputError(
                f"at has row {int(at.max())}, and there are {len(rows)} rows of features"
            )
        if deepstack is not None:
            deepstack = jnp.asarray(as_array(deepstack))
            if deepstack.ndim != 3 or deepstack.shape[1:] != rows.shape:
                raise UserInputError(
                    f"deepstack must be [n, {len(rows)}, {width}], as features are, not {deepstack.shape}"
                )
        return Features(rows, at.astype(jnp.int32), deepstack)

    def _axes(self, positions: Any, cache: Any, ids: jax.Array) -> jax.Array | None:
        """The positions for RoPE ``[B, T]`` or ``[B, T, 3]``; None: those of the tokens in their texts."""
        if positions is None:
            if cache is None or cache.offsets is None:
                return None
            place = jnp.arange(ids.shape[1], dtype=jnp.int32)
            return (cache.lengths + cache.offsets)[:, None] + place[None, :]
        found = jnp.asarray(as_array(positions))
        if found.shape not in (ids.shape, (*ids.shape, 3)) or not jnp.issubdtype(
            found.dtype, jnp.integer
        ):
            raise UserInputError(
                f"positions must be integers {list(ids.shape)} or {[*ids.shape, 3]}, not {found.dtype} of shape "
                f"{found.shape}"
            )
        if self.position_limit is not None:
            raise UserInputError(
                f"{type(self).__name__} has learned positions, and takes no others: leave positions out"
            )
        if cache is not None and cache.offsets is None:
            raise UserInputError(
                f"positions= with a cache is for models with M-RoPE, not for this {type(self).__name__}"
            )
        return found.astype(jnp.int32)

    def _blocks(self, blocks: Any, features: Features | None, ids: jax.Array) -> jax.Array | None:
        """The number of each token's block ``[B, T]``; None: there are none."""
        if blocks is not None:
            found = jnp.asarray(as_array(blocks))
            if found.shape != ids.shape or not jnp.issubdtype(found.dtype, jnp.integer):
                raise UserInputError(
                    f"blocks must be integers {list(ids.shape)}, one for each token, not {found.dtype} of shape "
                    f"{found.shape}"
                )
            return found.astype(jnp.int32)
        if features is None or self.vision is None:
            return None
        return self.vision.blocks(features.at)

    def _check_positions(self, after: jax.Array, length: Any) -> None:
        """Refuses texts longer than the learned positions, where lengths are known."""
        limit = self.position_limit
        if limit is None:
            return
        if not isinstance(length, int):  # an exported program may be for any length
            if isinstance(after, Tracer) or not after.is_fully_addressable:
                return
            length = int(after.max())
        if length > limit:
            raise UserInputError(
                f"a text of {length} tokens is longer than the {limit} positions "
                f"that this {type(self).__name__} has learned: shorten it"
            )

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

    def _inner_cache(self, batch: int, length: int) -> KVCache | None:
        """A cache for a call without one, if layers read the keys and values of other layers; else None."""
        return self.cache(batch, length) if shares(self.config) else None

    def _counts(self, lengths: Any, batch: int) -> jax.Array | None:
        counts = None if lengths is None else jnp.asarray(as_array(lengths)).astype(jnp.int32)
        if counts is not None and counts.shape != (batch,):
            raise UserInputError(f"lengths must be [{batch}], one for each row, not {counts.shape}")
        return counts

    def _checked(self, ids: Any, cache: KVCache | None) -> jax.Array:
        given, size = as_array(ids), self.config.vocab_size
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

    def _check_layers(self, cache: KVCache | PagedCache) -> None:
        expected = {name: group.layers for name, group in self._groups.items()}
        states = (cache.pool if isinstance(cache, PagedCache) else cache).states
        found = {name: state.layers for name, state in states.items() if state.layers}
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


def _offsets(axes: Any, counts: jax.Array | None, after: jax.Array) -> jax.Array:
    """By how much the position after the largest one exceeds the number of tokens, int32 ``[B]``."""
    largest = axes if axes.ndim == 2 else axes.max(-1)
    if counts is not None:
        is_real = jnp.arange(largest.shape[1], dtype=jnp.int32)[None] < counts[:, None]
        largest = jnp.where(is_real, largest, -1)
    return largest.max(1) + 1 - after


def _sharded_as_rows(cache: KVCache, array: jax.Array) -> jax.Array:
    """``array`` with its rows sharded as those of the cache, if the cache's mesh has Explicit axes."""
    mesh = None if isinstance(cache, PagedCache) else explicit.mesh_of(cache.keys)
    if mesh is None:
        return array
    rows = [explicit.entries(cache.keys)[1], *[()] * (array.ndim - 1)]
    return jax.sharding.reshard(array, explicit.sharding(mesh, rows))


def _nan_beyond(
    limit: int, x: jax.Array, context: ForwardContext, at: jax.Array | None
) -> jax.Array:
    """Return ``x``, with NaN for tokens at positions of ``limit`` and beyond.

    Args:
        limit: number of positions.
        x: ``[B, T, ...]`` for all tokens, or ``[B, ...]`` for one in each row.
        context: positions of the tokens.
        at: index ``[B]`` of the one token in each row; None: T is 1, or ``x`` has all tokens.
    """
    fits = context.rows_of_positions < limit  # [B or 1, T]
    real = context.real
    fits = fits if real is None else fits | ~real
    if at is not None:
        fits = jnp.broadcast_to(fits, (at.shape[0], context.length))
        fits = jnp.take_along_axis(fits, at[:, None], axis=1)
    return jnp.where(fits[..., None] if x.ndim == 3 else fits, x, jnp.nan)
