"""The programs of a decoder, compiled for devices that this process need not have.

The programs are those that ``maxjax.generate`` runs (``engine/batching/programs.py``), and a plain call of the
model. No weight has a value: arguments are placeholders with the shardings of the real ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ...errors import UserInputError
from ...graph.placement.mesh import make_mesh
from ...nn.kv_cache.pages import PagePool
from ..batching.calls import RAGGED, table_widths
from ..batching.memory import in_groups, page_size_of, window_page_count
from ..batching.programs import Choosing, EngineMemory, TextRows, decode, read, read_tokens
from ..bucket import bucket
from ..shardings import shardings_on_mesh
from .footprint import CHUNK, Footprint
from .options import PlanRequest
from .topology import Topology


@dataclass(frozen=True)
class ProgramMemory:
    """The memory that a compiled program takes on each device.

    Attributes:
        program: ``"decode"``, ``"read"``, ``"read_tokens"`` or ``"call"``.
        arguments: bytes of weights, cache and other arguments.
        temporaries: bytes of temporary buffers while it runs.
        results: bytes of results that do not alias a donated argument.
        seconds: time that it took to compile, in seconds.
        refused: the compiler's message if the program needs more memory than the device has; else "".
    """

    program: str
    arguments: int = 0
    temporaries: int = 0
    results: int = 0
    seconds: float = 0.0
    refused: str = ""

    @property
    def total(self) -> int:
        """Bytes of arguments, temporaries and results.

        Example:
            >>> ProgramMemory("decode", 10, 3, 2).total
            15
        """
        return self.arguments + self.temporaries + self.results


def placeholder_of(model: Any, mesh: Mesh, rules: Mapping[str, Any] | None = None) -> Any:
    """The same model without values, placed on a mesh by its rules; the given one is not changed.

    Raises:
        UserInputError: the model is no decoder, or the mesh does not suit it.
    """
    if not callable(getattr(model, "cache", None)) or not hasattr(model, "max_length"):
        raise UserInputError(
            f"{type(model).__name__} is not a language model: it has no programs of generation to compile"
        )
    return jax.eval_shape(lambda model: model, model).to(mesh, rules=rules)


def abstract_pool(model: Any, batch: int, length: int, cache_dtype: Any = None) -> PagePool:
    """The pool of pages of ``maxjax.generate`` for so many texts of up to ``length`` tokens, of placeholders."""
    slots, groups = in_groups(model, batch)
    size = page_size_of(model)
    pages = slots * -(-length // size)
    windows = groups * window_page_count(model, slots, pages // groups, CHUNK)
    return model.page_pool(pages, size, slots, cache_dtype, abstract=True, window_pages=windows)


def lowered(
    program: str,
    model: Any,
    mesh: Mesh,
    *,
    batch: int,
    capacity: int,
    tokens: int = CHUNK,
    cache_dtype: Any = None,
) -> Any:
    """A program of a model of placeholders, lowered for the mesh that it is on.

    Args:
        program: ``"decode"``, ``"read"``, ``"read_tokens"`` or ``"call"``.
        model: a decoder on ``mesh``, as :func:`placeholder_of` makes it.
        mesh: the mesh.
        batch, capacity: number of texts, and largest number of tokens of each; a call has no cache.
        tokens: tokens of each text in one ``read`` or call, of all texts in one ``read_tokens``.
        cache_dtype: dtype of the cache; the model's by default.

    Returns:
        A ``jax.stages.Lowered``.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> mesh = maxjax.make_mesh(model=1)
        >>> model = placeholder_of(Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)), mesh)
        >>> text = lowered("decode", model, mesh, batch=3, capacity=64).as_text()
        >>> "tensor<2x3x2x64x4xf32>" in text  # the keys: layers, pages, heads, tokens of a page, width
        True
    """
    if program == "call":
        ids = jax.ShapeDtypeStruct(
            (batch, tokens), np.int32, sharding=NamedSharding(mesh, PartitionSpec())
        )
        return jax.jit(lambda model, ids: model(ids)).lower(model, ids)
    pool = abstract_pool(model, batch, capacity, cache_dtype)
    slots, groups = in_groups(model, batch)
    rows = groups if program == "read" else slots
    size = page_size_of(model)
    width = table_widths(-(-capacity // size))[-1]
    if program == "read_tokens":
        width = min(width, RAGGED // size)
    texts = TextRows.of(
        [None] * rows, width, slots,
        vocab_size=model.config.vocab_size, has_lengths=bool(model.config.ropes_by_length),
        has_windows=pool.window_pages > 0,
    )  # fmt: skip
    step = float(jnp.finfo(model.dtype.np).eps)
    choosing = Choosing(None, draws=False, step=step, delays_ends=False)
    how = {"how": choosing, "shardings": shardings_on_mesh(pool)}
    memory, each, zero = EngineMemory(pool, None), np.zeros(rows, np.int32), np.int32(0)
    if program == "decode":
        return decode.lower(model, memory, texts, each, each > 0, zero, zero, **how)
    if program == "read":
        ids = np.zeros((rows, tokens), np.int32)
        return read.lower(model, memory, texts, ids, each, **how)
    ids = np.zeros(tokens, np.int32)
    return read_tokens.lower(model, memory, texts, ids, ids, ids, each, **how)


def memory_of(program: str, executable: Any, seconds: float = 0.0) -> ProgramMemory:
    """The memory of a compiled program."""
    found = executable.memory_analysis()
    return ProgramMemory(
        program, found.argument_size_in_bytes, found.temp_size_in_bytes,
        max(0, found.output_size_in_bytes - found.alias_size_in_bytes), seconds,
    )  # fmt: skip


def compiled_memory(
    program: str, model: Any, mesh: Mesh, *, batch: int, length: int, cache_dtype: Any = None
) -> ProgramMemory:
    """Compiles a program for sequences of up to ``length`` tokens, and reads what memory it takes.

    A compiler that knows the memory of its devices refuses a program that is too large; then the
    result says so.
    """
    tokens = min(CHUNK, bucket(length))
    start = time.perf_counter()
    text = lowered(
        program, model, mesh,
        batch=batch, capacity=length, tokens=tokens, cache_dtype=cache_dtype,
    )  # fmt: skip
    try:
        executable = text.compile()
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        # Without the error's number, and the address of its description.
        message = re.sub(
            r"^(RESOURCE_EXHAUSTED: |E\d+: |\w+Oom: )+|\s*See https?://.*", "", message
        )
        return ProgramMemory(program, refused=message[:300], seconds=time.perf_counter() - start)
    return memory_of(program, executable, time.perf_counter() - start)


class Programs:
    """The programs ``decode`` and ``read`` of a plan, compiled for a topology; none without one.

    Args:
        source: the model.
        mesh: the mesh as sizes, or a real one.
        request: the planned sizes.
        rules: sharding rules that take precedence over the model's own, or None.
        topology: the devices, or None.

    Attributes:
        found: the memory of each program.

    Raises:
        UserInputError: maxjax has no such decoder, or the batch or the length is not known.
        MissingCompilerError: the compiler is not installed.
    """

    def __init__(
        self,
        source: Footprint,
        mesh: Any,
        request: PlanRequest,
        rules: Any,
        topology: Topology | None,
    ):
        self.found: tuple[ProgramMemory, ...] = ()
        self._options = request
        if topology is None:
            return
        if source.model is None:
            raise UserInputError(
                "maxjax has no model for this checkpoint, so there are no programs to compile"
            )
        assert mesh is not None
        types = getattr(mesh, "axis_types", None) or AxisType.Auto
        self._mesh = make_mesh(devices=topology.devices(), axis_types=types, **dict(mesh.shape))
        self._model = placeholder_of(source.model(self._mesh, request.dtype), self._mesh, rules)
        if request.batch is None or request.length is None:
            raise UserInputError("the size of the KV cache is not known: nothing can be compiled")
        self.found = tuple(
            self._measured(name, request.batch, request.length) for name in ("decode", "read")
        )

    def _measured(self, program: str, batch: int, length: int) -> ProgramMemory:
        return compiled_memory(
            program, self._model, self._mesh,
            batch=batch, length=length, cache_dtype=self._options.cache_dtype,
        )  # fmt: skip

    @property
    def refused(self) -> str:
        """The compiler's message about a program that is too large; "" if it compiles both."""
        return next((one.refused for one in self.found if one.refused), "")

    @property
    def most(self) -> int | None:
        """The largest bytes of temporaries and results of a program; None if nothing was compiled."""
        return max((one.temporaries + one.results for one in self.found), default=None)

    def temporaries(self, batch: int, length: int) -> int | None:
        """As ``most``, for other sizes, of the program that needs most; None if that is too large."""
        if (batch, length) == (self._options.batch, self._options.length):
            return None if self.refused else self.most
        largest = max(self.found, key=lambda one: one.temporaries + one.results)
        found = self._measured(largest.program, batch, length)
        return None if found.refused else found.temporaries + found.results
