"""Reads the chat templates of a checkpoint directory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ...errors import CheckpointFormatError, CheckpointLimitError
from ...models.config import read_object
from ...storage.files import is_there, open_regular
from ...storage.save.beside import Files, files_of

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
PROCESSORS = "chat_template.json"
_MAX_NAMED = 100
_MAX_BYTES = 1 << 20  # published templates have some thousands


def read_templates(directory: Path | Files, settings: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name; an unnamed one is "default".

    ``chat_template.jinja``, and for named ones ``additional_chat_templates/NAME.jinja``, take
    precedence over ``tokenizer_config.json``, which has a template or a list of named ones.
    ``chat_template.json``, which old multimodal models have for their processor, is used if there
    is no other.

    Raises:
        CheckpointFormatError: a template is not text.
        CheckpointLimitError: a file is too large.
    """
    found = listed_templates(settings, directory / "tokenizer_config.json")
    file = directory / TEMPLATE_FILE
    if is_there(file):
        found["default"] = _text(file)
    start = f"{TEMPLATE_FOLDER}/"
    named = [name for name in files_of(directory).names() if name.startswith(start)]
    for name in named[:_MAX_NAMED]:
        found[name.removeprefix(start).removesuffix(".jinja")] = _text(directory / name)
    if not found and is_there(directory / PROCESSORS):
        found = listed_templates(read_object(directory / PROCESSORS), directory / PROCESSORS)
    return found


def listed_templates(settings: Mapping[str, Any], file: Path | None = None) -> dict[str, str]:
    """The chat templates in the content of a ``tokenizer_config.json``."""
    given = settings.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, Mapping):
        listed = [{"name": name, "template": text} for name, text in given.items()]
    else:
        listed = given if isinstance(given, list) else [{"name": "default", "template": given}]
    found = {}
    for item in listed:
        name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointFormatError(
                "'chat_template' is not a template",
                path=file, expected="a string, or a list of objects with name and template",
            )  # fmt: skip
        found[name] = text
    return found


def _text(file: Path) -> str:
    with closing(open_regular(file)) as opened:
        if opened.size > _MAX_BYTES:
            raise CheckpointLimitError(
                "the chat template is too long",
                path=file, expected=f"at most {_MAX_BYTES} bytes", found=opened.size,
            )  # fmt: skip
        data = opened.pread(0, opened.size)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(
            "the chat template is not UTF-8", path=file, offset=error.start
        ) from None
