"""Configuration files: JSON that is read strictly and becomes frozen dataclasses."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

from ..elsewhere import check_keywords
from ..errors import CheckpointFormatError, CheckpointMismatchError, UnsupportedModelError, shown
from ..paths import local_path
from ..storage.files import is_there
from ..storage.strict_json import load_json
from .unread import ReadTracker

# JAX indexes with 32-bit integers, so no size in a configuration can be larger.
MAX_SIZE = 2**31 - 1

# Maximum number of labels of a classification head.
_MAX_LABELS = 1 << 20
_NO_LABELS = "without 'id2label' and 'num_labels', config.json"
# The weights of heads that have a row for each label, by the names of models.
_LABEL_WEIGHTS = (
    *("classifier.weight", "classifier.out_proj.weight", "score.weight"),
    "cls_classifier.weight",
)


def read_object(path: str | os.PathLike[str], option: str = "config_bytes") -> dict[str, Any]:
    """The content of a JSON file that holds one object ``{…}``, read strictly.

    ``option`` is the limit on the size of the file.

    Raises:
        CheckpointFormatError: the file is not JSON, has a key twice, or does not hold an object.
        CheckpointError: the file is missing, unreadable, or over a limit.
        UserInputError: the path is empty or a URL.
    """
    # Some published configurations hold Infinity; ``from_dict`` checks the numbers that are used.
    value = load_json(local_path(path), allow_nan=True, option=option)
    if not isinstance(value, dict):
        found = type(value).__name__
        raise CheckpointFormatError("not a JSON object", path=path, expected="{…}", found=found)
    return value


def config_field(
    default: Any = dataclasses.MISSING,
    *,
    key: str | None = None,
    aliases: tuple[str, ...] = (),
    minimum: float = 0,
    maximum: float = MAX_SIZE,
    bounded_by: str | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a configuration that needs more than a type and a default.

    Args:
        default: value if the file does not have the key; without it the key is required.
        key: key in the file, if it differs from the field's name.
        aliases: other keys for the same setting, used if the file does not have the first.
        minimum, maximum: range of a number, both ends included.
        bounded_by: what the number counts in the checkpoint's tensors, which therefore limit it: "axis"
            (the length of an axis) or "layers" (the layers in their names).
        choices: supported values of a text, or of each text in a list; others raise UnsupportedModelError.
    """
    metadata = {
        "key": key, "minimum": minimum, "maximum": maximum, "bounded_by": bounded_by, "aliases": aliases,
        "choices": choices,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The settings that a model family reads from ``config.json``; subclasses declare the fields.

    Annotations are ``int``, ``float``, ``bool``, ``str``, or one of them ``| None``.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config(ModelConfig):
        ...     hidden_size: int
        ...     num_hidden_layers: int
        ...     eps: float = config_field(1e-5, key="layer_norm_eps")
        >>> Config.from_dict({"hidden_size": 8, "num_hidden_layers": 2, "dropout": 0.1})
        Config(hidden_size=8, num_hidden_layers=2, eps=1e-05)
        >>> Config.from_dict({"hidden_size": "8", "num_hidden_layers": 2}, path="config.json")
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointFormatError: config.json: 'hidden_size' has the wrong type
        (expected int, found '8'). Download the file again, or convert the model again.
    """

    # ``model_type`` of the files that a class reads.
    model_type: ClassVar[str] = ""
    # Keys of special tokens, and what is written if they are not known, since the tokens that transformers uses by
    # default may not exist: null, or -1 where transformers reads integers only.
    special: ClassVar[Mapping[str, int | None]] = MappingProxyType({})
    # Whether a model may be the text model of a multimodal model.
    in_multimodal: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes the instance; an unknown keyword argument raises an error with the name that it has here."""
        check_keywords(cls, kwargs)
        return super().__new__(cls)

    @classmethod
    def key_of(cls, name: str) -> str:
        """The key in files of the field ``name``."""
        return cls.__dataclass_fields__[name].metadata.get("key") or name

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default of each key that a file may leave out, for keys that have one."""
        fields = [field for field in dataclasses.fields(cls) if not field.metadata.get("constant")]
        found = {field.metadata.get("key") or field.name: field.default for field in fields}
        found.pop("rope_parameters", None)
        return {key: d for key, d in found.items() if d not in (None, (), dataclasses.MISSING)}

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of a file that ``check_bounds`` compares with its tensors: those that the model uses."""
        return raw

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Self:
        """Reads the declared fields from ``raw``; ``null`` counts as absent.

        Raises:
            CheckpointFormatError: a key is missing, of the wrong type or out of range, or
                values contradict each other; the message names the key.
            UnsupportedModelError: a setting is not supported; the message names it.
        """
        kinds, tracker = typing.get_type_hints(cls), ReadTracker(raw, path)
        fields = dataclasses.fields(cls)
        try:
            found = {one.name: field_value(one, kinds[one.name], tracker) for one in fields}
            given = {name: one for name, one in found.items() if one is not dataclasses.MISSING}
            return cls(**given)
        except CheckpointFormatError:
            raise
        except UnsupportedModelError as error:
            raise unsupported_in(path, error) from None
        except ValueError as error:  # from a subclass's __post_init__
            raise CheckpointFormatError(str(error), path=path) from None


def unsupported_in(
    path: str | os.PathLike[str] | None, error: UnsupportedModelError
) -> UnsupportedModelError:
    """Return the error about a setting with the path of its file in front; without a path, the error itself."""
    return error if path is None else UnsupportedModelError(f"{os.fspath(path)}: {error}")


def field_value(field: dataclasses.Field, expected: Any, raw: ReadTracker) -> Any:
    """Return the value of a field in a file, checked; ``dataclasses.MISSING`` if the file does not have it.

    Args:
        field: field of the configuration.
        expected: its type: ``int``, ``float``, ``bool``, ``str``, ``tuple[…, ...]`` of one of these, or several of
            them and None with ``|``.
        raw: content of the file.

    Raises:
        CheckpointFormatError: the value has the wrong type or is out of range, or a required key is missing.
        UnsupportedModelError: a text is not one of the field's choices.
    """
    key = _key(field, raw)
    value = raw.get(key)
    if value is None:
        if field.default is dataclasses.MISSING:
            raise CheckpointFormatError(f"'{key}' is missing", path=raw.path)
        return dataclasses.MISSING
    kinds = typing.get_args(expected) if isinstance(expected, types.UnionType) else (expected,)
    listed = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    if listed and (isinstance(value, (list, tuple)) or kinds == tuple(listed)):
        (item, _) = typing.get_args(listed[0])
        if not isinstance(value, (list, tuple)):
            raise CheckpointFormatError(
                f"'{key}' has the wrong type", path=raw.path, expected="list", found=shown(value)
            )
        value = tuple(_checked(key, one, item, field, raw.path) for one in value)
    else:
        others = tuple(kind for kind in kinds if kind not in listed)
        value = _checked(key, value, others, field, raw.path)
    choices = field.metadata.get("choices")
    for one in value if isinstance(value, tuple) else (value,):
        if choices and one not in choices:
            raise UnsupportedModelError(
                f"'{key}' with {shown(one)}: supported are {', '.join(choices)}"
            )
    return value


def _key(field: dataclasses.Field, raw: Mapping[str, Any]) -> str:
    """The key under which a file has a field; the first of them if it does not."""
    key = field.metadata.get("key") or field.name
    names = (key, *field.metadata.get("aliases", ()))
    return next((name for name in names if raw.get(name) is not None), key)


def _checked(key: str, value: Any, expected: Any, field: dataclasses.Field, path: Any) -> Any:
    """``value``, checked against the type (or one of several) and the range of its field."""
    kinds = typing.get_args(expected) if isinstance(expected, types.UnionType) else expected
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if float in kinds and type(value) is int:
        value = float(value) if abs(value) < 2**53 else math.inf
    if type(value) not in kinds:  # a bool is an int to isinstance
        names = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise CheckpointFormatError(
            f"'{key}' has the wrong type", path=path, expected=names, found=shown(value)
        )
    if type(value) in (int, float):
        limits = {"minimum": 0, "maximum": MAX_SIZE} | dict(field.metadata)
        minimum, maximum = limits["minimum"], limits["maximum"]
        if not minimum <= value <= maximum:
            raise CheckpointFormatError(
                f"'{key}' is out of range",
                path=path,
                expected=f"{minimum} to {maximum}",
                found=shown(value),
            )
    return value


def read_config(path: str | os.PathLike[str], folder: Any) -> dict[str, Any]:
    """The content of a ``config.json``, with the quantisation that modelopt writes beside it.

    Args:
        path: path of the file.
        folder: directory that may have ``hf_quant_config.json``.

    Raises:
        CheckpointFormatError: one of the files is not a JSON object.
        CheckpointError: a file cannot be read.
    """
    config, file = read_object(path), folder / "hf_quant_config.json"
    if quantization_settings(config) is None and is_there(file):
        given = read_object(file).get("quantization")
        if isinstance(given, Mapping) and given.get("quant_algo"):
            return {**config, "quantization_config": {**given, "quant_method": "modelopt"}}
    return config


def quantization_settings(raw: Mapping[str, Any]) -> Any:
    """The object of a ``config.json`` that says how the weights are quantised; None: they are not.

    MLX calls it ``quantization``, without a ``quant_method``; here it has the method "mlx".

    Example:
        >>> quantization_settings({"quantization": {"group_size": 64, "bits": 4}})
        {'group_size': 64, 'bits': 4, 'quant_method': 'mlx'}
    """
    for key in ("quantization_config", "quantization"):
        given = raw.get(key)
        if isinstance(given, Mapping) and {"group_size", "bits"} <= given.keys():
            if given.get("quant_method") is None:
                return {**given, "quant_method": "mlx"}
    return raw.get("quantization_config") or None


def labels_of(raw: Mapping[str, Any]) -> int:
    """The number of labels of a classification head: of ``id2label``, else ``num_labels``, else 2."""
    listed = raw.get("id2label")
    if isinstance(listed, Mapping) and 0 < len(listed) <= _MAX_LABELS:
        return len(listed)
    found = raw.get("num_labels")
    return found if type(found) is int and 0 < found <= _MAX_LABELS else 2


def check_labels(
    raw: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Raise an error unless a file's configuration has as many labels as its head.

    Args:
        raw: content of ``config.json``.
        shapes: shapes of the checkpoint's tensors by the model's names.
        path: path of the configuration, for messages.

    Raises:
        CheckpointFormatError: ``id2label`` is not an object.
        CheckpointMismatchError: the numbers of labels differ.

    Example:
        >>> check_labels({"id2label": {"0": "bad", "1": "good"}}, {"score.weight": (3, 8)})
        Traceback (most recent call last):
        ...
        maxjax.errors.CheckpointMismatchError: 'id2label' does not have the labels of 'score.weight' (expected 3
        labels, found 2). Write all labels in 'id2label' of config.json.
    """
    listed = raw.get("id2label")
    if listed is not None and not isinstance(listed, Mapping):
        raise CheckpointFormatError(
            "'id2label' has the wrong type", path=path, expected="an object of numbers and names",
            found=shown(listed), hint='Write it as {"0": "…", "1": "…"}.',
        )  # fmt: skip
    head = next((name for name in _LABEL_WEIGHTS if shapes.get(name)), None)
    if head is None or (count := labels_of(raw)) == shapes[head][0]:
        return
    key = next((f"'{one}'" for one in ("id2label", "num_labels") if raw.get(one)), None)
    raise CheckpointMismatchError(
        f"{key or _NO_LABELS} does not have the labels of '{head}'",
        path=path, expected=f"{shapes[head][0]} labels", found=count,
        hint="Write all labels in 'id2label' of config.json.",
    )  # fmt: skip


def labels_in(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the labels in ``id2label``, by their numbers; none if it does not name each from 0 on.

    Example:
        >>> labels_in({"id2label": {"1": "good", "0": "bad"}}), labels_in({"id2label": {"1": "good"}})
        (('bad', 'good'), ())
    """
    listed = raw.get("id2label")
    if not isinstance(listed, Mapping) or len(listed) > _MAX_LABELS:
        return ()
    found = {str(number): str(name) for number, name in listed.items()}
    numbers = [str(i) for i in range(len(found))]
    return tuple(found[i] for i in numbers) if found.keys() == {*numbers} else ()


def default_labels(count: int) -> tuple[str, ...]:
    """The names that transformers gives this number of labels without names.

    Example:
        >>> default_labels(2)
        ('LABEL_0', 'LABEL_1')
    """
    return tuple(f"LABEL_{i}" for i in range(count))


def label_names(labels: Sequence[str]) -> dict[str, Any]:
    """The names of labels, as transformers writes them.

    Example:
        >>> label_names(["good"])
        {'id2label': {'0': 'good'}, 'label2id': {'good': 0}}
    """
    names = {str(i): name for i, name in enumerate(labels)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
