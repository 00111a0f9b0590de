"""The registry of model families agrees with their files, and imports no other file."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import maxjax.models
from maxjax.errors import UserInputError
from maxjax.models import (
    BertForMaskedLM,
    BertModel,
    DebertaV2ForMaskedLM,
    Llama,
    LlamaConfig,
    Mistral,
    all_families,
    find_family,
    register,
    registry,
)
from maxjax.models.deberta_v2 import DebertaV3ForMaskedLM
from maxjax.models.gguf.table import GGUF_TABLES
from maxjax.models.registry import ENTRIES, gguf_architectures, gguf_of, of_gguf


@pytest.fixture(autouse=True)
def entries():
    before = dict(ENTRIES)
    yield
    ENTRIES.clear()
    ENTRIES.update(before)


def test_entries_have_the_names_of_their_families():
    for (key, entry), family in zip(ENTRIES.items(), all_families(), strict=True):
        names = entry.model_type, tuple(entry.architectures.split())
        assert names == (family.model_type, family.architectures), key
        if family.gguf is not None:
            assert entry.gguf.split()[:1] == [family.gguf.architecture]
    assert [gguf_of(name) for name in ("olmo3", "kimi_k2", "glm4_moe_lite")] == [
        "olmo2", "deepseek2", "deepseek2"
    ]  # fmt: skip
    assert all(GGUF_TABLES[name].architecture == name for name in gguf_architectures())


def test_each_file_with_a_model_is_listed():
    folder = Path(registry.__file__).parent
    files = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if re.search(r"^\w+ = \w+\.family = ", path.read_text(), re.M)
    }
    assert files == {key.rpartition(".")[0] for key in ENTRIES}


def test_names_of_the_package_are_the_classes():
    for file, names in registry.classes().items():
        for name in names.split():
            found = getattr(maxjax.models, name)
            assert (found.__name__, found.__module__) == (name, f"maxjax.models.{file}")


@pytest.mark.parametrize(
    "config, files",
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, {"llama"}),
        ({"model_type": "smollm3"}, {"smollm3"}),
        ({"architectures": ["LlamaForSequenceClassification"]}, {"llama"}),
        ({"model_type": "clip_vision_model"}, {"vision.clip"}),
    ],
)
def test_finding_a_family_imports_its_file_only(config, files):
    code = f"import sys, maxjax.models; maxjax.models.find_family({config}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(re.findall(r"maxjax\.models\.([\w.]+)\s", done.stdout))
    assert found & {key.rpartition(".")[0] for key in ENTRIES} == files


class MineConfig(LlamaConfig):
    model_type = "mine"


class Mine(Llama):
    pass


def test_a_model_class_is_registered_with_its_family():
    with pytest.raises(UserInputError, match="Mine has no family of its own"):
        register(Mine)
    Mine.family = Llama.family.like(Mine, MineConfig)
    assert register(Mine) is Mine
    assert find_family({"architectures": ["MineForCausalLM"]}) is Mine.family
    assert find_family({"model_type": "mine"}).config is MineConfig
    assert all_families()[-1] is Mine.family
    Mine.family = Llama.family.like(Mine, LlamaConfig, "LlamaForCausalLM")
    register(Mine)
    assert find_family({"model_type": "llama"}) is Mine.family
    assert gguf_of("llama") == "llama"


def test_a_registered_head_replaces_that_head_only():
    mine = replace(BertForMaskedLM.family)
    register(mine)
    assert find_family({"architectures": ["BertForMaskedLM"]}) is mine
    assert find_family({"architectures": ["BertForTokenClassification"]}) is not mine
    assert find_family({"model_type": "bert"}) is BertModel.family
    register(again := replace(mine))
    assert find_family({"architectures": ["BertForPreTraining"]}) is again
    base = replace(BertModel.family)
    register(base)
    assert find_family({"model_type": "bert"}) is base
    assert find_family({"architectures": ["BertForMaskedLM"]}) is again


def test_a_registered_variant_replaces_that_variant_only():
    variant, others = DebertaV3ForMaskedLM.family, replace(DebertaV2ForMaskedLM.family)
    register(others)
    config = {"architectures": ["DebertaV2ForMaskedLM"]}
    assert find_family(config) is others and find_family({**config, "legacy": False}) is variant
    register(mine := replace(variant))
    assert find_family(config) is others and find_family({**config, "legacy": False}) is mine


def test_of_registered_families_the_last_reads_gguf_files():
    mistral = replace(Mistral.family, gguf=Llama.family.gguf)
    for family in (mistral, Llama.family, mistral):
        register(mine := replace(family))
        assert of_gguf("llama") is mine
