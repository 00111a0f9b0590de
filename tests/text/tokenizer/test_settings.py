"""Settings of tokenizer_config.json beside a tokenizer.json: as transformers applies them, or a warning."""

import inspect
import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from maxjax.text.tokenizer.tokenizer import load_tokenizer
from tests.models.gguf.tokenizer.tokenizer_files import TEKKEN, byte_level, sentencepiece
from tests.oracles.recorded import recorded, transformers

TEXTS = ["the Word  Café there", "  lead", " 漢字 it's", "don't . stop ,", "a[SEP]<|end|>the"]


LETTERS = sorted({letter for text in TEXTS for letter in text.lower() + text} - {" "})


def unigram():
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "▁", *LETTERS]
    made = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=3))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return json.loads(made.to_str())


def wordpiece():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.add_special_tokens(special)
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return json.loads(made.to_str())


NAMES = {f"{n}_token": f"[{n.upper()}]" for n in ("unk", "pad", "cls", "sep", "mask")}
PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
          "mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"}  # fmt: skip
ENDS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>")
SP = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def put(directory, document, settings, config=None):
    (directory / "tokenizer.json").write_text(json.dumps(document))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def answers(directory):
    """The ids that transformers finds."""
    return transformers.AutoTokenizer.from_pretrained(directory)(TEXTS)["input_ids"]


def found(directory):
    return [row.ids for row in load_tokenizer(directory).tokens(TEXTS)]


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2", "GPTNeoX"])
def test_a_space_before_texts_of_byte_level_tokenizers(tmp_path, kind):
    document = byte_level("qwen2" if kind == "Qwen2" else "gpt2")
    settings = {**ENDS, "tokenizer_class": f"{kind}TokenizerFast"}
    plain = found(put(tmp_path, document, settings))
    with_space = found(put(tmp_path, document, settings | {"add_prefix_space": True}))
    assert with_space != plain and with_space == recorded(lambda: answers(tmp_path))


@pytest.mark.parametrize("key", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
@pytest.mark.parametrize("kind", ["Bert", "MPNet"])
def test_normalisation_of_berts_tokenizers(tmp_path, kind, key):
    document = wordpiece()
    settings = {**NAMES, "tokenizer_class": f"{kind}Tokenizer"}
    plain = found(put(tmp_path, document, settings))
    changed = found(put(tmp_path, document, settings | {key: False}))
    assert changed != plain and changed == recorded(lambda: answers(tmp_path))


@pytest.mark.parametrize("kind", ["XLMRoberta", "Camembert", "Albert", "DebertaV2"])
def test_a_space_before_texts_of_unigram_tokenizers(tmp_path, kind):
    """Within the words: transformers makes the other steps anew, and not all of them are in this file."""
    settings = {**PIECES, "tokenizer_class": f"{kind}Tokenizer", "add_prefix_space": False}
    put(tmp_path, unigram(), settings)
    scheme = "first" if kind == "DebertaV2" else "never"
    made = json.loads(load_tokenizer(tmp_path).files()["tokenizer.json"])
    assert made["pre_tokenizer"]["prepend_scheme"] == made["decoder"]["prepend_scheme"] == scheme

    def theirs():
        made = json.loads(transformers.AutoTokenizer.from_pretrained(tmp_path)._tokenizer.to_str())
        steps = made["pre_tokenizer"].get("pretokenizers", [made["pre_tokenizer"]])
        return [step["prepend_scheme"] for step in steps if step["type"] == "Metaspace"]

    assert recorded(theirs) == [scheme]


# --- the expression of Mistral's tokenizers -----------------------------------------------------


def mistral(count):
    """A tokenizer of so many tokens, whose expression is not that of the model's tekken.json."""
    document = byte_level("llama3")
    document["model"]["vocab"] |= {f"<{i}>": i for i in range(501, count)}
    return document


OLD = {"model_type": "mistral3", "transformers_version": "4.50.0.dev0"}
FIX = {**ENDS, "tokenizer_class": "PreTrainedTokenizerFast", "fix_mistral_regex": True}


@pytest.mark.parametrize(
    ("settings", "config", "is_fixed"),
    [
        (FIX, OLD, True),
        (FIX, {"model_type": "mistral"}, True),
        (FIX | {"fix_mistral_regex": False}, OLD, False),
        (FIX, OLD | {"transformers_version": "5.0.0"}, False),
        (FIX, OLD | {"model_type": "llama"}, False),
    ],
)
def test_fix_mistral_regex(tmp_path, monkeypatch, settings, config, is_fixed):
    """transformers looks at more than 100,000 tokens; which of them no text has does not matter."""
    expected = recorded(lambda: answers(put(tmp_path, mistral(100_001), settings, config)))
    monkeypatch.setattr("maxjax.text.tokenizer.settings._MISTRAL_SIZE", 500)
    assert found(put(tmp_path, mistral(501), settings, config)) == expected
    made = json.loads(load_tokenizer(tmp_path).files()["tokenizer.json"])
    pattern = made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert (pattern == TEKKEN) is is_fixed


def test_small_vocabularies_and_files_alone_are_not_fixed(tmp_path, monkeypatch):
    plain = found(put(tmp_path, byte_level("llama3"), FIX, OLD))
    assert plain == recorded(lambda: answers(tmp_path))
    (tmp_path / "config.json").unlink()
    monkeypatch.setattr("maxjax.text.tokenizer.settings._MISTRAL_SIZE", 500)
    assert found(tmp_path) == plain


# --- all other settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "kind", "wrong", "right"),
    [
        (sentencepiece(), "Llama", {"legacy": False}, {"legacy": True}),
        (sentencepiece(), "LlamaFast", {"add_prefix_space": False}, {"add_prefix_space": True}),
        (sentencepiece(False), "Llama", {"add_prefix_space": True}, {"add_prefix_space": None}),
        (unigram(), "Albert", {"do_lower_case": True}, {"do_lower_case": False}),
        (unigram(), "Albert", {"keep_accents": False}, {"keep_accents": True}),
        (unigram(), "DebertaV2", {"split_by_punct": True}, {"split_by_punct": False}),
        (byte_level("llama3"), "Llama", {}, {"legacy": False, "add_prefix_space": False}),
    ],
)
def test_settings_that_are_not_applied_are_told_of(tmp_path, caplog, document, kind, wrong, right):
    name = {"tokenizer_class": f"{kind.removesuffix('Fast')}Tokenizer{'Fast' * ('Fast' in kind)}"}
    load_tokenizer(put(tmp_path, document, name | right))
    assert "is not applied" not in caplog.text
    load_tokenizer(put(tmp_path, document, name | wrong))
    assert all(f"{key}=" in caplog.text for key in wrong)


# Settings that transformers' classes read, by what becomes of them here.
APPLIED = set(
    "added_tokens_decoder additional_special_tokens extra_special_tokens add_prefix_space chat_template "
    "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output "
    "do_lower_case strip_accents tokenize_chinese_chars fix_mistral_regex model_input_names model_max_length "
    "split_special_tokens truncation_side tokenizer_class bos_token eos_token unk_token pad_token sep_token cls_token "
    "mask_token".split()
)
TOLD = set("legacy keep_accents split_by_punct".split())
# They change neither ids nor texts where there is a tokenizer.json.
IDLE = {
    "add_bos_token": True, "add_eos_token": True, "errors": "strict", "trim_offsets": False, "padding_side": "left",
    "use_default_system_prompt": True, "verbose": True, "remove_space": False, "unk_id": 1, "clean_text": False,
    "wordpieces_prefix": "@@", "legacy_behaviour": True, "max_length": 3, "stride": 1, "pad_to_multiple_of": 8,
    "processor_class": "X", "name_or_path": "x", "response_template": "x", "chat_control_tokens": ["x"],
    "sp_model_kwargs": {}, "normalization": True, "do_basic_tokenize": False, "never_split": ["the"],
    "extra_ids": 5, "from_slow": True, "spaces_between_special_tokens": False, "use_fast": False,
}  # fmt: skip
# What the loader itself passes, and settings of classes of models that maxjax does not have.
OTHERS = set(
    "self args kwargs vocab merges vocab_file merges_file tokenizer_file tokenizer_object _spm_precompiled_charsmap "
    "backend files_loaded max_len model_specific_special_tokens response_schema device_map "
    "pad_token_label only_label_first_subword sep_token_box pad_token_box cls_token_box src_lang tgt_lang "
    "prefix_token middle_token suffix_token suffix_first eot_token fill_token fill_token chain_break_token task "
    "entity_vocab max_entity_length max_mention_length entity_token_1 entity_token_2 entity_1_token entity_2_token "
    "entity_unk_token entity_pad_token entity_mask_token entity_mask2_token tags_dict max_depth max_width pad_width "
    "mask_token_sent offset question_token normalizer_file language predict_timestamps additional_task_tokens".split()
)


@pytest.mark.parametrize("setting", IDLE)
def test_idle_settings_change_nothing(tmp_path, setting):
    def changed():
        rows = []
        for document, named in ((byte_level("llama3"), ENDS), (sentencepiece(), SP)):
            settings = {**named, "tokenizer_class": "PreTrainedTokenizerFast"}
            rows.append([answers(put(tmp_path, document, settings))])
            rows[-1].append(answers(put(tmp_path, document, settings | {setting: IDLE[setting]})))
        return [before == after for before, after in rows]

    assert recorded(changed) == [True, True]
    document = byte_level("llama3")
    plain = found(put(tmp_path, document, ENDS))
    assert found(put(tmp_path, document, ENDS | {setting: IDLE[setting]})) == plain


def test_every_setting_that_transformers_reads_is_known():
    def read():
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

        names = {name for name in TOKENIZER_MAPPING_NAMES.values() if isinstance(name, str)}
        classes = [getattr(transformers, name, None) for name in names]
        base = transformers.TokenizersBackend
        classes = [one for one in classes if inspect.isclass(one) and issubclass(one, base)]
        return sorted(
            {name for one in classes for name in inspect.signature(one.__init__).parameters}
        )

    listed = {*APPLIED, *TOLD, *IDLE, *OTHERS}
    assert set(recorded(read)) - listed == set()
    assert len(listed) == len(APPLIED) + len(TOLD) + len(IDLE) + len(OTHERS)
