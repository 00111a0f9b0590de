"""BertModel against transformers: small random models in its files, read by us."""

import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.errors import UserInputError
from maxjax.graph.weights import load_weights
from maxjax.models import BertConfig, BertModel, build
from tests.models.decoders import sampled
from tests.oracles.models import OracleModel
from tests.oracles.recorded import torch

SETTINGS = {
    "plain": {},
    "one layer": {"num_hidden_layers": 1, "num_attention_heads": 1},
    "tanh": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "relu": {
        "hidden_act": "relu",
        "type_vocab_size": 1,
        "hidden_size": 48,
        "num_attention_heads": 6,
    },
    "odd": {"hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 7, "vocab_size": 101},
}


def drawn(rng, name, shape):
    """Values of a tensor; ones and zeros would hide a mistake."""
    return 0.3 * rng.standard_normal(shape) + ("LayerNorm.weight" in name)


def pair(directory, architecture="BertModel", seed=0, **settings):
    """(transformers' model, ours), the same weights."""
    small = {
        "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 37, "max_position_embeddings": 40, "initializer_range": 0.3,
    }  # fmt: skip
    oracle = OracleModel(architecture, "BertConfig", small | settings, draw=drawn, seed=seed)
    oracle.save(directory)
    weights = load_weights(directory)
    model = build(weights)
    model.load_state_dict(weights)
    return oracle, model


def inputs(batch, length, vocab_size=99, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, (batch, length)).astype(np.int32)
    lengths = rng.integers(1, length + 1, batch)
    mask = (np.arange(length)[None] < lengths[:, None]).astype(np.int32)
    return ids, mask, rng.integers(0, 2, (batch, length)).astype(np.int32)


def from_torch(oracle, ids, mask=None, types=None, positions=None, part=None):
    """What transformers' model answers, or the part of it that is asked for."""
    arguments = {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions
    }  # fmt: skip
    given = {name: np.asarray(array) for name, array in arguments.items() if array is not None}

    def answer(model):
        model = model if part is None else getattr(model, part)
        with torch.no_grad():
            out = model(**{name: torch.tensor(a).long() for name, a in given.items()})
        pooled = out.pooler_output
        return [out.last_hidden_state.numpy(), None if pooled is None else pooled.numpy()]

    asked = repr([(name, array.shape, array.tobytes()) for name, array in given.items()])
    answers = oracle.ask(f"states {part} {zlib.crc32(asked.encode()):08x}", answer)
    return SimpleNamespace(last_hidden_state=answers[0], pooler_output=answers[1])


# One compiled program for each shape; eagerly each operation would be one.
call = jax.jit(lambda model, *arrays, **named: model(*arrays, **named))


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, shape", [*((name, (2, 40)) for name in SETTINGS), ("odd", (1, 1))])
def test_states_and_pooler(tmp_path, name, shape):
    settings = SETTINGS[name]
    oracle, model = pair(tmp_path, **settings)
    ids, _, types = inputs(*shape)
    types %= settings.get("type_vocab_size", 2)
    expected, found = from_torch(oracle, ids, types=types), call(model, ids, token_type_ids=types)
    same(found.last_hidden_state, expected.last_hidden_state)
    same(found.pooler_output, expected.pooler_output)
    same(call(model, ids).last_hidden_state, from_torch(oracle, ids).last_hidden_state)


def test_padding_changes_nothing(tmp_path):
    oracle, model = pair(tmp_path)
    ids, mask, types = inputs(4, 11)
    expected, found = from_torch(oracle, ids, mask, types), call(model, ids, mask, types)
    same(found.last_hidden_state, expected.last_hidden_state)  # the padded places as well
    lengths = mask.sum(1)
    assert lengths.min() < lengths.max()
    for row in (lengths.argmin(), lengths.argmax()):
        n = mask[row].sum()
        alone = call(model, ids[row : row + 1, :n], None, types[row : row + 1, :n])
        alone = alone.last_hidden_state
        np.testing.assert_allclose(found.last_hidden_state[row, :n], alone[0], atol=2e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_masks_of_any_type(tmp_path, dtype):
    _, model = pair(tmp_path)
    ids, mask, _ = inputs(4, 11)
    np.testing.assert_array_equal(
        call(model, ids, mask.astype(dtype)).last_hidden_state,
        call(model, ids, mask).last_hidden_state,
    )


@pytest.mark.extra
def test_a_mask_for_each_query(tmp_path):
    oracle, model = pair(tmp_path)
    ids, _, _ = inputs(2, 6)
    mask = np.tril(np.ones((6, 6), np.int32))[None].repeat(2, 0)

    def answer(model):
        least = torch.finfo(torch.float32).min
        additive = torch.where(torch.tensor(mask[:, None]) > 0, 0.0, least)
        with torch.no_grad():
            found = model(torch.tensor(ids).long(), attention_mask=additive)
        return found.last_hidden_state.numpy()

    same(model(ids, mask).last_hidden_state, oracle.ask("a mask for each query", answer))


def test_positions(tmp_path):
    oracle, model = pair(tmp_path)
    ids, _, _ = inputs(2, 5)
    places = np.array([[7, 3, 3, 0, 39]], np.int32)
    expected = from_torch(oracle, ids, positions=places).last_hidden_state
    same(call(model, ids, position_ids=places).last_hidden_state, expected)
    each = np.concatenate([places, places[:, ::-1]])
    expected = from_torch(oracle, ids, positions=each).last_hidden_state
    same(call(model, ids, position_ids=each).last_hidden_state, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "architecture, pooler",
    [("BertForMaskedLM", False), ("BertForSequenceClassification", True),
     ("BertForQuestionAnswering", False), ("BertForPreTraining", True)],
)  # fmt: skip
def test_the_encoder_of_a_model_with_a_head(tmp_path, architecture, pooler):
    oracle, model = pair(tmp_path, architecture)
    ids, mask, types = inputs(2, 7)
    expected, found = (
        from_torch(oracle, ids, mask, types, part="bert"),
        call(model, ids, mask, types),
    )
    same(found.last_hidden_state, expected.last_hidden_state)
    assert (found.pooler_output is not None) is pooler
    if pooler:
        same(found.pooler_output, expected.pooler_output)


def test_names_and_shapes_are_those_of_the_checkpoint(tmp_path):
    oracle, model = pair(tmp_path)
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert found == oracle.shapes
    assert model.encoder.layer[0].attention.self.query.weight.name == (
        "encoder.layer.0.attention.self.query.weight"
    )


def test_gradients_are_those_of_torch(tmp_path):
    oracle, model = pair(tmp_path)
    ids, mask, types = inputs(2, 7)

    def gradients(model):
        arguments = [torch.tensor(a).long() for a in (ids, mask, types)]
        # Not the plain sum of a normalised state, whose gradient is nearly nothing.
        (model(*arguments).last_hidden_state ** 3).sum().backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {n: [sampled(g.numpy()), float(g.abs().max())] for n, g in grads.items()}

    loss = lambda m: jnp.sum(m(ids, mask, types).last_hidden_state ** 3)
    gradient = jax.jit(jax.grad(loss))(model)
    found = {n: np.asarray(weight.value) for n, weight in gradient.raw_state_dict().items()}
    largest = max(np.abs(value).max() for value in found.values())
    expected = oracle.ask("gradients", gradients)
    for name, (some, most) in expected.items():
        # A key's bias has none but rounding errors: softmax does not see it.
        scale = max(most, 1e-3 * largest)
        np.testing.assert_allclose(
            sampled(found[name]) / scale, some / scale, atol=2e-4, err_msg=name
        )
    assert len(expected) == len(found) - 2  # all but the pooler's


@pytest.mark.extra
def test_jit_vmap_and_eval_shape(tmp_path):
    _, model = pair(tmp_path)
    ids, mask, types = inputs(3, 7)
    run = lambda m, *a: m(*a).last_hidden_state
    plain = run(model, ids, mask, types)
    np.testing.assert_allclose(jax.jit(run)(model, ids, mask, types), plain, atol=2e-5)
    one = lambda m, *a: run(m, *(x[None] for x in a))[0]
    mapped = jax.vmap(one, (None, 0, 0, 0))(model, ids, mask, types)
    np.testing.assert_allclose(mapped, plain, atol=2e-5)
    lazy = build(load_weights(tmp_path))
    out = jax.eval_shape(lambda m, x: m(x), lazy, jnp.asarray(ids))
    assert out.last_hidden_state.shape == (3, 7, 32) and out.pooler_output.shape == (3, 32)
    assert jax.tree.structure(lazy) == jax.tree.structure(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "least", "reduce_dtype"),
    [
        ("bfloat16", 0.999, None), ("float16", 0.99999, "float32"),
        ("bfloat16", 0.999, "float32"), ("float16", 0.99999, None),
    ],
)  # fmt: skip
def test_sixteen_bits(tmp_path, dtype, least, reduce_dtype):
    _, model = pair(tmp_path)
    weights = load_weights(tmp_path)
    narrow = build(weights, dtype=dtype, reduce_dtype=reduce_dtype or dtype)
    narrow.load_state_dict(weights, cast=True)
    ids, mask, types = inputs(3, 9)
    states = call(narrow, ids, mask, types).last_hidden_state
    assert states.dtype == dtype
    a = np.asarray(states, np.float64).reshape(-1, 32)
    b = np.asarray(call(model, ids, mask, types).last_hidden_state, np.float64).reshape(-1, 32)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert cosine.min() > least


def test_sequences_the_model_cannot_take():
    config = BertConfig(
        9, 4, 4, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=5
    )
    model = BertModel(config, "float32")
    shape = lambda *s: jax.eval_shape(lambda m, x: m(x), model, jnp.zeros(s, jnp.int32))
    assert shape(2, 5).last_hidden_state.shape == (2, 5, 4)
    with pytest.raises(UserInputError, match="6.*5"):
        shape(2, 6)
    with pytest.raises(UserInputError, match=r"\[B, T\]"):
        shape(5)


@pytest.mark.extra
def test_a_missing_oracle_key_would_show(tmp_path):
    """The comparison can fail: one weight changed by a little is seen."""
    oracle, model = pair(tmp_path)
    ids, mask, types = inputs(2, 7)
    weight = model.encoder.layer[1].attention.self.key.weight
    weight.value = weight.value.at[0, 0].add(0.05)
    with pytest.raises(AssertionError):
        same(
            model(ids, mask, types).last_hidden_state,
            from_torch(oracle, ids, mask, types).last_hidden_state,
        )
