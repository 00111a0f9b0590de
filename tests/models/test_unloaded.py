"""What a checkpoint holds besides the loaded model is saved with it, byte for byte: heads, towers, predicted tokens."""

import json
import os

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax.errors import CheckpointChangedError
from maxjax.models.bert import BertConfig, BertForMaskedLM, BertModel
from maxjax.models.deepseek import DeepseekV3, DeepseekV3Config
from maxjax.models.gemma4 import Gemma4, Gemma4Config
from maxjax.models.llama import Llama, LlamaConfig
from maxjax.models.qwen3 import Qwen3MoE, Qwen3MoEConfig

WEIGHTS = "model.safetensors"


def parts(*names):
    """Tensors that maxjax does not read, of a dtype of their own."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((3, 5)).astype(np.float16) for name in names}


def written(folder, model, config, named, more):
    """The files of a checkpoint: a model of ours under other names, and more tensors."""
    model = maxjax.init(model, jax.random.key(0))
    maxjax.save_pretrained(model, folder)
    raw = json.loads((folder / "config.json").read_text())
    tensors = {named(name): value for name, value in load_file(folder / WEIGHTS).items()}
    save_file({**tensors, **more}, folder / WEIGHTS, {"format": "pt"})
    (folder / "maxjax_digests.json").unlink()
    (folder / "config.json").write_text(json.dumps(config(raw)))
    return folder


def next_sentences(folder):
    """A BertForNextSentencePrediction."""
    model = BertModel(
        BertConfig(60, 16, 24, num_hidden_layers=1, num_attention_heads=2), pooler=False
    )
    more = parts("cls.seq_relationship.bias", "cls.seq_relationship.weight")
    config = lambda raw: {**raw, "architectures": ["BertForNextSentencePrediction"]}
    return written(folder, model, config, "bert.{}".format, more)


def choosing(folder):
    """A BertForMultipleChoice."""
    model = BertModel(
        BertConfig(60, 16, 24, num_hidden_layers=1, num_attention_heads=2), pooler=False
    )
    config = lambda raw: {**raw, "architectures": ["BertForMultipleChoice"]}
    return written(
        folder, model, config, "bert.{}".format, parts("classifier.weight", "classifier.bias")
    )


def pretrained(folder):
    """A BertForPreTraining, of which the head for masked words runs."""
    model = BertForMaskedLM(BertConfig(60, 16, 24, num_hidden_layers=1, num_attention_heads=2))
    config = lambda raw: {**raw, "architectures": ["BertForPreTraining"]}
    return written(folder, model, config, str, parts("cls.seq_relationship.bias"))


def seeing(folder, front="language_model.model.", head="language_model.lm_head."):
    """A ViP-LLaVA, whose tower maxjax does not have, in the names of old files or of new ones."""
    model = Llama(LlamaConfig(60, 16, 24, num_hidden_layers=2, num_attention_heads=2))
    whole = {
        "architectures": ["VipLlavaForConditionalGeneration"],
        "model_type": "vipllava",
        "image_token_index": 9,
    }
    config = lambda raw: {**whole, "text_config": raw, "vision_config": {"depth": 1}}
    named = lambda name: name.replace("lm_head.", head).replace(
        "model.", front, name.startswith("model.")
    )
    return written(
        folder, model, config, named, parts("vision_tower.a.weight", "multi_modal_projector.b")
    )


def predicting(folder):
    """A DeepSeek V3 with a layer that predicts the token after the next one."""
    config = DeepseekV3Config(
        60, 16, 24, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=6, q_lora_rank=4, qk_nope_head_dim=4,
        qk_rope_head_dim=2, v_head_dim=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=4,
        first_k_dense_replace=0, n_group=1, topk_group=1,
    )  # fmt: skip
    more = parts("model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight")
    return written(
        folder, DeepseekV3(config), lambda raw: raw | {"num_nextn_predict_layers": 1}, str, more
    )


def together(folder):
    """A Qwen3-VL-MoE, whose files hold the experts of a layer as one tensor ``[X, in, out]``."""
    config = Qwen3MoEConfig(
        60, 16, 24, num_hidden_layers=2, num_attention_heads=2, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=8, head_dim=8
    )  # fmt: skip
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    named = lambda name: name.replace("model.", "model.language_model.", name.startswith("model."))
    written(
        folder, Qwen3MoE(config), lambda raw: {**whole, "text_config": raw}, named, parts("model.visual.patch")
    )  # fmt: skip
    found = load_file(folder / WEIGHTS)
    for layer in range(2):
        front = f"model.language_model.layers.{layer}.mlp.experts"
        each = [
            [found.pop(f"{front}.{x}.{kind}_proj.weight") for kind in ("gate", "up", "down")]
            for x in range(6)
        ]
        found[f"{front}.gate_up_proj"] = np.stack([np.concatenate([g, u]).T for g, u, _ in each])
        found[f"{front}.down_proj"] = np.stack([np.ascontiguousarray(d.T) for _, _, d in each])
    save_file(
        {n: np.ascontiguousarray(v) for n, v in found.items()}, folder / WEIGHTS, {"format": "pt"}
    )
    return folder


def routed(folder):
    """A Gemma 4 with experts, whose files have the router in the layer."""
    config = Gemma4Config(
        60, 16, 24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        global_head_dim=16, layer_types=("sliding_attention", "full_attention"), sliding_window=8,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    )  # fmt: skip
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    named = lambda name: name.replace("model.", "model.language_model.", name.startswith("model."))
    more = parts("model.vision_tower.patch")
    return written(folder, Gemma4(config), lambda raw: {**whole, "text_config": raw}, named, more)


NEW = ("model.language_model.", "lm_head.")
KINDS = {
    "next sentences": next_sentences, "multiple choice": choosing, "pretrained": pretrained, "old names": seeing,
    "new names": lambda folder: seeing(folder, *NEW), "predicting": predicting, "experts together": together,
    "router": routed,
}  # fmt: skip


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_loaded_and_saved_checkpoint_is_the_same(tmp_path, make):
    source = make(tmp_path / "a")
    model, _ = maxjax.load(source)
    maxjax.save_pretrained(model, tmp_path / "b")
    first, second = (load_file(folder / WEIGHTS) for folder in (source, tmp_path / "b"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and value.tobytes() == second[name].tobytes(), name
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "b")
    ]
    assert configs[0] == configs[1]


def test_a_trained_text_model_is_saved_with_its_towers_where_it_was(tmp_path):
    source = seeing(tmp_path / "a")
    before = load_file(source / WEIGHTS)
    model, _ = maxjax.load(source)
    for factor in (2, 3):  # twice: the references are then to the files of the first save
        model = jax.tree.map(lambda x, by=factor: x * by, model)
        maxjax.save_pretrained(model, source)
    after = load_file(source / WEIGHTS)
    for name, value in before.items():
        factor = 1 if "vision" in name or "modal" in name else 6
        np.testing.assert_allclose(after[name], value * np.float32(factor), rtol=1e-6)


def test_another_dtype_is_that_of_the_model_alone(tmp_path):
    model, _ = maxjax.load(seeing(tmp_path / "a"))
    maxjax.save_pretrained(model, tmp_path / "b", dtype="float16")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["text_config"]["dtype"] == "float16" and "dtype" not in raw  # as in the file
    assert load_file(tmp_path / "b" / WEIGHTS)["language_model.lm_head.weight"].dtype == np.float16


@pytest.mark.parametrize("change", ["replaced", "gone", "touched"])
def test_a_checkpoint_that_has_changed_meanwhile(tmp_path, change):
    source = next_sentences(tmp_path / "a")
    model, _ = maxjax.load(source)
    if change == "gone":
        (source / WEIGHTS).unlink()
    elif change == "touched":
        os.utime(source / WEIGHTS, ns=(1, 1))
    else:
        next_sentences(source)
    with pytest.raises(CheckpointChangedError, match=r"2 tensors .*model\.unloaded = None"):
        maxjax.save_pretrained(model, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    model.unloaded = None
    maxjax.save_pretrained(model, tmp_path / "b")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["architectures"] == ["BertModel"]
    assert "cls.seq_relationship.bias" not in load_file(tmp_path / "b" / WEIGHTS)


def test_a_text_model_alone_has_no_default_of_the_multimodal_file(tmp_path):
    model, _ = maxjax.load(together(tmp_path / "a"))
    model.unloaded = None
    maxjax.save_pretrained(model, tmp_path / "b")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["num_experts"] == 6 and "num_local_experts" not in raw
    assert maxjax.load(tmp_path / "b")[0].config == model.config


def test_a_step_of_orbax_holds_the_model_alone(tmp_path):
    model, _ = maxjax.load(seeing(tmp_path / "a"))
    maxjax.checkpoint.save(tmp_path / "steps", model)
    again, _ = maxjax.load(tmp_path / "steps")
    assert again.unloaded is None and again.hf_config["architectures"] == ["LlamaForCausalLM"]


def test_a_file_without_a_dtype_gets_none(tmp_path):
    source = written(
        tmp_path / "a", Llama(LlamaConfig(60, 16, 24, num_hidden_layers=1, num_attention_heads=2)),
        lambda raw: {key: value for key, value in raw.items() if key != "dtype"}, str, {},
    )  # fmt: skip
    maxjax.save_pretrained(maxjax.load(source)[0], tmp_path / "b")
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "b")
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    "scales", [("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",), ("k_proj.output_scale",)]
)
def test_scales_of_a_cache_in_fp8_have_no_effect(tmp_path, scales, caplog):
    names = [f"model.layers.0.self_attn.{name}" for name in scales]
    config = LlamaConfig(60, 16, 24, num_hidden_layers=1, num_attention_heads=2)
    source = written(tmp_path / "a", Llama(config), dict, str, parts(*names))
    model, _ = maxjax.load(source)
    assert model.config == config and not caplog.records
    maxjax.save_pretrained(model, tmp_path / "b")
    assert load_file(tmp_path / "b" / WEIGHTS).keys() == load_file(source / WEIGHTS).keys()


BASES = {
    "Bert": {}, "Roberta": {"pad_token_id": 1}, "MPNet": {}, "Electra": {"embedding_size": 16}, "XLMRoberta": {},
    "Albert": {"embedding_size": 16}, "ModernBert": {"pad_token_id": 0}, "Camembert": {},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_attention_heads": 2}
LAYERS, DEPTH = {"num_hidden_layers": 1}, {"depth": 1, "out_hidden_size": 32}
SEEING = {
    "Qwen3VLMoe": ({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
                   DEPTH | {"deepstack_visual_indexes": [0]}),
    "Qwen3VL": ({}, DEPTH | {"deepstack_visual_indexes": [0]}),
    "Qwen2VL": ({}, {"depth": 1, "embed_dim": 16, "hidden_size": 32}),
    "Qwen2_5_VL": ({}, DEPTH), "Gemma3": ({}, LAYERS | {"image_size": 224, "patch_size": 14}),
    "Llava": ({}, LAYERS | {"image_size": 28}),
    "Mistral3": ({}, LAYERS), "Glm4v": ({}, DEPTH), "Lfm2Vl": ({}, LAYERS),
}  # fmt: skip


def same_by_transformers(made, folder):
    """Asserts that transformers opens a saved checkpoint as it does the one that it was loaded from."""
    made.save_pretrained(folder / "a")
    maxjax.save_pretrained(maxjax.load(folder / "a")[0], folder / "b")
    first, second = (load_file(folder / one / WEIGHTS) for one in "ab")
    assert first.keys() == second.keys()
    assert all(value.tobytes() == second[name].tobytes() for name, value in first.items())
    configs = [json.loads((folder / one / "config.json").read_text()) for one in "ab"]
    assert configs[0] == configs[1]
    _, told = type(made).from_pretrained(folder / "b", output_loading_info=True)
    assert not any(told.values())


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize(
    "head",
    [
        "MaskedLM",
        "TokenClassification",
        "QuestionAnswering",
        "SequenceClassification",
        "MultipleChoice",
    ],
)
@pytest.mark.parametrize("base", BASES)
def test_heads_of_encoders(tmp_path, base, head):
    import transformers

    config = getattr(transformers, f"{base}Config")(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
        max_position_embeddings=60, **BASES[base],
    )  # fmt: skip
    same_by_transformers(getattr(transformers, f"{base}For{head}")(config), tmp_path)


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("kind", SEEING)
def test_multimodal_models(tmp_path, kind):
    import transformers

    text, vision = SEEING[kind]
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")()
    text, vision = sizes | text, VISION | vision
    kinds = type(config.get_text_config()), type(config.vision_config)
    whole = type(config)(
        text_config=kinds[0](**text).to_dict(), vision_config=kinds[1](**vision).to_dict()
    )
    same_by_transformers(getattr(transformers, f"{kind}ForConditionalGeneration")(whole), tmp_path)
