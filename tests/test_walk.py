"""The code of README and docs runs as it is written, page by page; blocks that are not run give a reason."""

import json
import re
import shutil
from collections import Counter

import jax
import numpy as np
import pytest

import maxjax
from scripts.tiny_text import stories
from tests.blocks import PAGES, ROOT, blocks, run
from tests.engine.test_load_gguf import write

# Pages whose blocks are run by other tests: in several processes, with torch and transformers, or
# with other libraries.
ELSEWHERE = {
    "distributed": "tests/test_distributed.py",
    "families": "tests/models/test_families_page.py",
    "ten-tasks": "tests/test_ten_tasks.py",
}
# The reasons for not running a block, each with the largest number of blocks that may give it.
REASONS = {
    "a synopsis": 1,
    "makes an environment": 6,
    "needs compilers for accelerators": 2,
    "needs grain": 1,
    "needs IPython": 1,
    "needs the hub": 5,
}
# The page in the default set; the others are campaigns, as other tests do what they show.
DEFAULT = ["README"]
NAMES = sorted(
    page.stem
    for page in PAGES
    if page.stem not in ELSEWHERE
    and any(b.kind in ("python", "console") and b.not_run is None for b in blocks(page))
)


@pytest.fixture(autouse=True)
def strict_jax() -> None:
    """A reader's program runs under JAX's defaults."""


def minilm_and_gguf(folder, minilm):
    write(folder / "minilm-q8_0.gguf", minilm, "Q8_0")
    return {"path": str(minilm)}


def of_four_devices(folder, minilm):
    return {"path": str(ROOT / "maxjax" / "tiny"), "mesh": maxjax.make_mesh(model=4)}


def importance_matrix(folder, minilm):
    model, tokenizer = maxjax.load("tiny")
    maxjax.calibrate(model, tokenizer, (folder / "FILE").read_text()).save(folder / "imatrix.gguf")
    # The page's model has a chat template with a system role; the template of "tiny" raises for it.
    path = folder / "DIR" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template, count = re.subn(
        r"{% else %}.*?raise_exception.*?{% endif %}", "{% endif %}", config["chat_template"]
    )
    assert count == 1
    path.write_text(json.dumps(config | {"chat_template": template}))


def quantised(folder, minilm):
    maxjax.convert(folder / "DIR", folder / "model-Q4_K_M.gguf", quantize="q4_k_m")


# What a page assumes to exist: files in the current folder, and names.
GIVEN = {
    "accelerators": of_four_devices,
    "checkpoints": lambda folder, minilm: {"path": str(minilm)},
    "command-line": importance_matrix,
    "formats": minilm_and_gguf,
    "quantization": quantised,
    "walk": minilm_and_gguf,
}


def check_readme(names, folder):
    assert names["model"].model.norm.weight.value.sharding.num_devices == 4
    assert maxjax.load("mine")[1] is not None


def check_checkpoints(names, folder):
    assert names["found"]["data"] == {"epoch": 3, "file": "a.txt"}
    model, body = names["model"].state_dict(), names["smaller"].layers.state_dict()
    assert all((np.asarray(model[f"layers.{name}"]) == body[name]).all() for name in body)


def check_finetuning(names, folder):
    assert (folder / "tuned" / "config.json").exists()
    assert len([name for name in names["tuned"].raw_state_dict() if "lora_A" in name]) == 14


def check_formats(names, folder):
    assert names["data"].quantization_encoding.value == "Q8_0"
    assert names["data"].logical_shape == [384, 384] and names["data"].shape == [384, 408]


def check_getting_started(names, folder):
    assert names["value"] < 0.5 and (folder / "model.html").stat().st_size > 1000
    model, tokenizer = maxjax.load("tuned")
    assert maxjax.generate(model, tokenizer, "Who is near Tom?\n") == "The brother."


def check_interop(names, folder):
    assert len(names["found"]) == 25


def check_walk(names, folder):
    assert names["query"].exists()
    assert names["out"].last_hidden_state.shape == (1, 8, 384)


# Checks after a page has run, in addition to its own assertions.
AFTERWARDS = {
    "README": check_readme,
    "checkpoints": check_checkpoints,
    "finetuning": check_finetuning,
    "formats": check_formats,
    "getting-started": check_getting_started,
    "interop": check_interop,
    "walk": check_walk,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.campaign]) for name in NAMES],
)
def test_a_page_runs(name, minilm, tmp_path, monkeypatch):
    """A page runs in a folder with a model, `DIR`, and with texts under the names that pages use."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "maxjax" / "tiny", tmp_path / "DIR")
    for text in ("FILE", "wiki.test.raw", "calibration.txt"):
        (tmp_path / text).write_text(stories(8, 20))
    names = GIVEN[name](tmp_path, minilm) if name in GIVEN else None
    if name == "README":  # the page says "here four"
        four = jax.devices()[:4]
        monkeypatch.setattr(jax, "devices", lambda *backend: four)
    [page] = [page for page in PAGES if page.stem == name]
    found = run(page, **names or {})
    if name in AFTERWARDS:
        AFTERWARDS[name](found, tmp_path)


def test_every_block_is_run_or_says_why():
    every = [block for page in PAGES for block in blocks(page)]
    assert len(every) > 150
    count = Counter(block.not_run for block in every if block.not_run is not None)
    print(*(f"{b.name}: {b.not_run}" for b in every if b.not_run is not None), sep="\n")
    assert set(count) <= set(REASONS), count
    assert all(count[why] <= REASONS[why] for why in count), count
    for block in every:
        if block.page.stem in ELSEWHERE or block.not_run is not None:
            continue
        assert block.kind in ("python", "console", "text"), f"{block.name}: {block.kind!r}"
    for page, test in ELSEWHERE.items():
        assert f"{page}.md" in (ROOT / test).read_text()


def test_no_code_is_without_a_fence():
    """A paragraph that is indented by four spaces is code in Markdown, and nothing would run it."""
    for page in PAGES:
        before, fenced, listed = "", False, False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.lstrip().startswith("```"):
                assert not line.startswith(" "), f"{page.name}:{number}: an indented fence"
                fenced = not fenced
            listed = line.lstrip()[:2] in ("* ", "- ") or (listed and (not line or line[:1] == " "))
            if not fenced and not before.strip() and line.startswith("    ") and not listed:
                raise AssertionError(f"{page.name}:{number}: code without a fence")
            before = line
