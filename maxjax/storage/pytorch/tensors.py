"""The entries of a PyTorch file's tensors, which are views of storages.

Each record of a tensor in the pickle becomes an entry. It is checked against its storage, with Python
integers, before anything is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from ...dtype import DType
from ...errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
)
from ..boxes import c_strides
from ..entry import MAX_DIMS, Checksum, Coding, Nibbles, Strided, TensorEntry, UnknownType
from ..limits import Limits
from .names import VIEW, Storage, Tensor
from .pickle_machine import Token, described

# Total bytes of tensors that are allowed before the limit `expansion` applies.
_FREE_BYTES = 1 << 30
_KEY = re.compile(r"[0-9A-Za-z_-]+")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the ``nbytes`` bytes of a storage lie.

    If they are compressed, ``packed_bytes`` lie there, and ``packed`` returns the coding of a tensor,
    given the number of bytes before it, its axes from slowest to fastest, and whether its bytes must
    be swapped.
    """

    offset: int
    nbytes: int
    checksum: Checksum | None = None
    packed: Callable[[int, tuple[int, ...], bool], Coding] | None = None
    packed_bytes: int = 0


class Entries:
    """Makes the entries of one file's tensors.

    Args:
        number: index of the file in a set.
        find: function from a key to the location of its storage, or None.
        swap: whether the bytes of each value must be swapped for this machine.
    """

    def __init__(
        self,
        path: str,
        number: int,
        limits: Limits,
        find: Callable[[str], Stored | None],
        swap: bool = False,
    ):
        self.path = path
        self.number = number
        self.limits = limits
        self.find = find
        self.swap = swap
        self.storages: dict[str, tuple[Any, ...]] = {}
        self.stored_bytes = self.tensor_bytes = 0

    def entry(self, name: str, tensor: Tensor) -> TensorEntry:
        """The entry of a tensor.

        Raises:
            CheckpointFormatError: the kind of tensor is not supported, or it exceeds its storage.
            CheckpointTruncatedError: the storage has fewer bytes than its tensors need.
            CheckpointUnsafeError: the key of the storage leads out of the archive's data.
            CheckpointLimitError: a size exceeds the limits.
        """
        return _TensorParser(self, name, tensor).entry()


class _TensorParser:
    """One tensor being checked. Errors name it, the field, and the byte of its instruction."""

    def __init__(self, all: Entries, name: str, tensor: Tensor):
        self.all = all
        self.tensor = tensor
        self.place = {"path": all.path, "tensor": name, "offset": tensor.at}
        self.name = name

    def error(self, problem: str, expected: Any, found: str) -> CheckpointFormatError:
        return CheckpointFormatError(problem, expected=expected, found=found, **self.place)

    def over_limit(self, problem: str, option: str, value: int) -> CheckpointError:
        return self.all.limits.error(problem, option, value, **self.place)

    def entry(self) -> TensorEntry:
        if self.tensor.function.value != VIEW:
            return self._unsupported()
        storage, offset, sizes, strides, dtype = self._arguments()
        if isinstance(dtype, UnknownType):
            shape, stored = self._integers("size", sizes), self._found(storage)
            place = self.all.number, stored.offset, stored.nbytes
            return TensorEntry(self.name, dtype, shape, *place)
        stored = self._stored(storage)
        shape = self._integers("size", sizes)
        steps = self._integers("stride", strides)
        if type(offset) is not int or offset < 0:
            raise self.error("storage offset: not an offset", "an integer >= 0", described(offset))
        if len(steps) != len(shape):
            problem = "stride: not as many numbers as the size has"
            raise self.error(problem, f"{len(shape)} numbers", f"{len(steps)} numbers")
        if len(shape) > MAX_DIMS:
            raise self.error("size: too many dimensions", f"<= {MAX_DIMS}", described(len(shape)))
        self._check_size(shape, dtype)
        steps = _normal(shape, steps)
        span = self._check_span(shape, steps, offset, dtype, stored)
        self._check_expansion(shape, dtype)
        return self._entry(stored, dtype, shape, steps, offset, span)

    def _unsupported(self) -> TensorEntry:
        """The entry of an unsupported kind of tensor, with its shape if the record has it."""
        kind = self.tensor.function.value
        error = self.error("not a plain tensor", "a tensor in a storage", kind)
        arguments = self.tensor.arguments
        inner = (item for one in arguments if type(one) is tuple for item in one)
        for one in (*arguments, *inner):
            if type(one) is tuple and all(type(size) is int and size >= 0 for size in one):
                return TensorEntry(self.name, UnknownType(kind, error), one, self.all.number, 0, 0)
        raise error

    # --- the arguments ---

    def _arguments(self) -> tuple[Storage, Any, Any, Any, Any]:
        """(storage, offset in values, size, stride, dtype); the last three still unchecked."""
        function, arguments = self.tensor.function, self.tensor.arguments
        least, most = _ARITY[function.name]
        if not least <= len(arguments) <= most:
            problem, expected = f"the arguments of {function.name}", f"{least} to {most}"
            raise self.error(problem, expected, str(len(arguments)))
        storage, offset, sizes, strides, *rest = arguments
        if type(storage) is not Storage:
            raise self.error("storage: not a storage", "a storage", described(storage))
        kind = storage.kind
        if function.name == "_rebuild_tensor_v3":
            kind = rest.pop(2)
        dtype = kind.value if type(kind) is Token else None
        if type(dtype) is not DType or type(storage.kind.value) is not DType:
            found = kind if type(dtype) is not DType else storage.kind
            problem = "dtype: unknown or not supported"
            error = self.error(problem, "a type that JAX has arrays of", described(found))
            if type(found) is not Token:
                raise error
            dtype = UnknownType(found.name.removesuffix("Storage"), error)
        if error := self._check_rest(rest):
            dtype = UnknownType("a view that must be computed", error)
        return storage, offset, sizes, strides, dtype

    def _check_rest(self, rest: list[Any]) -> CheckpointFormatError | None:
        """(requires gradients, hooks, bits): the error if one of them changes the values."""
        gradient, hooks, bits = (*rest, *(None, None, None)[len(rest) :])
        if gradient not in (None, True, False) or type(gradient) is int:
            raise self.error("requires_grad: not a boolean", "True or False", described(gradient))
        if hooks is not None and (type(hooks) is not dict or hooks):
            raise self.error("backward_hooks: not empty", "an empty dict", described(hooks))
        if bits is not None and type(bits) is not dict:
            raise self.error("metadata: not a dict", "a dict", described(bits))
        for key, value in (bits or {}).items():
            if value is not False:
                problem = "metadata: a view that is computed when it is read"
                return self.error(problem, "False", f"{described(key)}: {described(value)}")
        return None

    def _integers(self, field: str, values: Any) -> tuple[int, ...]:
        if type(values) is not tuple:
            raise self.error(f"{field}: not a tuple", "a tuple of integers", described(values))
        for value in values:
            # The exact type: True is an int to isinstance.
            if type(value) is not int or value < 0:
                raise self.error(f"{field}: not a size", "an integer >= 0", described(value))
        return values

    # --- the storage ---

    def _stored(self, storage: Storage) -> Stored:
        """Where the storage lies; checks that it has the size that the pickle says."""
        numel, kind = storage.numel, storage.kind.value
        if type(numel) is not int or numel < 0:
            raise self.error("storage numel: not a size", "an integer >= 0", described(numel))
        nbytes = numel * kind.np.itemsize
        if nbytes > self.all.limits.storage_bytes:
            raise self.over_limit("storage numel: too many bytes", "storage_bytes", nbytes)
        stored = self._found(storage)
        self._check_stored(storage, stored, nbytes)
        return self._part(storage, stored)

    def _found(self, storage: Storage) -> Stored:
        """Where the storage lies; raises an error if it does not exist."""
        key = storage.key
        if type(key) is not str:
            raise self.error("storage key: not text", "text", described(key))
        if not _KEY.fullmatch(key):
            raise CheckpointUnsafeError(
                "storage key: may not lead out of the directory of the storages",
                expected="letters and digits",
                found=f"'{key[:80]}'",
                **self.place,
            )
        stored = self.all.find(key)
        if stored is None:
            problem = "storage: missing from the file"
            raise self.error(problem, f"storage '{key}'", "no storage with this key")
        return stored

    def _check_stored(self, storage: Storage, stored: Stored, nbytes: int) -> None:
        key = storage.key
        if stored.nbytes < nbytes:
            raise CheckpointTruncatedError(
                f"storage '{key}' is too short for its number of values",
                expected=f"{nbytes} bytes",
                found=f"{stored.nbytes} bytes",
                **{**self.place, "offset": stored.offset},
            )
        if stored.nbytes > nbytes:
            problem = f"storage '{key}' is too long for its number of values"
            raise self.error(problem, f"{nbytes} bytes", f"{stored.nbytes} bytes")
        if key not in self.all.storages:
            self.all.stored_bytes += nbytes
        declared = (storage.kind.value, storage.numel)
        if self.all.storages.setdefault(key, declared) != declared:
            problem = f"two tensors disagree about the type or size of storage '{key}'"
            first = "{}, {} values".format(*self.all.storages[key])
            raise self.error(problem, first, "{}, {} values".format(*declared))

    def _part(self, storage: Storage, stored: Stored) -> Stored:
        """The part of the storage that a storage view covers, as in files from before 2018."""
        view = storage.view
        if view is None:
            return stored
        if type(view) is not tuple or len(view) != 3:
            raise self.error("storage view: not a part of a storage", "3 values", described(view))
        start, size = self._integers("storage view", view[1:])
        if start + size > storage.numel:
            expected = f"at most {storage.numel} values"
            raise self.error("storage view: ends outside its storage", expected, str(start + size))
        if stored.packed is not None:
            raise self.error(
                "storage view: of a compressed storage", "a stored one", described(view)
            )
        itemsize = storage.kind.value.np.itemsize
        return Stored(stored.offset + start * itemsize, size * itemsize, stored.checksum)

    # --- the view ---

    def _check_size(self, shape: tuple[int, ...], dtype: DType) -> None:
        if prod(shape) >= 2**63:
            raise self.error("size: too many values", "less than 2^63", described(prod(shape)))
        nbytes = prod(n or 1 for n in shape) * dtype.np.itemsize
        if nbytes > self.all.limits.tensor_bytes:
            problem = "size: too large, even without the dimensions of size 0"
            raise self.over_limit(problem, "tensor_bytes", nbytes)

    def _check_span(
        self,
        shape: tuple[int, ...],
        steps: tuple[int, ...],
        offset: int,
        dtype: DType,
        stored: Stored,
    ) -> int:
        """The number of values from the first to the last of the view, checked to be in the storage."""
        if 0 in shape:
            return 0
        span = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        available = stored.nbytes // dtype.np.itemsize
        if offset + span > available:
            field = "storage offset" if offset >= available else "size and stride"
            problem = f"{field}: the tensor ends after the end of its storage"
            raise self.error(problem, f"at most {available} values", described(offset + span))
        return span

    def _check_expansion(self, shape: tuple[int, ...], dtype: DType) -> None:
        """Bounds the total size of tensors, which may share storages and repeat values."""
        self.all.tensor_bytes += prod(shape) * dtype.np.itemsize
        times = self.all.limits.expansion
        if self.all.tensor_bytes > times * self.all.stored_bytes + _FREE_BYTES:
            found = f"{self.all.tensor_bytes} bytes of tensors in {self.all.stored_bytes}"
            raise self.all.limits.error(
                "size and stride: the tensors repeat the values of their storages too often",
                "expansion",
                found,
                **self.place,
            )

    def _entry(
        self,
        stored: Stored,
        dtype: DType,
        shape: tuple[int, ...],
        steps: tuple[int, ...],
        offset: int,
        span: int,
    ) -> TensorEntry:
        itemsize, number = dtype.np.itemsize, self.all.number
        start, swap = offset * itemsize, self.all.swap and itemsize > 1
        is_plain = steps == _normal(shape, c_strides(shape)) or not span
        if dtype is DType.float4_e2m1fn:
            return self._nibbles(stored, shape, start, is_plain)
        if not span:
            return TensorEntry(self.name, dtype, shape, number, stored.offset, 0)
        if stored.packed is not None:
            order = _order(shape, steps)
            if order is None:
                problem = "stride: a view of a compressed storage"
                raise self.error(problem, "contiguous values", "other strides")
            coding = stored.packed(start, order, swap)
            place, nbytes = stored.offset, stored.packed_bytes
        else:
            coding = None if is_plain and not swap else Strided(steps, swap)
            place, nbytes = stored.offset + start, span * itemsize
        sum_of = stored.checksum
        return TensorEntry(self.name, dtype, shape, number, place, nbytes, coding, checksum=sum_of)

    def _nibbles(
        self, stored: Stored, shape: tuple[int, ...], start: int, is_plain: bool
    ) -> TensorEntry:
        """The entry of a float4 tensor: two values per byte; the size in the file counts bytes."""
        if not shape or not is_plain or stored.packed is not None:
            problem = "stride: a view of values of four bits"
            raise self.error(problem, "contiguous values", "other strides, or a compressed storage")
        shape, nbytes = (*shape[:-1], 2 * shape[-1]), prod(shape)
        dtype, place, number = DType.float4_e2m1fn, stored.offset + start, self.all.number
        sum_of = stored.checksum
        return TensorEntry(
            self.name, dtype, shape, number, place, nbytes, Nibbles(), checksum=sum_of
        )


_ARITY = {"_rebuild_tensor": (4, 4), "_rebuild_tensor_v2": (6, 7), "_rebuild_tensor_v3": (7, 8)}


def _normal(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, with 0 on axes of size 1, where they have no meaning."""
    return tuple(0 if size == 1 else step for size, step in zip(shape, steps, strict=True))


def _order(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes from slowest to fastest if the values are contiguous, else None."""
    order = sorted(range(len(shape)), key=lambda axis: -steps[axis])
    sizes, sorted_steps = (tuple(of[axis] for axis in order) for of in (shape, steps))
    return tuple(order) if sorted_steps == _normal(sizes, c_strides(sizes)) else None
