"""fill_mask, tag, classify and answer against the pipelines of transformers."""

import json

import jax
import numpy as np
import pytest

import maxjax
from maxjax import models
from maxjax.engine.answer import Answer
from maxjax.engine.fill_mask import FilledMask
from maxjax.engine.heads import _token_logits
from maxjax.engine.tag import Tag
from maxjax.errors import UserInputError
from tests.engine.head_models import KINDS, LABELS, MASKS, drawn_texts, write
from tests.fill import filled
from tests.models.parts.test_score import scored
from tests.oracles.recorded import FOLDER, recorded, transformers

TEXTS = ["The cat sat on Bob's mat.", "", "猫 and 🐱", *drawn_texts(30)]
AGGREGATIONS = ["none", "simple", "first", "average", "max"]
LONG = [" ".join(drawn_texts(12, seed=i)) for i in range(4)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A function from a kind, a head and settings to the directory, the model and the tokenizer."""
    kept = {}

    def of(kind, head, **more):
        key = (kind, head, json.dumps(more, sort_keys=True))
        if key not in kept:
            folder = write(kind, head, tmp_path_factory.mktemp("heads"), **more)
            kept[key] = folder, *maxjax.load(folder)
        return kept[key]

    return of


def pipeline(task, folder, **options):
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.pipeline(
        task, model=str(folder), tokenizer=tokenizer, device="cpu", **options
    )


# --- tag ------------------------------------------------------------------------------------------


def tags_of(folder, texts, aggregation, **options):
    """What the pipeline finds: its numbers as lists, which recorded answers hold."""
    run = pipeline("token-classification", folder, aggregation_strategy=aggregation, **options)
    key = "entity" if aggregation == "none" else "entity_group"
    return [
        [[t[key], float(t["score"]), t["start"], t["end"]] for t in run(text)] for text in texts
    ]


def assert_same_tags(found, expected, texts):
    assert len(found) == len(expected)
    for tags, theirs, text in zip(found, expected, texts, strict=True):
        assert [[t.label, t.start, t.end] for t in tags] == [[a, s, e] for a, _, s, e in theirs], (
            text
        )
        assert [t.text for t in tags] == [text[s:e] for _, _, s, e in theirs]
        np.testing.assert_allclose([t.score for t in tags], [b for _, b, _, _ in theirs], 1e-4)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_tags_are_those_of_transformers(loaded, kind, aggregation):
    folder, model, tokenizer = loaded(kind, "TokenClassification", labels=LABELS)
    expected = recorded(lambda: tags_of(folder, TEXTS, aggregation))
    assert sum(map(len, expected)) > 30
    assert_same_tags(maxjax.tag(model, tokenizer, TEXTS, aggregation=aggregation), expected, TEXTS)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_tags_of_many_texts_are_those_of_transformers(loaded, kind, aggregation):
    folder, model, tokenizer = loaded(kind, "TokenClassification", labels=LABELS)
    texts = drawn_texts(200, seed=1)
    expected = tags_of(folder, texts, aggregation)
    assert_same_tags(maxjax.tag(model, tokenizer, texts, aggregation=aggregation), expected, texts)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_long_texts_are_tagged_in_windows_as_by_transformers(loaded, kind, aggregation):
    folder, model, tokenizer = loaded(kind, "TokenClassification", labels=LABELS)
    expected = recorded(lambda: tags_of(folder, [*LONG, "the cat"], aggregation, stride=20))
    found = maxjax.tag(model, tokenizer, [*LONG, "the cat"], aggregation=aggregation, stride=20)
    assert max(tag.end for tags in found for tag in tags) > 250
    assert_same_tags(found, expected, [*LONG, "the cat"])


def test_labels_to_ignore(loaded):
    _, model, tokenizer = loaded("bert", "TokenClassification", labels=LABELS)
    every = maxjax.tag(model, tokenizer, TEXTS[0], ignore_labels=())
    some = maxjax.tag(model, tokenizer, TEXTS[0], ignore_labels=("O", "PER"))
    assert [t for t in every if t.label not in ("O", "PER")] == some
    assert every[0].start == 0 and every[-1].end == len(TEXTS[0])


def test_labels_to_ignore_are_checked(loaded):
    _, model, tokenizer = loaded("bert", "TokenClassification", labels=LABELS)
    for given, says in [
        ("LOC", r"ignore_labels must be a list of labels, such as \['O'\], not str"),
        (None, "ignore_labels must be a list of labels, .* not NoneType"),
        ([3], "ignore_labels has a int: each label must be a str"),
    ]:
        with pytest.raises(TypeError, match=says):
            maxjax.tag(model, tokenizer, "a", ignore_labels=given)
    says = r"ignore_labels has 'B-PER', which no span has \(labels: LOC, MISC, O, PER\)"
    with pytest.raises(UserInputError, match=says):
        maxjax.tag(model, tokenizer, "a", ignore_labels=["B-PER"])
    maxjax.tag(model, tokenizer, "a", ignore_labels={"B-PER"}, aggregation="none")
    with pytest.raises(UserInputError, match=r"'PER', which no span has \(labels: B-LOC, .*\)"):
        maxjax.tag(model, tokenizer, "a", ignore_labels=["PER"], aggregation="none")
    _, model, tokenizer = loaded("bert", "TokenClassification", labels=("name", "other"))
    assert maxjax.tag(model, tokenizer, "a", ignore_labels=["O"]) == maxjax.tag(
        model, tokenizer, "a"
    )


def test_invalid_arguments_of_tag(loaded):
    _, model, tokenizer = loaded("bert", "TokenClassification", labels=LABELS)
    with pytest.raises(
        UserInputError, match=r"texts\[1\] has \d+ tokens and the model takes 70: .*stride="
    ):
        maxjax.tag(model, tokenizer, ["a", LONG[0]])
    with pytest.raises(UserInputError, match="aggregation must be one of 'none', 'simple'"):
        maxjax.tag(model, tokenizer, "a", aggregation="mean")
    with pytest.raises(UserInputError, match="stride needs an aggregation"):
        maxjax.tag(model, tokenizer, "a", aggregation="none", stride=2)
    with pytest.raises(UserInputError, match="stride must be from 0 to 67, not 68"):
        maxjax.tag(model, tokenizer, "a", stride=68)
    with pytest.raises(TypeError, match="did you mean aggregation="):
        maxjax.tag(model, tokenizer, "a", aggregation_strategy="simple")


# --- fill_mask ------------------------------------------------------------------------------------


def masked(kind):
    mask = MASKS[KINDS[kind][1]]
    texts = [
        f"the cat {mask} on the mat",
        f"{mask} sat {mask}.",
        f"is it {mask} ?{mask} {mask}",
        mask,
    ]
    return texts + [f"{text} {mask}" for text in drawn_texts(12, seed=2)]


@pytest.mark.parametrize("kind", KINDS)
def test_filled_masks_are_those_of_transformers(loaded, kind):
    folder, model, tokenizer = loaded(kind, "MaskedLM")
    texts = masked(kind)

    def theirs():
        run = pipeline("fill-mask", folder, top_k=4)
        found = [run(text) for text in texts]
        rows = [row if isinstance(row[0], list) else [row] for row in found]
        keys = ("token_str", "score", "token", "sequence")
        return [[[[one[key] for key in keys] for one in mask] for mask in row] for row in rows]

    expected = recorded(theirs)
    found = maxjax.fill_mask(model, tokenizer, texts, top=4)
    assert [len(row) for row in found][:4] == [1, 2, 3, 1]
    for row, other in zip(found, expected, strict=True):
        for mask, wanted in zip(row, other, strict=True):
            assert [[m.token, m.token_id, m.sequence] for m in mask] == [
                [a, c, d] for a, _, c, d in wanted
            ]
            np.testing.assert_allclose([m.score for m in mask], [b for _, b, _, _ in wanted], 2e-4)


def test_only_the_logits_of_masks_are_computed(loaded):
    _, model, tokenizer = loaded("bert", "MaskedLM")
    from maxjax.engine.fill_mask import _best_tokens

    batch = tokenizer.batch(["the cat sat on the mat"] * 4)
    places = np.full((4, 1), 2, np.int32)
    text = _best_tokens.lower(model, (batch, places), top=2).as_text()
    assert "4x1x320x" in text and f"4x{batch.input_ids.shape[1]}x320x" not in text


def test_invalid_arguments_of_fill_mask(loaded):
    _, model, tokenizer = loaded("bert", "MaskedLM")
    with pytest.raises(UserInputError, match=r"texts\[1\].*\(\[MASK\]\)"):
        maxjax.fill_mask(model, tokenizer, ["[MASK]", "a"])
    with pytest.raises(
        UserInputError, match=r"texts\[0\] has \d+ tokens and the model takes 70: shorten it"
    ):
        maxjax.fill_mask(model, tokenizer, "[MASK]" + LONG[0])
    with pytest.raises(UserInputError, match="top=400 must be at most 320"):
        maxjax.fill_mask(model, tokenizer, "[MASK]", top=400)
    with pytest.raises(TypeError, match="did you mean top="):
        maxjax.fill_mask(model, tokenizer, "[MASK]", top_k=2)


# --- classify -------------------------------------------------------------------------------------

PROBLEMS = {
    "several": {"labels": ("bad", "good", "fine")},
    "single_label_classification": {"labels": ("bad", "good", "fine")},
    "multi_label_classification": {"labels": ("bad", "good", "fine")},
    "regression": {"labels": ("stars",)},
    "one": {"labels": ("good",)},
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_labels_of_texts_are_those_of_transformers(loaded, kind, problem):
    more = PROBLEMS[problem] | (
        {"problem_type": problem} if "_" in problem or problem == "regression" else {}
    )
    folder, model, tokenizer = loaded(kind, "SequenceClassification", **more)
    pairs = [(a[:20], b[:20]) for a, b in zip(TEXTS[3:9], TEXTS[9:15], strict=True)]

    def theirs():
        run = pipeline("text-classification", folder, top_k=None)
        found = run(TEXTS) + run([{"text": a, "text_pair": b} for a, b in pairs])
        return [[[one["label"], one["score"]] for one in row] for row in found]

    expected = recorded(theirs)
    found = maxjax.classify(model, tokenizer, TEXTS) + maxjax.classify(model, tokenizer, pairs)
    for row, wanted in zip(found, expected, strict=True):
        assert [one.label for one in row] == [label for label, _ in wanted]
        np.testing.assert_allclose([one.score for one in row], [b for _, b in wanted], 1e-4, 1e-5)


def test_options_of_classify(loaded):
    _, model, tokenizer = loaded("bert", "SequenceClassification", labels=("bad", "good", "fine"))
    whole = maxjax.classify(model, tokenizer, "The cat")
    assert sum(one.score for one in whole) == pytest.approx(1)
    assert maxjax.classify(model, tokenizer, ["The cat"], top=1) == [whole[:1]]
    alone = maxjax.classify(model, tokenizer, ("The cat", "sat"))
    assert maxjax.classify(model, tokenizer, [("The cat", "sat")]) == [alone] and alone != whole
    logits = maxjax.classify(model, tokenizer, "The cat", activation="linear")
    powers = np.exp([one.score for one in logits])
    np.testing.assert_allclose([one.score for one in whole], powers / powers.sum(), 1e-5)
    assert maxjax.classify(model, tokenizer, []) == []
    with pytest.raises(UserInputError, match="truncate=True"):
        maxjax.classify(model, tokenizer, LONG)
    assert len(maxjax.classify(model, tokenizer, LONG, truncate=True)) == 4
    with pytest.raises(TypeError, match="did you mean activation="):
        maxjax.classify(model, tokenizer, "a", function_to_apply="none")


def test_an_empty_second_text_is_one_text_as_in_transformers(loaded):
    folder, model, tokenizer = loaded(
        "bert", "SequenceClassification", labels=("bad", "good", "fine")
    )

    def theirs():
        run = pipeline("text-classification", folder, top_k=None)
        found = run({"text": "The cat", "text_pair": ""})
        return [[one["label"], one["score"]] for one in found]

    found = maxjax.classify(model, tokenizer, ("The cat", ""))
    expected = recorded(theirs)
    assert [one.label for one in found] == [label for label, _ in expected]
    np.testing.assert_allclose([one.score for one in found], [b for _, b in expected], 1e-4, 1e-5)
    assert found == maxjax.classify(model, tokenizer, "The cat")


def test_texts_and_pairs_in_one_list(loaded):
    _, model, tokenizer = loaded("bert", "SequenceClassification", labels=("bad", "good"))
    given = [("The cat", "sat"), "mat", ["is it?", "where"], ""]
    found = maxjax.classify(model, tokenizer, given)
    expected = [
        maxjax.classify(model, tokenizer, one) for one in (given[0], "mat", tuple(given[2]), "")
    ]
    for row, wanted in zip(found, expected, strict=True):
        assert [one.label for one in row] == [one.label for one in wanted]
        np.testing.assert_allclose([a.score for a in row], [b.score for b in wanted], 1e-4)


@pytest.mark.parametrize("texts, says", [
    (None, r"texts must be a list of texts or of pairs of texts, .* not NoneType"),
    (b"a", r"texts must be a list of texts or of pairs of texts, .* not bytes"),
    (np.array("a"), r"texts must be a list of texts or of pairs of texts, .* not ndarray"),
    ({"text": "Ada", "text_pair": "Bob"}, r"texts must be .* not dict: pass its text, or a tuple \(text, text_pair\)"),
    ([None], r"texts\[0\] is a NoneType, not a text or a pair of texts"),
    (["a", 3], r"texts\[1\] is a int, not a text or a pair of texts"),
    (["a", b"ab"], r"texts\[1\] is a bytes, not a text or a pair of texts"),
    ([("a", "b"), ["Bob"]], r"texts\[1\] has 1 items: it must be a text or a pair of texts"),
    (("a", "b", "c"), r"texts\[0\] has 3 items: it must be a text or a pair of texts"),
    (["a", {"text": "a", "text_pair": "b"}], r"texts\[1\] is a dict, .*a tuple \(text, text_pair\)"),
    ([("a", None)], r"texts\[0\]\[1\] is a NoneType, not a str"),
])  # fmt: skip
def test_what_classify_refuses(loaded, texts, says):
    _, model, tokenizer = loaded("bert", "SequenceClassification", labels=("bad", "good"))
    with pytest.raises(TypeError, match=says):
        maxjax.classify(model, tokenizer, texts)


# --- answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_impossible", [False, True])
def test_answers_are_those_of_transformers_4(loaded, kind, is_impossible):
    from tests.oracles.make_answers_golden import CASES

    with np.load(FOLDER / "answers.npz") as golden:
        expected = json.loads(golden[f"{kind} {is_impossible}"].tobytes())
    _, model, tokenizer = loaded(kind, "QuestionAnswering")
    questions, contexts = zip(*CASES, strict=True)
    found = maxjax.answer(
        model, tokenizer, questions, contexts, handle_impossible_answer=is_impossible
    )
    for one, (text, score, start, end), context in zip(found, expected, contexts, strict=True):
        assert (one.text, one.start, one.end) == (text, start, end)
        assert one.text == context[one.start : one.end]
        assert one.score == pytest.approx(score, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_without_tokens_has_no_answer(loaded, kind):
    _, model, tokenizer = loaded(kind, "QuestionAnswering")
    expected = maxjax.answer(model, tokenizer, "is it?", "the cat")
    none = Answer("", 0.0, 0, 0)
    found = maxjax.answer(model, tokenizer, ["is it?"] * 2, ["", "the cat"])
    assert found[0] == none and found[1][:1] + found[1][2:] == expected[:1] + expected[2:]
    assert maxjax.answer(model, tokenizer, "is it?", "") == none
    may = maxjax.answer(model, tokenizer, "is it?", "", handle_impossible_answer=True)
    assert may == Answer("", pytest.approx(1), 0, 0)
    if kind in ("bert", "distilbert"):  # elsewhere spaces are tokens
        assert maxjax.answer(model, tokenizer, "is it?", "  ") == none


def test_invalid_arguments_of_answer(loaded):
    _, model, tokenizer = loaded("bert", "QuestionAnswering")
    one = maxjax.answer(model, tokenizer, "is it?", "the cat")
    assert isinstance(one, Answer)
    assert maxjax.answer(model, tokenizer, ["is it?"], ["the cat"]) == [one]
    with pytest.raises(UserInputError, match="got 2 questions and 1 contexts"):
        maxjax.answer(model, tokenizer, ["a", "b"], ["c"])
    with pytest.raises(UserInputError, match="^question is empty"):
        maxjax.answer(model, tokenizer, "", "a")
    with pytest.raises(UserInputError, match=r"^question\[1\] is empty"):
        maxjax.answer(model, tokenizer, ["a", ""], ["b", "c"])
    with pytest.raises(UserInputError, match="pair 0 has"):
        maxjax.answer(model, tokenizer, LONG[0], "the cat")
    with pytest.raises(UserInputError, match="max_length=71.*70"):
        maxjax.answer(model, tokenizer, "a", "b", max_length=71)
    with pytest.raises(UserInputError, match="max_length.*4.*3"):
        maxjax.answer(model, tokenizer, "a", "b", max_length=3)
    with pytest.raises(UserInputError, match="stride must be an int, not '8'"):
        maxjax.answer(model, tokenizer, "a", "b", stride="8")
    with pytest.raises(
        UserInputError, match="stride must be from 0 to 16, not 17: max_length is 20"
    ):
        maxjax.answer(model, tokenizer, "a", "b", stride=17, max_length=20)
    with pytest.raises(TypeError, match="'top_k'.*max_answer_len"):
        maxjax.answer(model, tokenizer, "a", "b", top_k=2)
    with pytest.raises(TypeError, match="did you mean max_length="):
        maxjax.answer(model, tokenizer, "a", "b", max_seq_len=50)


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head, call", [
    ("MaskedLM", lambda *given: maxjax.fill_mask(*given, "the [MASK]")),
    ("TokenClassification", lambda *given: maxjax.tag(*given, "the cat")),
    ("SequenceClassification", lambda *given: maxjax.classify(*given, "the cat")),
    ("QuestionAnswering", lambda *given: maxjax.answer(*given, "is it?", "the cat")),
])  # fmt: skip
def test_a_model_with_another_head_is_refused(loaded, head, call):
    named = {
        "MaskedLM": "fill_mask", "TokenClassification": "tag", "SequenceClassification": "classify",
        "QuestionAnswering": "answer",
    }  # fmt: skip
    for other, name in named.items():
        _, model, tokenizer = loaded("bert", other)
        if other == head:
            with pytest.raises(UserInputError, match="needs a tokenizer"):
                call(model, None)
            continue
        with pytest.raises(UserInputError, match=rf"its head is for .*: use maxjax\.{name}"):
            call(model, tokenizer)
    with pytest.raises(UserInputError, match=r"it is a decoder: use maxjax\.generate"):
        call(*maxjax.load("tiny"))


@pytest.mark.parametrize("head, call", [
    ("MaskedLM", lambda *given: maxjax.fill_mask(*given)),
    ("TokenClassification", lambda *given: maxjax.tag(*given)),
    ("TokenClassification", lambda *given: maxjax.embed(*given)),
    ("SequenceClassification", lambda *given: maxjax.rerank(*given[:2], "is it?", given[2])),
    ("QuestionAnswering", lambda model, tokenizer, texts: maxjax.answer(model, tokenizer, texts, texts)),
])  # fmt: skip
def test_what_is_neither_a_text_nor_a_list_of_texts_is_refused(loaded, head, call):
    _, model, tokenizer = loaded("bert", head)
    of = r"(texts|question|documents)"
    for given, says in [
        ({"text": "Ada"}, rf"^{of} must be a list of str, not dict: pass its text"),
        (["a", {"text": "Ada"}], rf"^{of}\[1\] is a dict, not a str: pass its text"),
        (b"a", rf"^{of} must be a list of str, not bytes"),
        (np.array("Ada"), rf"^{of} must be a list of str, not ndarray"),
        (None, rf"^{of} must be a list of str, not NoneType"),
    ]:
        with pytest.raises(TypeError, match=says):
            call(model, tokenizer, given)


def test_the_calls_say_what_a_head_for_replaced_tokens_is(loaded):
    _, _, tokenizer = loaded("bert", "MaskedLM")
    config = models.ElectraConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40
    )  # fmt: skip
    model = filled(models.ElectraForPreTraining(config))
    for call in (maxjax.tag, maxjax.classify, maxjax.fill_mask):
        says = r"no head for .*; its head tells replaced tokens: model\(ids, mask\)\.logits"
        with pytest.raises(UserInputError, match=says):
            call(model, tokenizer, "the cat")
    output = model(np.array([[1, 2, 3]]), np.ones((1, 3), np.int32))
    assert output.logits.shape == (1, 3) and output.start_logits is None


def test_results_are_in_order_and_single_for_one_text(loaded):
    _, model, tokenizer = loaded("bert", "TokenClassification", labels=LABELS)
    every = maxjax.tag(model, tokenizer, TEXTS)
    assert isinstance(every[0][0], Tag)
    for i in (0, 1, 5):
        alone = maxjax.tag(model, tokenizer, TEXTS[i])
        assert [t[2:] for t in alone] == [t[2:] for t in every[i]]
        np.testing.assert_allclose([t.score for t in alone], [t.score for t in every[i]], 1e-4)
    assert maxjax.tag(model, tokenizer, []) == []
    assert every == maxjax.tag(model, tokenizer, (text for text in TEXTS))
    small = maxjax.tag(model, tokenizer, TEXTS, batch_size=2)
    assert [[t[2:] for t in row] for row in small] == [[t[2:] for t in row] for row in every]
    _, model, tokenizer = loaded("bert", "MaskedLM")
    assert isinstance(maxjax.fill_mask(model, tokenizer, "the [MASK]")[0][0], FilledMask)
    assert maxjax.fill_mask(model, tokenizer, []) == []


@pytest.mark.parametrize("head", ["MaskedLM", "TokenClassification", "QuestionAnswering"])
def test_on_a_mesh(loaded, head):
    folder, model, tokenizer = loaded("bert", head)
    texts = [f"{text} [MASK]" for text in TEXTS]
    calls = {
        "MaskedLM": lambda m: [[k.score for k in one[0]] for one in maxjax.fill_mask(m, tokenizer, texts)],
        "TokenClassification": lambda m: [
            [t.score for t in maxjax.tag(m, tokenizer, text, ignore_labels=())] for text in texts[:3]
        ],
        "QuestionAnswering": lambda m: [
            maxjax.answer(m, tokenizer, "is it?", text).score for text in texts[:3]
        ],
    }  # fmt: skip
    sharded, _ = maxjax.load(folder, mesh=jax.make_mesh((4, 2), ("data", "model")))
    for found, expected in zip(calls[head](sharded), calls[head](model), strict=True):
        np.testing.assert_allclose(found, expected, 1e-3)


def test_programs_are_compiled_once_for_each_shape(loaded):
    _, model, tokenizer = loaded("bert", "TokenClassification", labels=LABELS)
    maxjax.tag(model, tokenizer, ["the cat", "is it?", "on the mat"])
    before = _token_logits._cache_size()
    maxjax.tag(model, tokenizer, ["sat", "where is the cat?", "find it"])
    assert _token_logits._cache_size() == before


def test_dtype_and_capture(loaded):
    folder, model, tokenizer = loaded("bert", "TokenClassification", labels=LABELS)
    half, _ = maxjax.load(folder, dtype="bfloat16")
    found = maxjax.tag(half, tokenizer, TEXTS[:3], ignore_labels=(), aggregation="none")
    expected = maxjax.tag(model, tokenizer, TEXTS[:3], ignore_labels=(), aggregation="none")
    scores = [[tag.score for row in rows for tag in row] for rows in (found, expected)]
    np.testing.assert_allclose(*scores, atol=0.1)
    with maxjax.capture(model, "encoder.layer.*") as taken:
        again = maxjax.tag(model, tokenizer, TEXTS[:3], ignore_labels=(), aggregation="none")
    assert taken
    np.testing.assert_allclose([t.score for row in again for t in row], scores[1], 1e-4)


def test_a_decoder_classifies_as_in_transformers(tmp_path):
    folder = scored(tmp_path, 3)
    texts = [text for text in TEXTS[3:] if text.strip()]

    def theirs():
        found = pipeline("text-classification", folder, top_k=None)(texts)
        return [[[one["label"], one["score"]] for one in row] for row in found]

    found = maxjax.classify(*maxjax.load(folder), texts)
    for row, wanted in zip(found, recorded(theirs), strict=True):
        assert [one.label for one in row] == [label for label, _ in wanted]
        np.testing.assert_allclose([one.score for one in row], [b for _, b in wanted], 2e-3, 1e-4)
