"""The checkpoints of ``scripts/family_snapshot.py``: :func:`snapshots`.

Configurations are those that tests and ``scripts/random_decoders.py`` have; transformers writes the files of
most, with random weights of NumPy's.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax.models.multimodal import ARCHITECTURES, WRAPPERS
from maxjax.models.names import VISION_PATTERNS
from scripts.family_snapshot import Snapshot
from scripts.random_decoders import generator, respelled, within
from tests.engine import sentence_models
from tests.models import quantizers, test_bert, test_encoders, test_multimodal, test_mxfp4
from tests.models.families import draws
from tests.models.families.cases import Case, every
from tests.models.gguf import files as llama_cpp_files
from tests.oracles import recorded
from tests.oracles.recorded import transformers

DRAWN = 3  # configurations of each family of decoders
LABELS = 3
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True, "head_dim": 32,
    "num_hidden_layers": 2,
}  # fmt: skip


def snapshots() -> list[Snapshot]:
    """All checkpoints."""
    recorded.start("ask", absent=False)
    found = [
        *decoders(),
        *multimodal(),
        *encoders(),
        *embedders(),
        *quantised(),
        *of_llama_cpp(),
    ]
    seen: dict[str, Snapshot] = {}
    for one in found:
        seen.setdefault(one.name, one)
    return list(seen.values())


def changed(
    directory: Path,
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
) -> None:
    """Changes the settings or the tensors of a checkpoint."""
    if config is not None:
        path = directory / "config.json"
        path.write_text(json.dumps(config(json.loads(path.read_text()))))
    if tensors is not None:
        path = directory / "model.safetensors"
        save_file(tensors(load_file(path)), path, {"format": "pt"})


def decoders() -> Iterator[Snapshot]:
    """The known cases of each family and random ones, the other architectures, and a classifier.

    What is most unlike the others comes first.
    """
    names = {one.model_type: one.architectures for one in reversed(maxjax.models.families())}
    for family in draws.names():
        cases = [case for case in every() if case.family == family]
        for case in cases[:1]:
            yield Snapshot(f"{family}/{case.name}", case.model)
            yield Snapshot(f"{family}/{case.name} varied", case.model, True)
        yield Snapshot(f"{family}/drawn 0", functools.partial(write_drawn, family, 0))
        yield Snapshot(f"{family}/drawn 0 varied", functools.partial(write_drawn, family, 0), True)
        for case in cases[:1]:
            yield Snapshot(f"{family}/classifier", functools.partial(classifier, case))
            for name in names[family]:
                if name != case.kind:
                    write = functools.partial(other_architecture, case, name)
                    yield Snapshot(f"{family}/{name}", write)
        for case in cases[1:]:
            yield Snapshot(f"{family}/{case.name}", case.model)
        for seed in range(1, DRAWN):
            yield Snapshot(f"{family}/drawn {seed}", functools.partial(write_drawn, family, seed))


def other_architecture(case: Case, name: str, directory: Path) -> None:
    """The same checkpoint with another architecture; without the head and the prefix of names, if it has none."""
    case.model(directory)
    changed(directory, lambda config: config | {"architectures": [name]})
    if not name.endswith("LMHeadModel") and name.endswith("Model"):
        front = getattr(transformers, case.kind).base_model_prefix + "."
        changed(
            directory,
            tensors=lambda found: {
                key.removeprefix(front): value
                for key, value in found.items()
                if key.startswith(front)
            },
        )


def classifier(case: Case, directory: Path) -> None:
    """The same checkpoint with the head of a classifier."""
    model = case.model(directory)
    name = re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", case.kind)
    score = (
        np.random.default_rng(0).normal(0, 1, (LABELS, model.config.hidden_size)).astype(np.float32)
    )
    changed(
        directory,
        lambda config: (
            config | {"architectures": [name], "id2label": {str(i): f"{i}" for i in range(LABELS)}}
        ),
        lambda found: (
            {k: v for k, v in found.items() if "lm_head" not in k and "embed_out" not in k}
            | {"score.weight": score}
        ),
    )


def write_drawn(family: str, seed: int, directory: Path, **fixed: Any) -> None:
    """A random configuration's checkpoint."""
    one = draws.draw(family, generator(family, seed))
    one.case.settings.update(fixed)
    one.case.model(directory, seed)
    changed(directory, lambda config: respelled(one, config))


def multimodal() -> Iterator[Snapshot]:
    """Each architecture of a multimodal model with each of its text models, and those that transformers writes."""
    kinds: set[str] = set()
    for number, (architecture, kind) in enumerate(ARCHITECTURES.items()):
        group = f"multimodal {kind}"
        wrapper = WRAPPERS[kind]
        others = (
            wrapper.text_models
            if wrapper.text_models or not wrapper.takes_any
            else ("llama", "qwen3")
        )
        for name in [None, *others] if kind not in kinds else [None]:
            write = functools.partial(write_multimodal, architecture, kind, name, number)
            yield Snapshot(f"{group}/{architecture} {name}", write)
        if kind in kinds:
            continue
        kinds.add(kind)
        if architecture in test_multimodal.KINDS:
            write = functools.partial(test_multimodal.theirs, architecture)
            yield Snapshot(f"{group}/{architecture} whole", write)
        if "omni" in kind:
            write = functools.partial(write_thinker, architecture, kind, number)
            yield Snapshot(f"{group}/{architecture} thinker", write)
        if wrapper.flat:
            write = functools.partial(write_flat, architecture, kind, number)
            yield Snapshot(f"{group}/{architecture} flat", write)


def write_multimodal(
    architecture: str, kind: str, name: str | None, seed: int, directory: Path
) -> None:
    """A random text model in a multimodal model, with some tensors of its other parts."""
    text = WRAPPERS[kind].text_model(name)
    assert text is not None
    write_drawn(text.model_type, seed, directory, **text.always)

    def wrapped(config: dict[str, Any]) -> dict[str, Any]:
        config = {key: value for key, value in config.items() if key != "architectures"}
        config["model_type"] = name
        if name is None:
            del config["model_type"]
        return within(config, kind, directory, seed % 2 == 0) | {"architectures": [architecture]}

    changed(directory, wrapped, lambda found: found | other_parts())


def other_parts() -> dict[str, np.ndarray]:
    """Tensors of the parts of a multimodal model for images and audio."""
    rng = np.random.default_rng(1)
    return {
        name.replace("*", "weight"): rng.normal(0, 1, (2, 3)).astype(np.float32)
        for name in VISION_PATTERNS[::3]
    }


def write_thinker(architecture: str, kind: str, seed: int, directory: Path) -> None:
    """The same where the text model is two objects deep."""
    write_multimodal(architecture, kind, None, seed, directory)

    def inner(config: dict[str, Any]) -> dict[str, Any]:
        text = config.pop("text_config")
        return config | {"thinker_config": {"text_config": text, "model_type": f"{kind}_thinker"}}

    changed(
        directory, inner,
        lambda found: {
            re.sub("^(model[.]language_model|language_model[.]model)[.]", "thinker.model.", re.sub(
                "^(language_model[.])?lm_head[.]", "thinker.lm_head.", name)): value
            for name, value in found.items()
        },
    )  # fmt: skip


def write_flat(architecture: str, kind: str, seed: int, directory: Path) -> None:
    """The same where its settings are at the top level."""
    write_multimodal(architecture, kind, None, seed, directory)
    changed(
        directory,
        lambda config: config.pop("text_config") | config | {"vision_config": {"depth": 1}},
    )


def encoders() -> Iterator[Snapshot]:
    """The encoders of the tests; and of each every architecture that transformers has."""
    known = [(kind, config, settings) for _, kind, config, settings in test_encoders.CASES]
    known += [("BertModel", "BertConfig", settings) for settings in test_bert.SETTINGS.values()]
    first: dict[str, dict[str, Any]] = {}
    for number, (kind, config, settings) in enumerate(known):
        first.setdefault(config, settings)
        family = getattr(transformers, config).model_type
        yield Snapshot(
            f"{family}/{kind} {number}", functools.partial(encoder, kind, config, settings)
        )
    for config, settings in first.items():
        family = getattr(transformers, config).model_type
        for one in maxjax.models.families():
            for kind in one.architectures if one.model_type == family else ():
                if hasattr(importlib.import_module("transformers"), kind):
                    write = functools.partial(encoder, kind, config, settings)
                    yield Snapshot(f"{family}/{kind}", write)
                    if kind.endswith(("Model", "SequenceClassification")):
                        yield Snapshot(f"{family}/{kind} varied", write, True)
    for name in ("NOMIC", "GTE", "JINA"):
        write = functools.partial(published, getattr(test_encoders, name))
        yield Snapshot(f"published/{name}", write)
        yield Snapshot(f"published/{name} varied", write, True)
    scored = test_encoders.GTE | {"architectures": ["NewForSequenceClassification"]}
    yield Snapshot("published/GTE classifier", functools.partial(published, scored))
    yield Snapshot("published/JINA adapted", jina)


def encoder(kind: str, config: str, settings: dict[str, Any], directory: Path) -> None:
    """An encoder of the tests."""
    test_encoders.oracle_of(kind, config, settings).save(directory)


def published(config: dict[str, Any], directory: Path) -> None:
    """A model whose code was published with it, with settings of that code."""
    sentence_models.write_weights(config, directory)
    (directory / "config.json").write_text(json.dumps(config))


def jina(directory: Path) -> None:
    """Jina's embedding model as it was published, with an adapter in its file."""
    published(test_encoders.JINA, directory)
    pattern = re.compile(r"(Wqkv|out_proj|fc1|fc2|word_embeddings|dense)[.]weight$")
    adapter = "roberta.encoder.layers.0.mixer.Wqkv.parametrizations.weight.0.lora_A"

    def renamed(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        new = r"\1.parametrizations.weight.original"
        named = {f"roberta.{pattern.sub(new, name)}": value for name, value in found.items()}
        return named | {adapter: np.ones((1, 2, 32), np.float32)}

    changed(directory, tensors=renamed)


def embedders() -> Iterator[Snapshot]:
    """Embedding models and rerankers with their tokenizers."""
    for what, kinds in (
        ("embedder", sentence_models.EMBEDDERS),
        ("reranker", sentence_models.RERANKERS),
    ):
        for name, kind in kinds.items():
            yield Snapshot(f"{what}/{name}", functools.partial(sentence_models.write, kind))


def quantised() -> Iterator[Snapshot]:
    """Quantised Llamas of each format, mixtures of experts of some, and gpt-oss in MXFP4."""
    yield Snapshot("quantised/mxfp4", test_mxfp4.checkpoint)
    for name in ("fp8 blocks", "gptq 4 order"):
        write = functools.partial(write_quantised, quantizers.CASES[name], QWEN3_MOE)
        yield Snapshot(f"quantised/experts {name}", write)
    for name, case in quantizers.CASES.items():
        yield Snapshot(f"quantised/{name}", functools.partial(write_quantised, case, {}))


def write_quantised(case: Any, settings: dict[str, Any], directory: Path) -> None:
    """A quantised checkpoint."""
    (config, packed), _ = quantizers.tensors_of(case, **settings)
    quantizers.write(directory, config, packed)


def of_llama_cpp() -> Iterator[Snapshot]:
    """GGUF files as llama.cpp's converter writes them."""
    for name in llama_cpp_files.CASES:
        yield Snapshot(f"converter/{name}", functools.partial(write_llama_cpp, name))


def write_llama_cpp(name: str, directory: Path) -> None:
    """A GGUF file of llama.cpp's converter."""
    made = llama_cpp_files.model(name)
    llama_cpp_files.write(directory / "model.gguf", name, made, dict(made.tensors))
