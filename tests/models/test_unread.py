"""Keys of a configuration that change results and that its family does not look at."""

import json
import logging
from pathlib import Path

import pytest

from maxjax.models import (
    DeepseekV2Config,
    Gemma3Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    SmolLM3Config,
    find_family,
    unread,
)
from maxjax.models.config import read_object
from tests.models.families.cases import every

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip


@pytest.fixture
def said(caplog):
    unread._told.clear()
    caplog.set_level(logging.WARNING, "maxjax")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "family, key, value",
    [
        (LlamaConfig, "clip_qkv", 8.0),
        (LlamaConfig, "logits_scaling", 8.0),
        (LlamaConfig, "residual_multiplier", 0.22),
        (LlamaConfig, "no_rope_layers", [1, 1, 0]),
        (LlamaConfig, "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        (Olmo2Config, "num_experts", 8),
        (GraniteConfig, "num_local_experts", 4),
    ],
)
def test_a_key_that_nobody_looks_at_is_named_once(said, family, key, value):
    for _ in range(2):
        family.from_dict({**SMALL, key: value})
    (line,) = said()
    assert f"'{key}'" in line and family.model_type in line


@pytest.mark.parametrize(
    "family, settings",
    [
        (LlamaConfig, {"pretraining_tp": 1, "attention_dropout": 0.0, "rope_interleaved": False}),
        (LlamaConfig, {"no_rope_layers": [1, 1, 1], "layer_types": ["full_attention"] * 3}),
        (LlamaConfig, {"clip_qkv": None, "logits_scaling": 1, "num_local_experts": 0}),
        (GraniteConfig, {"logits_scaling": 8.0, "residual_multiplier": 0.22}),
        (SmolLM3Config, {"no_rope_layers": [1, 1, 0]}),
        (DeepseekV2Config, {"rope_interleave": True, "q_lora_rank": 8}),
        (Gemma3Config, {"attn_logit_softcapping": 50.0}),  # transformers computes no cap either
    ],
)
def test_keys_that_are_looked_at_or_change_nothing_are_not(said, family, settings):
    family.from_dict({**SMALL, **settings})
    assert not said()


# config.json as published, of one model a line.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_no_such_key(said, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = read_object(tmp_path / "config.json")
    find_family(config).config.from_dict(config)
    assert not said()


def test_layers_alternate_as_published_where_no_list_says_so():
    seen = set()
    for name, config in PUBLISHED.items():
        text = config if "layer_types" in config else config.get("text_config", {})
        if (
            "layer_types" in text and "granite" not in text["model_type"]
        ):  # its layers have no order
            family = find_family(text)
            unsaid = {key: value for key, value in text.items() if key != "layer_types"}
            assert family.config.from_dict(unsaid) == family.config.from_dict(text), name
            seen.add(family.model_type)
    assert {"gpt_oss", "olmo3", "exaone4", "smollm3", "gemma3n_text", "qwen3_5_text"} <= seen


def test_files_of_transformers_have_no_such_key(said):
    """Whatever it writes for a family that there is, the family looks at it."""
    seen = set()
    for case in every():
        if case.family not in seen and not case.is_whole:
            seen.add(case.family)
            config = case.model().config.settings
            find_family(config).config.from_dict(config)
    assert len(seen) > 10 and not said()
