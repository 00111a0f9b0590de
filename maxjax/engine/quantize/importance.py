"""The importance matrix, which says how much each input of each linear layer counts, and its file.

The file is llama.cpp's (``llama-imatrix``, GGUF). For each weight, by its GGUF name, ``.in_sum2``
``[experts or 1, in]`` holds sums of squared inputs, and ``.counts`` the numbers of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointFormatError, UserInputError
from ...graph.weights import GGUFWeights, load_weights
from ...models.gguf.metadata import Settings
from ...paths import local_path
from ...storage.gguf.writer import plan_gguf
from ...storage.save.durable import replace_file, writable_path
from ...storage.save.outgoing import outgoing

_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True, eq=False)
class Importance(Mapping[str, np.ndarray]):
    """Mean squares of the inputs of linear layers: name of the weight → float32 ``[in]``.

    From a file, names are GGUF's, and the experts of a layer are one weight, ``[experts, in]``.

    Attributes:
        sums: sums of the squared inputs, float64 of the same shapes.
        counts: numbers of tokens, ``[]`` or ``[experts]``.
        gguf_names: GGUF name and number of the expert (-1: none) by the checkpoint's name; empty
            for a matrix from a file.
        chunks, chunk_size: number of chunks of text it was computed from, and tokens in each.

    Example:
        >>> matrix = Importance({"weight": np.array([8.0, 2.0])}, {"weight": np.array(4)})
        >>> matrix["weight"]
        array([2. , 0.5], dtype=float32)
    """

    sums: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    gguf_names: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    chunks: int = 0
    chunk_size: int = 0

    def __getitem__(self, name: str) -> np.ndarray:
        # Rounded as in a file, so that a matrix and its file give the same blocks.
        sums = np.asarray(self.sums[name], np.float32)
        counts = np.asarray(self.counts[name], np.float32)[..., None]
        # An expert that no token chose counts evenly, as in llama.cpp.
        return np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sums)

    def __len__(self) -> int:
        return len(self.sums)

    def __repr__(self) -> str:
        return f"Importance({len(self)} weights, {self.chunks} chunks of {self.chunk_size} tokens)"

    def of_checkpoint(self, names: Mapping[str, tuple[str, int]]) -> dict[str, np.ndarray]:
        """The importance ``[in]`` of those weights of a checkpoint that this matrix contains.

        Args:
            names: GGUF name and number of the expert (-1: none) of each weight, by its name.

        Raises:
            UserInputError: the matrix has fewer experts than the checkpoint.
        """
        found = {name: self[name] for name in names if name in self}
        for name, (other, expert) in names.items():
            if name not in found and other in self:
                given = self[other]
                if given.ndim > 1 and expert >= len(given):
                    raise UserInputError(
                        f"the importance matrix has {len(given)} experts for {other}, but {name} is expert {expert}: "
                        "it was computed with another model"
                    )
                found[name] = given if expert < 0 or given.ndim == 1 else given[expert]
        return found

    def of_gguf(self) -> dict[str, np.ndarray]:
        """The importance by GGUF's names, ``[experts or 1, in]``."""
        return {name: np.atleast_2d(given) for name, given in self._gathered().items()}

    def _gathered(self) -> Importance:
        """This matrix by GGUF names, with the experts of a layer as one weight."""
        if not self.gguf_names:
            return self
        sums: dict[str, dict[int, Any]] = {}
        counts: dict[str, dict[int, Any]] = {}
        for name, total in self.sums.items():
            other, expert = self.gguf_names.get(name, (name, -1))
            sums.setdefault(other, {})[max(expert, 0)] = total
            counts.setdefault(other, {})[max(expert, 0)] = self.counts[name]
        together = lambda parts: np.stack([parts[i] for i in range(len(parts))])
        return Importance(
            {name: together(parts) for name, parts in sums.items()},
            {name: together(parts) for name, parts in counts.items()},
            {}, self.chunks, self.chunk_size,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the matrix as a GGUF file, in the format of ``llama-imatrix``.

        Raises:
            CheckpointError: the file cannot be written; an existing file is unchanged.
        """
        path = writable_path(path)
        gathered = self._gathered()
        tensors = []
        for name in sorted(gathered):
            tensors.append(
                outgoing(name + _SUMS, np.atleast_2d(gathered.sums[name]).astype(np.float32))
            )
            counts = np.reshape(gathered.counts[name], (-1, 1)).astype(np.float32)
            tensors.append(outgoing(name + _COUNTS, counts))
        metadata = {
            "general.type": "imatrix",
            "imatrix.datasets": ["maxjax.calibrate"],
            "imatrix.chunk_count": np.uint32(self.chunks),
            "imatrix.chunk_size": np.uint32(self.chunk_size),
        }
        replace_file(path, plan_gguf(metadata, tensors).pieces())


def load_importance(path: str | os.PathLike[str]) -> Importance:
    """Reads an importance matrix that :meth:`Importance.save` or ``llama-imatrix`` wrote.

    Raises:
        CheckpointError: the file cannot be read, or is not an importance matrix.
        UserInputError: the path is a URL, or the file is a checkpoint in another format than GGUF.
    """
    file = Path(local_path(path))
    if file.is_file():
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise UserInputError(
                    f"{path}: an importance matrix is a GGUF file. llama-imatrix of today's llama.cpp writes one, "
                    "also of an older .dat file"
                )
    with load_weights(path) as weights:
        if not isinstance(weights, GGUFWeights):
            raise UserInputError(
                f"{path}: an importance matrix is a GGUF file, as llama-imatrix writes it"
            )
        found = {name: np.asarray(one.data(), np.float64) for name, one in weights.items()}
        metadata = weights.metadata
    names = [name.removesuffix(_SUMS) for name in found if name.endswith(_SUMS)]
    if metadata.get("general.type") != "imatrix" or not names:
        raise CheckpointFormatError(
            "no importance matrix", path=path, expected=f"tensors that end in {_SUMS}",
            hint="maxjax.calibrate(...).save(path) and llama-imatrix write one.",
        )  # fmt: skip
    sums, counts = {}, {}
    for name in names:
        total, count = found[name + _SUMS], found.get(name + _COUNTS)
        rows = np.atleast_2d(total)
        if count is None or count.size != len(rows) or rows.ndim != 2:
            raise CheckpointFormatError(
                "counts do not fit the sums", path=path, tensor=name + _COUNTS,
                expected=f"{len(rows)} numbers", found=None if count is None else list(count.shape),
            )  # fmt: skip
        if not all(np.isfinite(one).all() and (one >= 0).all() for one in (total, count)):
            raise CheckpointFormatError(
                "holds values that are negative or not finite", path=path, tensor=name + _SUMS
            )
        alone = len(rows) == 1
        sums[name] = rows[0] if alone else rows
        counts[name] = count.reshape(-1)[0] if alone else count.reshape(-1)
    given = Settings(metadata, "imatrix.", path)
    chunks = (given.count(key, 0, minimum=0) for key in ("chunk_count", "chunk_size"))
    return Importance(sums, counts, {}, *chunks)
