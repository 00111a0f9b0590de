"""``mmproj`` files, written by the rules of llama.cpp's converter, give the models of Hugging Face's checkpoints."""

import json
import shutil

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata
from safetensors.numpy import load_file

import maxjax
from maxjax.checkpoint import convert
from maxjax.engine.pictures import Inputs, SeenPictures, placed_pictures
from maxjax.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.graph.weights import load_weights
from maxjax.images import ImageProcessor
from maxjax.models.gguf import config_of
from maxjax.models.gguf.metadata import Settings
from maxjax.models.gguf.mmproj import processor_settings
from maxjax.models.vision.idefics3 import Idefics3Vision
from maxjax.models.vision.qwen3_vl import Qwen3Vision
from tests.models.test_vision_language import FAMILIES, IMAGE, picture, prompt_of
from tests.models.test_vision_language import folders as folders

FILES = {
    "gemma3": ("gemma3", "<image_soft_token>"),
    "smolvlm": ("idefics3", "<image>"),
    "qwen2_5_vl": ("qwen2.5vl_merger", "<|image_pad|>"),
    "qwen3_vl": ("qwen3vl_merger", "<|image_pad|>"),
    "qwen3_5": ("qwen3vl_merger", "<|image_pad|>"),
}
PARTS = (
    "vision_tower.",
    "visual.",
    "multi_modal_projector.",
    "model.vision_model.",
    "model.connector.",
)
MEAN, STD = [0.5, 0.25, 0.75], [0.5, 0.5, 0.25]


# What files of Gemma 3 do not say is always so: every sixth layer has no window, and the scale is that of a head.
AS_IN_FILES = {"gemma3": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"] * 3}}


def write_text(folder, path, token):
    """Writes the text half with a vocabulary in which ``token`` stands for pictures."""
    plain = path.with_name("plain.gguf")
    convert(folder, plain)
    reader = gguf.GGUFReader(plain)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    tokens = [token if i == IMAGE else f"t{i}" for i in range(200)]
    array = MetadataDetails(gguf.GGUFValueType.ARRAY, tokens, sub_type=gguf.GGUFValueType.STRING)
    writer = gguf.GGUFWriter(path, arch=architecture)
    copy_with_new_metadata(reader, writer, {"tokenizer.ggml.tokens": array}, [])
    plain.unlink()


def write_mmproj(folder, path, family, **changes):
    """Writes the vision part; names are those of the map of the package gguf."""
    raw = json.loads((folder / "config.json").read_text())
    tower, width = raw["vision_config"], raw["text_config"]["hidden_size"]
    get = lambda *keys: next(tower[key] for key in keys if key in tower)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(changes.get("projector", FILES[family][0]))
    writer.add_vision_projection_dim(changes.get("width", width))
    depth = get("depth", "num_hidden_layers")
    writer.add_vision_block_count(depth)
    writer.add_vision_embedding_length(get("hidden_size"))
    writer.add_vision_feed_forward_length(get("intermediate_size"))
    writer.add_vision_head_count(get("num_heads", "num_attention_heads"))
    writer.add_vision_patch_size(get("patch_size"))
    writer.add_vision_image_size(tower.get("image_size", 560))
    writer.add_vision_image_mean(MEAN)
    writer.add_vision_image_std(STD)
    writer.add_vision_attention_layernorm_eps(1e-6)
    if family in ("gemma3", "smolvlm"):
        writer.add_vision_use_gelu(True)
        writer.add_vision_projector_scale_factor(2)
    if family == "qwen2_5_vl":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(tower["fullatt_block_indexes"][0] + 1)
        writer.add_uint32("clip.vision.window_size", tower["window_size"])
    if family in ("qwen3_vl", "qwen3_5"):
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(2)
        deep = tower.get("deepstack_visual_indexes", [])
        writer.add_vision_is_deepstack_layers([number in deep for number in range(depth)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, depth)
    for name, array in load_file(folder / "model.safetensors").items():
        # As in the published checkpoints.
        name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        if name.startswith(("vision_model.", "connector.")):
            name = f"model.{name}"
        if name.startswith(PARTS):
            for new, part in in_file(name, array, tower):
                wide = part.ndim == 1 or changes.get("dtype") is None
                part = np.ascontiguousarray(part if wide else part.astype(changes["dtype"]))
                new = names.get_name(new, (".weight", ".bias")) or new
                if changes.get("is_old"):
                    new = (
                        new.replace("ffn_up", "x")
                        .replace("ffn_down", "ffn_up")
                        .replace("x", "ffn_down")
                    )
                writer.add_tensor(new, part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_file(name, array, tower):
    """The parts of a tensor, by names that the map has or by those in the file."""
    if name.startswith("multi_modal_projector"):
        is_norm = "soft_emb_norm" in name
        return [(name.replace("_weight", ".weight"), array + 1 if is_norm else array)]
    if "patch_embed.proj.weight" in name:
        return [("v.patch_embd.weight", array[:, :, 0]), ("v.patch_embd.weight.1", array[:, :, 1])]
    if ".qkv." in name and "fullatt_block_indexes" in tower:
        parts = np.split(array, 3)
        return [(name.replace("qkv", one), part) for one, part in zip("qkv", parts, strict=True)]
    if name.startswith("visual.deepstack_merger_list."):
        *_, place, kind, suffix = name.split(".")
        kind = kind.replace("linear_", "")
        return [
            (f"v.deepstack.{tower['deepstack_visual_indexes'][int(place)]}.{kind}.{suffix}", array)
        ]
    if name.startswith("visual.merger.linear_fc"):
        number, suffix = name.removeprefix("visual.merger.linear_fc").split(".")
        return [(f"mm.{2 * int(number) - 2}.{suffix}", array)]
    if name.startswith("visual.merger.norm"):
        return [(f"v.post_ln.{name.rpartition('.')[2]}", array)]
    return [(name, array)]


@pytest.fixture(scope="module")
def pairs(folders, tmp_path_factory):
    """The folder of a family's checkpoint, and one with the two files of the same model."""
    made = {}

    def pair_of(family):
        if family not in made:
            source, path = (tmp_path_factory.mktemp(f"{family}-{name}") for name in ("hf", "gguf"))
            shutil.copytree(folders(family), source, dirs_exist_ok=True)
            raw = json.loads((source / "config.json").read_text())
            raw["text_config"] |= AS_IN_FILES.get(family, {})
            (source / "config.json").write_text(json.dumps(raw))
            write_text(source, path / "model.gguf", FILES[family][1])
            write_mmproj(source, path / "mmproj-model.gguf", family)
            made[family] = source, path
        return made[family]

    return pair_of


def logits(model, family):
    _, _, form, count = FAMILIES[family]
    ids, (inputs, _) = prompt_of(count), picture(form, count)
    pictures = placed_pictures(model, ids, [inputs], SeenPictures())
    args = Inputs.of([(pictures, 0, len(ids))], len(ids), model)._asdict()
    return np.asarray(model(jnp.array([ids]), **args)[0], np.float32)


@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        "qwen3_vl",
        *(
            pytest.param(one, marks=pytest.mark.extra)
            for one in ("smolvlm", "qwen2_5_vl", "qwen3_5")
        ),
    ],
)
def test_both_files_are_the_model(family, pairs, tmp_path):
    source, path = pairs(family)
    model, _ = maxjax.load(path / "model.gguf", tokenizer=False)
    expected, _ = maxjax.load(source)
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        # Gemma's norms are files' numbers less 1.
        error = 1e-6 if "norm" in name else 0
        np.testing.assert_allclose(found[name], array, rtol=0, atol=error, err_msg=name)
    assert model.vision.image_token == IMAGE and type(model.vision) is type(expected.vision)
    wanted = logits(expected, family)
    np.testing.assert_allclose(logits(model, family), wanted, atol=1e-4)
    maxjax.save_pretrained(model, tmp_path)
    saved, _ = maxjax.load(tmp_path)
    np.testing.assert_allclose(logits(saved, family), wanted, atol=1e-4)


@pytest.fixture
def text(pairs, tmp_path):
    """The file of the text half of a Gemma 3, alone in a directory."""
    return shutil.copy(pairs("gemma3")[1] / "model.gguf", tmp_path)


def test_files_of_2024_in_float16(pairs, text, tmp_path):
    """The maps of MLPs have each other's names there; the vision part is computed in float32, or as one says."""
    source, _ = pairs("gemma3")
    write_mmproj(source, tmp_path / "old.gguf", "gemma3", dtype=np.float16, is_old=True)
    model, _ = maxjax.load(text, mmproj=tmp_path / "old.gguf", tokenizer=False)
    vision, tensors = model.vision.raw_state_dict(), load_file(source / "model.safetensors")
    name = "vision_tower.encoder.layers.1.mlp.fc1.weight"
    wanted = next(array for one, array in tensors.items() if one.endswith(name)).astype(np.float16)
    np.testing.assert_array_equal(np.asarray(vision[name].value), wanted)
    assert model.vision.dtype == model.dtype == maxjax.DType.float32
    assert np.isfinite(logits(model, "gemma3")).all()
    options = {"mmproj": tmp_path / "old.gguf", "tokenizer": False, "dtype": "bfloat16"}
    model, _ = maxjax.load(text, **options)
    assert model.vision.raw_state_dict()[name].dtype == maxjax.DType.bfloat16


def test_the_image_processor(pairs):
    source, path = pairs("gemma3")
    with (
        load_weights(path / "model.gguf") as weights,
        load_weights(path / "mmproj-model.gguf") as part,
    ):
        settings = processor_settings(weights, part, config_of(weights, part))
    found = ImageProcessor.of(*settings)
    made = found(np.full((20, 30, 3), 255, np.uint8))
    assert made.pixels.shape == (1, 3, 16, 16) and made.counts.tolist() == [4]
    expected = (1 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    np.testing.assert_allclose(made.pixels[0, :, 3, 3], expected, rtol=1e-6)
    assert found.tokens.feature == FILES["gemma3"][1]


def test_the_image_processors_of_other_files():
    """Sizes that llama.cpp's converter writes for SmolVLM, and those of Qwen3-VL, which its files do not have."""
    given = Settings({"clip.vision.preproc_image_size": 2048}, "clip.vision.")
    config = {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4}
    found = ImageProcessor.of(*Idefics3Vision.gguf.processor(given, config))
    made = found(np.zeros((256, 512, 3), np.uint8))
    assert made.pixels.shape == (9, 3, 512, 512) and made.counts.tolist() == [9 * 64]
    tower = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    found = ImageProcessor.of(*Qwen3Vision.gguf.processor(given, {"vision_config": tower}))
    assert found(np.zeros((256, 512, 3), np.uint8)).counts.tolist() == [8 * 16]


def test_a_file_beside_it(pairs, text, tmp_path, caplog):
    """What fits is used; what does not is named, and the text half runs; of several, one must be named."""
    source, path = pairs("gemma3")
    load = lambda **more: maxjax.load(text, tokenizer=False, **more)[0]
    assert load().vision is None and not caplog.messages
    write_mmproj(source, tmp_path / "mmproj-audio.gguf", "gemma3", projector="ultravox")
    write_mmproj(source, tmp_path / "mmproj-other.gguf", "gemma3", width=48)
    assert load().vision is None
    assert "ultravox" in caplog.text and "mmproj-other.gguf" in caplog.text and "48" in caplog.text
    for name in ("mmproj-a.gguf", "b.mmproj.gguf"):
        shutil.copy(path / "mmproj-model.gguf", tmp_path / name)
    with pytest.raises(UserInputError, match=r"b.mmproj.gguf, mmproj-a.gguf"):
        load()
    assert load(vision=False).vision is None
    assert load(mmproj=tmp_path / "mmproj-a.gguf").vision is not None


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"projector": "ultravox"}, UnsupportedModelError, "ultravox"),
        ({"projector": "qwen3vl_merger"}, CheckpointMismatchError, "gemma3_text"),
        ({"width": 48}, CheckpointMismatchError, "projection_dim"),
    ],
)  # fmt: skip
def test_files_of_other_models(pairs, text, tmp_path, changes, error, says):
    write_mmproj(pairs("gemma3")[0], tmp_path / "other.gguf", "gemma3", **changes)
    with pytest.raises(error, match=says):
        maxjax.load(text, mmproj=tmp_path / "other.gguf", tokenizer=False)


def test_not_two_files(pairs, text, tmp_path):
    source, path = pairs("gemma3")
    with pytest.raises(UnsupportedModelError, match="without the file of its text half"):
        maxjax.load(path / "mmproj-model.gguf")
    with pytest.raises(CheckpointFormatError, match="not an mmproj file"):
        maxjax.load(text, mmproj=text)
    for given, more in ((source, {}), (text, {"vision": False})):
        with pytest.raises(UserInputError, match="mmproj="):
            maxjax.load(given, mmproj=path / "mmproj-model.gguf", **more)
    write_text(source, tmp_path / "text.gguf", "other")
    with pytest.raises(CheckpointFormatError, match="<image_soft_token>"):
        maxjax.load(tmp_path / "text.gguf", mmproj=path / "mmproj-model.gguf", tokenizer=False)
