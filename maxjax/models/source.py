"""``source_of``: the text of an architecture's file, to copy and change."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import UserInputError, shown
from .multimodal import WRAPPERS
from .registry import BUILT_IN


def source_of(model_type: str) -> str:
    """Return the text of the file of an architecture, with absolute imports: saved anywhere, it is the same model.

    Args:
        model_type: ``model_type`` in the model's ``config.json``. For a vision-language model, the file is that of its
            vision part; its text model has a type of its own.

    Raises:
        UserInputError: maxjax has no file for the model type.

    Example:
        >>> "class LlamaAttention(Module):" in source_of("llama")
        True
        >>> "class XLMRobertaModel(RobertaModel):" in source_of("xlm-roberta")
        True
        >>> "class LlavaVision(VisionPart):" in source_of("llava")
        True
    """
    keys = [key for key, one in BUILT_IN if one.model_type == model_type]
    if model_type in WRAPPERS and WRAPPERS[model_type].vision:
        keys = [f"vision.{WRAPPERS[model_type].vision}"]
    if not keys:
        raise UserInputError(
            f"no architecture of maxjax has the model type {shown(model_type)}: "
            "maxjax.models.families() lists them"
        )
    # A family without a class of its own is a variant, in the file of another architecture.
    file = min(keys, key=lambda key: "_" in key.rpartition(".")[2]).rpartition(".")[0]
    text = (Path(__file__).parent / f"{file.replace('.', '/')}.py").read_text()
    packages = f"{__package__}.{file}".split(".")

    def absolute(match: re.Match[str]) -> str:
        return f"from {'.'.join(packages[: -len(match[1])])}."

    return re.sub(r"^from (\.+)(?=\w)", absolute, text, flags=re.MULTILINE)
