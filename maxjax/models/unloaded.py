"""What a checkpoint holds besides the model that was loaded from it: references, with which it is saved again.

These are heads that maxjax does not have (next sentences, multiple choice), the vision and audio parts of
multimodal models, and layers of multi-token prediction. Their tensors are not read when a model is loaded. Of an
encoder, the names that the file has for its weights are kept as well: with a prefix or without, new or old.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointChangedError, CheckpointError
from ..graph.weights import FileWeights, GGUFWeights, WeightData, load_weights
from .family import PretrainedModel
from .multimodal import is_multimodal
from .names import Copy, Names, unwrapped
from .ties import tied_as

_ADVICE = "Load the model again; or set model.unloaded = None, and the model is saved without these tensors."


@dataclass(frozen=True)
class Unloaded:
    """References to the tensors of a checkpoint that its model does not hold.

    Attributes:
        path: path of the checkpoint.
        names: names of these tensors; none if only names of weights are kept.
        config: text of the file's ``config.json``.
        spelled: names in the file of the model's tensors, where they differ.
        files: path, size, modification time and inode of each file, as of the loading.
        table: the table of names, with the forms that the file has.
    """

    path: str
    names: tuple[str, ...]
    config: str
    spelled: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, int, int, int], ...]
    table: Names

    def __repr__(self) -> str:
        return f"Unloaded({len(self.names)} tensors of {self.path!r})"

    @classmethod
    def of(
        cls, weights: FileWeights, config: Mapping[str, Any], model: PretrainedModel
    ) -> Unloaded | None:
        """The references for a model; None if it holds all that the checkpoint has, by the names of files of today.

        Args:
            weights: the open checkpoint; nothing is read.
            config: content of its ``config.json``.
            model: the model, whose weights need not be loaded.
        """
        if weights.name or isinstance(weights, GGUFWeights):
            return None
        table = weights._family.open_table()
        if table.format == "orbax":
            return None
        family, known = model.family, model.tensor_names
        named = unwrapped({name: name for name in table.entries})
        names = tuple(sorted(named[name] for name in known.unloaded(named)))
        holds_parts = bool(names) or is_multimodal(config)
        if not holds_parts and known.body is None:
            return None
        if not holds_parts:  # what a wrapper of PyTorch's has added is not written again
            named = {name: name for name in named}
        form = known.as_in(unwrapped(dict(weights._named_data())))
        weights_of_model = model.raw_state_dict()
        head, original = family.tied
        if head in named and head not in weights_of_model and original in weights_of_model:
            form = Names(*form.rows, Copy(head, original))
        spelled = {name: raw for name, raw in named.items() if name != raw}
        for name, raw in named.items():
            weight = known.model_name(name)
            # A file may have a weight under two names: then it is written under the model's, too.
            if weight is not None and (weight == name or weight not in named):
                if raw != form.file_names(weight)[0]:
                    spelled[weight] = raw
        if not holds_parts and form == known and not spelled:
            return None
        return cls(
            weights._path, names, json.dumps(config), tuple(sorted(spelled.items())),
            tuple(_identity(file.path, file.stat) for file in table.files), form,
        )  # fmt: skip

    @property
    def holds_parts(self) -> bool:
        """Whether the checkpoint is more than the model: its ``config.json`` is then that of the whole."""
        return bool(self.names) or is_multimodal(json.loads(self.config))

    def open(self) -> FileWeights:
        """Opens the checkpoint again.

        Raises:
            CheckpointChangedError: it is gone, or another one since the model was loaded.
        """
        try:
            weights = load_weights(self.path)
        except CheckpointError as error:
            raise self._changed(f"cannot be opened again: {error.problem}") from error
        table = weights._family.open_table()
        if self.files != tuple(_identity(file.path, file.stat) for file in table.files):
            weights.close()
            raise self._changed("has changed since the model was loaded from it")
        return weights

    def is_in(self, directory: str) -> bool:
        """Whether the checkpoint is, or was, in a directory."""
        return os.path.realpath(directory) in {
            os.path.realpath(os.path.dirname(one[0])) for one in self.files
        }

    def at(self, directory: str) -> Unloaded:
        """These references to the same tensors in the checkpoint that was saved to a directory."""
        with load_weights(directory) as weights:
            files = weights._family.open_table().files
            return replace(
                self, path=directory, files=tuple(_identity(one.path, one.stat) for one in files)
            )

    def _changed(self, problem: str) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"the checkpoint {problem}; it holds {len(self.names)} tensors that are saved with the model "
            f"but were not loaded, such as '{next(iter(self.names), '')}'",
            path=self.path, hint=_ADVICE,
        )  # fmt: skip

    def write(self, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
        """A model's tensors as this file holds them: its names, and its form of the experts."""
        return self.table.write(tensors, dict(self.spelled))

    def config_with(self, tied: bool | None) -> dict[str, Any]:
        """The content of the file's ``config.json``; ``tied`` is whether the model's head is tied, if it has one."""
        return tied_as(json.loads(self.config), tied)


def _identity(path: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ino
