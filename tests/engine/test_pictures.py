"""Prompts with pictures: messages become tokens and features, in generate, a Conversation and an Engine."""

import base64
import io
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import maxjax
from maxjax.engine.pictures import Inputs, Pictures, PictureSpan, pictures_in
from maxjax.errors import UserInputError
from maxjax.images import ImageProcessor

PIL = pytest.importorskip("PIL.Image")
IMAGE = 7
RAW = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": IMAGE,
    "text_config": {
        "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 256,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 16,
    },
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
    "do_resize": True, "do_center_crop": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.5], "resample": 3, "do_convert_rgb": True,
    "processor_class": "LlavaProcessor",
}  # fmt: skip
PROCESSOR = {
    "processor_class": "LlavaProcessor", "patch_size": 4, "vision_feature_select_strategy": "default",
    "image_token": "<image>", "num_additional_image_tokens": 1,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llava"))


def write_model(path):
    """Writes a small LLaVA with its tokenizer and its image processor."""
    words = {f"w{i}": i for i in range(40) if i != IMAGE} | {"<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(path / "tokenizer.json"))
    files = {
        "config.json": RAW, "preprocessor_config.json": PREPROCESSOR, "processor_config.json": PROCESSOR,
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    }  # fmt: skip
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    tensors = {}
    draw = np.random.default_rng(0)
    for name, shape in shapes().items():
        tensors[name] = draw.normal(size=shape).astype(np.float32) * 0.2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def shapes():
    """The names and shapes of the tensors of the checkpoint."""
    from maxjax.models import Llama, LlamaConfig
    from maxjax.models.vision.llava import LlavaVision

    text = {key: value for key, value in RAW["text_config"].items() if key != "model_type"}
    config = LlamaConfig(**text)
    model = Llama(config, stacked=False)
    model.vision = LlavaVision(RAW, config, model.dtype)
    return {
        model.tensor_names.file_names(name)[0]: tuple(map(int, weight.shape))
        for name, weight in model.raw_state_dict().items()
    }


@pytest.fixture(scope="module")
def loaded(folder):
    return maxjax.load(folder)


def picture(seed=0, size=(20, 30)):
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (*size, 3), dtype=np.uint8)


def asked(item, text="w1 w2"):
    return [
        {
            "role": "user",
            "content": [{"type": "image", "image": item}, {"type": "text", "text": text}],
        }
    ]


OPTIONS = {"max_new_tokens": 6, "temperature": 0, "eos_ids": ()}


def test_each_form_of_a_picture_is_the_same(loaded, tmp_path):
    model, tokenizer = loaded
    array = picture()
    image = PIL.fromarray(array)
    image.save(tmp_path / "a.png")
    data = io.BytesIO()
    image.save(data, "png")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    forms = [asked(one) for one in (array, image, tmp_path / "a.png", str(tmp_path / "a.png"), url)]
    part = {"type": "image_url", "image_url": {"url": url}}
    forms.append([{"role": "user", "content": [part, {"type": "text", "text": "w1 w2"}]}])
    found = maxjax.generate(model, tokenizer, forms, **OPTIONS)
    assert len({one.tokens for one in found}) == 1
    other = maxjax.generate(model, tokenizer, asked(picture(1)), **OPTIONS, logprobs=1)
    first = maxjax.generate(model, tokenizer, asked(array), **OPTIONS, logprobs=1)
    assert first.logprobs[0].logprob != other.logprobs[0].logprob


def test_a_model_without_a_chat_template_may_have_a_form_of_its_prompts(folder):
    """PaliGemma's: the pictures, a first token, the texts, and the end of a line."""
    model, tokenizer = maxjax.load(folder)
    settings = {
        "image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16},
        "processor_class": "PaliGemmaProcessor", "image_seq_length": 16,
    }  # fmt: skip
    tokenizer.images = ImageProcessor.of(settings, tokenizer_config={"bos_token": " w3 "})
    tokenizer.chat_templates = {}
    parts = [{"type": "text", "text": "w1 w2"}, {"type": "image", "image": picture()}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": " w4"}]
    found = maxjax.generate(model, tokenizer, messages, **OPTIONS)
    assert list(found.prompt_tokens) == [IMAGE] * 16 + [3, 1, 2, 4]
    assert found.prompt.endswith("w4\n")
    with pytest.raises(UserInputError, match="no chat template"):
        maxjax.generate(model, tokenizer, [{"role": "user", "content": "w1"}], **OPTIONS)


def test_the_tokens_of_an_answer_are_in_no_block():
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=2, has_axes=False))
    at = np.array([0, 1, -1, -1], np.int32)
    rows = np.ones((2, 2), np.float32)
    whole = Pictures(rows, at, (PictureSpan(0, 4, b""),), blocks=at * 0)
    found = Inputs.of([(whole, 0, 6), (None, 0, 3), (whole, 2, 3)], 8, model)
    assert found.blocks.tolist() == [
        [0, 0, 0, 0, -1, -1, -1, -1],
        [-1] * 8,
        [0, 0, -1, -1, -1, -1, -1, -1],
    ]
    assert Inputs.of([(Pictures(rows, at, whole.spans), 0, 4)], 4, model).blocks is None


def test_the_prompt_is_what_the_model_gets_by_hand(loaded):
    model, tokenizer = loaded
    inputs = tokenizer.images(picture())
    assert inputs.counts.tolist() == [16]
    rows = jax.jit(lambda vision, pixels: vision(pixels))(model.vision, inputs.pixels)[0]
    ids = np.array([[*[IMAGE] * 16, 1, 2]])
    at = np.array([[*range(16), -1, -1]])
    logits = model(ids, features=rows, at=at)
    answer = maxjax.generate(model, tokenizer, asked(picture()), **OPTIONS)
    assert len(answer.prompt_tokens) == 18
    assert answer.tokens[0] == int(logits[0, -1].argmax())


def test_a_conversation_encodes_a_picture_once(loaded, monkeypatch):
    model, tokenizer = loaded
    calls = []
    usual = type(model.vision).encode
    monkeypatch.setattr(
        type(model.vision), "encode", lambda self, *args: calls.append(1) or usual(self, *args)
    )
    chat = maxjax.Conversation(model, tokenizer, **OPTIONS)
    for message in (asked(picture())[0], "w3 w4"):
        list(chat.say(message))
    assert len(calls) == 1
    again = maxjax.generate(model, tokenizer, chat.messages[:-1], **OPTIONS)
    assert chat.completion.tokens == again.tokens


def test_a_chat_with_a_picture_is_saved(loaded, tmp_path):
    """A path as it is; a picture that JSON does not have is refused by name."""
    PIL.fromarray(picture()).save(tmp_path / "a.png")
    chat = maxjax.Conversation(*loaded, asked(tmp_path / "a.png"), **OPTIONS)
    chat.save(tmp_path / "chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == asked(str(tmp_path / "a.png"))
    with pytest.raises(UserInputError, match="ndarray"):
        maxjax.Conversation(*loaded, asked(picture()), **OPTIONS).save(tmp_path / "chat.json")
    assert json.loads((tmp_path / "chat.json").read_text()) == saved


def test_several_pictures_in_an_engine(loaded):
    model, tokenizer = loaded
    two = asked(picture(), "w1") + asked(picture(1), "w2")
    prompts = [two, asked(picture()), "w5 w6"]
    alone = [maxjax.generate(model, tokenizer, one, **OPTIONS).tokens for one in prompts]
    with maxjax.Engine(model, tokenizer, slots=2, chunk=16) as engine:
        pending = [engine.submit(one, **OPTIONS) for one in prompts]
        assert [one.result().tokens for one in pending] == alone


def test_a_saved_model_takes_pictures(loaded, folder, tmp_path):
    model, tokenizer = loaded
    maxjax.save_pretrained(model, tmp_path, tokenizer=tokenizer)
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        one, other = (json.loads((at / name).read_text()) for at in (folder, tmp_path))
        assert one == other
    again = maxjax.load(tmp_path)
    found = [maxjax.generate(*one, asked(picture()), **OPTIONS).tokens for one in (loaded, again)]
    assert found[0] == found[1]


def test_what_is_not_supported_says_so(loaded, folder, tmp_path):
    model, tokenizer = loaded
    with pytest.raises(UserInputError, match="beam"):
        maxjax.generate(model, tokenizer, asked(picture()), num_beams=2, max_new_tokens=2)
    with pytest.raises(UserInputError, match="not fetched"):
        maxjax.generate(model, tokenizer, asked("https://example.org/a.png"), **OPTIONS)
    with pytest.raises(UserInputError):
        maxjax.generate(model, tokenizer, asked(str(tmp_path / "none.png")), **OPTIONS)
    text, _ = maxjax.load(folder, vision=False)
    with pytest.raises(UserInputError, match="takes text alone"):
        maxjax.generate(text, tokenizer, asked(picture()), **OPTIONS)
    draft = maxjax.load(folder, vision=False)[0]
    with pytest.raises(UserInputError, match="draft"):
        maxjax.generate(model, tokenizer, asked(picture()), draft=draft, **OPTIONS)
    with pytest.raises(UserInputError, match="placeholder"):  # the text has one more
        maxjax.generate(model, tokenizer, asked(picture(), "w1 <image>"), **OPTIONS)


def test_pictures_of_prompts():
    spans = (PictureSpan(2, 5, b"a"), PictureSpan(7, 9, b"b"))
    pictures = Pictures(
        np.zeros((5, 1)), np.zeros(10, np.int32), spans, blocks=np.zeros(10, np.int32)
    )
    assert [pictures.piece_end(0, n) for n in (1, 2, 3, 5, 8)] == [1, 2, 2, 5, 7]
    assert pictures.piece_end(2, 1) == 5  # the picture as a whole, though it is longer
    assert pictures.digest(0, 2) == b"" and pictures.digest(4, 8) == b"ab"
    assert pictures.common(None) == 2
    assert pictures.common(Pictures(pictures.rows, pictures.at, (spans[0],))) == 7
    assert pictures.common(pictures) == 10


def test_messages_without_pictures_stay_as_they_are():
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    assert pictures_in(messages) == (messages, [])
