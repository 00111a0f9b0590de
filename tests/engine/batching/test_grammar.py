"""Answers that match a JSON schema, a regular expression or a grammar."""

import dataclasses
import json
import re

import jax
import jsonschema
import numpy as np
import pydantic
import pytest

import maxjax
from maxjax.engine.batching.calls import compiled_count
from maxjax.engine.batching.programs import decode, read, read_tokens
from maxjax.errors import UserInputError


@pytest.fixture(scope="module")
def engine():
    with maxjax.Engine(*maxjax.load("tiny"), slots=4) as found:
        yield found


@dataclasses.dataclass
class Sum:
    first: int
    sign: bool


class Colour(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)


def drawn_schema(rng, depth=0):
    """A schema all of whose values have at most a few characters."""
    kinds = [
        "integer",
        "boolean",
        "enum",
        "string",
        "null",
        *(["array", "object"] if depth < 2 else []),
    ]
    match rng.choice(kinds):
        case "integer":
            low = int(rng.integers(-20, 20))
            return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(1, 99))}
        case "enum":
            return {"enum": [["red", "blue", 3, None, "ä"][i] for i in rng.permutation(5)[:3]]}
        case "string":
            return {"type": "string", "maxLength": int(rng.integers(1, 6))}
        case "array":
            size = int(rng.integers(0, 3))
            return {
                "type": "array",
                "items": drawn_schema(rng, depth + 1),
                "minItems": size,
                "maxItems": size + 1,
            }
        case "object":
            names = [f"k{i}" for i in range(rng.integers(0, 4))]
            each = {name: drawn_schema(rng, depth + 1) for name in names}
            required = names[: rng.integers(0, len(names) + 1)]
            return {
                "type": "object",
                "properties": each,
                "required": required,
                "additionalProperties": False,
            }
        case kind:
            return {"type": str(kind)}


@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.extra)])
def test_drawn_schemas(engine, count):
    """Each answer ends by itself and is valid; none compiles a program after the first two."""
    rng = np.random.default_rng(count)
    schemas = [drawn_schema(rng) for _ in range(count)]
    engine.submit("Hi", schema={"type": "null"}).result()
    engine.submit("Hi", schema={"type": "string", "maxLength": 3}, temperature=1.0).result()
    options = {"max_new_tokens": 200, "temperature": 1.5}
    # Prompts of other lengths need other programs, with grammars or without.
    for i in range(4):
        [engine.submit(f"What is {j} + 1?", max_new_tokens=2) for j in range(2**i)][-1].result()
    before = compiled_count(decode, read, read_tokens)
    answers = [
        engine.submit(f"What is {i} + 1?", schema=schema, key=jax.random.key(i), **options)
        for i, schema in enumerate(schemas)
    ]
    for answer, schema in zip(answers, schemas, strict=True):
        text = answer.result()
        assert text.finish_reason == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema)
    assert compiled_count(decode, read, read_tokens) == before


def test_the_three_forms(engine):
    model_text = engine.submit("What is 2 + 3?")
    by_regex = engine.submit("What is 2 + 3?", regex=r"[a-c]{3} [0-9]")
    by_grammar = engine.submit("?", grammar='root ::= "yes" | "no"')
    by_lark = engine.submit("?", grammar='start: "a" ("b" | "c")')
    assert re.fullmatch(r"[a-c]{3} [0-9]", by_regex.result())
    assert by_grammar.result() in ("yes", "no")
    assert by_lark.result() in ("ab", "ac")
    assert model_text.result() == "2 + 3 = 5"  # beside them
    text = engine.submit("x", schema=Sum, max_new_tokens=60).result()
    assert text.finish_reason == "length" or set(json.loads(text)) == {"first", "sign"}
    found = json.loads(engine.submit("x", schema=Colour, max_new_tokens=60).result())
    assert len(found["name"]) <= 6
    found = engine.submit("x", schema='{"enum": ["A", "B"]}').result()
    assert json.loads(found) in ("A", "B")


def test_few_programs(engine):
    engine.submit("x", regex="[ab]{9}").result()
    before = decode._cache_size(), read_tokens._cache_size()
    engine.submit("x", regex="[cd]{9}").result()
    assert (decode._cache_size(), read_tokens._cache_size()) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"regex": "("}, "regex"),
        ({"schema": {"type": "foo"}}, "foo"),
        ({"schema": 5}, "int"),
        ({"schema": "{"}, "schema"),
        ({"schema": {}, "regex": "a"}, "schema and regex"),
        ({"regex": "a", "eos_ids": ()}, "eos_ids"),
    ],
)
def test_refused(engine, options, says):
    with pytest.raises(UserInputError, match=says):
        engine.submit("x", **options)
    assert engine.submit("What is 1 + 1?").result() == "1 + 1 = 2"


def test_no_tokenizer():
    with maxjax.Engine(maxjax.load("tiny")[0], slots=1) as engine:
        with pytest.raises(UserInputError, match="tokenizer"):
            engine.submit([1], regex="a", eos_ids=[2])
