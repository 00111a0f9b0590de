"""Adapters of models whose modules in transformers have other names than their files, or other tensors."""

import copy
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax import lora
from maxjax.errors import CheckpointFormatError, CheckpointMismatchError
from maxjax.lora.peft import base_weights, table_of
from tests.lora.test_peft import unwarned
from tests.models import test_multimodal
from tests.models.decoders import SMALL, drawn, ids_of
from tests.models.families import cases
from tests.oracles.models import OracleModel, content, opened
from tests.oracles.recorded import recorded

_ENCODER = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "pad_token_id": 0}  # fmt: skip
_EXPERTS = {"num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Name → transformers' class of the model, its settings, settings of PEFT's LoraConfig.
CASES = {
    # The file calls the head "decoder", and what is before it "lm_head".
    "renamed head": ("ModernBertDecoderForCausalLM", {
        "num_hidden_layers": 2, "tie_word_embeddings": False, "local_attention": 8, **_SPECIAL},
        {"target_modules": ["Wqkv", "q_proj", "decoder", "lm_head.dense"], "modules_to_save": ["lm_head.norm"]}),
    # The file calls the head "embed_out", and the module "lm_head".
    "renamed module": ("GPTNeoXForCausalLM", {"num_hidden_layers": 1}, {
        "target_modules": ["query_key_value", "lm_head"], "bias": "lora_only"}),
    "renamed body": ("NemotronHForCausalLM", {
        "layer_types": ["mamba", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
        "n_groups": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8}, {
        "target_modules": r"model\.layers\.(0\.mixer\.in_proj|1\.mixer\.q_proj)"}),
    "router": ("Gemma4ForCausalLM", {
        "enable_moe_block": True, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 12,
        "hidden_size_per_layer_input": 0, "num_hidden_layers": 1, "layer_types": ["full_attention"],
        "global_head_dim": 12, "head_dim": 8}, {"target_modules": ["q_proj", "router.proj"]}),
    # The text model of a multimodal one, whose vision tower has layers of the same names.
    "inside": ("Mistral3ForConditionalGeneration", {}, {
        "target_modules": r"model\.language_model\.layers\..*\.(q_proj|down_proj)",
        "modules_to_save": ["language_model.norm"]}),
    # Tensors with all experts of a layer, which the file has one by one.
    "experts": ("MixtralForCausalLM", _EXPERTS, {"target_modules": ["q_proj"], "modules_to_save": ["experts"]}),
    "transposed experts": ("GptOssForCausalLM", {**_EXPERTS, "layer_types": ["full_attention"], "head_dim": 8}, {
        "target_modules": ["q_proj"], "modules_to_save": ["experts"], "bias": "all"}),
    # One layer here and in the file, two or three in transformers.
    "split with biases": ("GteForMaskedLM", _ENCODER, {
        "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"], "bias": "all"}),
    "split, some of three": ("NomicBertForMaskedLM", _ENCODER, {
        "target_modules": ["q_proj", "v_proj", "gate_proj"], "modules_to_save": ["layers.1.self_attn"],
        "layers_to_transform": [0], "use_rslora": True}),
    "split with norms": ("JinaEmbeddingsV3ForMaskedLM", _ENCODER, {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1"], "use_dora": True}),
}  # fmt: skip


def theirs(name):
    kind, settings, _ = CASES[name]
    if name == "inside":
        with tempfile.TemporaryDirectory() as directory:
            return test_multimodal.theirs(kind, Path(directory))
    config = kind.replace("ForCausalLM", "Config").replace("ForMaskedLM", "Config")
    config = config.replace("Gemma4", "Gemma4Text")
    settings = settings if "MaskedLM" in kind else {**SMALL, **settings}
    return OracleModel(kind, config, settings, draw=drawn, file="lora.peft_names")


def trained(name):
    """PEFT's files of an adapter with values of their names, and the logits with it."""

    def ask(model):
        with unwarned():
            import peft
        import torch

        base = copy.deepcopy(model)
        config = peft.LoraConfig(r=2, lora_alpha=4, **CASES[name][2])
        with tempfile.TemporaryDirectory() as out, unwarned(), torch.no_grad():
            made = peft.get_peft_model(base, config).eval()
            rng = np.random.default_rng(0)
            for weight in (one for one in made.parameters() if one.requires_grad):
                weight.add_(torch.tensor(rng.normal(0, 0.2, tuple(weight.shape))).float())
            logits = made(torch.tensor(IDS)).logits.numpy()
            made.save_pretrained(out)
            files = {path.name: path.read_bytes() for path in Path(out).glob("adapter_*")}
        return {"files": files, "logits": logits}

    made = theirs(name)
    answer = recorded(
        lambda: ask(made.live()), f"tests/lora/test_peft_names.py::{name}", is_compared=False
    )
    return made, answer


IDS = ids_of(2, 9).astype(np.int64) % 96


def run(model, ids=IDS):
    found = model(jnp.asarray(ids, jnp.int32))
    return np.asarray(getattr(found, "logits", found))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_adapters_of_peft_give_its_logits_and_are_written_with_its_names(name, tmp_path):
    made, answer = trained(name)
    made.save(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    for file, data in answer["files"].items():
        (tmp_path / "adapter" / file).write_bytes(data)
    model, _ = maxjax.load(tmp_path / "base")
    tuned = lora.load(model, tmp_path / "adapter")
    assert np.abs(run(model) - answer["logits"]).max() > 0.01
    np.testing.assert_allclose(run(tuned), answer["logits"], atol=1e-4)

    again = lora.save(tmp_path / "again", tuned)
    np.testing.assert_array_equal(run(lora.load(model, again)), run(tuned))
    ours, kept = (
        safetensors.numpy.load_file(p / "adapter_model.safetensors")
        for p in (again, tmp_path / "adapter")
    )
    if "split" not in name:
        assert set(ours) >= {n for n in kept if ".base_layer.weight" not in n}
        assert not [n for n in ours if n not in kept and ".lora_" in n]
        for full in kept.keys() & ours.keys():
            np.testing.assert_array_equal(ours[full], kept[full])

    def ask():
        with unwarned():
            import peft
        import torch

        with unwarned(), torch.no_grad():
            base = opened(made.kind, tmp_path / "base")
            found = peft.PeftModel.from_pretrained(base, str(again)).eval()
            return found(torch.tensor(IDS)).logits.numpy()

    key = f"tests/lora/test_peft_names.py::{name} {content(again)}"
    np.testing.assert_allclose(recorded(ask, key), answer["logits"], atol=1e-4)


def base(name, directory):
    theirs(name).save(directory)
    return maxjax.load(directory)[0]


def test_trained_experts_are_written_as_one_tensor_of_each_kind(tmp_path):
    model = base("experts", tmp_path / "base")
    tuned = lora.add(model, "q_proj", rank=2, key=jax.random.key(0))
    change, rest = maxjax.partition(tuned, ["*.lora_*", "*.experts.*"])
    tuned = maxjax.merge(jax.tree.map(lambda x: x + 1, change), rest)
    path = lora.save(tmp_path / "adapter", tuned)
    settings = json.loads((path / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["model.layers.0.mlp.experts"]
    tensors = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    front = "base_model.model.model.layers.0."
    experts = f"{front}mlp.experts."
    assert {n: v.shape for n, v in tensors.items() if "experts" in n} == {
        f"{experts}gate_up_proj": (3, 80, 32), f"{experts}down_proj": (3, 32, 40),
    }  # fmt: skip
    again = lora.load(model, path)
    for name, weight in again.raw_state_dict().items():
        np.testing.assert_array_equal(weight.value, tuned.raw_state_dict()[name].value)
    short = tensors | {f"{experts}down_proj": tensors[f"{experts}down_proj"][0]}
    safetensors.numpy.save_file(short, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointFormatError, match="not a stack of experts"):
        lora.load(model, path)


def without(tensors, *parts):
    return {name: one for name, one in tensors.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (lambda t: t, {"alpha_pattern": {"0.self_attn.q_proj": 3}}, "attention.qkv_proj.* different scales"),
        (lambda t: without(t, "q_proj.lora_m"), {}, "do not all have the tensors lora_A.weight, lora_B.weight"),
        (lambda t: without(t, "0.self_attn.q_proj"), {}, "do not all have an update, and use_dora"),
        (lambda t: {n: v[:-1] if "q_proj.lora_B" in n else v for n, v in t.items()}, {}, "different shapes"),
        (lambda t: t | {n.replace("layers.0.self_attn.q_proj", "encoder.layer.0.attention.qkv_proj"): v
                        for n, v in t.items() if ".0.self_attn.q_proj" in n}, {}, "of this layer and of its parts"),
        (lambda t: t | {"base_model.model.gte.layers.0.self_attn.q_proj.base_layer.bias": np.ones(16, np.float32)},
         {"bias": "lora_only"}, "not supported: base_model.*self_attn.q_proj.base_layer.bias"),
    ],
)  # fmt: skip
def test_updates_of_parts_that_are_none_of_the_whole_are_refused(change, settings, says, tmp_path):
    model = base("split with biases", tmp_path / "base")
    tuned = lora.add(model, "qkv_proj", rank=2, dora=True, key=jax.random.key(0))
    path = lora.save(tmp_path / "adapter", tuned)
    file = path / "adapter_model.safetensors"
    tensors = without(safetensors.numpy.load_file(file), "lm_head")
    assert sorted({n.split(".")[6] for n in tensors}) == ["k_proj", "q_proj", "v_proj"]
    safetensors.numpy.save_file(change(tensors), file)
    old = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(old | settings))
    with pytest.raises(CheckpointMismatchError, match=says):
        lora.load(model, path)


def test_code_beside_the_files_has_their_names(tmp_path):
    """A model that transformers does not know: its modules are those of the code that its files come with."""
    theirs("split with biases").save(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text()) | {
        "model_type": "new",
        "auto_map": {"AutoModel": "modeling--NewModel"},
    }
    file.write_text(json.dumps(config | {"architectures": ["NewForMaskedLM"]}))
    model, _ = maxjax.load(tmp_path / "base")
    path = lora.save(
        tmp_path / "adapter", lora.add(model, "qkv_proj", rank=2, key=jax.random.key(0))
    )
    names = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    assert "base_model.model.gte.encoder.layer.0.attention.qkv_proj.lora_A.weight" in names
    lora.load(model, path)


def families():
    found = {case.family: case for case in reversed(cases.every())}
    return [pytest.param(case, id=family) for family, case in sorted(found.items())]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", families())
def test_all_weights_have_names_in_the_modules_of_transformers(case, tmp_path):
    made = case.model(tmp_path)
    model, _ = maxjax.load(tmp_path)
    table = table_of(model)
    assert {
        one for name in model.raw_state_dict() for one in table.tensors_of(name)
    } <= made.shapes.keys()
    state = {name: np.zeros(shape) for name, shape in made.shapes.items()}
    found, others = base_weights(model, state)
    assert (found.keys(), others) == (model.raw_state_dict().keys(), [])
    assert all(
        found[n].shape == tuple(map(int, w.shape)) for n, w in model.raw_state_dict().items()
    )
