"""Mistakes of a first session: each error says what is wrong and the call that works."""

import pytest

import maxjax
from maxjax.elsewhere import TOKENIZER_METHODS
from maxjax.errors import CheckpointMissingError, UserInputError


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny")


def test_a_prompt_in_place_of_the_tokenizer_is_named(tiny):
    for call in (maxjax.generate, lambda *given: next(maxjax.stream(*given))):
        with pytest.raises(TypeError, match="tokenizer is the second argument, the text the third"):
            call(tiny[0], "What is 1 + 2?")
    with pytest.raises(TypeError, match="prompts must be text, messages or token ids"):
        maxjax.generate(*tiny)


@pytest.mark.parametrize(
    ("message", "missing"),
    [({"role": "user"}, "'content'"), ({"content": "Hi"}, "'role'"), ({}, "'role' and 'content'")],
)
def test_a_message_without_role_or_content_is_refused(tiny, message, missing):
    with pytest.raises(UserInputError, match=rf"messages\[0\] without {missing}"):
        maxjax.generate(*tiny, [message])


def test_a_call_of_the_function_itself_needs_no_content(tiny):
    call = {"role": "assistant", "tool_calls": []}
    with pytest.raises(UserInputError, match="template"):  # that of tiny knows no calls
        maxjax.generate(*tiny, [{"role": "user", "content": "Hi"}, call | {"role": "tool"}])


def test_a_tokenizer_that_is_called_names_its_methods(tiny):
    with pytest.raises(TypeError, match=r"tokenizer.encode\(text\)"):
        tiny[1]("text")


@pytest.mark.parametrize(
    ("given", "meant"), [("q4km", "q4_k_m"), ("Q8-0", "q8_0"), ("q4k", "q4_k")]
)
def test_a_misspelled_quantisation_type_is_corrected(tiny, given, meant):
    with pytest.raises(UserInputError, match=f"did you mean '{meant}'"):
        maxjax.quantize(tiny[0], given)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_file_name_in_place_of_a_directory_is_refused(tiny, name, tmp_path):
    with pytest.raises(UserInputError, match="expected a directory"):
        maxjax.save_pretrained(tiny[0], tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("open_it", [maxjax.load, maxjax.load_weights, maxjax.plan])
def test_a_misspelled_name_of_the_model_in_the_package_is_corrected(open_it):
    with pytest.raises(CheckpointMissingError, match="Did you mean 'tiny'"):
        open_it("tinny")


def test_text_in_place_of_token_ids_is_refused(tiny):
    with pytest.raises(
        UserInputError, match=r"got text: maxjax.generate\(model, tokenizer, text\)"
    ):
        tiny[0]("hello")
    with pytest.raises(
        UserInputError, match=r"got int.. of shape \(2,\): put one sequence in brackets"
    ):
        tiny[0]([1, 2])


def test_methods_of_other_tokenizers_say_what_to_write(tiny):
    with pytest.raises(AttributeError, match=r"maxjax.apply_chat_template\(tokenizer, messages\)"):
        tiny[1].apply_chat_template([])
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        tiny[1].nothing
    assert not any(hasattr(tiny[1], name) for name in TOKENIZER_METHODS)
