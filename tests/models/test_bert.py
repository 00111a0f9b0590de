"""BertModel against transformers: small random models, saved by it and read by us."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.errors import UserInputError
from maxjax.graph.weights import load_weights
from maxjax.models import BertConfig, BertModel, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

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


def pair(directory, architecture="BertModel", seed=0, **settings):
    """(transformers' model, ours), the same weights."""
    config = transformers.BertConfig(
        **{
            "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "intermediate_size": 37, "max_position_embeddings": 40, "initializer_range": 0.3,
            **settings,
        }
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    oracle = getattr(transformers, architecture)(config).eval()
    for name, weight in oracle.named_parameters():
        if weight.ndim == 1:  # ones and zeros would hide a mistake
            weight.data = torch.randn_like(weight) * 0.3 + float("LayerNorm.weight" in name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle.save_pretrained(directory)
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


def from_torch(oracle, ids, mask=None, types=None, positions=None):
    arguments = {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions
    }  # fmt: skip
    given = {k: torch.tensor(v).long() for k, v in arguments.items() if v is not None}
    with torch.no_grad():
        return oracle(**given)


def same(found, expected):
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 40)])
def test_states_and_pooler(tmp_path, name, shape):
    settings = SETTINGS[name]
    oracle, model = pair(tmp_path, **settings)
    ids, _, types = inputs(*shape)
    types %= settings.get("type_vocab_size", 2)
    expected, found = from_torch(oracle, ids, types=types), model(ids, token_type_ids=types)
    same(found.last_hidden_state, expected.last_hidden_state)
    same(found.pooler_output, expected.pooler_output)
    same(model(ids).last_hidden_state, from_torch(oracle, ids).last_hidden_state)


@pytest.mark.slow
def test_padding_changes_nothing(tmp_path):
    oracle, model = pair(tmp_path)
    ids, mask, types = inputs(4, 11)
    expected, found = from_torch(oracle, ids, mask, types), model(ids, mask, types)
    same(found.last_hidden_state, expected.last_hidden_state)  # the padded places as well
    for row in range(4):
        n = mask[row].sum()
        alone = model(ids[row : row + 1, :n], None, types[row : row + 1, :n]).last_hidden_state
        np.testing.assert_allclose(found.last_hidden_state[row, :n], alone[0], atol=2e-5)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_masks_of_any_type(tmp_path, dtype):
    _, model = pair(tmp_path)
    ids, mask, _ = inputs(4, 11)
    np.testing.assert_array_equal(
        model(ids, mask.astype(dtype)).last_hidden_state, model(ids, mask).last_hidden_state
    )


def test_a_mask_for_each_query(tmp_path):
    oracle, model = pair(tmp_path)
    ids, _, _ = inputs(2, 6)
    mask = np.tril(np.ones((6, 6), np.int32))[None].repeat(2, 0)
    additive = torch.where(torch.tensor(mask[:, None]) > 0, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = oracle(torch.tensor(ids).long(), attention_mask=additive)
    same(model(ids, mask).last_hidden_state, expected.last_hidden_state)


def test_positions(tmp_path):
    oracle, model = pair(tmp_path)
    ids, _, _ = inputs(2, 5)
    places = np.array([[7, 3, 3, 0, 39]], np.int32)
    expected = from_torch(oracle, ids, positions=places).last_hidden_state
    same(model(ids, position_ids=places).last_hidden_state, expected)
    each = np.concatenate([places, places[:, ::-1]])
    expected = from_torch(oracle, ids, positions=each).last_hidden_state
    same(model(ids, position_ids=each).last_hidden_state, expected)


@pytest.mark.parametrize(
    "architecture, pooler",
    [("BertForMaskedLM", False), ("BertForSequenceClassification", True),
     ("BertForQuestionAnswering", False), ("BertForPreTraining", True)],
)  # fmt: skip
def test_the_encoder_of_a_model_with_a_head(tmp_path, architecture, pooler):
    oracle, model = pair(tmp_path, architecture)
    ids, mask, types = inputs(2, 7)
    expected, found = from_torch(oracle.bert, ids, mask, types), model(ids, mask, types)
    same(found.last_hidden_state, expected.last_hidden_state)
    assert (found.pooler_output is not None) is pooler
    if pooler:
        same(found.pooler_output, expected.pooler_output)


def test_names_and_shapes_are_those_of_the_checkpoint(tmp_path):
    oracle, model = pair(tmp_path)
    expected = {name: tuple(value.shape) for name, value in oracle.named_parameters()}
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert found == expected
    assert model.encoder.layer[0].attention.self.query.weight.name == (
        "encoder.layer.0.attention.self.query.weight"
    )


@pytest.mark.slow
def test_gradients_are_those_of_torch(tmp_path):
    oracle, model = pair(tmp_path)
    ids, mask, types = inputs(2, 7)
    arguments = [torch.tensor(a).long() for a in (ids, mask, types)]
    # Not the plain sum of a normalised state, whose gradient is nearly nothing.
    (oracle(*arguments).last_hidden_state ** 3).sum().backward()
    gradient = jax.grad(lambda m: jnp.sum(m(ids, mask, types).last_hidden_state ** 3))(model)
    found = gradient.raw_state_dict()
    largest = max(float(jnp.abs(weight.value).max()) for weight in found.values())
    checked = 0
    for name, weight in oracle.named_parameters():
        if weight.grad is not None:
            # A key's bias has none but rounding errors: softmax does not see it.
            scale = max(float(weight.grad.abs().max()), 1e-3 * largest)
            np.testing.assert_allclose(
                found[name].value / scale, weight.grad.numpy() / scale, atol=2e-4, err_msg=name
            )
            checked += 1
    assert checked == len(found) - 2  # all but the pooler's


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype, least", [("bfloat16", 0.999), ("float16", 0.99999)])
@pytest.mark.parametrize("reduce_dtype", ["float32", None])
def test_sixteen_bits(tmp_path, dtype, least, reduce_dtype):
    _, model = pair(tmp_path)
    weights = load_weights(tmp_path)
    narrow = build(weights, dtype=dtype, reduce_dtype=reduce_dtype or dtype)
    narrow.load_state_dict(weights, cast=True)
    ids, mask, types = inputs(3, 9)
    states = narrow(ids, mask, types).last_hidden_state
    assert states.dtype == dtype
    a = np.asarray(states, np.float64).reshape(-1, 32)
    b = np.asarray(model(ids, mask, types).last_hidden_state, np.float64).reshape(-1, 32)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert cosine.min() > least


def test_sequences_the_model_cannot_take():
    config = BertConfig(9, 4, 4, num_layers=1, num_heads=1, max_position_embeddings=5)
    model = BertModel(config, "float32")
    shape = lambda *s: jax.eval_shape(lambda m, x: m(x), model, jnp.zeros(s, jnp.int32))
    assert shape(2, 5).last_hidden_state.shape == (2, 5, 4)
    with pytest.raises(UserInputError, match="6.*5"):
        shape(2, 6)
    with pytest.raises(UserInputError, match=r"\[B, T\]"):
        shape(5)


def test_a_missing_oracle_key_would_show(tmp_path):
    """The comparison can fail: one weight changed by a little is seen."""
    oracle, model = pair(tmp_path)
    ids, mask, types = inputs(2, 7)
    weight = model.encoder.layer[1].attention.self.key.weight
    weight.value = weight.value.at[0, 0].add(0.05)
    with pytest.raises(AssertionError):
        same(model(ids, mask, types).last_hidden_state, from_torch(oracle, ids, mask, types)[0])
