"""The tokens of pictures in a text against transformers' processors, whose texts and token ids they equal."""

import importlib
import json
import sys
import types

import numpy as np
import pytest

from maxjax.errors import UserInputError
from maxjax.images import ImageProcessor
from maxjax.text.chat import apply_chat_template
from tests.images.pictures import PICTURES, photograph
from tests.images.test_kinds import CASES, NESTED, SCAN
from tests.oracles.recorded import recorded

IMAGES = [*(PICTURES[name] for name in ("portrait", "landscape", "page")), photograph(25, 150, 4)]
LLAVA = {
    "patch_size": 12,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}

# Case of test_kinds → class of the processor, and its settings.
FAMILIES = {
    "gemma3": ("Gemma3", {"image_seq_length": 5}),
    "gemma3 scanned": ("Gemma3", {"image_seq_length": 2}),
    "llava": ("Llava", {**LLAVA, "patch_size": 7}),
    "llava_next": ("LlavaNext", LLAVA),
    "llava_onevision": ("LlavaOnevision", {
        "num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"}),
    "idefics3": ("Idefics3", {"image_seq_len": 3}),
    "idefics3 whole": ("Idefics3", {"image_seq_len": 3}),
    "smolvlm": ("SmolVLM", {"image_seq_len": 2}),
    "pixtral": ("Pixtral", {"patch_size": 7, "spatial_merge_size": 2}),
    "qwen2_vl": ("Qwen2VL", {}),
    "qwen3_vl": ("Qwen3VL", {}),
}  # fmt: skip
MODULES = {
    "LlavaNext": "llava_next",
    "LlavaOnevision": "llava_onevision",
    "Qwen2VL": "qwen2_vl",
    "Qwen3VL": "qwen3_vl",
}
GEMMA = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}


def processor_of(case):
    stem, settings = CASES[case]
    name, outer = FAMILIES[case]
    return ImageProcessor.of(
        {"image_processor_type": f"{stem}ImageProcessor", **settings},
        {"processor_class": f"{name}Processor", **outer},
    )


def processor_class(name):
    module = MODULES.get(name, name.lower())
    if name == "Pixtral":  # its module imports one that needs torchvision
        stub = types.ModuleType("stub")
        stub.get_resize_output_image_size = None
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", stub)
    return getattr(
        importlib.import_module(f"transformers.models.{module}.processing_{module}"),
        f"{name}Processor",
    )


def image_processor(case, outer):
    return pil_processor(*CASES[case], outer)


def pil_processor(stem, settings, outer):
    """transformers' image processor on Pillow, as its processor with these settings calls it."""
    module = MODULES.get(stem, stem.lower())
    file = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    if stem == "Pixtral":  # as its processor says in each call
        settings = {**settings, "patch_size": outer["patch_size"] * outer["spatial_merge_size"]}
    if stem == "Gemma3":  # its processor's defaults for what the file leaves out
        settings = {"do_pan_and_scan": False, **settings}
    return getattr(file, f"{stem}ImageProcessorPil")(**settings)


def bare_processor(name, outer, images):
    """transformers' processor of texts with pictures, without a tokenizer and a processor of videos."""
    cls = processor_class(name)
    token = "[IMG]" if name == "Pixtral" else "<|image_pad|>" if "Qwen" in name else "<image>"
    made = cls.__new__(cls)
    made.__dict__ |= {
        "image_processor": images, "image_token": token, "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]", "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": "<global-img>", "global_image_token": "<global-img>", **outer,
    }  # fmt: skip
    if name == "Gemma3":
        features = GEMMA["image_token"] * outer["image_seq_length"]
        made.full_image_sequence = f"\n\n{GEMMA['boi_token']}{features}{GEMMA['eoi_token']}\n\n"
    if name == "PaliGemma":
        made.image_seq_length = images.image_seq_length
        made.tokenizer = types.SimpleNamespace(bos_token="<bos>")
    return made


def pil_inputs(name, images, pictures):
    """The arrays that transformers makes of the pictures of one prompt."""
    options = {"return_row_col_info": True} if name in ("Idefics3", "SmolVLM") else {}
    given = [one.transpose(2, 0, 1) for one in pictures]
    given = [given] if name in NESTED and len(given) > 1 else given
    return images(given, input_data_format="channels_first", return_tensors="np", **options)


def replaced(case):
    """What transformers writes for each picture, by the method of its processor."""
    name, outer = FAMILIES[case]
    images = image_processor(case, outer)
    made = bare_processor(name, outer, images)
    inputs = [pil_inputs(name, images, [image]) for image in IMAGES]
    return [made.replace_image_token(dict(one), 0) for one in inputs]


@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_of_a_picture_equal_transformers(case):
    processor = processor_of(case)
    texts = recorded(lambda: replaced(case))
    assert processor.tokens is not None
    place, feature = processor.tokens.placeholder, processor.tokens.feature
    each = [processor(image) for image in IMAGES]
    for inputs, text in zip(each, texts, strict=True):
        assert processor.expand(f"a{place}b", inputs) == f"a{text}b"
        assert inputs.counts.tolist() == [text.count(feature)]
    whole = processor.expand(place.join("abcde"), each)
    assert whole == "".join(f"{a}{t}" for a, t in zip("abcd", texts, strict=True)) + "e"
    if CASES[case][0] not in ("Pixtral", "LlavaOnevision"):  # these depend on the other pictures
        assert processor.expand(place.join("abcde"), processor(IMAGES)) == whole


def test_features_are_as_many_as_the_tiles_give():
    """Of families whose every tile has the same number of features."""
    for case, per_tile in (("gemma3 scanned", 2), ("idefics3", 3), ("smolvlm", 2)):
        for image in IMAGES:
            inputs = processor_of(case)(image)
            assert inputs.counts.tolist() == [per_tile * inputs.tiles[0]]
    inputs = processor_of("qwen2_vl")(IMAGES)
    assert (inputs.counts * 4).tolist() == inputs.tiles.tolist()


TOKENS = [
    *GEMMA.values(), "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip


def small_tokenizer(named):
    """A tokenizer of characters, with the tokens of pictures."""
    import tokenizers
    import transformers

    characters = sorted({chr(i) for i in range(32, 127)} | {"\n"})
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="?", pad_token="?", extra_special_tokens=named
    )
    made.add_tokens(TOKENS, special_tokens=True)
    return made


@pytest.mark.oracle
@pytest.mark.parametrize(
    "case", ["gemma3", "gemma3 scanned", "llava", "llava_next", "idefics3", "idefics3 whole"]
)
def test_ids_of_a_whole_prompt_equal_transformers(case):
    name, outer = FAMILIES[case]
    tokenizer = small_tokenizer(GEMMA if name == "Gemma3" else {})
    theirs = processor_class(name)(image_processor(case, outer), tokenizer, **outer)
    ours = processor_of(case)
    text = f"What is {theirs.image_token}, and {theirs.image_token}?\n"
    images = [image.transpose(2, 0, 1) for image in IMAGES[:2]]
    if CASES[case][0] in NESTED:
        images = [images]
    # A call of Gemma3Processor turns pan and scan off, whatever the settings of its image processor are.
    options = {key: value for key, value in CASES[case][1].items() if "pan_and_scan" in key}
    expected = theirs(images=images, text=[text], **options)["input_ids"]
    inputs = [ours(image) for image in IMAGES[:2]]
    assert tokenizer(ours.expand(text, inputs))["input_ids"] == expected[0]


# --- settings -----------------------------------------------------------------------------


def test_llava_with_the_processor_of_clip():
    """Files of LLaVA 1.5 name CLIP's image processor: what is written for a picture is the processor's matter."""
    processor = ImageProcessor.of(
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": 28,
        },
        {"processor_class": "LlavaProcessor", **LLAVA, "patch_size": 14},
    )
    inputs = processor(IMAGES[0])
    assert inputs.counts.tolist() == [4]
    assert processor.expand("<image>?", inputs) == "<image>" * 4 + "?"


def test_the_pictures_of_a_paligemma_come_first():
    """As PaliGemmaProcessor writes them, whatever the order of the messages' parts is."""
    settings = {
        "image_processor_type": "SiglipImageProcessor", "processor_class": "PaliGemmaProcessor", "size": 16,
    }  # fmt: skip
    with pytest.raises(UserInputError, match=r"preprocessor_config.json: 'image_seq_length'"):
        ImageProcessor.of(settings)
    settings |= {"image_seq_length": 3, "size": {"height": 16, "width": 16}}
    for processor in (
        ImageProcessor.of(settings),
        ImageProcessor.of(settings, {"image_processor": settings}),
    ):
        inputs = processor(IMAGES[:2])
        assert inputs.counts.tolist() == [3, 3]
        text = processor.expand("<image><image>caption en", inputs)
        assert text == "<image>" * 6 + "<bos>caption en\n"
        assert processor.expand("caption en", []) == "caption en"
        content = [{"type": "text", "text": "caption"}, {"type": "image"}]
        messages = [{"role": "user", "content": content}, {"role": "user", "content": " en"}]
        template = processor.tokens.template
        tokenizer = types.SimpleNamespace(chat_templates={}, special_tokens={})
        shown = apply_chat_template(tokenizer, messages, chat_template=template)
        assert shown == "<image>caption en"


def test_tokens_have_the_names_of_the_tokenizer(tmp_path):
    files = {
        "preprocessor_config": {"image_processor_type": "Gemma3ImageProcessor", "size": 28},
        "processor_config": {"processor_class": "Gemma3Processor", "image_seq_length": 2},
        "tokenizer_config": {
            "boi_token": {"content": "[boi]"},
            "extra_special_tokens": {"image_token": "[i]"},
        },
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    processor = ImageProcessor.in_folder(tmp_path)
    assert processor is not None
    inputs = processor(IMAGES[0])
    assert processor.expand("[boi]", inputs) == "\n\n[boi][i][i]<end_of_image>\n\n"
    assert inputs.counts.tolist() == [2]


def test_models_without_such_texts_have_no_counts():
    processor = ImageProcessor.of(
        {"image_processor_type": "SiglipImageProcessor", "processor_class": "Siglip2Processor"}
    )
    inputs = processor(IMAGES[0])
    assert inputs.counts.tolist() == [0] and processor.tokens is None
    with pytest.raises(UserInputError, match="'Siglip2Processor'"):
        processor.expand("<image>", inputs)


@pytest.mark.parametrize("text", ["no picture", "<image>", "<image><image><image>"])
def test_each_picture_needs_one_placeholder(text):
    processor = processor_of("llava")
    with pytest.raises(UserInputError, match="there are 2 pictures"):
        processor.expand(text, processor(IMAGES[:2]))
    with pytest.raises(UserInputError, match="there are 0 pictures"):
        processor.expand("<image>", [])


@pytest.mark.parametrize(
    ("name", "outer", "says"),
    [
        ("Llava", {}, "'patch_size'"),
        ("Llava", {"patch_size": 0}, "'patch_size'"),
        (
            "Llava",
            {"patch_size": 14, "vision_feature_select_strategy": "last"},
            "vision_feature_select_strategy",
        ),
        ("LlavaOnevision", {}, "'num_image_tokens'"),
        (
            "LlavaOnevision",
            {"num_image_tokens": 9, "vision_aspect_ratio": "pad"},
            "vision_aspect_ratio",
        ),
        ("Gemma3", {"image_seq_length": "many"}, "image_seq_length"),
        ("Idefics3", {"image_seq_len": 2**40}, "image_seq_len"),
        ("Pixtral", {"spatial_merge_size": -1}, "spatial_merge_size"),
    ],
)
def test_settings_of_a_processor_are_refused_by_their_key(name, outer, says):
    with pytest.raises(UserInputError, match=says):
        ImageProcessor.of(
            {"image_processor_type": f"{name}ImageProcessor"},
            {"processor_class": f"{name}Processor", **outer},
        )


def test_the_defaults_of_pan_and_scan_are_those_of_gemma3s_processor():
    """A file may only turn it on."""
    given = dict.fromkeys(SCAN) | {
        "do_pan_and_scan": True,
        "image_processor_type": "Gemma3ImageProcessor",
    }
    settings = ImageProcessor.of(given).settings
    assert settings.pan_and_scan_min_crop_size == 256 and settings.pan_and_scan_max_num_crops == 4
    assert settings.pan_and_scan_min_ratio_to_activate == 1.2
    assert np.array_equal(
        ImageProcessor.of({**given, "do_pan_and_scan": None})(IMAGES[3]).tiles, [1]
    )
