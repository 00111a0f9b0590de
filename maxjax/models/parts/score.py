"""The classification head of a decoder: ``score``, a linear layer over the state of a text's last token.

Source: ``GenericForSequenceClassification`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ...dtype import DType
from ...errors import UserInputError
from ...nn.linear import Linear
from ..config import default_labels, labels_in

ENDING = "ForSequenceClassification"
"""The suffix of the architecture in ``config.json`` of a model with this head."""


def has_score(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a decoder with a classification head.

    Example:
        >>> has_score({"architectures": ["Qwen2ForSequenceClassification"]}), has_score({})
        (True, False)
    """
    return (config.get("architectures") or [""])[0].endswith(ENDING)


class Scored:
    """Mixin of models that may have a classification head.

    Attributes:
        score: the head, or None.
    """

    lm_head: Any
    score: Any = None
    hf_config: Any

    @property
    def task(self) -> str | None:  # type: ignore[override]
        """What the head is for: "classify" for a model with a classification head, else None."""
        return None if self.score is None else "classify"

    @property
    def id2label(self) -> dict[int, str]:
        """The names of the labels of the classification head, by number; none without such a head."""
        count = 0 if self.score is None else int(self.score.weight.logical_shape[0])
        found = labels_in(self.hf_config or {})
        return dict(enumerate(found if len(found) == count else default_labels(count)))

    @property
    def problem_type(self) -> str | None:
        """What the labels of a text are, as ``config.json`` says; None if it does not say."""
        found = (self.hf_config or {}).get("problem_type")
        return found if isinstance(found, str) else None

    def make_score(self, labels: int, dtype: DType) -> None:
        """Makes the classification head and removes ``lm_head``, which computes logits.

        Args:
            labels: number of scores of a text.
            dtype: dtype of the weight.
        """
        width = self.lm_head.weight.shape[1]
        self.lm_head = None
        self.score = Linear(int(width), labels, dtype)

    def scores(self, pooled: jax.Array) -> jax.Array:
        """The classification head: states of the last tokens ``[B, E]`` → scores ``[B, labels]``.

        Raises:
            UserInputError: the model has no classification head.

        Example:
            >>> import jax.numpy as jnp
            >>> from maxjax.models import Llama, LlamaConfig
            >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
            >>> model.make_score(3, model.dtype)
            >>> jax.eval_shape(lambda m, x: m.scores(x), model, jnp.zeros((2, 8))).shape
            (2, 3)
        """
        if self.score is None:
            raise UserInputError(
                f"{type(self).__name__} has no classification head: its architecture in config.json does not end in "
                f"'{ENDING}'"
            )
        return self.score(pooled.astype(self.score.weight.dtype.np))
