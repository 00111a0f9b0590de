"""The families of docs/families.md compute what others do, each in under 40 lines.

`python -m scripts.pages families` runs the page, which compares them with transformers.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.graph import DeviceRef
from maxjax.models import Decoder, DecoderConfig, SmolLM3, SmolLM3Config, registry
from maxjax.models.decoder.attention import DecoderAttention
from maxjax.models.decoder.block import DecoderLayer
from scripts import pages
from tests.models import decoders
from tests.models.decoders import oracle
from tests.products import ALL

PAGE = (pages.ROOT / "docs" / "families.md").read_text()
BLOCKS = [block.code for block in pages.blocks(PAGE) if block.kind == "python"]

call = jax.jit(lambda model, *arrays: model(*arrays))


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


@pytest.fixture(autouse=True)
def families():
    before = dict(registry.ENTRIES)
    yield
    registry.ENTRIES.clear()
    registry.ENTRIES.update(before)


def families_of_the_page():
    """The names after the blocks that make families."""
    names = {"np": np, "maxjax": maxjax}
    for block in BLOCKS:
        if "register(" in block:
            exec(compile(block, "families.md", "exec"), names)
    return names


def fused_weights(model):
    """The weights of a SmolLM3 as the page's family has them."""
    weights = {name: np.asarray(value) for name, value in model.state_dict().items()}
    for i in range(model.config.num_hidden_layers):
        for parts, whole in (
            [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv"],
            [("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"],
        ):
            each = [weights.pop(f"model.layers.{i}.{part}.weight") for part in parts]
            weights[f"model.layers.{i}.{whole}.weight"] = np.concatenate(each)
    return weights


@pytest.mark.slow
def test_its_families_compute_what_others_do(tmp_path):
    names = families_of_the_page()
    theirs = oracle("Olmo2", tmp_path / "olmo2", attention_bias=True)
    ids = decoders.ids_of(2, 9)
    mine, _ = maxjax.load(tmp_path / "olmo2")
    assert type(mine) is names["Olmo2"]
    decoders.same(call(mine, ids), decoders.logits_of(theirs, ids))

    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    rotates = (True, True, True, False)
    config = SmolLM3Config(96, 32, 40, tie_word_embeddings=False, rotates=rotates, **sizes)
    known = maxjax.init(SmolLM3(config), jax.random.key(0))
    expected = np.asarray(call(known, ids))
    raw = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "no_rope_layer_interval": 4,
        "model_type": "fused", "max_position_embeddings": 64, "rope_theta": 2e6,
    }  # fmt: skip
    weights = fused_weights(known)
    # With a mesh each device runs all there is.
    for mesh in (*([None] if ALL else []), maxjax.make_mesh(model=2)):
        model = maxjax.models.build(weights, raw)
        assert type(model) is names["Fused"]
        if mesh is not None:
            model.to(mesh)
            assert "all-gather" not in compiled(model, ids), "a fused result moves"
        model.load_state_dict(weights)
        cache = model.cache(batch=2, capacity=16)
        if mesh is not None:
            assert cache.keys.sharding.spec[2] in ("model", ("model",))
        found, cache = call(model, ids[:, :8], cache)
        one, cache = call(model, ids[:, 8:], cache)
        found = np.concatenate([np.asarray(found), np.asarray(one)], 1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * expected.std())


def compiled(model, ids):
    """The programs of the fused projections of a layer on a mesh."""
    layer, x = model.model.layers[0], jax.ShapeDtypeStruct((*ids.shape, 32), jnp.float32)
    runs = (lambda layer, x: layer.self_attn.project(x), lambda layer, x: layer.mlp(x))
    return "".join(jax.jit(run).lower(layer, x).compile().as_text() for run in runs)


def test_no_private_name_is_needed():
    code = "".join(BLOCKS)
    private = set(re.findall(r"\b_[a-z]\w*", code)) | set(re.findall(r"`_[a-z]\w*`", PAGE))
    assert not private


class Fused(DecoderAttention):
    """As the page told before: one method that has another name now."""

    def make_projections(self, config, dtype):
        super().make_projections(config, dtype)
        size = (config.num_attention_heads + 2 * config.kv_heads) * config.width
        self.qkv_proj = maxjax.nn.Linear(config.hidden_size, size, dtype, DeviceRef.CPU())
        del self.q_proj, self.k_proj, self.v_proj

    def _projected(self, x):
        y = self.qkv_proj(x).reshape(*x.shape[:-1], -1, self.head_dim)
        return jnp.split(y, [self.num_heads, self.num_heads + self.num_kv_heads], axis=-2)


class FusedLayer(DecoderLayer):
    attention_class = Fused


class FusedDecoder(Decoder):
    layer_class = FusedLayer

    def _logits(self, x):
        return self.lm_head(x) * 0.5


@pytest.mark.default("2")
@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_projection_of_its_own_is_enough_for_a_cache(devices):
    model = FusedDecoder(
        DecoderConfig(48, 16, 24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    )
    if devices > 1:
        model.to(maxjax.make_mesh(model=devices))
    maxjax.init(model, jax.random.key(0))
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    whole = call(model, ids)
    _, cache = call(model, ids[:, :5], model.cache(2, 8))
    one, _ = call(model, ids[:, 5:], cache)
    np.testing.assert_allclose(np.asarray(one), np.asarray(whole)[:, 5:], atol=1e-5)
    halved = model.lm_head(model.model.norm.weight.value) * 0.5
    np.testing.assert_allclose(model.logits(model.model.norm.weight.value), halved, atol=1e-6)


@pytest.mark.slow
def test_a_rope_that_there_is_not_is_refused():
    model = Decoder(
        DecoderConfig(48, 16, 24, num_hidden_layers=1, num_attention_heads=4), stacked=False
    )
    maxjax.init(model, jax.random.key(0))
    model.model.layers[0].self_attn.rope = "globl"
    with pytest.raises(
        UserInputError, match="'globl': it must be one of 'global', 'local', 'none'"
    ):
        jax.eval_shape(lambda m: m(np.zeros((1, 3), np.int32)), model)


def test_each_family_is_under_40_lines():
    made = [block for block in BLOCKS if "register(" in block]
    assert len(made) == 3
    for block in made:
        assert len([line for line in block.splitlines() if line.strip()]) < 40
