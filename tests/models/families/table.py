"""The table of model families in docs/models.md: ``python -m tests.models.families.table`` writes it anew.

Names of model types measure these alone, and leave the other rows as they are.

Names and formats are those of ``maxjax.models.families()``, the source is in the head of the family's
file, features are those of the models of ``known/``, and the largest difference is measured on all of
them, against transformers itself: the largest of the logits', which have a standard deviation of 1.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import maxjax
from maxjax.models import FAMILIES
from maxjax.models.decoder.attention import DecoderAttention
from maxjax.models.encoder.config import EncoderConfig
from maxjax.nn.kv_cache.kinds import LatentVectors, Shared, States
from tests.models import decoders
from tests.models.families.cases import Case, every

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
_HEAD = ("Family", "Architecture", "GGUF", "Features", "Difference", "Source")


def features(model: Any) -> list[str]:
    """What one model has that a Llama has not."""
    config = model.config
    below = [module for _, module in model.named_modules()]
    attention = [module for module in below if isinstance(module, DecoderAttention)]
    kept = [kind for i in range(config.num_layers) for kind in config.states(i).values()]
    found = {
        "experts": any(".experts." in name for name in model.raw_state_dict()),
        "sliding windows": any(config.slides) and not any(a.chunked for a in attention),
        "attention in chunks": any(a.chunked for a in attention),
        "attention sinks": any(a.sinks is not None for a in attention),
        "latent attention": any(isinstance(kind, LatentVectors) for kind in kept),
        "recurrent layers": any(isinstance(kind, States) for kind in kept),
        "shared caches": any(isinstance(kind, Shared) for kind in kept),
        "norms of queries and keys": bool(config.qk_norm),
        "partial RoPE": config.rope is not None and config.rope.part < 1,
        "RoPE of neighbours": config.rope is not None and config.rope.interleaved,
        "layers without RoPE": bool(config.rotates),
        "soft caps": bool(config.attn_soft_cap or config.logit_soft_cap),
    }
    return [name for name, has in found.items() if has]


def difference(case: Case) -> tuple[float, list[str]]:
    """(Largest difference of the logits of two texts, features) of one case."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = case.model(Path(folder))
        mine = decoders.ours(folder)
        ids = decoders.ids_of(2, case.length)
        expected = decoders.logits_of(theirs, ids)
        found = decoders.like(decoders.call(mine, ids), expected)
        return float(np.abs(found - expected).max()), features(mine)


def rows(names: set[str] | None = None) -> list[tuple[str, ...]]:
    """The rows of the decoders that have cases, all or those of some model types."""
    cases: dict[str, list[Case]] = {}
    for case in every():
        cases.setdefault(case.family, []).append(case)
    known = {one.model_type: one for one in maxjax.models.families()}
    found = []
    for name, of_family in cases.items():
        if names is not None and name not in names:
            continue
        one, worst, has = known[name], 0.0, {}
        for case in of_family:
            apart, more = difference(case)
            worst, has = max(worst, apart), has | dict.fromkeys(more)
        cells = (one.family, f"`{one.architectures[0]}`", f"`{one.gguf}`" if one.gguf else "–")
        print(name, f"{worst:.1e}", flush=True)
        found.append((*cells, ", ".join(has), rounded_up(worst), source_of(name)))
    return sorted(found, key=lambda row: row[0].lower())


def rounded_up(number: float) -> str:
    """A number as a text of one digit that is no less, as ``2e-05``."""
    power = 10.0 ** math.floor(math.log10(number))
    return f"{math.ceil(number / power - 1e-9) * power:.0e}"


def source(head: str) -> str:
    """The papers that the head of a file names, as links; without any, transformers' file."""
    papers = re.findall(r"arXiv:(\d+\.\d+)", head)
    if papers:
        return ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers)
    return ", ".join(f"`{name}`" for name in re.findall(r"``(modeling_\w+)``", head))


def source_of(model_type: str) -> str:
    """The :func:`source` of the file of a family's settings."""
    config = next(one.config for one in FAMILIES if one.model_type == model_type)
    return source(sys.modules[config.__module__].__doc__ or "")


def encoders() -> list[tuple[str, ...]]:
    """The rows of the encoders: name, architectures, source."""
    found: dict[str, tuple[list[str], str]] = {}
    for one in FAMILIES:
        if issubclass(one.config, EncoderConfig):
            names, _ = found.setdefault(one.model_type, ([], source_of(one.model_type)))
            names += [f"`{name}`" for name in one.architectures if f"`{name}`" not in names]
    return [(f"`{name}`", ", ".join(names), of) for name, (names, of) in found.items()]


def table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *lines))


def written() -> list[list[str]]:
    """The cells of the page's table of decoders."""
    part = PAGE.read_text().split(BEGIN)[1].split(END)[0].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()[2:]]


def main(names: set[str]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    every = {row[0]: tuple(row) for row in written()} if names else {}
    every |= {row[0]: row for row in rows(names or None)}
    lines = sorted(every.values(), key=lambda row: row[0].lower())
    both = table(_HEAD, lines) + "\n" + table(("Encoder", "Architectures", "Source"), encoders())
    PAGE.write_text(before + BEGIN + both + END + after)


if __name__ == "__main__":
    from tests.oracles import recorded

    recorded.start("ask", absent=False)
    main(set(sys.argv[1:]))
