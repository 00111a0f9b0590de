"""The schema of a function is that of transformers; its strings were compared with transformers 5.24."""

import enum
from typing import Any, Dict, List, Literal, Optional, Tuple  # noqa: UP035

import pytest

from maxjax.errors import UserInputError
from maxjax.text.template.function_schema import function_schema
from maxjax.text.template.render import plain
from tests.oracles.recorded import transformers


class Color(enum.Enum):
    RED = "red"
    BLUE = 3


def every_type(
    unit: str, numbers: list[int], table: dict[str, float], pair: tuple[int, str], maybe: Optional[int] = None,  # noqa: UP045
    either: int | str = 3, one: Literal["a", "b"] = "a", color: Color = Color.RED, any_: Any = 1,
    plain: dict = {}, rows: list[int] | None = None, mixed: list[int] | str = "",  # noqa: B006
) -> str:  # fmt: skip
    """Gets things.
    On two lines.

    Args:
        unit: The unit (choices: ["celsius", "fahrenheit"])
        numbers (list): some numbers
            that go on

            for lines
        table: a map
        pair: a pair: of things
        maybe: optional
        either: a union
        one: a literal
        color: a color
        any_: anything
        plain: a dict
        rows: rows or none
        mixed: a list or a text

    Returns:
        a text
        on two lines

    Raises:
        ValueError: never
    """
    return ""


class Tool:
    def run(self, fast: bool) -> "list[str]":
        """Runs it.

        Args:
            fast: yes or no
        """
        return []


WANTED = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The unit"},
    "numbers": {"type": "array", "items": {"type": "integer"}, "description": "some numbers that go on for lines"},
    "table": {"type": "object", "additionalProperties": {"type": "number"}, "description": "a map"},
    "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
             "description": "a pair: of things"},
    "maybe": {"type": "integer", "nullable": True, "description": "optional"},
    "either": {"type": ["integer", "string"], "description": "a union"},
    "one": {"type": "string", "enum": ["a", "b"], "description": "a literal"},
    "color": {"type": ["string", "integer"], "enum": ["red", 3], "description": "a color"},
    "any_": {"description": "anything"},
    "plain": {"type": "object", "description": "a dict"},
    "rows": {"type": "array", "items": {"type": "integer"}, "nullable": True, "description": "rows or none"},
    "mixed": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}],
              "description": "a list or a text"},
}  # fmt: skip


def test_every_type():
    found = function_schema(every_type)
    assert found["type"] == "function"
    function = found["function"]
    assert (
        function["name"] == "every_type"
        and function["description"] == "Gets things.\nOn two lines."
    )
    assert function["return"] == {
        "type": "string",
        "description": "a text\n    on two lines",
    }
    parameters = function["parameters"]
    assert parameters["required"] == ["unit", "numbers", "table", "pair"]
    assert parameters["properties"] == WANTED and list(parameters["properties"]) == list(WANTED)


def test_methods_have_no_self():
    function = function_schema(Tool().run)["function"]
    assert list(function["parameters"]["properties"]) == ["fast"]
    assert function_schema(Tool.run)["function"] == function


@pytest.mark.oracle
@pytest.mark.parametrize("function", [every_type, Tool().run, Tool.run])
def test_as_transformers_has_it(function):
    assert function_schema(function) == transformers.utils.get_json_schema(function)


def silent(x: int): ...


def untyped(x):
    """Does.

    Args:
        x: it
    """


def undescribed(x: int, y: int):
    """Does.

    Args:
        x: it
    """


def odd(x: Color | set):
    """Does.

    Args:
        x: it
    """


def choices(x: str):
    """Does.

    Args:
        x: it (choices: [a, b])
    """


def number(x: int):
    """Does.

    Args:
        x: it (choices: 5)
    """


def unknown(x: "Nothing"):  # noqa: F821
    """Does.

    Args:
        x: it
    """


@pytest.mark.parametrize(
    "function, text",
    [
        (silent, "silent has no docstring"),
        (untyped, "argument x of untyped has no type hint"),
        (undescribed, "does not describe y"),
        (odd, "argument x of odd has the type .*set"),
        (choices, "no list in JSON"),
        (number, "no list in JSON"),
        (dict, "dict has no readable arguments"),
        (unknown, "type hints of unknown cannot be read"),
    ],
)
def test_what_cannot_be_described(function, text):
    with pytest.raises(UserInputError, match=text):
        function_schema(function)


def bare(a: List, b: Dict, c: Tuple, d: list, e: Optional[List] = None):  # noqa: UP006, UP045
    """Does.

    Args:
        a: one (choices: [1, 2])
        b: two
        c: three
        d: four
        e: five
    """


def test_types_without_their_elements_and_numbers_to_choose_from():
    found = function_schema(bare)["function"]["parameters"]["properties"]
    assert {name: one["type"] for name, one in found.items()} == {
        "a": "array", "b": "object", "c": "array", "d": "array", "e": "array",
    }  # fmt: skip
    assert found["a"]["enum"] == [1, 2]


def test_objects_of_pydantic_are_their_content():
    class Call:
        def model_dump(self):
            return {"name": "f", "arguments": {"x": (1, 2)}}

    assert plain({"tool_calls": [Call()]}) == {
        "tool_calls": [{"name": "f", "arguments": {"x": (1, 2)}}]
    }
    assert plain(Call) == "<type>"
