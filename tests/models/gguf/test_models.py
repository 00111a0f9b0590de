"""GGUF files of small random models become Hugging Face's checkpoints again, of all architectures.

Oracles: transformers runs what we made of a file and gives the logits of the model that the file
was made of; where transformers reads GGUF itself, it finds the same values.
"""

import json
import zlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxjax.errors import CheckpointFormatError
from maxjax.graph.weights import load_weights
from maxjax.models.gguf import config_of, hf_config, hf_names, hf_tensors
from maxjax.storage.gguf.writer import plan_gguf
from maxjax.storage.save.outgoing import outgoing
from tests.models.gguf import files
from tests.oracles.models import ask_of, opened
from tests.oracles.recorded import recorded, torch, transformers

# What transformers 5 reads by itself, in the class it takes the architecture for.
READ_BY_TRANSFORMERS = ["llama", "llama-tied", "qwen2", "qwen2moe", "qwen3", "qwen3moe"]
READ_BY_TRANSFORMERS += ["gemma2", "gemma3", "gpt2"]


@pytest.fixture(scope="module", params=list(files.CASES))
def made(request, tmp_path_factory):
    """(case, model, its tensors, path of its GGUF file)."""
    directory = tmp_path_factory.mktemp("gguf")
    model = files.model(request.param)
    tensors = files.checkpoint(model, directory / "original")
    path = files.write(directory / "model.gguf", request.param, model, tensors)
    return request.param, model, tensors, path


def tables(path):
    """(configuration, tensors) as maxjax's tables have them."""
    metadata, stored = files.read(path)
    shapes = {name: values.shape for name, values in stored.items()}
    config = hf_config(metadata, shapes, divisors=stored, path=path)
    sources = hf_names(metadata["general.architecture"], shapes, metadata, path=path)
    tensors = {name: source.layout.apply(stored[source.tensor]) for name, source in sources.items()}
    return config, tensors, sources, stored


def run(model, length=12):
    ids = torch.tensor(np.random.default_rng(0).integers(3, 64, (2, length)))
    with torch.no_grad():
        out = model(ids)
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state).numpy()[..., ::4]


def checksums(tensors):
    """Name → a checksum of the shape and the values, in the order of the names."""
    return {
        name: [list(tensors[name].shape), zlib.crc32(np.ascontiguousarray(tensors[name]))]
        for name in sorted(tensors)
    }


def close(case):
    # 1 + w loses bits of w; all else is moved only.
    rounded = case.startswith("gemma")
    return {"rtol": 1e-4 if rounded else 0, "atol": 1e-5 if rounded else 0}


def test_the_tensors_are_those_of_the_checkpoint(made):
    case, _, original, path = made
    _, tensors, _, _ = tables(path)
    expected = {k: v for k, v in original.items() if not k.startswith("pooler.")}
    assert sorted(tensors) == sorted(expected)
    for name, values in expected.items():
        tolerance = 2e-7 if case.startswith("gemma") and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(tensors[name], values, rtol=0, atol=tolerance, err_msg=name)


def test_rows_and_change_give_what_apply_gives(made):
    _, _, _, path = made
    _, tensors, sources, stored = tables(path)
    for name, source in sources.items():
        values, layout = stored[source.tensor], source.layout
        assert layout.shape(values.shape) == tensors[name].shape
        if not layout.by_rows:
            continue
        wide = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values
        shape = tensors[name].shape
        count = int(np.prod(shape[:-1])) if len(shape) > 1 else shape[0]
        half = slice(count // 2, count)
        part = layout.change(wide[layout.rows(count)[half]])
        expected = tensors[name].reshape(count, *shape[-1:] * (len(shape) > 1))[half]
        np.testing.assert_array_equal(part, expected, err_msg=name)


def test_transformers_runs_what_we_made_of_the_file(made, tmp_path):
    case, model, _, path = made
    config, tensors, _, _ = tables(path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    contiguous = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    save_file(contiguous, tmp_path / "model.safetensors", {"format": "pt"})
    assert config["architectures"] == [model.kind]

    def again():
        found, info = opened(model.kind, tmp_path, output_loading_info=True)
        wrong = [*info["unexpected_keys"], *info["mismatched_keys"]]
        return [wrong, sorted(info["missing_keys"]), run(found)]

    wrong, missing, outputs = ask_of(tmp_path, "info and outputs", again)
    assert not wrong and all(key.startswith("pooler.") for key in missing)
    np.testing.assert_allclose(outputs, model.ask("outputs", run), **close(case))


@pytest.mark.parametrize("case", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_out_of_the_file(case, tmp_path):
    model = files.model(case)
    original = files.checkpoint(model, tmp_path / "original")
    path = files.write(tmp_path / "model.gguf", case, model, original, squeezed=True)

    def read_by_transformers():
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        oracle = files.model(case, seed=1).live()
        # As from_pretrained(gguf_file=...) does, which wants another package for it.
        state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=oracle)["tensors"]
        left = oracle.load_state_dict(state, strict=False)
        oracle.save_pretrained(tmp_path / "read")
        found = load_file(tmp_path / "read" / "model.safetensors")
        return [sorted(left.unexpected_keys), sorted(left.missing_keys), checksums(found)]

    unexpected, missing, found = recorded(read_by_transformers)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    assert ("lm_head.weight" in missing) == model.config.tie_word_embeddings
    _, tensors, _, _ = tables(path)
    assert checksums(tensors) == found


SHARED = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads".split()
SHARED += (
    "intermediate_size max_position_embeddings rms_norm_eps head_dim tie_word_embeddings".split()
)
SHARED += "num_experts num_experts_per_tok n_embd n_layer n_head layer_norm_epsilon".split()


@pytest.mark.parametrize("case", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_settings(case, tmp_path):
    model = files.model(case)
    original = files.checkpoint(model, tmp_path / "original")
    path = files.write(tmp_path / "model.gguf", case, model, original)
    config = tables(path)[0]

    def read_by_transformers():
        found = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
        settings = json.loads(found.to_json_string(use_diff=False))
        return {key: settings.get(key) for key in ("model_type", *SHARED)}

    oracle = recorded(read_by_transformers)
    assert config["model_type"] == oracle["model_type"]
    compared = [key for key in SHARED if key in config and oracle.get(key) is not None]
    assert len(compared) >= 5
    for key in compared:
        if key == "head_dim" and case in ("qwen2", "qwen2moe", "qwen3"):
            continue  # transformers leaves it at a default
        assert config[key] == pytest.approx(oracle[key], rel=1e-7), key


@pytest.mark.parametrize("case", ["qwen3moe", "qwen2moe"])
def test_experts_with_gate_and_up_in_one_tensor(case, tmp_path):
    model = files.model(case)
    original = files.checkpoint(model, tmp_path / "original")
    path = files.write(tmp_path / "model.gguf", case, model, original, fused=True)
    _, tensors, sources, _ = tables(path)
    assert any(source.tensor.endswith("ffn_gate_up_exps.weight") for source in sources.values())
    assert sorted(tensors) == sorted(original)
    for name, values in original.items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)


@pytest.mark.parametrize("case", ["llama", "llama-bias", "qwen2", "bert"])
def test_queries_keys_and_values_may_be_one_tensor(case, tmp_path):
    model = files.model(case)
    tensors = files.checkpoint(model, tmp_path / "original")
    plain, fused = (
        load_weights(files.write(tmp_path / f"{qkv}.gguf", case, model, tensors, qkv=qkv))
        for qkv in (False, True)
    )
    assert "blk.1.attn_qkv.weight" in fused and config_of(fused) == config_of(plain)
    expected, found = hf_tensors(plain), hf_tensors(fused)
    assert sorted(found) == sorted(expected)
    for name, data in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name].data), np.asarray(data.data), name)


def test_one_tensor_of_other_rows_than_the_heads(tmp_path):
    metadata = {
        "general.architecture": "qwen2",
        "qwen2.attention.head_count": 4,
        "qwen2.block_count": 1,
    }
    tensor = outgoing("blk.0.attn_qkv.weight", np.zeros((30, 8), np.float32))
    (tmp_path / "m.gguf").write_bytes(b"".join(plan_gguf(metadata, [tensor]).pieces()))
    with pytest.raises(CheckpointFormatError, match=r"attn_qkv.*4 \+ 4 \+ 4 heads.*30, 8"):
        hf_tensors(load_weights(tmp_path / "m.gguf"))


@pytest.mark.parametrize("case", ["llama", "qwen3moe"])
def test_weights_are_multiplied_by_their_scales(case, tmp_path):
    """As of NVFP4: a number for each weight, or for each expert; the scales of activations change nothing."""
    model = files.model(case)
    tensors = files.checkpoint(model, tmp_path / "original")
    plain = load_weights(files.write(tmp_path / "plain.gguf", case, model, tensors))
    out = []
    for name, place in plain.items():
        values = np.asarray(place.data().data)
        if values.ndim > 1 and name.startswith("blk.") and "gate_inp" not in name:
            by = np.float32([0.5, 2, 4, 0.25][: len(values) if values.ndim == 3 else 1])
            values = values / by.reshape(-1, *[1] * (values.ndim - 1))
            out += [outgoing(name.replace(".weight", ".scale"), by)]
            out += [outgoing(name.replace(".weight", ".input_scale"), np.float32([3]))]
        out.append(outgoing(name, values))
    path = tmp_path / "scaled.gguf"
    path.write_bytes(b"".join(plan_gguf(plain.metadata, out).pieces()))
    expected, found = hf_tensors(plain), hf_tensors(load_weights(path))
    assert sorted(found) == sorted(expected)
    for name, data in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name].data), np.asarray(data.data), name)
    scale = outgoing("blk.0.attn_q.scale", np.ones(2, np.float32))
    out = [scale if one.name == scale.name else one for one in out]
    path.write_bytes(b"".join(plan_gguf(plain.metadata, out).pieces()))
    with pytest.raises(CheckpointFormatError, match="attn_q.scale.*not one number"):
        hf_tensors(load_weights(path))
