"""Numbers of a configuration that no tensor holds: refused at once, by name, before they cost anything."""

import dataclasses
import json
import math
import time
import tracemalloc

import numpy as np
import pytest

from maxjax.checkpoint import convert
from maxjax.errors import CheckpointError, CheckpointMismatchError, UnsupportedModelError
from maxjax.graph.weights import load_weights
from maxjax.models import Gemma3, LlamaConfig, all_families, build
from maxjax.models.bounds import check_bounds
from maxjax.models.parts import LabelledConfig
from maxjax.models.parts.rotary import Rope
from maxjax.nn.rope_scaling import YarnScalingParams
from tests.models.decoders import oracle
from tests.models.families.cases import Case
from tests.models.families.cases import every as families
from tests.models.gguf import files as gguf_files

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
KINDS = {
    "llama": ("Llama", {}), "mistral": ("Mistral", {"sliding_window": 8}), "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}), "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", MOE), "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16}), "gemma3_text": ("Gemma3", {"head_dim": 16}),
    "gpt2": ("GPT2", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": ("Bert", {}),
}  # fmt: skip
KINDS |= {case.family: case for case in reversed(families()) if case.family not in KINDS}
# Encoders of texts, whose numbers are those of BERT, and of images, which tests/models/vision has.
ENCODERS = {
    family.model_type for family in all_families() if issubclass(family.config, LabelledConfig)
}
HOSTILE = [
    10**9, 2**31 - 1, 2**31, 2**63, 10**40, 10**400, -1, -(10**9), 0, True, 1.5, 1e300, math.nan,
    math.inf, -math.inf, "7", "x" * 1000, [], [7], {},
]  # fmt: skip
# Numbers that count nothing in a file, and cost nothing however large they are.
FREE = {
    "max_position_embeddings", "model_max_length", "sliding_window", "sliding_window_pattern", "local_attention",
    "attention_chunk_size", "moe_layer_start_index", "moe_layer_interval", "window_size", "n_positions",
    "max_relative_positions", "first_k_dense_replace", "moe_layer_end_index",
    "seq_length", "max_seq_len", "index_topk", "floor_scale", "eos_token_id", "image_size", "projection_dim",
}  # fmt: skip
# Of models whose layers all have experts, or that have one size for all; and what "per_layer_config" says.
UNUSED = {("qwen3_moe", "intermediate_size"), ("qwen3_5_moe_text", "intermediate_size")}
UNUSED |= {("qwen3_next", "intermediate_size"), ("qwen2_moe", "intermediate_size")}
UNUSED |= {("nemotron_h", "num_hidden_layers")}  # which the pattern of layers says
UNUSED |= {("nemotron_h", "intermediate_size")}
UNUSED |= {("lfm2", "intermediate_size")}  # from which its own is computed
UNUSED |= {("gemma4_text", key) for key in ("global_head_dim", "num_global_key_value_heads")}
# Which a file has in an object of their own.
UNUSED |= {("mpt", key) for key in ("clip_qkv", "softmax_scale", "alibi_bias_max")}
# Numbers that may be a list with one for each layer.
LISTS = {("hunyuan_v1_moe", key) for key in ("num_experts", "moe_topk", "num_experts_per_tok")}
# Lists that may be empty: no layer is an exception, or Llama 4's files leave the choice to the default.
EMPTY = {(name, "mlp_only_layers") for name in ("qwen2_moe", "qwen3_moe", "qwen3_next")}
EMPTY |= {("llama4_text", "moe_layers"), ("llama4_text", "no_rope_layers")}
SECONDS, BYTES = 5, 200_000_000  # 1 s on a machine that does nothing else


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            made[name] = folder = tmp_path_factory.mktemp(name)
            if isinstance(case := KINDS[name], Case):
                case.model(folder)
            elif case[0] == "Bert":
                gguf_files.model("bert").save(folder)
            else:
                oracle(case[0], folder, **case[1])
        return made[name], json.loads((made[name] / "config.json").read_text())

    return of


def fields_of(family):
    """(key, field) of each number that a file may say; other keys for it as well."""
    for field in dataclasses.fields(family.config):
        if not field.metadata.get("constant") and (
            "int" in str(field.type) or "float" in str(field.type)
        ):
            yield field.metadata.get("key") or field.name, field
            yield from ((name, field) for name in field.metadata.get("aliases", ()))


def refusal(weights, config):
    """What is raised; and it took no time and no memory."""
    tracemalloc.reset_peak()
    held, began, found = tracemalloc.get_traced_memory()[0], time.perf_counter(), None
    try:
        build(weights, config)
    except (CheckpointError, UnsupportedModelError) as error:
        found = error
    assert time.perf_counter() - began < SECONDS
    assert tracemalloc.get_traced_memory()[1] - held < BYTES
    return found


def check(checkpoints, name, values):
    family = next(family for family in all_families() if family.model_type == name)
    folder, config = checkpoints(name)
    weights = load_weights(folder)
    build(weights, config)
    tracemalloc.start()
    try:
        for key, field in fields_of(family):
            own = field.metadata.get("key") or field.name
            names = {own, *field.metadata.get("aliases", ())}
            spelled = {k: v for k, v in config.items() if k not in names}
            for value in values:
                error = refusal(weights, {**spelled, key: value})
                large = isinstance(value, int) and value >= 10**9
                unused = (name, key) in UNUSED
                if error is not None:
                    assert f"'{key}'" in str(error) or f"'{own}'" in str(error), error
                    assert len(str(error)) < 600
                if field.metadata.get("bounded_by") and large and not unused:
                    assert isinstance(error, CheckpointError), (key, value)
                elif isinstance(value, list) and (name, key) in LISTS:
                    continue
                elif value == [] and (name, key) in EMPTY:
                    assert error is None, (key, error)
                elif unused or key == "sliding_window":  # a family without one looks at none
                    continue
                elif (
                    value == -1 and field.metadata.get("minimum") == -1
                ):  # it stands for the last layer
                    continue
                elif isinstance(value, (str, list, dict)) or value in (-1, True, math.inf):
                    assert error is not None, (key, value)
                elif key not in FREE and large and "int" in str(field.type) and not unused:
                    assert error is not None, (key, value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("family", [one for one in all_families() if hasattr(one.config, "window")])
def test_a_sliding_window_may_be_longer_than_every_axis(family):
    check_bounds(family.config, {"sliding_window": 10**6}, {"model.layers.0.q.weight": (10**5, 8)})


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_hostile_numbers(checkpoints, name):
    check(checkpoints, name, [10**9, 2**63, math.nan])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", KINDS)
def test_hostile_numbers_of_every_family(checkpoints, name):
    """Each family some, so that each number is given to two families or more."""
    check(checkpoints, name, HOSTILE[list(KINDS).index(name) % 5 :: 5])


@pytest.mark.extra
@pytest.mark.parametrize("name", KINDS)
def test_all_hostile_numbers(checkpoints, name):
    check(checkpoints, name, HOSTILE)


def test_every_family_is_in_the_table():
    left = {"kimi_k2"}  # another name of deepseek_v3
    assert {family.model_type for family in all_families()} - left - ENCODERS | {"bert"} == set(
        KINDS
    )


def test_every_whole_number_counts_something_or_is_free():
    for family in all_families():
        for key, field in fields_of(family):
            if "int" in str(field.type) and key not in FREE:
                small = field.metadata["maximum"] <= 1000  # layers that share weights
                assert small or field.metadata["bounded_by"] in ("axis", "layers"), (family, key)


def test_the_message_has_the_field_the_value_and_what_is_there(checkpoints):
    folder, config = checkpoints("llama")
    with pytest.raises(CheckpointMismatchError) as caught:
        build(load_weights(folder), {**config, "head_dim": 10**9})
    for part in ("'head_dim'", "at most 96", "lm_head.weight", "1000000000"):
        assert part in str(caught.value)
    with pytest.raises(CheckpointMismatchError, match=r"'num_hidden_layers'.*at most 3.*found 900"):
        build(load_weights(folder), {**config, "num_hidden_layers": 900})


def test_the_numbers_of_a_text_config(checkpoints):
    folder, config = checkpoints("gemma3_text")
    text = {"text_config": {**config, "head_dim": 10**9}, "model_type": "gemma3"}
    text["architectures"] = ["Gemma3ForConditionalGeneration"]
    with pytest.raises(CheckpointMismatchError, match="'head_dim'"):
        build(load_weights(folder), text)
    assert isinstance(build(load_weights(folder), {**text, "text_config": config}), Gemma3)


def test_a_width_costs_nothing_without_a_file():
    tracemalloc.start()
    try:
        LlamaConfig(96, 32, 40, num_hidden_layers=1, num_attention_heads=4, head_dim=10**9)
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
    for width, reason in ((7, "must be even, not 7"),):
        with pytest.raises(ValueError, match=reason):
            Rope().check(width)
    with pytest.raises(ValueError, match="no valid frequencies"):
        Rope(1.0, YarnScalingParams(2.0, 32.0, 1.0, 64, True)).check(8)


@pytest.mark.parametrize(
    "key", ["head_dim", "num_attention_heads", "intermediate_size", "num_hidden_layers", "vocab_size"]
)  # fmt: skip
def test_conversion_to_gguf(checkpoints, tmp_path, key):
    folder, config = checkpoints("llama")
    rope = {**gguf_files.LLAMA3, "rope_type": "llama3"}
    weights = {name: np.asarray(place.data().data) for name, place in load_weights(folder).items()}
    np.savez(tmp_path / "w.npz", **weights)
    hostile = {**config, "rope_parameters": rope, key: 10**9 - 10**9 % 8}
    (tmp_path / "config.json").write_text(json.dumps(hostile))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            convert(tmp_path / "w.npz", tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "key",
    ["attention.key_length", "attention.head_count", "embedding_length", "feed_forward_length",
     "block_count"],
)  # fmt: skip
def test_metadata_of_gguf(checkpoints, tmp_path, key):
    folder, _ = checkpoints("llama")
    convert(folder, tmp_path / "x.gguf")
    weights = load_weights(tmp_path / "x.gguf")
    changes = {f"llama.{key}": 10**9}
    if key == "attention.key_length":
        changes |= {f"llama.{k}": 10**9 for k in ("attention.value_length", "rope.dimension_count")}
    weights._family.open_table().metadata.update(changes)
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
            build(weights)
        assert "1000000000" in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


def test_numbers_of_a_family_of_someone_elses_are_free():
    @dataclasses.dataclass(frozen=True)
    class Config(LlamaConfig):
        seed: int = 0

    check_bounds(Config, {"seed": 10**9, "vocab_size": 8}, {"a.0": (8, 8)})
    check_bounds(Config, {"vocab_size": 9}, {})
    with pytest.raises(CheckpointMismatchError, match="'vocab_size'"):
        check_bounds(Config, {"vocab_size": 9}, {"a.0": (8, 8)})
