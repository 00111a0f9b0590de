"""Small models that several files use."""

import pytest

import maxjax
from maxjax.models import Llama, LlamaConfig
from tests.fill import filled
from tests.models.decoders import VOCAB, one_character_each


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def small():
    """A Llama with VOCAB tokens, and its tokenizer of characters."""
    config = LlamaConfig(
        VOCAB, 16, 24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    return filled(Llama(config)), one_character_each()
