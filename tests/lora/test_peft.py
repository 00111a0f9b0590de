"""Adapters in PEFT's files: PEFT's own opened here, ours opened by PEFT, and what is refused."""

import contextlib
import fnmatch
import json
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax import lora, nn
from maxjax.errors import (
    CheckpointError,
    CheckpointMismatchError,
    UnsupportedModelError,
    UserInputError,
)
from tests.models import goldens
from tests.models.decoders import call
from tests.oracles.recorded import recorded

IDS = goldens.IDS
# Name → model of goldens, settings of PEFT's LoraConfig.
CASES = {
    "llama": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "patterns": ("llama", {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"], "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "one layer": ("qwen3", {
        "r": 4, "lora_alpha": 6, "target_modules": ["o_proj"], "layers_to_transform": [1], "lora_dropout": 0.1}),
    "gpt2": ("gpt2", {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "fan_in_fan_out": True}),
    "dora": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True}),
    "dora gpt2": ("gpt2", {
        "r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
    "table": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "v_proj"], "use_dora": True}),
    "tied table": ("gpt2", {
        "r": 2, "lora_alpha": 4, "target_modules": ["wte", "wpe", "c_attn"], "fan_in_fan_out": True}),
    "biases": ("gpt2", {
        "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "own biases": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
}  # fmt: skip

TRAINED = ("dora", "dora gpt2", "table", "tied table", "biases")


def base_of(name, folder):
    goldens.write(CASES[name][0], Path(folder))
    return Path(folder)


def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM


@contextlib.contextmanager
def unwarned():
    """What PEFT and transformers warn of each other's is not for these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def theirs(name):
    """PEFT's files of an adapter whose values are of their names, and the logits with it."""
    with unwarned():
        import peft
    import torch

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out, unwarned():
        base = quiet().from_pretrained(base_of(name, folder), attn_implementation="eager")
        model = peft.get_peft_model(base, peft.LoraConfig(**CASES[name][1])).eval()
        with torch.no_grad():
            for full, weight in model.named_parameters():
                if weight.requires_grad:
                    weight.copy_(torch.tensor(goldens.values(full, tuple(weight.shape), "") / 3))
            logits = model(torch.tensor(IDS).long()).logits.numpy()
        model.save_pretrained(out)
        files = {path.name: path.read_bytes() for path in Path(out).glob("adapter_*")}
        answer = {"files": files, "logits": logits}
        if name in TRAINED:
            model(torch.tensor(IDS).long()).logits.square().mean().backward()
            answer["gradients"] = {
                full.removeprefix("base_model.model.").replace(".default", ""): weight.grad.numpy()
                for full, weight in model.named_parameters()
                if weight.grad is not None
            }
    return answer


def opened(name, tmp_path):
    """The base model here, PEFT's adapter as a directory, and PEFT's logits."""
    answer = answer_of(name)
    model, path = written(answer, name, tmp_path)
    return model, path, answer["logits"]


def answer_of(name):
    return recorded(lambda: theirs(name), f"tests/lora/test_peft.py::{name}", is_compared=False)


def written(answer, name, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    for file, content in answer["files"].items():
        (tmp_path / "adapter" / file).write_bytes(content)
    model, _ = maxjax.load(base_of(name, tmp_path / "base"))
    return model, tmp_path / "adapter"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_of_peft_gives_its_logits(name, tmp_path):
    model, path, expected = opened(name, tmp_path)
    tuned = lora.load(model, path)
    plain, found = (np.asarray(call(one, jnp.asarray(IDS))) for one in (model, tuned))
    assert np.abs(plain - expected).max() > 0.05
    np.testing.assert_allclose(found, expected, atol=2e-5)
    # Written again: the tensors of PEFT, and settings that give the same adapters.
    again = lora.save(tmp_path / "again", tuned, base="base")
    ours, kept = (
        safetensors.numpy.load_file(p / "adapter_model.safetensors") for p in (again, path)
    )
    assert set(ours) == {n for n in kept if "lora_" in n or n.endswith(".bias")}
    for full, value in ours.items():
        np.testing.assert_array_equal(value, kept[full])
    np.testing.assert_array_equal(call(lora.load(model, again), jnp.asarray(IDS)), found)
    settings = json.loads((again / "adapter_config.json").read_text())
    assert settings["fan_in_fan_out"] == ("fan_in_fan_out" in CASES[name][1])
    assert settings["bias"] == CASES[name][1].get("bias", "none")
    assert settings["use_dora"] == ("use_dora" in CASES[name][1])
    assert settings["base_model_name_or_path"] == "base"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINED)
def test_the_gradients_of_peft_on_a_mesh_and_merged_its_logits(name, tmp_path):
    """The norms of DoRA are constants of a derivative, as in PEFT."""
    answer = answer_of(name)
    model, path = written(answer, name, tmp_path)
    tuned, ids = lora.load(model, path), jnp.asarray(IDS)
    if name == "tied table":
        with pytest.raises(UserInputError, match="one tied weight"):
            lora.merge(tuned)
        file = path / "adapter_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"ensure_weight_tying": True}))
        with pytest.raises(UnsupportedModelError, match="ensure_weight_tying=True"):
            lora.load(model, path)
    else:
        np.testing.assert_allclose(call(lora.merge(tuned), ids), answer["logits"], atol=2e-5)
    tuned.to(maxjax.make_mesh(model=2))
    patterns = ["*.lora_*", "*.bias"] if name == "biases" else ["*.lora_*"]
    trained, rest = maxjax.partition(tuned, patterns)

    def loss(trained, rest):
        logits = maxjax.merge(trained, rest)(ids)
        return jnp.square(logits).mean(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(trained, rest)
    np.testing.assert_allclose(logits, answer["logits"], atol=2e-5)
    gradients = gradient.raw_state_dict()
    is_trained = lambda full: any(fnmatch.fnmatch(full, one) for one in patterns)
    found = {n: np.asarray(w.value) for n, w in gradients.items() if is_trained(n)}
    short = lambda full: full.replace("vector.weight", "vector").replace(".base_layer", "")
    theirs = {short(full): value for full, value in answer["gradients"].items()}
    assert set(found) == set(theirs)
    for full, value in found.items():
        np.testing.assert_allclose(value, theirs[full], rtol=1e-3, atol=1e-5, err_msg=full)


@pytest.mark.oracle
@pytest.mark.parametrize("name", CASES)
def test_peft_opens_what_is_saved_here(name, tmp_path):
    with unwarned():
        peft = pytest.importorskip("peft")
    import torch

    model, path, expected = opened(name, tmp_path)
    out = lora.save(tmp_path / "out", lora.load(model, path))
    with unwarned(), torch.no_grad():
        base = quiet().from_pretrained(tmp_path / "base", attn_implementation="eager")
        found = peft.PeftModel.from_pretrained(base, str(out)).eval()
        logits = found(torch.tensor(IDS).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return opened("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"use_dora": True}, "a tensor is missing .* and use_dora"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"bias": "boft_only"}, "bias='boft_only' is not supported"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be"),
        ({"peft_type": "IA3"}, "type 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": "4"}, "rank 'r' must be"),
        ({"r": 3}, "another rank"),
        ({"lora_alpha": None}, "alpha 'lora_alpha' must be"),
        ({"rank_pattern": 1}, "must be objects"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"lora_alpha": 10**400}, "alpha 'lora_alpha' must be"),
        (
            {"alpha_pattern": {r"(q_proj|v_proj)\1": 1}},
            "'alpha_pattern' has .* back references are not",
        ),
        ({"rank_pattern": {"x)|((.+)+~": 1}}, "'rank_pattern' has the pattern .* unbalanced"),
        ({"rank_pattern": {"(?:(?:.{9}){99}){999}": 1}}, "'rank_pattern' .* too many parts"),
    ],
)
def test_settings_that_cannot_be_read_are_named(llama, tmp_path, setting, says):
    model, path, _ = llama
    config = json.loads((path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | setting))
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (path / "adapter_model.safetensors").read_bytes()
    )
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says):
        lora.load(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {n: v for n, v in t.items() if "0.self_attn.q_proj.lora_B" not in n}, "a tensor is missing"),
        (lambda t: t | {"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": np.ones(2, np.float32)},
         "no such LoRA weight .* not use_dora"),
        (lambda t: t | {"base_model.model.x.lora_other": np.ones(2, np.float32)}, "these tensors are not supported"),
        (lambda t: {n.replace("layers.1", "layers.7"): v for n, v in t.items()}, "not one of this model's"),
        (lambda t: {n: v[..., :-1] if "lora_A" in n else v for n, v in t.items()}, "shape"),
        (lambda t: {}, "no LoRA weights"),
        (lambda t: t | {"base_model.model.model.norm.weight": np.ones(24, np.float32)}, "copy of 'model.norm.weight'"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(llama, tmp_path, change, says):
    model, path, _ = llama
    tensors = change(safetensors.numpy.load_file(path / "adapter_model.safetensors"))
    (tmp_path / "adapter_config.json").write_bytes((path / "adapter_config.json").read_bytes())
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointMismatchError, match=says):
        lora.load(model, tmp_path)


def test_modules_to_save_replace_those_of_the_base_model(llama, tmp_path):
    model, path, _ = llama
    tensors = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    name, before = "lm_head.weight", np.asarray(model.lm_head.weight.value)
    head = np.random.default_rng(0).normal(size=before.shape).astype(np.float32)
    config = json.loads((path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config | {"modules_to_save": ["lm_head", "score"]})
    )
    file = tmp_path / "adapter_model.safetensors"
    safetensors.numpy.save_file(tensors | {f"base_model.model.{name}": head}, file)
    found = lora.load(model, tmp_path)
    np.testing.assert_array_equal(found.raw_state_dict()[name].value, head)
    np.testing.assert_array_equal(model.lm_head.weight.value, before)

    safetensors.numpy.save_file(tensors | {f"base_model.model.{name}": head[:-1]}, file)
    with pytest.raises(CheckpointMismatchError, match=r"lm_head\.weight"):
        lora.load(model, tmp_path)
    safetensors.numpy.save_file(tensors | {f"base_model.model.{name}": head}, file)
    values = {n: w.value for n, w in model.raw_state_dict().items() if n != name}
    tied = maxjax.models.build(values, model.hf_config | {"tie_word_embeddings": True})
    tied.load_state_dict(values)
    with pytest.raises(CheckpointMismatchError, match="one weight"):
        lora.load(tied, tmp_path)


def test_a_module_to_save_may_hold_others(llama, tmp_path):
    model, path, _ = llama
    tensors = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    tensors = {name: value for name, value in tensors.items() if "layers.1.mlp" not in name}
    config = json.loads((path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config | {"modules_to_save": ["layers.1.mlp"]})
    )
    name = "model.layers.1.mlp.up_proj.weight"
    trained = np.asarray(model.raw_state_dict()[name].value) + 1
    tensors |= {f"base_model.model.{name}": trained}
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    np.testing.assert_array_equal(lora.load(model, tmp_path).raw_state_dict()[name].value, trained)


def test_biases_of_modules_to_save_that_peft_writes_twice_load(tmp_path):
    model = maxjax.init(
        nn.Sequential([nn.Linear(4, 8), nn.Linear(8, 2, has_bias=True)]), jax.random.key(0)
    )
    lora.save(tmp_path, lora.add(model, "0", rank=2, key=jax.random.key(1)))
    file, front = tmp_path / "adapter_model.safetensors", "base_model.model.1."
    tensors, trained = safetensors.numpy.load_file(file), np.array([3, 4], np.float32)
    tensors |= {f"{front}bias": trained, f"{front}modules_to_save.bias": trained}
    tensors |= {f"{front}original_module.bias": np.asarray(model[1].bias.value)}
    safetensors.numpy.save_file(tensors, file)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings |= {"bias": "all", "modules_to_save": ["1"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    np.testing.assert_array_equal(lora.load(model, tmp_path)[1].bias.value, trained)


def test_an_adapter_for_classification_has_the_head_that_peft_asks_for(llama, tmp_path):
    model = llama[0]
    values = {n: w.value for n, w in model.raw_state_dict().items() if n != "lm_head.weight"}
    values["score.weight"] = np.ones((3, 24), np.float32)
    config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    scored = maxjax.models.build(values, model.hf_config | config)
    scored.load_state_dict(values)
    lora.save(tmp_path, lora.add(scored, "q_proj", rank=2, key=jax.random.key(0)))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    np.testing.assert_array_equal(tensors["base_model.model.score.weight"], values["score.weight"])
    lora.load(scored, tmp_path)


def test_settings_of_a_layer_whose_name_ends_another_name_are_written_for_it_alone(tmp_path):
    layers = nn.Sequential([nn.Linear(4, 4), nn.Sequential([nn.Linear(4, 4), nn.Linear(4, 4)])])
    model = maxjax.init(layers, jax.random.key(0))
    lora.save(tmp_path, lora.add(model, ["0", "1.1"], rank=2, key=jax.random.key(1)))
    (tmp_path / "maxjax_digests.json").unlink()
    file = tmp_path / "adapter_model.safetensors"
    tensors, front = safetensors.numpy.load_file(file), "base_model.model.0.lora_"
    tensors |= {f"{front}A.weight": np.ones((3, 4), np.float32)}
    safetensors.numpy.save_file(tensors | {f"{front}B.weight": np.ones((4, 3), np.float32)}, file)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == r"0|1\.0|1\.1"  # "1" would also be the inner Sequential
    settings |= {"rank_pattern": {"^0": 3}, "alpha_pattern": {"^0": 9}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    again = lora.save(tmp_path / "again", lora.load(model, tmp_path))
    kept = json.loads((again / "adapter_config.json").read_text())
    assert (kept["rank_pattern"], kept["alpha_pattern"]) == ({"^0": 3}, {"^0": 9})
    assert (
        lora.load(model, again)[1][0].lora.rank,
        lora.load(model, again)[0].lora.scale,
    ) == (2, 3)
