"""A decoder in MAX's style over a paged cache, against our own decoders of the same weights."""

import dataclasses

import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph.weights import WeightData
from maxjax.models import build
from tests.max_style import ragged

CONFIG = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
PAGE, LENGTHS, STEPS = 4, (7, 3), 2


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prompts_and_tokens_after_them_are_those_of_our_decoders(kind):
    params = ragged.cache_of(CONFIG, PAGE)
    model = ragged.decoder(CONFIG, params, qk_norm=kind == "qwen3")
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(name.endswith("norm.weight"), 0.3, [int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in model.raw_state_dict().items()
    }  # fmt: skip
    model.load_state_dict(weights)
    theirs = {
        ("" if name.startswith("lm_head") else "model.") + name: w for name, w in weights.items()
    }
    settings = CONFIG | {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"]}
    whole = build(theirs, settings)
    whole.load_state_dict(theirs)
    texts = [rng.integers(0, 40, n + STEPS) for n in LENGTHS]
    wanted = [np.asarray(whole(text[None]))[0] for text in texts]
    program = InferenceSession().load(ragged.graph_of(model), weights_registry=model.state_dict())
    # What was never written is no number: reading it is seen.
    pages = np.full((6, *params.shape_per_block), np.nan, np.float32)
    table = np.array([[4, 1, 2], [3, 0, 5]], np.uint32)
    done = [0, 0]
    for counts in (LENGTHS, *[(1, 1)] * STEPS):
        parts = [t[d : d + n] for t, d, n in zip(texts, done, counts, strict=True)]
        offsets = np.cumsum([0, *counts]).astype(np.uint32)
        last, logits, _, pages = program.execute(
            np.concatenate(parts), offsets, np.ones(1, np.int64), pages, np.array(done, np.uint32), table,
            np.array([max(counts)], np.uint32), np.array([max(done)], np.uint32),
        )  # fmt: skip
        want = [w[d : d + n] for w, d, n in zip(wanted, done, counts, strict=True)]
        np.testing.assert_allclose(logits.to_numpy(), np.concatenate(want), rtol=0, atol=2e-5)
        np.testing.assert_allclose(last.to_numpy(), [w[-1] for w in want], rtol=0, atol=2e-5)
        done = [d + n for d, n in zip(done, counts, strict=True)]


def test_an_adapter_replaces_fields_of_weights():
    data = WeightData.from_numpy(np.ones((2, 3), np.uint8), "old")
    new = dataclasses.replace(data, name="new", dtype=DType.float8_e8m0fnu)
    assert (new.name, new.dtype, new.shape) == ("new", DType.float8_e8m0fnu, data.shape)
    assert (data.name, new.data is data.data) == ("old", True)
