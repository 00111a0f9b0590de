"""The recipes of docs/clusters.md against the types of the APIs that they use, and against the command."""

import argparse
import json
import re
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from maxjax.cli.serve import serve_arguments
from scripts.pages import ROOT, blocks

PAGE = ROOT / "docs" / "clusters.md"
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes.json").read_text())
BLOCKS = blocks(PAGE.read_text())
TEXTS = [block.code for block in BLOCKS if block.kind == "yaml"]
# What LeaderWorkerSet sets in each container.
SET = {
    "LWS_LEADER_ADDRESS": "llama-0.llama.default",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}


def check(document, kind):
    jsonschema.Draft202012Validator({**SCHEMAS, "$ref": f"#/$defs/{kind}"}).validate(document)


def documents():
    """The documents of the page with their kinds; the second block is a part of a pod."""
    whole, part = TEXTS
    return [
        *((one["kind"], one) for one in yaml.safe_load_all(whole)),
        ("PodSpec", yaml.safe_load(part)),
    ]


@pytest.mark.parametrize(
    ("kind", "document"), documents(), ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_recipe_has_the_types_of_the_api(kind, document):
    check(document, kind)


@pytest.mark.parametrize(
    ("old", "new"),
    [("size: 2", "size: two"), ("RecreateGroupOnPodRestart", "Always"), ("workerTemplate:", "podTemplate:"),
     ("replicas: 1", "replica: 1"), ("image: ", "images: "), ("apps: 2", "size: 0"), ("x-k8s.io/v1", "x-k8s.io/v2"),
     ("command: [maxjax", "command: [1"), ("nvidia.com/gpu: 8", "nvidia.com/gpu: [8]")],
)  # fmt: skip
def test_a_wrong_recipe_is_found(old, new):
    text = TEXTS[0].replace(old if old != "apps: 2" else "size: 2", new)
    assert text != TEXTS[0]
    with pytest.raises(jsonschema.ValidationError):
        for one in yaml.safe_load_all(text):
            check(one, one["kind"])


def test_the_service_selects_process_0_by_the_labels_of_its_set():
    (_, leaders), (_, service), _ = documents()
    selector = service["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/name"] == leaders["metadata"]["name"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    # The set has a service of its own name, for the names of its pods.
    assert service["metadata"]["name"] != leaders["metadata"]["name"]


def commands():
    """Every command of the page that starts a server, as a shell or Kubernetes starts it."""
    (_, leaders), *_ = documents()
    (container,) = leaders["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    yield [re.sub(r"\$\((\w+)\)", lambda found: SET[found[1]], one) for one in container["command"]]
    for block in BLOCKS:
        if block.kind == "sh" and "maxjax serve" in block.code:
            (line,) = [line for line in block.code.splitlines() if "maxjax serve" in line]
            yield shlex.split(line[line.index("maxjax serve") :].rstrip('"'))


@pytest.mark.parametrize("command", list(commands()), ids=lambda command: command[2])
def test_a_command_has_options_that_there_are(command):
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve_arguments(parser)
    assert command[:2] == ["maxjax", "serve"] and "$" not in " ".join(command)
    found = parser.parse_args(command[2:])
    assert found.coordinator_address in ("auto", "llama-0.llama.default:1234")
    assert (found.host, found.num_processes in (None, 2)) == ("0.0.0.0", True)
