"""Compares random configurations of every family of decoders with transformers.

    python scripts/random_decoders.py 300            # 300 configurations, all families in turn
    python scripts/random_decoders.py 5 --family gemma2 --seed 7
    python scripts/random_decoders.py --quick        # one of each, to see that it runs

A configuration is drawn (``tests/models/families/draws.py``): heads, widths, layers, ties, biases, windows, kinds
of RoPE, caps, experts, in the spelling of old files or of new ones, sometimes within a multimodal model.
transformers makes a model of it with random weights; maxjax opens its files, on one device or several,
stacked or not. The logits of a batch of texts of different length are compared, computed at once, and in chunks
and single steps with a cache; for the first configuration of a family also the greedy texts of
``maxjax.generate`` and of transformers' ``generate``, or of its calls without a cache for each whose RoPE
depends on the length of the text. Logits have a standard deviation of 1 and may differ by
1e-4; a token may differ only where the two best logits of transformers are as close. A larger difference is
accepted, and printed, if transformers' own logits move by half of it when the last bit of its weights changes.
If a configuration fails, the exit code is 1, and the command that reproduces it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MAXJAX_COMPILE_CACHE", "0")
# Each program runs once or twice, so that compiling is most of the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax.models import find_family
from maxjax.models.multimodal import ARCHITECTURES, WRAPPERS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.models.decoders import ids_of, padded
from tests.models.families import draws
from tests.oracles import recorded
from tests.oracles.models import next_logits

LENGTHS, CHUNK, NEW, WRITTEN = (21, 3, 10), 8, 6, 40
NEAR = 1e-4


@jax.jit
def whole(model: Any, ids: Any, lengths: Any) -> Any:
    """All logits without a cache."""
    return model(ids, lengths=lengths)


@jax.jit
def part(model: Any, ids: Any, cache: Any, lengths: Any) -> Any:
    """All logits of a part of the texts, and the new cache."""
    return model(ids, cache, lengths=lengths)


def in_parts(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[np.ndarray]]:
    """The texts with greedy tokens appended, and the logits of all tokens but the last.

    Where RoPE depends on the length of a text, it is that of the text without the last token.
    """
    rows, lengths = padded(prompts)
    batch, width = rows.shape
    cache = model.cache(batch, width + NEW).for_texts(lengths + NEW)
    texts, logits = [list(one) for one in prompts], [[] for _ in prompts]
    for start in range(0, width, CHUNK):
        ids = rows[:, start : start + CHUNK]
        ids = np.pad(ids, ((0, 0), (0, CHUNK - ids.shape[1])))
        counts = np.clip(lengths - start, 0, CHUNK)
        found, cache = part(model, ids, cache, counts)
        for row, count, values in zip(logits, counts, np.asarray(found), strict=True):
            row.extend(values[:count])
    for _ in range(NEW):
        tokens = [int(np.argmax(row[-1])) for row in logits]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        ids = np.array(tokens, np.int32)[:, None]
        found, cache = part(model, ids, cache, np.ones(batch, np.int32))
        for row, values in zip(logits, np.asarray(found), strict=True):
            row.append(values[0])
    return texts, [np.stack(row) for row in logits]


def opened(drawn: draws.Drawn, folder: Path, rng: np.random.Generator) -> Any:
    """maxjax's model of the files; sometimes their settings are first changed to another spelling."""
    path = folder / "config.json"
    config = respelled(drawn, json.loads(path.read_text()))
    parents = [
        (kind, name)
        for kind, wrapper in WRAPPERS.items()
        for name in (*wrapper.text_models, None, *([drawn.model_type] if wrapper.takes_any else []))
        if (text := wrapper.text_model(name)) is not None
        # Voxtral's defaults are for a Llama: transformers' files of other families may lack these keys.
        and (not wrapper.defaults or drawn.model_type == wrapper.text)
        and text.model_type == drawn.model_type
        and all(config.get(key) == value for key, value in text.always.items())
    ]
    if parents and not drawn.bare and rng.random() < 0.4:
        kind, name = parents[int(rng.integers(len(parents)))]
        if name is None:  # a file that does not say which text model it is
            del config["model_type"]
        else:
            config["model_type"] = name
        config = within(config, kind, folder, rng.random() < 0.5)
    path.write_text(json.dumps(config))
    devices = int(rng.choice([1, 1, 1, 1, 2, 4]))
    model, _ = maxjax.load(folder, mesh=maxjax.make_mesh(model=devices) if devices > 1 else None)
    return model if rng.random() < 0.7 else model.unstack()


def respelled(drawn: draws.Drawn, config: dict[str, Any]) -> dict[str, Any]:
    """What transformers writes, or the drawn settings and nothing else."""
    if drawn.bare:
        kept = {name: config[name] for name in ("architectures", "model_type")}
        config = {**dict.fromkeys(("rope_scaling", "head_dim")), **drawn.case.settings, **kept}
    return {**config, "model_type": drawn.model_type}


def within(config: dict[str, Any], kind: str, folder: Path, is_old: bool) -> dict[str, Any]:
    """The settings of a multimodal model with this text model; renames the tensors in its file to match."""
    front = "language_model.model." if is_old else "model.language_model."
    head = "language_model.lm_head." if is_old else "lm_head."
    tensors = load_file(folder / "model.safetensors")
    own = find_family({"model_type": kind, "text_config": config}).names.headless_prefix or "model."
    named = {
        re.sub(f"^(model[.]|{re.escape(own)})", front, re.sub("^lm_head[.]", head, name)): value
        for name, value in tensors.items()
    }
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    architecture = next(name for name, one in ARCHITECTURES.items() if one == kind)
    tied = tensors.keys().isdisjoint({"lm_head.weight", "embed_out.weight", "decoder.weight"})
    return {
        "architectures": [architecture], "model_type": kind, "text_config": config,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def generator(family: str, seed: int) -> np.random.Generator:
    """The random generator for the configuration of a family with this seed."""
    return np.random.default_rng([seed, zlib.crc32(family.encode())])


def one(family: str, seed: int, *, writes: bool, first: bool = True) -> tuple[float, float]:
    """(largest difference of logits of one configuration, largest difference that is accepted for it).

    Raises:
        AssertionError: a generated token differs.
    """
    rng = generator(family, seed)
    drawn = draws.draw(family, rng)
    with tempfile.TemporaryDirectory() as directory:
        theirs = drawn.case.model(Path(directory), seed)
        model = opened(drawn, Path(directory), rng)
    vocabulary = model.config.vocab_size
    texts = [(ids_of(1, n, seed + n)[0] % vocabulary).tolist() for n in LENGTHS]
    rows, lengths = padded(texts)
    found = np.asarray(whole(model, rows, lengths))
    pairs = [(text, row[: len(text)]) for text, row in zip(texts, found, strict=True)]
    pairs += zip(*in_parts(model, texts), strict=True)
    worst = max(float(np.abs(logits_of(theirs, text) - row).max()) for text, row in pairs)
    if writes and (first or drawn.by_length):
        options: Any = {"max_new_tokens": WRITTEN, "eos_ids": (), "temperature": 0.0}
        mine = maxjax.generate(model, None, texts, chunk=16, **options)
        for text, one in zip(texts, mine, strict=True):
            if drawn.by_length:
                length = len(text) + WRITTEN if drawn.by_length == "dynamic" else None
                other = theirs.greedy(text, WRITTEN, length)
            else:
                length, other = None, theirs.generated([text], WRITTEN)[0].tolist()
            assert_same(theirs, text, list(one.tokens), other, length)
    return worst, NEAR if worst <= NEAR else max(NEAR, 2 * wavering(theirs, pairs))


def logits_of(theirs: Any, text: list[int]) -> np.ndarray:
    """transformers' logits of one text, without others in the batch."""
    with torch.no_grad():
        return theirs.live()(torch.tensor([text]).long()).logits[0].numpy()


def wavering(theirs: Any, pairs: list[tuple[list[int], np.ndarray]]) -> float:
    """How far transformers' own logits move when the last bit of its weights changes.

    Some random models are so badly conditioned that float32 does not determine their logits.
    """
    before = [logits_of(theirs, text) for text, _ in pairs]
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in theirs.live().parameters():
            weight.mul_(1 + 2**-23 * torch.randint(-1, 2, weight.shape))
    after = [logits_of(theirs, text) for text, _ in pairs]
    return max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True))


def assert_same(
    theirs: Any, prompt: list[int], mine: list[int], other: list[int], length: int | None
) -> None:
    """Asserts that both texts are the same, up to a token where the two best logits are a tie."""
    at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
    if at is not None:
        logits = next_logits(theirs.live(), prompt + mine[:at], length)
        apart = logits.max() - logits[[mine[at], other[at]]].min()
        assert apart < NEAR, f"token {at} is {mine[at]}, not {other[at]}: logits {apart:.1e} apart"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--family", choices=draws.names())
    parser.add_argument("--seed", type=int, default=0, help="the first; each round has its own")
    parser.add_argument("--quick", action="store_true", help="one of each")
    parser.add_argument("--no-texts", action="store_true", help="nothing is generated")
    parser.add_argument("--show", action="store_true", help="print each configuration")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)
    torch.set_num_threads(1)
    recorded.start("ask", absent=False)
    families = [options.family] if options.family else draws.names()
    count = len(families) if options.quick else options.count
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    largest: dict[str, float] = dict.fromkeys(families, 0.0)
    began = time.perf_counter()
    for number in range(count):
        family, seed = families[number % len(families)], options.seed + number // len(families)
        total[family] += 1
        start = time.perf_counter()
        try:
            told = {"writes": not options.no_texts, "first": seed == options.seed}
            (difference, limit), what = one(family, seed, **told), ""
        except Exception as error:
            difference, limit, what = np.inf, NEAR, f"{type(error).__name__}: {error}"
        largest[family] = max(largest[family], difference)
        right[family] += difference <= limit
        if difference <= limit and limit > NEAR:
            what = f"(the last bit of its weights moves the oracle's by {limit / 2:.1e})"
        if options.show or not difference <= NEAR:
            drawn = draws.draw(family, generator(family, seed))
            print(
                f"python scripts/random_decoders.py 1 --family {family} --seed {seed}: {difference:.1e} "
                f"{what} {drawn.case.settings} {'bare' if drawn.bare else 'full'} "
                f"{time.perf_counter() - start:.1f} s",
                flush=True,
            )
        jax.clear_caches()
    for family in families:
        if total[family]:
            print(f"{family:18} {right[family]} of {total[family]}, at most {largest[family]:.0e}")
    seconds = time.perf_counter() - began
    print(f"{sum(right.values())} of {sum(total.values())} configurations, {seconds:.0f} s")
    return int(sum(right.values()) < sum(total.values()))


if __name__ == "__main__":
    sys.exit(main())
