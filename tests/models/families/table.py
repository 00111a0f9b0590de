"""The table of model families in docs/models.md: ``python -m tests.models.families.table`` writes it anew.

Names of model types write these rows alone, and leave the others as they are. Names and formats are those of
``maxjax.models.families()``, features those of the models of ``known/``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import maxjax
from maxjax.models import EncoderConfig, all_families
from maxjax.models.multimodal import WRAPPERS
from maxjax.models.parts import LabelledConfig
from maxjax.nn.kv_cache.kinds import LatentVectors, Shared, States
from tests.models import decoders
from tests.models.families.cases import Case, every

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
_CAPS = "attn_soft_cap logit_soft_cap attn_logit_softcapping final_logit_softcapping".split()
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
_HEAD = ("Family", "Architecture", "GGUF", "Features")


def features(model: Any) -> list[str]:
    """What one model has that a Llama has not."""
    config, count = model.config, model.config.num_hidden_layers
    modules = [module for _, module in model.named_modules()]
    kept = [kind for i in range(count) for kind in config.states(i).values()]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope", None)
    in_chunks = any(getattr(getattr(m, "mask", None), "chunked", False) for m in modules)
    caps = [getattr(config, name, None) for name in _CAPS]
    found = {
        "experts": any(".experts." in name for name in model.raw_state_dict()),
        "sliding windows": any(config.window(i) for i in range(count)) and not in_chunks,
        "attention in chunks": in_chunks,
        "ALiBi": bool(getattr(config, "alibi", False)),
        "attention sinks": any(getattr(m, "sinks", None) is not None for m in modules),
        "attention to chosen tokens": getattr(config, "index_topk", None) is not None,
        "latent attention": any(isinstance(kind, LatentVectors) for kind in kept),
        "recurrent layers": any(isinstance(kind, States) for kind in kept),
        "shared caches": any(isinstance(kind, Shared) for kind in kept),
        "norms of queries and keys": any(
            getattr(m, name, None) is not None for m in modules for name in _QUERY_NORMS
        ),
        "partial RoPE": rope is not None and rope.part < 1,
        "RoPE of neighbours": rope is not None and rope.interleaved,
        "layers without RoPE": not all(getattr(m, "uses_rope", True) for m in modules),
        "soft caps": any(caps),
        "multi-token prediction": model.mtp_class is not None,
    }
    return [name for name, has in found.items() if has]


def features_of(case: Case) -> list[str]:
    """The features of one case's model."""
    with tempfile.TemporaryDirectory() as folder:
        case.model(Path(folder))
        return features(decoders.ours(folder))


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
        one, has = known[name], {}
        for case in of_family:
            has |= dict.fromkeys(features_of(case))
        cells = (one.family, f"`{one.architectures[0]}`", f"`{one.gguf}`" if one.gguf else "–")
        print(name, flush=True)
        found.append((*cells, ", ".join(has)))
    return sorted(found, key=lambda row: row[0].lower())


def encoders() -> str:
    """The sentences that name the encoders and the models of images, by their model types."""
    kinds = {"Encoders": EncoderConfig, "Models of [images](images.md)": LabelledConfig}
    found: dict[str, dict[str, None]] = {name: {} for name in kinds}
    for one in all_families():
        name = next((name for name, kind in kinds.items() if issubclass(one.config, kind)), None)
        if name is not None:
            found[name][f"`{one.model_type}`"] = None
    return "\n\n".join(f"{name}: {', '.join(listed)}." for name, listed in found.items()) + "\n"


def with_pictures() -> str:
    """The sentence that names the models of texts and pictures, by their model types."""
    found: dict[bool, list[str]] = {False: [], True: []}
    for name, one in sorted(WRAPPERS.items()):
        if one.vision:
            found[one.takes_any].append(f"`{name}`")
    own, around = (", ".join(names) for names in found.values())
    return f"Texts with [pictures](images.md): {own}; around any text family: {around}.\n"


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
    both = table(_HEAD, lines) + "\n" + encoders() + "\n" + with_pictures()
    PAGE.write_text(before + BEGIN + both + END + after)


if __name__ == "__main__":
    from tests.oracles import recorded

    recorded.start("ask", absent=False)
    main(set(sys.argv[1:]))
