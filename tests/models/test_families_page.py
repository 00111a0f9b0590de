"""The page that writes a family: its Python runs as it is written, in under 100 lines."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.graph import DeviceRef
from maxjax.models import FAMILIES, Decoder, DecoderConfig
from maxjax.models.decoder.attention import DecoderAttention
from maxjax.models.decoder.block import DecoderLayer
from tests.models import decoders
from tests.models.decoders import oracle
from tests.oracles.recorded import transformers
from tests.test_walk import ROOT, blocks_of, run_blocks

PAGE = ROOT / "docs" / "families.md"

call = jax.jit(lambda model, *arrays: model(*arrays))


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


@pytest.fixture(autouse=True)
def families():
    before = list(FAMILIES)
    yield
    FAMILIES[:] = before


@pytest.mark.oracle
def test_the_page_runs(tmp_path, monkeypatch):
    """With torch and transformers, which it imports."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = run_blocks(PAGE)
    model = names["model"]
    assert type(model) is names["Granite"] and names["expected"].std() > 0.1
    assert model.config.residual_multiplier == 0.7
    spread = maxjax.models.build(names["weights"])
    spread.to(maxjax.make_mesh(model=2))
    spread.load_state_dict(names["weights"])
    found = np.asarray(spread(names["ids"]))
    np.testing.assert_allclose(found, np.asarray(names["logits"]), atol=1e-4)
    maxjax.save_pretrained(model, tmp_path / "again")
    again = transformers.GraniteForCausalLM.from_pretrained(tmp_path / "again")
    same = names["theirs"].state_dict()
    assert all((value == same[name]).all() for name, value in again.state_dict().items())

    mine, ids = names["mine"], names["ids"]
    over = maxjax.make_mesh(model=2)
    split, _ = maxjax.load("phi3-tiny", mesh=over)
    cache = split.cache(batch=2, capacity=16)
    assert cache.keys.sharding.spec[2] == "model" or cache.keys.sharding.spec[2] == ("model",)
    found, cache = split(ids, cache)
    one, _ = split(ids[:, :1], cache)
    np.testing.assert_allclose(np.asarray(found), np.asarray(mine(ids)), atol=1e-4)
    np.testing.assert_allclose(np.asarray(one), names["wanted"][:, 8:], atol=1e-4)


FAMILIES_OF_THE_PAGE = {
    "Granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
        "logits_scaling": 0.1,
    },
    "Phi3": {},
}  # fmt: skip


@pytest.mark.slow
def test_its_families_are_those_of_transformers(tmp_path):
    names = {"np": np, "maxjax": maxjax}
    for block in blocks_of(PAGE):
        if "transformers." not in block:
            exec(compile(block, str(PAGE), "exec"), names)
    ids = decoders.ids_of(2, 9)
    for kind, settings in FAMILIES_OF_THE_PAGE.items():
        theirs = oracle(kind, tmp_path / kind, **settings)
        expected = theirs.logits(ids)
        for mesh in (None, maxjax.make_mesh(model=2)):
            model, _ = maxjax.load(tmp_path / kind, mesh=mesh)
            assert type(model) is names[kind]
            cache = model.cache(batch=2, capacity=16)
            if mesh is not None:
                assert cache.keys.sharding.spec[2] in ("model", ("model",))
            found, cache = call(model, ids[:, :8], cache)
            one, cache = call(model, ids[:, 8:], cache)
            found = np.concatenate([np.asarray(found), np.asarray(one)], 1)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * expected.std())
        maxjax.save_pretrained(model, tmp_path / "again")
        again = maxjax.load_weights(tmp_path / "again")
        for name, values in theirs.tensors.items():
            assert (np.asarray(again[name].data().data) == values).all()
    assert names["GRANITE"].config.from_dict(theirs.config.settings).residual_multiplier == 1.0


def test_no_private_name_is_needed():
    code = "".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    private = set(re.findall(r"\b_[a-z]\w*", code)) | set(
        re.findall(r"`_[a-z]\w*`", PAGE.read_text())
    )
    assert not private


class Fused(DecoderAttention):
    """As the page told before: one method that has another name now."""

    def make_projections(self, config, dtype):
        super().make_projections(config, dtype)
        size = (config.num_heads + 2 * config.kv_heads) * config.width
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


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_projection_of_its_own_is_enough_for_a_cache(devices):
    model = FusedDecoder(DecoderConfig(48, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2))
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
    model = Decoder(DecoderConfig(48, 16, 24, num_layers=1, num_heads=4), stacked=False)
    maxjax.init(model, jax.random.key(0))
    model.model.layers[0].self_attn.rope = "globl"
    with pytest.raises(
        UserInputError, match="'globl': it must be one of 'global', 'local', 'none'"
    ):
        model(np.zeros((1, 3), np.int32))


def test_the_family_is_under_100_lines():
    first = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    assert "register(" in first and len(first.splitlines()) < 100
