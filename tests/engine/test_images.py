"""maxjax.embed and maxjax.classify for images: items of both kinds, batches, labels, files, and what is refused."""

import json
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

import maxjax
from maxjax.errors import UserInputError
from maxjax.images import ImageProcessor
from tests.models.vision.cases import FIRST, inputs, oracle_of

MEAN = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
SETTINGS = {
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 12, "width": 12}},
    "clip": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 12},
             "crop_size": {"height": 12, "width": 12}},
    "vit": {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}},
    "deit": {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}},
    "dinov2": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 16},
               "crop_size": {"height": 12, "width": 12}},
}  # fmt: skip
WORDS = {f"w{i}": i for i in range(40)} | {"<end>": 40}


def opened(folder, **options) -> Any:
    """The model, and its tokenizer or image processor."""
    return maxjax.load(folder, **options)


def saved(name, folder):
    """The files of a small model, its image processor and, if it has texts, a tokenizer of words."""
    oracle = oracle_of(*FIRST[name])
    oracle.save(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS[name] | MEAN))
    if name in ("siglip", "clip"):
        backend = Backend(models.WordLevel(WORDS, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.post_processor = processors.TemplateProcessing(
            "$A <end>", special_tokens=[("<end>", 40)]
        )
        backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w1"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((30, 20), (12, 12), (15, 40))]


@pytest.mark.parametrize("name", ["siglip", "clip"])
def test_texts_and_images_in_one_space(name, tmp_path, pictures):
    model, tokenizer = opened(saved(name, tmp_path / "a"))
    path = tmp_path / "one.png"
    Image.fromarray(pictures[0]).save(path)
    texts = ["w3 w4 w5", "w6"]
    items = [texts[0], pictures[1], {"type": "image", "image": str(path)}, path, {"type": "text", "text": texts[1]},
             Image.fromarray(pictures[2])]  # fmt: skip
    found = maxjax.embed(model, tokenizer, items, batch_size=2)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(found[2], found[3], atol=1e-6)
    pixels = tokenizer.images([pictures[i] for i in (1, 0, 2)]).pixels
    pad = 1 if model.pads_texts else 40  # what is behind the end of a text has no effect in CLIP
    ids = np.full((2, 9), pad, np.int32)
    ids[0, :4], ids[1, :2] = [3, 4, 5, 40], [6, 40]
    out = jax.jit(lambda m, a, b: m(a, b))(model, ids, pixels)
    np.testing.assert_allclose(found[[1, 2, 5]], out.image_embeds, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[[0, 4]], out.text_embeds, rtol=1e-4, atol=1e-5)
    # The cosines of the vectors are what the logits are made of.
    logits = model.logits_of(found[[1, 2, 5]] @ found[[0, 4]].T)
    np.testing.assert_allclose(logits, out.logits_per_image, rtol=1e-4, atol=1e-4)
    longer = maxjax.embed(model, tokenizer, items[:2], normalize=False)
    np.testing.assert_allclose(
        longer / np.linalg.norm(longer, axis=1, keepdims=True), found[:2], atol=1e-5
    )
    assert maxjax.embed(model, tokenizer, []).shape == (0, found.shape[1])
    assert maxjax.embed(model, tokenizer, items[:1], truncate_dim=5).shape == (1, 5)
    # On a mesh, and saved with its image processor.
    split, _ = opened(tmp_path / "a", mesh=maxjax.make_mesh(data=2, model=2))
    np.testing.assert_allclose(maxjax.embed(split, tokenizer, items), found, rtol=1e-4, atol=1e-5)
    maxjax.save_pretrained(model, tmp_path / "b", tokenizer=tokenizer)
    again, other = opened(tmp_path / "b")
    np.testing.assert_array_equal(maxjax.embed(again, other, items, batch_size=2), found)


def test_vectors_of_images_alone(tmp_path, pictures):
    model, processor = opened(saved("dinov2", tmp_path / "a"))
    assert isinstance(processor, ImageProcessor)
    found = maxjax.embed(model, processor, pictures, normalize=False)
    expected = model(processor(pictures).pixels).last_hidden_state[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    Image.fromarray(pictures[0]).save(tmp_path / "one.png")
    np.testing.assert_array_equal(
        maxjax.embed(model, processor, [str(tmp_path / "one.png")], normalize=False)[0],
        maxjax.embed(model, processor, pictures[:1], normalize=False)[0],
    )
    maxjax.save_pretrained(model, tmp_path / "b", tokenizer=processor)
    assert opened(tmp_path / "b")[1].to_dict() == processor.to_dict()


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2"])
def test_labels_of_images(name, tmp_path, pictures):
    folder = saved(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    names = ["ant", "bee", "cat", "dog", "elk"]
    (folder / "config.json").write_text(json.dumps(config | {"id2label": dict(enumerate(names))}))
    model, processor = opened(folder)
    found = maxjax.classify(model, processor, pictures, batch_size=2)
    logits = np.asarray(model(processor(pictures).pixels).logits, np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for scores, row in zip(found, expected, strict=True):
        assert [one.label for one in scores] == [names[i] for i in np.argsort(-row)]
        np.testing.assert_allclose([one.score for one in scores], np.sort(row)[::-1], rtol=1e-4)
    alone = maxjax.classify(model, processor, pictures[0], top=2)
    assert [one.label for one in alone] == [one.label for one in found[0][:2]]
    assert maxjax.classify(model, processor, []) == []


def test_what_is_refused(tmp_path, pictures):
    model, tokenizer = opened(saved("clip", tmp_path / "clip"))
    image = pictures[0]
    with pytest.raises(TypeError, match=r"\[image\]"):
        maxjax.embed(model, tokenizer, image)
    with pytest.raises(TypeError, match=r"items\[1\] is a int"):
        maxjax.embed(model, tokenizer, ["w1", 7])
    with pytest.raises(UserInputError, match=r"texts\[0\] has 11 tokens"):
        maxjax.embed(model, tokenizer, ["w5 " * 10])
    assert maxjax.embed(model, tokenizer, ["w5 " * 10], truncate=True).shape == (1, 20)
    with pytest.raises(UserInputError, match="pooling="):
        maxjax.embed(model, tokenizer, [image], pooling="mean")
    with pytest.raises(UserInputError, match="no head for labels"):
        maxjax.classify(model, tokenizer, image)
    with pytest.raises(UserInputError, match="capture"), maxjax.capture(model, "vision_model"):
        maxjax.embed(model, tokenizer, [image])
    tokenizer.images = None
    with pytest.raises(UserInputError, match="preprocessor_config.json"):
        maxjax.embed(model, tokenizer, [image])
    with pytest.raises(UserInputError, match="tokenizer.json"):
        maxjax.embed(model, None, ["w1"])
    oracle = oracle_of(*FIRST["clip-text"])
    oracle.save(tmp_path / "text")
    alone, _ = opened(tmp_path / "text")
    with pytest.raises(UserInputError, match="embeds texts alone"):
        maxjax.embed(alone, tokenizer, [image])
    assert inputs(oracle.config)[0] is None
