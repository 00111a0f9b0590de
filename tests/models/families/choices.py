"""Random choices that the generators of configurations share: kinds of layers and of RoPE, in several spellings."""

from __future__ import annotations

from typing import Any

import numpy as np

Settings = dict[str, Any]
FULL, NEAR, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LEFT_OUT = object()  # for a setting that was drawn and is none of the family
ORIGINAL = "original_max_position_embeddings"


class Pick:
    """Random choices."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def __call__(self, *of: Any) -> Any:
        return of[int(self.rng.integers(len(of)))]

    def maybe(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def many(self, count: int, *of: Any) -> list[Any]:
        return [self(*of) for _ in range(count)]


def width_of(found: Settings) -> int:
    """The width of a head."""
    width = found.get("head_dim")
    return width or found["hidden_size"] // found["num_attention_heads"]


def rope(pick: Pick, found: Settings, kinds: tuple[str, ...], width: int | None = None) -> Settings:
    """RoPE of a kind, in one spelling or the other, or none at all.

    Args:
        pick: random choices.
        found: the settings drawn so far.
        kinds: kinds of scaling, for all families those of transformers.
        width: number of features that are rotated; by default those of a head.
    """
    kind = pick(*kinds)
    if kind == "default" and pick.maybe(0.3):
        return {}
    given: Settings = {"rope_type": kind, **scaling(pick, kind, width or width_of(found))}
    theta = pick(100.0, 10000.0, 1000000)
    if pick.maybe():
        return {"rope_parameters": {**given, "rope_theta": theta}}
    if kind == "default":
        return {"rope_theta": theta}
    if pick.maybe(0.7):
        given["type"] = kind
        given = given if pick.maybe(0.3) else {k: v for k, v in given.items() if k != "rope_type"}
    return {"rope_theta": theta, "rope_scaling": given}


def scaling(pick: Pick, kind: str, width: int) -> Settings:
    """The settings of one kind of RoPE."""
    if kind in ("linear", "dynamic"):
        return {"factor": pick(2.0, 2.5, 8.0)}
    if kind == "llama3":
        return {"factor": pick(8.0, 32.0), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                ORIGINAL: pick(32, 256)}  # fmt: skip
    if kind == "yarn":
        more = pick({}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"mscale": 0.707},
                    {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False})  # fmt: skip
        return {"factor": pick(3.0, 16.0), **pick({ORIGINAL: 16}, {ORIGINAL: 64}, {}), **more}
    if kind == "longrope":
        pairs = width // 2
        lists = {"short_factor": [1 + 0.1 * i for i in range(pairs)],
                 "long_factor": [2 + 0.3 * i for i in range(pairs)]}  # fmt: skip
        return lists
    return {}


def partly(pick: Pick, found: Settings, default: float, kinds: tuple[str, ...]) -> Settings:
    """RoPE of a part of each head, where the family's default is ``default``."""
    width = width_of(found)
    shares = [
        s
        for s in (0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
        if round(width * s, 9) % 2 == 0 and width * s >= 4
    ]
    share = default if default in shares and pick.maybe() else pick(*shares)
    found = {**found, **rope(pick, found, kinds, round(width * share))}
    changed = {k: found[k] for k in ("rope_parameters", "rope_scaling", "rope_theta") if k in found}
    if share == default and pick.maybe():
        return changed
    if "rope_parameters" in changed:
        changed["rope_parameters"]["partial_rotary_factor"] = share
    else:
        changed["partial_rotary_factor"] = share
    return changed


def without_rope(found: Settings) -> Settings:
    """The settings without any of RoPE."""
    return {k: v for k, v in found.items() if not k.startswith("rope_")}


# Common kinds; LongRoPE needs a list for each pair.
KINDS = ("default", "default", "linear", "dynamic", "llama3", "yarn")


def longrope(pick: Pick, found: Settings) -> Settings:
    """LongRoPE at times, instead of what there was."""
    if pick.maybe(0.8):
        return {}
    changed = rope(pick, found, ("longrope",))
    given = changed["rope_scaling" if "rope_scaling" in changed else "rope_parameters"]
    given |= {ORIGINAL: pick(16, 64), **pick({}, {"factor": 4.0})}
    return {**no_rope(), **changed}


def no_rope() -> Settings:
    """Takes away all settings of RoPE that were drawn."""
    return dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), LEFT_OUT)


def both(pick: Pick, far: Settings, near: Settings, **outer: Any) -> Settings:
    """RoPE of two kinds of layers: an object for each, the older spelling, or nothing."""
    old = {k: v for k, v in far.items() if k != "rope_theta"}
    return {**no_rope(), **pick({}, {"rope_parameters": {FULL: far, NEAR: near}},
                            {"rope_theta": pick(1e4, 1e6), "rope_scaling": old, **outer})}  # fmt: skip


def window(pick: Pick, found: Settings) -> Settings:
    """The window of Qwen, which one setting turns on and another gives to some layers."""
    used, layers = pick.maybe(), found["num_hidden_layers"]
    kinds = found.get("layer_types", LEFT_OUT) if used else LEFT_OUT
    first = int(pick.rng.integers(0, layers + 1))
    return {"use_sliding_window": used, "max_window_layers": first, "layer_types": kinds}


def kinds_of(pick: Pick, found: Settings, *of: str) -> list[str]:
    """A kind for each layer, attention one of them at least: transformers counts its tokens."""
    kinds = pick.many(found["num_hidden_layers"], *of)
    kinds[int(pick.rng.integers(len(kinds)))] = FULL
    return kinds
