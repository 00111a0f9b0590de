"""Beam search: the answers of transformers, token for token."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import maxjax
from maxjax.engine.generate.defaults import read_defaults
from maxjax.errors import CheckpointFormatError, UserInputError
from tests.models import decoders
from tests.models.decoders import ids_of, one_character_each, ours
from tests.models.test_text_lengths import BORDER, MODELS
from tests.oracles.recorded import recorded, torch

PROMPTS = [ids_of(1, n, seed=n)[0].tolist() for n in (7, 1, 30, 18)]
ENDS = list(range(60, 68))
# The arguments of transformers; those of maxjax have the same names but for eos_token_id.
CASES = {
    "plain": {"num_beams": 4},
    "two": {"num_beams": 2, "eos_token_id": ENDS},
    "ends": {"num_beams": 4, "eos_token_id": ENDS},
    "one end": {"num_beams": 3, "eos_token_id": 60, "max_new_tokens": 40},
    "long": {"num_beams": 4, "eos_token_id": ENDS, "length_penalty": 2.5},
    "short": {"num_beams": 5, "eos_token_id": ENDS, "length_penalty": -1.0},
    "no penalty": {"num_beams": 4, "eos_token_id": ENDS, "length_penalty": 0.0},
    "early": {"num_beams": 4, "eos_token_id": ENDS, "early_stopping": True},
    "never": {"num_beams": 4, "eos_token_id": ENDS, "early_stopping": "never"},
    "never, short": {"num_beams": 3, "eos_token_id": ENDS, "early_stopping": "never", "length_penalty": -0.5},
    "no repeats": {"num_beams": 4, "eos_token_id": ENDS, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "not yet": {"num_beams": 4, "eos_token_id": ENDS, "min_new_tokens": 6},
}  # fmt: skip
NEW = 14


def beams_of(model, options):
    """The tokens of all beams of each prompt, each with its number of tokens in front."""
    found = []
    ends = np.atleast_1d(options.get("eos_token_id", []))
    for prompt in PROMPTS:
        with torch.no_grad():
            given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options}
            count = given["num_beams"]
            ids = torch.tensor(np.array([prompt])).long()
            tokens = model.generate(ids, num_return_sequences=count, pad_token_id=0, **given)
        rows = tokens.numpy()[:, len(prompt) :]
        for row in rows:
            stops = np.flatnonzero(np.isin(row, ends))
            row[stops[0] + 1 if len(stops) else len(row) :] = -1
        found.append(np.pad(rows, ((0, 0), (0, 40 - rows.shape[1])), constant_values=-1))
    return found


def as_ours(options):
    """The arguments of maxjax."""
    ends = options.get("eos_token_id", ())
    found = {"max_new_tokens": NEW, "n": options["num_beams"], **options}
    found["eos_ids"] = [ends] if isinstance(ends, int) else ends
    return {name: value for name, value in found.items() if name != "eos_token_id"}


@pytest.mark.parametrize("name", CASES)
def test_as_transformers(theirs, model, name):
    options = CASES[name]
    expected = recorded(lambda: beams_of(theirs.live(), options))
    found = maxjax.generate(model, None, PROMPTS, **as_ours(options))
    for texts, rows in zip(found, expected, strict=True):
        wanted = [tuple(token for token in row if token >= 0) for row in rows.tolist()]
        assert [text.tokens for text in texts] == wanted
        ends = np.atleast_1d(options.get("eos_token_id", []))
        for text in texts:
            assert (text.finish_reason == "stop") == (text.tokens[-1] in ends)


def test_batches_chunks_and_caches_change_nothing(model):
    options = as_ours(CASES["ends"])
    expected = [
        [t.tokens for t in each] for each in maxjax.generate(model, None, PROMPTS, **options)
    ]
    for other in ({"batch_size": 4}, {"batch_size": 1}, {"batch_size": 8, "chunk": 8}):
        found = maxjax.generate(model, None, PROMPTS, **options, **other)
        assert [[t.tokens for t in each] for each in found] == expected
    best = maxjax.generate(model, None, PROMPTS, **{**options, "n": None})
    assert [text.tokens for text in best] == [each[0] for each in expected]
    one = maxjax.generate(model, None, PROMPTS[2], **{**options, "n": 2})
    assert [text.tokens for text in one] == expected[2][:2]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("axis", ["model", "data"])
def test_a_mesh(theirs, directory, model, axis, explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), (axis,), axis_types=(kind,), devices=jax.devices()[:2])
    options = as_ours(CASES["no repeats"])
    placed, _ = maxjax.load(directory, mesh=mesh, dtype="float32")
    found, expected = (
        maxjax.generate(one, None, PROMPTS[:2], **options) for one in (placed, model)
    )
    assert [[t.tokens for t in e] for e in found] == [[t.tokens for t in e] for e in expected]


def test_more_beams_are_at_least_as_probable(model):
    """Of answers of one length without ends; and the first beam alone is greedy generation."""
    totals = []
    for beams in (1, 2, 6):
        options = {"num_beams": beams, "max_new_tokens": 8, "eos_ids": ()}
        text = maxjax.generate(model, None, PROMPTS[0], **options)
        totals.append(maxjax.score(model, None, PROMPTS[0], list(text.tokens)).total)
    assert totals == sorted(totals) and totals[0] < totals[2]


def test_texts(model):
    tokenizer = one_character_each()
    options = {"num_beams": 3, "max_new_tokens": 5, "n": 2, "eos_ids": (), "chat": False}
    found = maxjax.generate(model, tokenizer, "ab", **options)
    ids = maxjax.generate(model, None, tokenizer.encode("ab"), **options)
    assert [str(text) for text in found] == [tokenizer.decode(text.tokens) for text in ids]
    assert found[0] != found[1] and found[0].prompt == "ab"


def test_recurrent_states_follow_their_beams():
    """Layers without keys and values: the beams of a model are those that reading each text anew gives."""
    config = maxjax.models.MambaConfig(96, 16, 2, state_size=6)
    model = maxjax.init(maxjax.models.Mamba(config), jax.random.key(0))
    options = {"num_beams": 3, "max_new_tokens": 6, "n": 3, "eos_ids": ()}
    found = maxjax.generate(model, None, [[1, 2, 3], [4]], **options)
    assert [[t.tokens for t in each] for each in found] == [
        plain_beams(model, p, 3, 6) for p in ([1, 2, 3], [4])
    ]


def plain_beams(model, prompt, count, new):
    """Beam search without end tokens, which reads each text anew."""
    beams = [(0.0, ())]
    for _ in range(new):
        longer = []
        for total, tokens in beams:
            logits = model(np.array([[*prompt, *tokens]], np.int32))[0, -1]
            logs = np.asarray(jax.nn.log_softmax(logits))
            longer += [(total + logs[i], (*tokens, int(i))) for i in np.argsort(-logs)[:count]]
        beams = sorted(longer, key=lambda one: -one[0])[:count]
    return [tokens for _, tokens in beams]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 2.5}, "num_beams is 2.5"),
        ({"num_beams": True}, "num_beams is True"),
        ({"num_beams": 2, "n": 3}, "n is 3: it must be at most num_beams, 2"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty is nan: it must be a number"),
        ({"num_beams": 2, "length_penalty": "1"}, "length_penalty is '1'"),
        ({"num_beams": 2, "early_stopping": "always"}, "early_stopping is 'always': it must be True"),
        ({"num_beams": 2, "early_stopping": 1}, "early_stopping is 1: it must be True"),
        ({"length_penalty": 2.0}, "length_penalty and early_stopping need num_beams above 1"),
        ({"early_stopping": True}, "length_penalty and early_stopping need num_beams above 1"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature=0.5 is not supported with num_beams"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs= is not supported with num_beams: maxjax.score"),
        ({"num_beams": 2, "chunk": 3}, "chunk is 3"),
        ({"num_beams": 2, "batch_size": 0}, "batch_size is 0"),
    ],
)  # fmt: skip
def test_bad_input(model, options, says):
    with pytest.raises(UserInputError, match=says):
        maxjax.generate(model, None, [1, 2], **{"max_new_tokens": 3, **options})


def test_what_has_no_beams_says_so(model):
    tokenizer = one_character_each()
    with pytest.raises(UserInputError, match="stop= is not supported with num_beams"):
        maxjax.generate(model, tokenizer, [1], num_beams=2, stop="a")
    with pytest.raises(UserInputError, match="while the model is captured"):
        with maxjax.capture(model, "model.norm"):
            maxjax.generate(model, None, [1], num_beams=2)
    with pytest.raises(
        TypeError, match="num_beams= of maxjax.generate, which alone has beam search"
    ):
        maxjax.stream(model, None, [1], num_beams=2)
    with maxjax.Engine(model, slots=1) as engine:
        with pytest.raises(TypeError, match="which alone has beam search"):
            engine.submit([1], num_beams=2)
    with pytest.raises(TypeError, match="which alone has beam search"):
        list(maxjax.generate_each(model, None, [[1]], num_beams=2))


def test_generation_config(model, tmp_path, caplog):
    """The beams of the checkpoint are those of generate, as in transformers, unless the call says otherwise."""
    content = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "eos_token_id": ENDS}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    defaults = read_defaults(tmp_path)
    assert "num_beams=3 of the generation config is for maxjax.generate" in caplog.text
    assert defaults.to_file() == content
    changed = dataclasses.replace(defaults, length_penalty=0.5)
    assert changed.to_file() == content | {"length_penalty": 0.5}
    prompt, plain = [5, 6, 7], {"max_new_tokens": 12, "eos_ids": ENDS}
    wanted = maxjax.generate(
        model, None, prompt, num_beams=3, length_penalty=2.0, early_stopping=True, **plain
    )
    greedy = maxjax.generate(model, None, prompt, **plain)
    assert wanted.tokens != greedy.tokens
    tuned = maxjax.replace(model, {})
    tuned.generation = defaults
    generate = lambda **options: maxjax.generate(tuned, None, prompt, max_new_tokens=12, **options)
    assert generate().tokens == wanted.tokens
    assert generate(num_beams=1).tokens == greedy.tokens
    assert "".join(maxjax.stream(tuned, None, prompt, max_new_tokens=12)) == ""
    for options in ({"temperature": 1.0}, {"n": 4}, {"speculation": "lookup"}):
        with pytest.raises(
            UserInputError, match="that of generation_config.json: pass num_beams=1"
        ):
            generate(**options)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"num_beams": "4"}, "num_beams is '4'"),
        ({"num_beams": 4, "length_penalty": [1]}, "length_penalty is"),
    ],
)
def test_invalid_beams_of_a_file(tmp_path, content, says):
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointFormatError, match=says):
        read_defaults(tmp_path)


def test_beams_that_draw_are_not_supported(tmp_path, caplog):
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4, "do_sample": true}')
    assert read_defaults(tmp_path).num_beams == 1
    assert "not supported: num_beams" in caplog.text


def test_not_finite(model):
    bad = jax.tree.map(lambda a: a * np.nan, model)
    with pytest.raises(FloatingPointError, match="to prompt 0 the logits are NaN"):
        maxjax.generate(bad, None, [1, 2], num_beams=2)


def test_a_text_that_outgrows_its_rope_is_refused(tmp_path):
    decoders.oracle("Llama", tmp_path, file="models.test_text_lengths", **MODELS["Llama"])
    model, options = ours(tmp_path), {"num_beams": 2, "eos_ids": ()}
    with pytest.raises(UserInputError, match="texts that outgrow their RoPE"):
        maxjax.generate(model, None, [1] * (BORDER - 4), max_new_tokens=8, **options)
    for length in (BORDER - 8, BORDER + 3):
        prompt, found = [1] * length, []
        for count in (4, 5):
            found.append(maxjax.generate(model, None, prompt, max_new_tokens=count, **options))
        assert [len(text.tokens) for text in found] == [4, 5]
