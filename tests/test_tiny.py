"""The model that the package contains: it is small, an ordinary checkpoint, and good at small sums."""

import itertools
import random
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

import maxjax
from maxjax.text.chat import apply_chat_template
from scripts import tiny_text, train_tiny
from tests.oracles.models import opened
from tests.oracles.recorded import recorded, torch, transformers

ROOT = Path(__file__).resolve().parent.parent
TINY = Path(str(files("maxjax"))) / "tiny"
TEXTS = (
    "What is 37 + 48?\n37 + 48 = 85<|endoftext|>",
    "What is thirty-seven plus forty-eight?\nthirty-seven plus forty-eight is eighty-five",
    "  Déjà vu:\t1234567890 — 東京, 👩‍🚀!\r\n\n <|pad|>x<|endoftext|>",
    "",
)


@pytest.fixture(scope="module")
def tiny():
    """The model with default arguments: in bfloat16, as it was measured."""
    return maxjax.load(TINY)


def theirs():
    """transformers' tokenizer of the model."""
    return transformers.AutoTokenizer.from_pretrained(TINY)


def completions(tiny, questions, new=28):
    model, tokenizer = tiny
    return maxjax.generate(model, tokenizer, questions, max_new_tokens=new, batch_size=125)


def share(tiny, turns):
    """The share of answers that are right and end with the end-of-text token."""
    found = completions(tiny, [turn.question for turn in turns])
    pairs = zip(found, turns, strict=True)
    return np.mean([(one.strip(), one.finish_reason) == (t.answer, "stop") for one, t in pairs])


# --- the directory --------------------------------------------------------------------------


def test_what_is_in_it():
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    found = {file.name: file.stat().st_size for file in TINY.iterdir()}
    assert found.keys() == wanted | {"tokenizer_config.json", "maxjax_digests.json"}
    assert sum(found.values()) <= 4_000_000


def test_how_large_it_is(tiny):
    weights = sum(leaf.size for leaf in jax.tree.leaves(tiny[0]))
    assert 1_000_000 <= weights <= 2_000_000


def test_logits_as_transformers():
    model, _ = maxjax.load(TINY, dtype="float32")
    ids = np.random.default_rng(0).integers(0, train_tiny.VOCABULARY, (2, 64)).astype(np.int32)

    def logits():  # of every 37th token
        with torch.no_grad():
            found = opened("LlamaForCausalLM", TINY)(torch.tensor(ids).long()).logits
        return found.numpy()[..., ::37].copy()

    expected = recorded(logits)
    assert np.std(expected) > 0.5
    found = np.asarray(jax.jit(lambda model: model(ids))(model))[..., ::37]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_as_transformers(tiny, text):
    ids = tiny[1].encode(text)
    assert ids == recorded(lambda: theirs()(text)["input_ids"])
    assert tiny[1].decode(ids, skip_special=False) == text
    assert recorded(lambda: theirs().decode(ids)) == text


def test_each_digit_is_a_token(tiny):
    assert len(tiny[1].encode("0123456789")) == 10


def test_chat_is_the_text_it_was_trained_on(tiny):
    messages = [
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "3 + 4 = 7"},
        {"role": "user", "content": "Thank you."},
    ]
    rendered = "What is 3 + 4?\n3 + 4 = 7<|endoftext|>Thank you.\n"
    options = {"tokenize": False, "add_generation_prompt": True}
    assert recorded(lambda: theirs().apply_chat_template(messages, **options)) == rendered
    assert apply_chat_template(tiny[1], messages) == rendered
    asked, answered = (tiny[1].encode(text) for text in ("What is 3 + 4?", "\n3 + 4 = 7"))
    assert tiny[1].encode(rendered)[: len(asked + answered)] == asked + answered


def test_chat_with_another_role(tiny):
    messages = [{"role": "system", "content": "Be brief."}]

    def refusal():
        with pytest.raises(Exception, match="roles user and assistant") as caught:
            theirs().apply_chat_template(messages, tokenize=False)
        return str(caught.value)

    with pytest.raises(maxjax.errors.UserInputError, match="roles user and assistant"):
        apply_chat_template(tiny[1], messages)
    assert "roles user and assistant" in recorded(refusal)


# --- the answers ----------------------------------------------------------------------------


def test_500_unseen_sums(tiny):
    assert share(tiny, train_tiny.questions(500)) >= 0.99


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sign", "words", "least"), [("-", False, 0.9), ("+", True, 0.9), ("-", True, 0.75)]
)
def test_200_other_unseen(tiny, sign, words, least):
    assert share(tiny, train_tiny.questions(200, sign=sign, words=words)) >= least


def test_the_sum_of_the_manual(tiny):
    """The sum is asked as a bare prompt, as a chat, and after other turns."""
    before = "Hello!\nHello! Ask me for a sum or a story.<|endoftext|>3 + 4\n3 + 4 = 7<|endoftext|>"
    question = "What is 37 + 48?"
    found = completions(tiny, [question, question + "\n", before + question + "\n"])
    assert [text.strip() for text in found] == ["37 + 48 = 85"] * 3
    assert [text.finish_reason for text in found] == ["stop"] * 3


def test_chat_of_several_turns(tiny):
    chat = maxjax.Conversation(*tiny)
    turns = train_tiny.questions(6)
    said = ["".join(chat.say(text)) for text in ("Hello!", *(turn.question for turn in turns))]
    assert said == ["Hello! Ask me for a sum or a story.", *(turn.answer for turn in turns)]


def test_talk(tiny):
    found = completions(tiny, ["Who are you?", "Tell me a story about a fox."], new=80)
    assert "tiny model of maxjax" in found[0] and "fox" in found[1]
    assert [text.finish_reason for text in found] == ["stop"] * 2


# --- what it was trained on -----------------------------------------------------------------

NUMBERS = {tiny_text.number_words(n): n for n in range(tiny_text.LARGEST + 1)}
PAIRS = (r"(\d+) *[-+] *(\d+)", r"Add (\d+) and (\d+)", r"add (\d+) to (\d+)",
         r"(\d+) (?:plus|minus|and|from|away from) (\d+)")  # fmt: skip
SPOKEN = r"([a-z-]+) (?:plus|minus) ([a-z-]+)"


def pairs(text):
    """The pairs of numbers that a text adds or subtracts, in whatever words."""
    for pattern in PAIRS:
        yield from ((int(a), int(b)) for a, b in re.findall(pattern, text))
    yield from ((NUMBERS[a], NUMBERS[b]) for a, b in re.findall(SPOKEN, text) if a in NUMBERS)


@pytest.mark.extra
def test_unseen_sums_are_in_no_turn():
    seen = set()
    for seed in (1, 2):  # the seeds of the training
        for turn in itertools.islice(tiny_text.turns(seed), 40_000):
            found = {pair for text in turn for pair in pairs(text)}
            assert not any(tiny_text.held_out(*pair) for pair in found), turn
            seen |= found
    unseen = {(s.a, s.b) for s in tiny_text.unseen("+")}
    assert (37, 48) in unseen and len(unseen) > 900
    assert not seen & unseen and len(seen | unseen) > 9_700  # the search covers nearly all pairs


def test_pairs_are_found_in_every_phrase():
    for sign, phrases in tiny_text.PHRASES.items():
        for phrase in phrases:
            turn = tiny_text.digits_turn(tiny_text.Sum(12, sign, 7), phrase)
            assert {tuple(sorted(p)) for text in turn for p in pairs(text)} >= {(7, 12)}, phrase
            assert {tuple(sorted(p)) for p in pairs(turn.question)} == {(7, 12)}, phrase
    turn = tiny_text.words_turn(tiny_text.Sum(12, "-", 7), "{a} {w} {b}")
    assert list(pairs(turn.question)) == [(12, 7)]


def test_questions_are_unseen_and_distinct():
    for sign, words in itertools.product("+-", (False, True)):
        turns = train_tiny.questions(500, sign=sign, words=words)
        assert len({turn.answer for turn in turns}) == 500
        for turn in turns:
            assert all(tiny_text.held_out(*pair) for pair in pairs(turn.question))


def test_answers_of_the_text_are_right():
    rng = random.Random(3)
    for _ in range(200):
        a, b, sign = rng.randint(0, 99), rng.randint(0, 99), rng.choice("+-")
        task = tiny_text.Sum(a, sign, b)
        value = a + b if sign == "+" else a - b
        assert tiny_text.digits_turn(task, "{a}").answer == f"{a} {sign} {b} = {value}"
        words = tiny_text.words_turn(task, "{a}").answer.split(" is ")[1]
        assert words == tiny_text.number_words(value)


def test_rows_hold_the_turns_one_after_the_other(tiny):
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    turns = list(itertools.islice(tiny_text.turns(1), 50))
    text = "".join(f"{q}\n{a}<|endoftext|>" if q else f"{a}<|endoftext|>" for q, a in turns)
    expected = tiny[1].encode(text)
    row = next(train_tiny.rows(backend, iter(turns), 200))
    assert row[0].tolist() == expected[:200]
    asked = tiny[1].encode(turns[0].question)
    assert row[1, : len(asked) + 1].tolist() == [0] * len(asked) + [1]


@pytest.mark.extra
def test_the_script_runs(tmp_path):
    """A few steps run, from text to a directory that loads, and the loss falls."""
    command = [sys.executable, str(ROOT / "scripts/train_tiny.py"), "--quick", "--out"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 1
    assert "of 500 unseen sums are right" in done.stdout.splitlines()[-1]
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in TINY.iterdir()}
