"""Small random models of families, one file each in ``known/``, for the tests beside this file.

A file of ``known/`` has the list ``CASES``: at least three configurations with settings as published
files have them, the first of them the most unusual, since the default set runs that one alone.

    CASES = [Case("olmo2", "Olmo2ForCausalLM", "Olmo2Config", {"num_key_value_heads": 1}), …]
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import decoders
from tests.models.families import known
from tests.oracles.models import OracleModel


@dataclass(frozen=True)
class Case:
    """One configuration of a family.

    Attributes:
        family: ``model_type`` of the family.
        kind, config: transformers' classes of the model and of its settings.
        settings: what differs from ``decoders.SMALL``; of a config with ``text_config``, ``whole``.
        name: tells the cases of a family apart.
        draw: values of a tensor, by generator, name and shape.
        last: names of the tensors that are divided so that logits have a deviation of 1: weight and
            bias of the last norm, or the head's if there is none.
        one: what the model adds to the weight of its last norm.
        length: tokens of each text.
        is_whole: whether ``settings`` are all there are, and nothing of ``decoders.SMALL``.
        gguf: whether llama.cpp has the architecture, and files are written and read.
        is_folded: whether factors of the configuration are multiplied into the tensors of a GGUF file,
            so that these come back as others that compute the same.
        like_llama_cpp: whether llama.cpp computes the same of such a file.
        exact: whether greedy tokens are compared; not where experts' choices are near ties.
        in_float64: whether transformers' logits are computed in float64.
    """

    family: str
    kind: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = "1"
    draw: Callable[..., np.ndarray] = decoders.drawn
    last: tuple[str, ...] = ("model.norm.weight",)
    one: float = 0.0
    length: int = 24
    is_whole: bool = False
    gguf: bool = True
    is_folded: bool = False
    like_llama_cpp: bool = True
    exact: bool = True
    in_float64: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"

    def model(self, directory: Path | None = None, seed: int = 0) -> OracleModel:
        """transformers' model, whose logits have a deviation of 1; its files in the directory as well."""

        def scaled(tensors: dict[str, np.ndarray], by: float) -> dict[str, np.ndarray]:
            one = np.float32(self.one)
            return tensors | {
                name: (tensors[name] + one) / np.float32(by) - one
                for name in self.last
                if name in tensors
            }

        settings = self.settings if self.is_whole else {**decoders.SMALL, **self.settings}
        made = OracleModel(
            self.kind, self.config, settings,
            draw=self.draw, seed=seed, measure=decoders.spread, scale=scaled,
            file=f"families.{self.family}", in_float64=self.in_float64,
        )  # fmt: skip
        if directory is not None:
            made.save(directory)
        return made


def every() -> list[Case]:
    """The cases of all families, those of one family side by side."""
    found: list[Case] = []
    for module in sorted(one.name for one in pkgutil.iter_modules(known.__path__)):
        found += importlib.import_module(f"{known.__name__}.{module}").CASES
    return found


def first_of_each_family(cases: list[Case]) -> list[Any]:
    """Parameters: all but the first case of each family are for ``pytest --all``."""
    seen: set[str] = set()
    found = []
    for case in cases:
        marks = [pytest.mark.extra] if case.family in seen else []
        seen.add(case.family)
        found.append(pytest.param(case, marks=marks, id=str(case)))
    return found
