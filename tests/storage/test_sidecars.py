"""The list of files that belong to a checkpoint has every file that is read, and no others."""

import numpy as np
import pytest

from maxjax.engine.generate.defaults import FILE as GENERATION
from maxjax.lora.peft import CONFIG as ADAPTER
from maxjax.models.pooling import Dense, Pooling
from maxjax.models.sentence_files import pooling_files
from maxjax.storage.hub import BESIDE
from maxjax.storage.sidecars import is_sidecar_folder, sidecar_kind
from maxjax.text.template.files import PROCESSORS, TEMPLATE_FILE, TEMPLATE_FOLDER
from maxjax.text.tokenizer.added import CONFIG, LIST, MAP
from maxjax.text.tokenizer.files import FILE
from maxjax.text.tokenizer.vocab import VOCABULARIES

READ = ["config.json", GENERATION, FILE, CONFIG, LIST, MAP, *VOCABULARIES, TEMPLATE_FILE, PROCESSORS,
        f"{TEMPLATE_FOLDER}/tool_use.jinja", ADAPTER]  # fmt: skip
UNRELATED = ["train.json", "notes.txt", "logs.txt", "CHANGES.md", "model.safetensors", "run.sh", "a/config.json",
             "../config.json", "/config.json", "config.json\n", ".config.json", "1_Pooling/../config.json",
             "maxjax_digests.json", "model.safetensors.index.json", "2_train.json", ""]  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_is_read_belongs_to_a_checkpoint(name):
    assert sidecar_kind(name)


@pytest.mark.parametrize("name", UNRELATED)
def test_other_files_do_not(name):
    assert sidecar_kind(name) is None


def test_the_files_of_pooling_belong_to_a_checkpoint():
    matrix = Dense.of(np.ones((2, 3), np.float32), None)
    pooling = Pooling(normalize=True, dense=(matrix,), prompts=(("a", "b"),))
    for name in pooling_files(pooling, 3):
        assert sidecar_kind(name)
        assert "/" not in name or is_sidecar_folder(name.partition("/")[0])


def test_what_is_downloaded_by_a_plain_name_belongs_to_a_checkpoint():
    plain = [name for name in BESIDE if not set("*[") & set(name) and name != "maxjax_digests.json"]
    assert len(plain) > 4 and all(map(sidecar_kind, plain))
