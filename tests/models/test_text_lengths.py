"""RoPE whose frequencies depend on the length of the text: LongRoPE and dynamic NTK.

A text has the tokens of transformers, however it is read: at once, in chunks, token by token, in the turns of a
conversation, beside other texts, on a mesh. The oracle is transformers' forward without a cache, for each length.
"""

import functools

import jax
import numpy as np
import pytest

import maxjax
from maxjax.errors import UserInputError
from maxjax.nn import KVCache
from tests.models.decoders import VOCAB, last, oracle, ours
from tests.models.families.cases import Case

BORDER, NEW, PAIRS = 24, 12, 4
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 9.0],
    "original_max_position_embeddings": BORDER,
}  # fmt: skip
SHORT = {"num_hidden_layers": 2}
MODELS = {
    "Llama": {**SHORT, "rope_parameters": LONG},
    "Phi3": {**SHORT, "rope_parameters": {**LONG, "type": "longrope"},
             "original_max_position_embeddings": BORDER, "sliding_window": 20},
    "Phimoe": {**SHORT, "num_local_experts": 4, "rope_parameters": {**LONG, "short_mscale": 1.2, "long_mscale": 1.2},
               "original_max_position_embeddings": BORDER},
    "dynamic": {**SHORT, "max_position_embeddings": BORDER,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
}  # fmt: skip


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """transformers' model of a name, and ours."""

    @functools.cache
    def made(name):
        place = tmp_path_factory.mktemp(name)
        kind = "Llama" if name == "dynamic" else name
        theirs = oracle(kind, place, file="models.test_text_lengths", **MODELS[name])
        return theirs, ours(place)

    return made


def expected(theirs, prompt, new, is_dynamic=False):
    return tuple(theirs.greedy(prompt, new, len(prompt) + new if is_dynamic else None))


def tokens(model, prompts, new=NEW, chunk=8):
    found = maxjax.generate(
        model, None, prompts, max_new_tokens=new, chunk=chunk, eos_ids=(), temperature=0.0
    )
    return [one.tokens for one in found]


@pytest.mark.parametrize("name", MODELS)
def test_each_row_of_a_batch_has_the_tokens_of_its_text_alone(models, name):
    """A row that grows beyond the border, one that is beyond it, one that ends just there, and a short one."""
    theirs, model = models(name)
    prompts = prompts_of(BORDER - 4, BORDER + 3, BORDER - NEW + 1, 5)
    is_dynamic = name == "dynamic"
    assert tokens(model, prompts) == [expected(theirs, p, NEW, is_dynamic) for p in prompts]
