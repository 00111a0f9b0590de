"""Models of transformers without transformers: it said once what they are and what they answer.

    theirs = OracleModel("LlamaForCausalLM", "LlamaConfig", settings, draw=draw)
    theirs.save(directory)
    expected = theirs.logits(ids)

Kept are the texts of its files, the names and shapes of its tensors, and its answers. The values are
NumPy's, of a seed and each tensor's name, so that they need no room. An answer is kept under what was
asked of which model: tests that ask the same share it.
"""

import copy
import hashlib
import json
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy

from maxjax.dtype import DType
from tests.oracles.recorded import is_live, recorded, torch, transformers

Arrays = dict[str, np.ndarray]
_told: dict[str, Any] = {}


class OracleModel:
    """A model of one of transformers' classes, with values of NumPy's.

    Args:
        kind: name of transformers' class of the model.
        config: name of its class of settings.
        settings: its settings.
        draw: values of a tensor, by generator, name and shape.
        seed: seed of the values.
        measure: a number that transformers says of a model with these values.
        scale: the values once more, by that number.
        file: name of the file that its answers are kept in.
        in_float64: whether its logits are computed in float64: in float32, those of a recurrence are
            farther from the truth than what our tests allow.
    """

    def __init__(
        self,
        kind: str,
        config: str,
        settings: dict[str, Any],
        *,
        draw: Callable[[np.random.Generator, str, tuple[int, ...]], np.ndarray],
        seed: int = 0,
        measure: Callable[[Any], float] | None = None,
        scale: Callable[[Arrays, float], Arrays] | None = None,
        file: str = "models",
        in_float64: bool = False,
    ) -> None:
        text = json.dumps([config, settings, seed, draw.__qualname__], sort_keys=True)
        self.kind, self.config_kind, self.file = kind, config, file
        self.in_float64 = in_float64
        self.key = f"{kind} {zlib.crc32(text.encode()):08x}"
        self._live: Any = None
        told = None if is_live() else _told.get(self.key)
        if told is None:
            told = recorded(lambda: _files(kind, config, settings), _name(self.key, "files", file))
            _told[self.key] = told
        self.files: dict[str, str] = told["files"]
        """Name → text of each file of JSON that it writes."""
        self.shapes = {name: tuple(shape) for name, shape in told["state"].items()}
        """Name → shape of what it has in memory."""
        self.config = _Config(json.loads(told["config"]), told["aliases"])
        """All its settings."""
        self.tensors: Arrays = {
            name: np.array(draw(_generator(seed, name), name, tuple(shape)), np.float32, order="C")
            for name, shape in told["tensors"].items()
        }
        """Name → values of what is in its file of weights."""
        if measure is not None and scale is not None:
            number = self.ask("measure", lambda model: float(f"{float(measure(model)):.3g}"))
            self.tensors, self._live = scale(self.tensors, number), None

    def save(self, directory: Path, dtype: str = "float32") -> None:
        """Writes the files that transformers would write."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (directory / name).write_text(text.replace('"float32"', f'"{dtype}"'))
        kind = DType.of(dtype).np
        tensors = {name: array.astype(kind) for name, array in self.tensors.items()}
        safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    def ask(self, question: str, answer: Callable[[Any], Any]) -> Any:
        """What ``answer`` has of transformers' model; the question names it among all of this model."""
        return recorded(lambda: answer(self.live()), _name(self.key, question, self.file))

    def live(self) -> Any:
        """transformers' model itself, which tests may change."""
        if self._live is None:
            with tempfile.TemporaryDirectory() as directory:
                self.save(Path(directory))
                self._live = opened(self.kind, directory)
            if self.kind.startswith("Phimoe"):
                use_long_factors(self._live)
        return self._live

    def logits(self, ids: Any, every: int = 1) -> np.ndarray:
        """The logits ``[B, T, V]`` of token ids, of each so many tokens of the vocabulary one."""
        ids = np.asarray(ids, np.int64)

        def answer(model: Any) -> np.ndarray:
            found = (logits_in_float64 if self.in_float64 else _logits)(model, ids)
            return found.astype(np.float32)[..., ::every].copy()

        asked = "logits in float64" if self.in_float64 else "logits"
        return self.ask(f"{asked} {every} {_sum(ids)}", answer)

    def generated(self, prompts: list[Any], new: int, **options: Any) -> np.ndarray:
        """The tokens ``[B, new]`` that it writes after each prompt, which it pads to the left."""
        lists = [[int(i) for i in prompt] for prompt in prompts]
        width = max(map(len, lists))

        def answer(model: Any) -> np.ndarray:
            rows = torch.tensor([[0] * (width - len(p)) + p for p in lists])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in lists])
            lengths = {"max_new_tokens": new, "min_new_tokens": new}
            with torch.no_grad():
                found = model.generate(
                    rows, attention_mask=mask, do_sample=False, **lengths, **options
                )
            return found[:, width:].numpy().astype(np.int32)

        asked = json.dumps([lists, new, options])
        return self.ask(f"generated {zlib.crc32(asked.encode()):08x}", answer)

    def greedy(self, prompt: Any, new: int, rope_length: int | None = None) -> list[int]:
        """The tokens after one prompt, each chosen by the logits of the whole text, computed without a cache.

        Args:
            prompt: token ids.
            new: number of tokens.
            rope_length: length of the text that dynamic NTK has the frequencies of; by default the present.
        """
        ids = [int(i) for i in prompt]

        def answer(model: Any) -> list[int]:
            text = list(ids)
            model = model if rope_length is None else with_rope_of(model, rope_length)
            with torch.no_grad():
                for _ in range(new):
                    logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
                    text.append(int(logits.argmax()))
            return text[len(ids) :]

        asked = json.dumps([ids, new, rope_length])
        return self.ask(f"greedy {zlib.crc32(asked.encode()):08x}", answer)


def next_logits(model: Any, text: Any, rope_length: int | None = None) -> np.ndarray:
    """The logits ``[V]`` of the token after a text, without a cache; ``rope_length`` as for a greedy text."""
    with torch.no_grad():
        model = model if rope_length is None else with_rope_of(model, rope_length)
        return model(torch.tensor([text]), use_cache=False).logits[0, -1].numpy()


def with_rope_of(model: Any, length: int) -> Any:
    """A copy of transformers' model whose dynamic NTK has the frequencies of texts of this length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = copy.deepcopy(model)
    for rope in (part for part in model.modules() if hasattr(part, "inv_freq")):
        rope.inv_freq = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=length)[0]
        rope.rope_type = "default"  # so that they stay
    return model


def use_long_factors(model: Any) -> None:
    """Makes a Phi-MoE of transformers use the factors that it chooses by the length of the text.

    Version 5.24 chooses them and then uses the short ones always, unlike Microsoft's code of the model.
    """
    for rope in (part for part in model.modules() if hasattr(part, "rope_init_fn")):
        rope.rope_init_fn = lambda config, rope=rope: (rope.inv_freq, rope.attention_scaling)


class _Config(SimpleNamespace):
    """Settings as attributes, under every name that transformers has for them."""

    def __init__(self, settings: dict[str, Any], aliases: dict[str, str]) -> None:
        other = {alias: settings[name] for alias, name in aliases.items() if name in settings}
        super().__init__(**{**other, **settings})
        self.settings = settings


def settings_of(config: str, settings: dict[str, Any] | None = None) -> _Config:
    """What transformers makes of settings for one of its classes: all there are."""

    def answer() -> list[Any]:
        made = getattr(transformers, config).from_dict(json.loads(text))
        return [made.to_json_string(use_diff=False), dict(made.attribute_map)]

    text = json.dumps(settings or {}, sort_keys=True)
    asked = f"{config} {zlib.crc32(text.encode()):08x}"
    told, aliases = recorded(answer, _name("settings", asked))
    return _Config(json.loads(told), aliases)


def opened(kind: str, directory: Any, **options: Any) -> Any:
    """What transformers makes of a directory, in float32 and with attention in plain torch."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(transformers, kind).from_pretrained(directory, **options)
    model = found[0] if isinstance(found, tuple) else found
    if getattr(model.config, "alibi", False):
        # Version 5.24 adds the biases of a Falcon twice in plain torch.
        model.config._attn_implementation = "sdpa"
    model.eval()
    return found


def _logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def logits_in_float64(model: Any, ids: np.ndarray) -> np.ndarray:
    """The logits ``[B, T, V]`` of a model of transformers, computed in float64 throughout.

    Its code asks for float32 by name in norms, softmax and recurrences, so those names mean float64 here.
    """
    import torch

    def wider(kind: Any) -> Any:
        return torch.float64 if kind is torch.float32 else kind

    def to(self: Any, *args: Any, **options: Any) -> Any:
        named = {name: wider(value) for name, value in options.items()}
        return narrow_to(self, *map(wider, args), **named)

    def softmax(*args: Any, **options: Any) -> Any:
        return narrow_softmax(*args, **{name: wider(value) for name, value in options.items()})

    narrow_to, narrow_softmax = torch.Tensor.to, torch.nn.functional.softmax
    model = copy.deepcopy(model).double()
    model.config._experts_implementation = "eager"  # torch's grouped products have no float64
    before = torch.get_default_dtype()
    with mock.patch.multiple(torch.Tensor, to=to, float=torch.Tensor.double):
        with mock.patch.object(torch.nn.functional, "softmax", softmax), torch.no_grad():
            torch.set_default_dtype(torch.float64)
            try:
                found = model(torch.tensor(ids)).logits
            finally:
                torch.set_default_dtype(before)
    assert found.dtype is torch.float64
    return found.numpy()


def ask_of(directory: Path, question: str, answer: Callable[[], Any]) -> Any:
    """What transformers says of a directory that was written by others: kept for what is in it."""
    return recorded(answer, _name("directory", f"{content(directory)} {question}"))


def content(directory: Path) -> str:
    """A checksum of the settings, texts and tensors in a directory, whatever their order."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.name == "maxjax_digests.json":
            continue
        if path.suffix == ".json":
            settings = json.loads(path.read_text())
            if isinstance(settings, dict):
                settings.pop("transformers_version", None)
            found.append([path.name, json.dumps(settings, sort_keys=True)])
        elif path.suffix == ".safetensors":
            data = path.read_bytes()
            size = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:size]).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    values = zlib.crc32(data[size + begin : size + end])
                    found.append([name, entry["dtype"], entry["shape"], values])
        elif path.suffix in (".bin", ".txt", ".jinja"):
            found.append([path.name, zlib.crc32(path.read_bytes())])
    text = json.dumps(sorted(map(json.dumps, found)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _files(kind: str, config: str, settings: dict[str, Any]) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Copied, because its classes of settings change what is in them.
    made = getattr(transformers, kind)(getattr(transformers, config)(**copy.deepcopy(settings)))
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(directory)
        files = {path.name: path.read_text() for path in sorted(Path(directory).glob("*.json"))}
        stored = safetensors.numpy.load_file(Path(directory, "model.safetensors"))
    assert all(array.dtype == np.float32 for array in stored.values())
    return {
        "files": files,
        "tensors": {name: list(array.shape) for name, array in stored.items()},
        "state": {name: list(array.shape) for name, array in made.state_dict().items()},
        "config": made.config.to_json_string(use_diff=False),
        "aliases": dict(made.config.attribute_map),
    }


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _name(key: str, question: str, file: str = "models") -> str:
    return f"{file}::{key} {question}"


def _sum(array: np.ndarray) -> str:
    return f"{zlib.crc32(array.tobytes() + repr(array.shape).encode()):08x}"
