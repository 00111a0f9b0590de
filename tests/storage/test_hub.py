"""Names on the hub, against a hub on this machine and a cache as huggingface_hub lays it out."""

import errno
import hashlib
import http.server
import importlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

import maxjax
from maxjax.cli import application as cli
from maxjax.errors import (
    CheckpointAccessError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointMissingError,
    CheckpointSaveError,
    UserInputError,
)
from maxjax.models import BertConfig, BertModel
from maxjax.storage.hub import HubName, find_model, hub_name, needed

CONFIG = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 8, "hidden_size": 4,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    "max_position_embeddings": 16,
}  # fmt: skip
SHA = "0123456789abcdef0123456789abcdef01234567"
OTHER_SHA = "f" * 40


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = BertModel(BertConfig.from_dict(CONFIG)).raw_state_dict()
    return save(
        {
            name: rng.standard_normal([int(d) for d in w.shape]).astype(np.float32)
            for name, w in shapes.items()
        }
    )


def repository(**more):
    """Files of a repository as people publish them: name → bytes."""
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": weights()}
    return files | {name.replace("__", "/"): data for name, data in more.items()}


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's interface that a download takes."""

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer(head=False)

    def answer(self, head):
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append(path)
        server.tokens.add(self.headers.get("Authorization"))
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo, revision = (info or tree or file).groups()[:2]
        if repo not in server.repos or repo in server.refused:
            return self.refuse(*server.refused.get(repo, (401, "RepoNotFound")))
        sha = {None: SHA, "main": SHA, "v2": OTHER_SHA}.get(revision, revision)
        files = server.repos[repo] if sha == SHA else server.second
        if sha not in (SHA, OTHER_SHA):
            return self.refuse(404, "RevisionNotFound")
        if info:
            names = [{"rfilename": name} for name in files]
            return self.send({"id": repo, "sha": sha, "siblings": names}, sha)
        if tree:
            return self.send([self.entry(*item) for item in files.items()], sha)
        if server.gated and not head:
            return self.refuse(403, "GatedRepo")
        data = files[file[3]]
        body = data[:-10] if server.cut and file[3].endswith("safetensors") else data
        self.send(b"" if head else body, sha, data)

    def entry(self, name, data):
        return {"type": "file", "path": name, "size": len(data), "oid": self.etag(data)}

    @staticmethod
    def etag(data):
        return hashlib.sha1(data).hexdigest()

    def send(self, body, sha, data=None):
        self.send_response(200)
        if data is None:
            body = data = json.dumps(body).encode()
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{self.etag(data)}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        body = json.dumps({"error": "as the test wants it\nin two lines"}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.repos, server.refused = [], {}, {}
    server.second, server.gated, server.cut, server.tokens = {}, False, False, set()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    listen(monkeypatch, server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def listen(monkeypatch, port):
    """Where the hub is, as HF_ENDPOINT says it."""
    address = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def fetched(hub):
    """The files whose content the hub was asked for, each as often as it was."""
    found = [re.fullmatch(r"/[^/]+/[^/]+/resolve/[^/]+/(.+)", path) for path in hub.asked]
    return {match[1] for match in found if match}


def lay_out(cache, files, repo="org/name", sha=SHA, ref="main"):
    """A repository in a cache as huggingface_hub lays it out: links to blobs, and refs."""
    root = cache / f"models--{repo.replace('/', '--')}"
    for name, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        place = root / "snapshots" / sha / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        place.symlink_to(os.path.relpath(blob, place.parent))
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(sha)
    return root / "snapshots" / sha


def values(model):
    return {name: np.asarray(value) for name, value in model.state_dict().items()}


# --- names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/name_2.5B", HubName("Org-1/name_2.5B")),
        ("org/name@v1.0", HubName("org/name", None, "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", None, "refs/pr/1")),
        ("org/name/q4.gguf", HubName("org/name", "q4.gguf")),
        ("org/name/a b/q4.gguf@main", HubName("org/name", "a b/q4.gguf", "main")),
    ],
)
def test_names_of_the_hub(text, expected):
    assert hub_name(text) == expected


PATHS = r"""./models/x /a/b model.gguf a/b/c org/name/ name ../a/b ~/a/b a//b dir/model.gguf
dir/w.safetensors dir/x.bin a\b -a/b a/b- .a/b a/.b a--b/c a/b..c a/b.git org/name@ org/name@-x
org/name@a@b a/b/../x.gguf a/b//x.gguf a/b/x.gguf/ ä/b"""


@pytest.mark.parametrize("text", [*PATHS.split(), "a/b\n", "a/b c"])
def test_wrong_paths_ask_no_hub(text, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointMissingError, match="no such file or directory"):
        maxjax.load(text)
    assert hub_name(text) is None


def test_a_file_that_is_not_in_a_directory_that_is(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/llama/x.gguf") is not None
    with pytest.raises(CheckpointMissingError, match="no such file or directory"):
        find_model("models/llama/x.gguf")


def test_a_path_object_is_a_path():
    with pytest.raises(CheckpointMissingError, match="no such file or directory"):
        find_model(Path("org/name"))


@pytest.mark.parametrize("name", ["org/name", "tiny"])
def test_a_directory_of_that_name_wins(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)
    assert find_model(name) == Path(name)
    with pytest.raises(UserInputError, match="revision='main'.*is a path"):
        find_model(name, revision="main")


def test_tiny_is_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = Path(maxjax.__file__).parent / "tiny"
    if not expected.exists():
        with pytest.raises(CheckpointMissingError, match="tiny: no such file"):
            find_model(None)
        return
    assert find_model("tiny") == find_model(None) == expected
    (tmp_path / "tiny").mkdir()
    assert find_model("tiny") == Path("tiny") and find_model(None) == expected


@pytest.mark.parametrize("revision", ["", "-x", "a b", "a\n", 3])
def test_a_revision_that_is_none(cache, revision):
    with pytest.raises(UserInputError, match="is not a branch, tag or commit"):
        find_model("org/name", revision)


def test_two_revisions(cache):
    with pytest.raises(UserInputError, match="'a'.*revision='b'"):
        find_model("org/name@a", "b")


# --- what is fetched ----------------------------------------------------------------------


def test_a_model_is_fetched_once(hub, cache):
    hub.repos["org/name"] = repository(
        **{
            "README.md": b"#", "pytorch_model.bin": b"x", "onnx__model.onnx": b"x", "flax_model.msgpack": b"x",
            "tf_model.h5": b"x", "original__consolidated.00.pth": b"x", "optimizer.pt": b"x",
            "generation_config.json": b"{}", "tokenizer_config.json": b"{}", "chat_template.jinja": b"a",
        }
    )  # fmt: skip
    model, tokenizer = maxjax.load("org/name")
    assert tokenizer is None
    expected = {
        "config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert fetched(hub) == expected
    folder = cache / "models--org--name" / "snapshots" / SHA
    assert find_model("org/name") == folder
    assert {file.name for file in folder.rglob("*")} == expected
    # A second time nothing but the listing is asked for, and without a connection nothing at all.
    hub.asked.clear()
    maxjax.load("org/name")
    assert fetched(hub) == set()
    for name, value in values(maxjax.load(folder)[0]).items():
        np.testing.assert_array_equal(values(model)[name], value)


def test_without_a_connection_what_was_fetched_is_there(hub, cache, monkeypatch):
    hub.repos["org/name"] = repository()
    found = find_model("org/name")
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model("org/name") == found and not hub.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    listen(monkeypatch, 9)  # nobody does
    assert find_model("org/name") == found
    # Without its access, too: what is in the cache was given before.
    hub.refused["org/name"] = (401, "RepoNotFound")
    listen(monkeypatch, hub.server_port)
    assert find_model("org/name") == found


def test_the_settings_of_huggingface_hub(hub, cache, tmp_path, monkeypatch):
    """``token``, ``cache_dir``, ``local_files_only`` and ``filename`` of maxjax.load."""
    monkeypatch.setenv("HF_TOKEN", "of-the-environment")
    hub.repos["org/name"] = repository() | {"other.safetensors": weights(1)}
    mine = {"cache_dir": tmp_path / "mine", "filename": "other.safetensors"}
    model, _ = maxjax.load("org/name", token="secret", **mine)
    assert hub.tokens == {"Bearer secret"} and not cache.exists()
    folder = tmp_path / "mine" / "models--org--name" / "snapshots" / SHA
    assert {file.name for file in folder.iterdir()} == {"config.json", "other.safetensors"}
    # The file counts where others lie beside it, in a directory as well.
    for name, value in values(maxjax.load(folder, filename="other.safetensors")[0]).items():
        np.testing.assert_array_equal(values(model)[name], value)
    hub.asked.clear()
    hub.tokens.clear()
    model, _ = maxjax.load("org/name", local_files_only=True, **mine)
    assert not hub.asked
    with pytest.raises(CheckpointMissingError) as caught:
        maxjax.load("org/name", local_files_only=True, token="secret")
    assert str(caught.value) == (
        f"org/name: not in the cache of the hub, {cache}, and local_files_only=True forbids "
        "downloads. Leave local_files_only out to download it."
    )
    maxjax.load(
        "org/name", token=False, cache_dir=str(tmp_path / "again"), filename="other.safetensors"
    )
    assert hub.tokens == {None}
    # A path needs none of them.
    maxjax.load(folder / "other.safetensors", token="x", cache_dir="x", local_files_only=True)


def test_a_file_that_is_not_the_one_of_the_name(tmp_path):
    with pytest.raises(UserInputError, match="'a.gguf'.*filename='b.gguf'"):
        maxjax.load("org/name/a.gguf", filename="b.gguf")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(UserInputError, match="filename='b.gguf' is given, and .* is a file"):
        maxjax.load(tmp_path / "a.gguf", filename="b.gguf")
    with pytest.raises(CheckpointMissingError, match="b.gguf"):
        maxjax.load(tmp_path, filename="b.gguf")


@pytest.mark.parametrize("shown", [False, True])
def test_its_bars_are_shown_where_ours_are(hub, monkeypatch, shown):
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    from maxjax.storage import hub as storage_hub

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    # Its module of bars has a copy, taken when it was imported.
    bars = importlib.import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(bars, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    enable_progress_bars()  # transformers, which other tests ask, may have disabled them
    monkeypatch.setattr(storage_hub, "is_on", lambda: shown)
    hub.repos["org/name"] = repository()
    seen = []
    real = huggingface_hub.snapshot_download

    def download(*args, **options):
        seen.append(are_progress_bars_disabled())
        return real(*args, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    find_model("org/name")
    assert seen == [not shown] and not are_progress_bars_disabled()


def test_revisions(hub):
    hub.repos["org/name"], hub.second = (
        repository(),
        repository() | {"model.safetensors": weights(1)},
    )
    first = values(maxjax.load("org/name")[0])
    second = values(maxjax.load("org/name@v2")[0])
    name = "embeddings.word_embeddings.weight"
    assert not np.array_equal(first[name], second[name])
    third = values(maxjax.load("org/name", revision=OTHER_SHA)[0])
    np.testing.assert_array_equal(second[name], third[name])
    with pytest.raises(
        CheckpointMissingError, match="org/name: the repository has no revision 'v9'"
    ):
        maxjax.load("org/name", revision="v9")


def test_a_gguf_file(hub, cache):
    files = {"q4.gguf": b"GGUF4", "q8-00001-of-00002.gguf": b"a", "q8-00002-of-00002.gguf": b"b"}
    hub.repos["org/name"] = files | {"config.json": b"{}", "sub/x.gguf": b"x", "mmproj.gguf": b"m"}
    found = find_model("org/name/q4.gguf")
    assert found.read_bytes() == b"GGUF4" and found.name == "q4.gguf"
    assert fetched(hub) == {"q4.gguf", "config.json"}
    hub.asked.clear()
    assert find_model("org/name/q8-00001-of-00002.gguf@main").name == "q8-00001-of-00002.gguf"
    assert fetched(hub) == {"q8-00001-of-00002.gguf", "q8-00002-of-00002.gguf"}
    assert find_model("org/name/sub/x.gguf").read_bytes() == b"x"
    with pytest.raises(CheckpointFormatError, match=r"several GGUF files.*org/name/q4\.gguf"):
        find_model("org/name")
    with pytest.raises(CheckpointMissingError, match=r"org/name: .* no file 'q5\.gguf'.*q4\.gguf"):
        find_model("org/name/q5.gguf")


def test_one_format_beside_another_in_the_cache(hub):
    hub.repos["org/name"] = repository(**{"q4.gguf": b"GGUF"})
    assert find_model("org/name/q4.gguf").name == "q4.gguf"
    model, _ = maxjax.load("org/name")  # the folder has both now
    assert isinstance(model, BertModel)


def test_the_model_in_a_folder_of_its_own(hub):
    modules = [
        {"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    hub.repos["org/name"] = {
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": json.dumps({"pooling_mode_mean_tokens": True}).encode(),
        **{f"0_Transformer/{name}": data for name, data in repository().items()},
    }
    model, _ = maxjax.load("org/name")
    assert model.pooling.modes == ("mean",)


LISTINGS = {
    "sharded": (
        "model.safetensors.index.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors"
        " config.json | pytorch_model.bin consolidated.safetensors model.fp16.safetensors"
    ),
    "sharded-bin": (
        "pytorch_model.bin.index.json pytorch_model-00001-of-00001.bin tokenizer.json | training_args.bin"
    ),
    "other-names": "a.safetensors b.safetensors tokenizer.json | adapter_model.safetensors vocab.txt",
    "index-of-other-names": "x.safetensors.index.json y.safetensors z.safetensors | pytorch_model.bin",
    "older-tokenizer": "a.safetensors vocab.json merges.txt added_tokens.json vocab.txt | README.md",
    "sentencepiece-alone": "a.safetensors tokenizer.model | tokenizer.checklist.chk",
    "sentencepiece-as-well": "a.safetensors tokenizer.json | tokenizer.model vocab.json merges.txt",
    "gguf-and-a-tokenizer": "m.gguf tokenizer_config.json | tokenizer.model vocab.json",
    "gguf": "m.gguf config.json special_tokens_map.json | imatrix.gguf README.md",
    "gguf-set": "m-00001-of-00002.gguf m-00002-of-00002.gguf | original/params.json",
    "sentence-transformers": (
        "modules.json 1_Pooling/config.json sentence_bert_config.json config.json model.safetensors"
        " | 2_Dense/model.safetensors openvino/openvino_model.bin"
    ),
    "dense": (
        "modules.json config_sentence_transformers.json 1_Pooling/config.json 2_Dense/config.json"
        " 2_Dense/model.safetensors 3_Dense/config.json 3_Dense/pytorch_model.bin model.safetensors"
        " | 2_Dense/pytorch_model.bin"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTINGS)
def test_the_files_that_are_needed(case):
    wanted, others = (part.split() for part in LISTINGS[case].split(" | "))
    for names in (wanted + others, others[::-1] + wanted[::-1]):
        assert needed("org/name", names) == sorted(wanted)


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        ("README.md config.json", CheckpointMissingError, "org/name: .*no weights"),
        ("tf_model.h5 config.json", CheckpointFormatError, "HDF5 is not a supported format"),
        ("model-00001-of-00002.safetensors", CheckpointMissingError, "1 of the 2 files"),
        ("a/x.gguf b/y.gguf", CheckpointFormatError, r"in subfolders.*org/name/a/x\.gguf"),
        ("", CheckpointMissingError, "org/name"),
    ],
)
def test_nothing_to_load(names, error, says):
    with pytest.raises(error, match=says):
        needed("org/name", names.split())


# --- a cache without a connection -----------------------------------------------------------


def test_a_cache_that_others_filled(cache):
    folder = lay_out(cache, repository())
    assert find_model("org/name") == folder
    model, _ = maxjax.load("org/name")
    assert len(values(model)) == 23
    assert find_model("org/name", SHA) == find_model(f"org/name@{SHA}") == folder
    with pytest.raises(CheckpointMissingError, match="org/name: not in the cache.*HF_HUB_OFFLINE"):
        find_model("org/name@v2")
    file = lay_out(cache, {"q4.gguf": b"x"}, "org/packed") / "q4.gguf"
    assert find_model("org/packed") == find_model("org/packed/q4.gguf") == file


def test_not_in_the_cache(cache):
    with pytest.raises(CheckpointMissingError) as caught:
        maxjax.load("org/name")
    assert str(caught.value) == (
        "org/name: not in the cache of the hub, and HF_HUB_OFFLINE forbids downloads. "
        "Unset HF_HUB_OFFLINE to download it."
    )


@pytest.mark.parametrize("files", [{"config.json": b"{}"}, {"q8.gguf": b"x"}])
def test_a_part_of_it_is_in_the_cache(cache, files):
    lay_out(cache, files)
    with pytest.raises(CheckpointMissingError, match="only a part of it is in the cache"):
        find_model("org/name/q4.gguf" if "q8.gguf" in files else "org/name")


def test_huggingface_hub_is_not_needed_and_its_variables_are_heeded(tmp_path):
    """In a process of its own: they are read when huggingface_hub is imported."""
    for name, data in repository().items():
        (tmp_path / name).write_bytes(data)
    folder = lay_out(tmp_path / "home" / "hub", repository())
    code = f"""
import sys
sys.modules["huggingface_hub"] = None  # importing it is an error
import maxjax
model, tokenizer = maxjax.load({str(tmp_path)!r})
try:
    maxjax.load("./nowhere/x")
except maxjax.errors.CheckpointMissingError as error:
    print(len(model.state_dict()), error)

del sys.modules["huggingface_hub"]
from maxjax.storage.hub import find_model
print(find_model("org/name"))
try:
    find_model("org/other")
except FileNotFoundError as error:
    print(error)
"""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS"))}
    variables |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    variables |= {"MAXJAX_COMPILE_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=variables
    )
    read, first, second = done.stdout.splitlines()
    assert read == "23 nowhere/x: no such file or directory. Check the path.", done.stderr
    assert first == str(folder) and second.startswith("org/other: not in the cache"), done.stderr


# --- what can go wrong with the hub ---------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ((401, "RepoNotFound"), CheckpointMissingError, "no such repository on the hub.*HF_TOKEN"),
        ((404, "RepoNotFound"), CheckpointMissingError, "no such path, and no such repository"),
        ((403, "GatedRepo"), CheckpointAccessError, "gated.*https://huggingface.co/org/name"),
        ((403, ""), CheckpointAccessError, r"the hub denies access \(403\)"),
        ((418, ""), CheckpointMissingError, "not in the cache of the hub, which cannot be .*418"),
    ],
)
def test_the_hub_refuses(hub, answer, error, says):
    hub.repos["org/name"], hub.refused["org/name"] = repository(), answer
    with pytest.raises(error, match=f"^org/name: .*{says}") as caught:
        maxjax.load("org/name")
    assert "\n" not in str(caught.value)


def test_gated_files(hub):
    hub.repos["org/name"], hub.gated = repository(), True
    with pytest.raises(CheckpointAccessError, match="gated"):
        maxjax.load("org/name")


def test_no_connection(hub, monkeypatch):
    listen(monkeypatch, 9)  # nobody does
    with pytest.raises(
        CheckpointMissingError, match="cannot be reached.*HF_HUB_OFFLINE=1"
    ) as caught:
        maxjax.load("org/name")
    assert "ConnectError" in str(caught.value) and "\n" not in str(caught.value)


def failing(monkeypatch, error):
    """A download that writes the small files and then fails."""

    def download(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.mark.parametrize(
    ("error", "expected", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointSaveError, "ENOSPC.*are free"),
        (RuntimeError("xet: I/O error: No space left on device"), CheckpointSaveError, "ENOSPC"),
        (PermissionError(errno.EACCES, "denied"), CheckpointAccessError, "permission denied"),
        (OSError(errno.EROFS, "read-only"), CheckpointSaveError, "EROFS"),
        (
            OSError("Consistency check failed:\n1 of 2"),
            CheckpointIncompleteError,
            "continues where",
        ),
        (ConnectionResetError(errno.ECONNRESET, "reset"), CheckpointIncompleteError, "interrupted"),
    ],
)
def test_downloads_that_fail(hub, monkeypatch, error, expected, says):
    hub.repos["org/name"] = repository()
    failing(monkeypatch, error)
    with pytest.raises(expected, match=says) as caught:
        find_model("org/name")
    assert "\n" not in str(caught.value) and caught.value.__cause__ is error
    if expected is CheckpointSaveError:
        assert caught.value.errno in (errno.ENOSPC, errno.EROFS)


def test_interrupts_stay_interrupts(hub, monkeypatch):
    hub.repos["org/name"] = repository()
    failing(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        find_model("org/name")


def test_a_broken_download_goes_on(hub, cache, monkeypatch):
    monkeypatch.setattr(
        "time.sleep", lambda seconds: None
    )  # huggingface_hub waits between attempts
    hub.repos["org/name"], hub.cut = repository(), True
    with pytest.raises(CheckpointIncompleteError, match="org/name: the download was interrupted"):
        maxjax.load("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointMissingError, match="only a part of it is in the cache"):
        maxjax.load("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.cut = False
    assert isinstance(maxjax.load("org/name")[0], BertModel)


def test_the_command_line(cache, capsys):
    assert cli.main(["embed", "--model", "org/name", "a text"]) == 1
    assert capsys.readouterr().err.startswith("maxjax: org/name: not in the cache of the hub")
