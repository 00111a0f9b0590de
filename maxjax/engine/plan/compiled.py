"""The programs of a decoder, compiled for devices that this process need not have.

The programs are those that ``maxjax.generate`` runs, ``decode`` and ``prefill``, and a plain call of
the model. No weight has a value: arguments are placeholders with the shardings of the real ones.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...errors import UserInputError
from ..generate.batch import bucket
from ..generate.programs import SamplerArgs, State, decode, prefill
from ..sampling.draw import Sampled
from ..sampling.settings import GREEDY, Amounts

CHUNK = 512
"""The tokens of a prompt that one run of ``prefill`` takes, as ``maxjax.generate`` has it by default."""


class ProgramMemory(NamedTuple):
    """The memory that a compiled program takes on each device.

    Attributes:
        program: ``"decode"``, ``"prefill"`` or ``"call"``.
        arguments: bytes of weights, cache and other arguments.
        temporaries: bytes that it needs beside them while it runs.
        results: bytes of results that do not lie in memory of the arguments.
        seconds: time that it took to compile.
        refused: what the compiler says if it makes no program, for want of memory; else "".
    """

    program: str
    arguments: int = 0
    temporaries: int = 0
    results: int = 0
    seconds: float = 0.0
    refused: str = ""

    @property
    def total(self) -> int:
        """Bytes of all of it.

        Example:
            >>> ProgramMemory("decode", 10, 3, 2).total
            15
        """
        return self.arguments + self.temporaries + self.results


def placeholder_of(model: Any, mesh: Mesh) -> Any:
    """The same model without values, placed on a mesh; the given one is not changed.

    Raises:
        UserInputError: the model is no decoder, or the mesh does not suit it.
    """
    if not callable(getattr(model, "cache", None)) or not hasattr(model, "max_length"):
        raise UserInputError(
            f"{type(model).__name__} is not a language model: it has no programs of generation to compile"
        )
    return jax.eval_shape(lambda model: model, model).to(mesh)


def abstract_state(
    model: Any, mesh: Mesh, batch: int, capacity: int, cache_dtype: Any = None
) -> State:
    """The state of a batch of ``maxjax.generate``, of placeholders, for greedy sampling."""
    home = NamedSharding(mesh, PartitionSpec())
    rows = lambda kind: _placeholder((batch,), kind, home)
    return State(
        cache=model.cache(batch, capacity, cache_dtype, abstract=True),
        last=rows(np.int32), done=rows(bool), bad=rows(bool), prompts=rows(np.int32),
        limits=rows(np.int32), rows=rows(np.int32), first=Sampled(rows(np.int32), rows(bool)),
        history=None,
    )  # fmt: skip


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
        program: ``"decode"``, ``"prefill"`` or ``"call"``.
        model: a decoder on ``mesh``, as :func:`placeholder_of` makes it.
        mesh: the mesh.
        batch, capacity: number of sequences, and of slots of the cache for each; a call has none.
        tokens: tokens of each sequence in one ``prefill`` or call.
        cache_dtype: dtype of the cache; the model's by default.

    Returns:
        A ``jax.stages.Lowered``.

    Example:
        >>> import maxjax
        >>> from maxjax.models import Llama, LlamaConfig
        >>> mesh = maxjax.make_mesh(model=1)
        >>> model = placeholder_of(Llama(LlamaConfig(100, 8, 16, num_layers=2, num_heads=2)), mesh)
        >>> text = lowered("decode", model, mesh, batch=3, capacity=64).as_text()
        >>> "tensor<2x3x2x64x4xf32>" in text  # the keys: layers, batch, heads, slots, width
        True
    """
    home = NamedSharding(mesh, PartitionSpec())
    of = _placeholder
    if program == "call":
        ids = of((batch, tokens), np.int32, home)
        return jax.jit(lambda model, ids: model(ids)).lower(model, ids)
    state = abstract_state(model, mesh, batch, capacity, cache_dtype)
    amounts = Amounts(*(of((), np.float32, home) for _ in GREEDY.amounts))
    sampler = SamplerArgs(of((8,), np.int32, home), None, amounts)
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(state))
    settings = GREEDY.kind
    if program == "decode":
        steps = of((), np.int32, home)
        return decode.lower(model, state, steps, sampler, settings=settings, shardings=shardings)
    # Prompts come from the host.
    ids, counts = of((batch, tokens), np.int32, None), of((batch,), np.int32, None)
    return prefill.lower(model, state, ids, counts, sampler, settings=settings, shardings=shardings)


def _placeholder(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


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
        return ProgramMemory(program, refused=message[:300], seconds=time.perf_counter() - start)
    return memory_of(program, executable, time.perf_counter() - start)
