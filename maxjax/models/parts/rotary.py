"""The rotary position embedding (RoPE) of a decoder, as its configuration describes it.

Configurations have two spellings: ``rope_theta`` with ``rope_scaling``, and since transformers 5
one object ``rope_parameters``, which may hold one object for each kind of layer.

Source: transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedModelError, UserInputError, shown
from ...kernels import explicit
from ...nn.rope_scaling import (
    DynamicScalingParams,
    LinearScalingParams,
    Llama3RopeScalingParams,
    LongRoPEScalingParams,
    YarnScalingParams,
    inv_freqs,
    yarn_mscale,
)
from ...nn.rotary_embedding import dynamic_multipliers, rotate

if TYPE_CHECKING:
    from .cache import LayerCache

DEFAULT_THETA = 10_000.0
# The length of a text that no text exceeds: positions are int32.
NO_LIMIT = 2**31 - 1
# Settings of RoPE that files may also hold outside of the object of RoPE settings.
_OUTER = ("rope_theta", "partial_rotary_factor")


@partial(jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["interleaved"])
@dataclass(frozen=True)
class Angles:
    """The angles by which the queries and keys of the tokens of a call are rotated: ``Rope.angles``.

    Attributes:
        cos, sin: float32 ``[B or 1, T, R/2]``, or ``[B, R/2]`` for one token per sequence.
        interleaved: whether neighbouring features form pairs; otherwise feature i and i + R/2.
    """

    cos: jax.Array
    sin: jax.Array
    interleaved: bool


def rope(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotate each pair of the first R features of each head by its angle (arXiv:2104.09864).

    Args:
        x: queries or keys ``[B, T, heads, D]``, or ``[B, heads, D]`` for one token per sequence.
        angles: the angles of the tokens.

    Returns:
        An array of the shape and dtype of ``x``, computed in float32. Features beyond R are unchanged.

    Example:
        >>> angles = Angles(jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)), False)
        >>> rope(jnp.array([[[[1.0, 2.0, 3.0]]]]), angles).tolist()
        [[[[-2.0, 1.0, 3.0]]]]
    """
    rotated = 2 * angles.cos.shape[-1]
    y = rotate(x[..., :rotated], angles.cos, angles.sin, interleaved=angles.interleaved)
    return y if rotated == x.shape[-1] else explicit.concatenate([y, x[..., rotated:]], -1)


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding with its settings.

    Attributes:
        theta: base of the frequencies.
        scaling: one of the ``…Params`` of ``nn.rope_scaling``, or None.
        magnitude: factor of cos and sin.
        part: share of a head's features that are rotated: the first ones; the others are not changed.
        interleaved: whether neighbouring features form pairs (GPT-J, GLM-4, Cohere); otherwise the
            first half of the rotated features forms pairs with the second.
        sections: numbers of pairs that turn by a token's time, row and column, where these differ (M-RoPE,
            arXiv:2409.12191); () if there is one position.
        sections_alternate: whether pairs of the three kinds alternate as long as there are any of a kind, and all
            others turn by the time (Qwen3-VL); otherwise they follow one another.

    Example:
        >>> cos, sin = Rope().cos_sin(jnp.array([[0, 1, 2]]), jnp.array([3]), 8)
        >>> cos.shape, Rope(part=0.5).rotated(8)
        ((1, 3, 4), 4)
    """

    theta: float = DEFAULT_THETA
    scaling: Any = None
    magnitude: float = 1.0
    part: float = 1.0
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    sections_alternate: bool = False

    def rotated(self, width: int) -> int:
        """The number of rotated features of a head of this width."""
        return int(width * self.part + 1e-6)  # ``part`` may be a rounded quotient

    def check(self, width: int) -> None:
        """Checks that heads of this width can be rotated.

        Raises:
            ValueError: the number of rotated features is odd, LongRoPE's lists do not have a factor
                for each pair, or the settings give no valid frequencies.
        """
        if self.part == 1 and width % 2:
            raise ValueError(
                f"RoPE rotates pairs of features, so the width of a head must be even, not {width}"
            )
        given, width = width, self.rotated(width)
        if width % 2 or not 0 < width <= given:
            raise ValueError(
                f"RoPE rotates pairs of features, so {self.part:g} of the {given} features of a head "
                f"must be an even number of them, not {width}"
            )
        if isinstance(self.scaling, LongRoPEScalingParams):
            for listed in (self.scaling.short_factor, self.scaling.long_factor):
                if len(listed) != width // 2:
                    raise ValueError(
                        f"LongRoPE over {width} features needs {width // 2} factors, "
                        f"not {len(listed)}"
                    )
            return
        try:
            # Two pairs are enough for this check: the width comes from a file and may be huge, as
            # it has not been compared with tensors yet.
            self._freqs(4)
        except ArithmeticError as error:
            raise ValueError(f"these rope settings give no valid frequencies: {error}") from None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the length of the text (LongRoPE, dynamic NTK)."""
        return isinstance(self.scaling, (LongRoPEScalingParams, DynamicScalingParams))

    def cos_sin(
        self, positions: jax.Array, lengths: jax.Array, width: int
    ) -> tuple[jax.Array, jax.Array]:
        """cos and sin of the angle of each pair of features that is rotated.

        Args:
            positions: integers ``[B, T]``, or ``[B, T, 3]``: a time, a row and a column.
            lengths: length of each sequence, integers ``[B]``. Two variants (dynamic, LongRoPE) choose
                their frequencies by it, for each row independently.
            width: D, the width of a head.

        Returns:
            Two arrays ``[B, T, R/2]`` in float32, where R is ``rotated(width)``.
        """
        width = self.rotated(width)
        if positions.ndim == 3:  # of each pair
            positions = positions[..., self._axis_of_pair(width // 2)]
        else:
            positions = positions[..., None]
        wide = positions.astype(jnp.float32)  # [B, T, 1 or R/2]
        angles = wide * jnp.asarray(self._freqs(width))[None, None, :]
        lengths = lengths.astype(jnp.float32)[:, None, None]  # [B, 1, 1]
        if isinstance(self.scaling, LongRoPEScalingParams):
            original = self.scaling.original_max_position
            long = wide * jnp.asarray(self._freqs(width, original + 1))[None, None, :]
            angles = jnp.where(lengths > original, long, angles)
        elif isinstance(self.scaling, DynamicScalingParams) and width > 2:
            angles = angles * dynamic_multipliers(lengths, width, self.scaling)
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude

    def angles(self, cache: LayerCache, head_dim: int) -> Angles:
        """Return the angles of the tokens of a call, for heads of this width; see :func:`rope`."""
        context = cache.context
        at = context.rows_of_positions if context.axes is None else context.axes
        cos, sin = self.cos_sin(at, context.text_lengths, head_dim)
        if context.is_step:
            cos, sin = cos[:, 0], sin[:, 0]
        return Angles(cos, sin, self.interleaved)

    def _axis_of_pair(self, pairs: int) -> np.ndarray:
        """The axis by whose position each pair turns: 0, 1 or 2, integers ``[pairs]``."""
        if not self.sections:
            return np.zeros(pairs, np.int32)
        if not self.sections_alternate:
            return np.repeat(np.arange(len(self.sections), dtype=np.int32), self.sections)
        place = np.arange(pairs)
        found = np.zeros(pairs, np.int32)
        for axis in (1, 2):
            found[(place % 3 == axis) & (place < 3 * self.sections[axis])] = axis
        return found

    def to_hf(self, default: Any = None) -> dict[str, Any]:
        """Return the settings as a ``config.json`` has them; ``default`` is the architecture's own Rope."""
        found: dict[str, Any] = {"rope_theta": self.theta}
        if (scaling := self.scaling_to_hf()) is not None:
            found["rope_scaling"] = scaling
        if {self.part, getattr(default, "part", 1)} != {1}:
            found["partial_rotary_factor"] = self.part
        return found

    def scaling_to_hf(self) -> dict[str, Any] | None:
        """Return the content of ``rope_scaling``; None if the frequencies are not scaled."""
        scaling = self.scaling
        match scaling:
            case None:
                return None
            case LinearScalingParams():
                return {"rope_type": "linear", "factor": scaling.factor}
            case DynamicScalingParams():
                return {"rope_type": "dynamic", "factor": scaling.factor}
            case Llama3RopeScalingParams():
                return {
                    "rope_type": "llama3", "factor": scaling.factor,
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.orig_max_position,
                }  # fmt: skip
            case YarnScalingParams():
                found: dict[str, Any] = {
                    "rope_type": "yarn", "factor": scaling.factor, "beta_fast": scaling.beta_fast,
                    "beta_slow": scaling.beta_slow, "attention_factor": self.magnitude,
                    "original_max_position_embeddings": scaling.original_max_position_embeddings,
                }  # fmt: skip
                return found | ({} if scaling.truncate else {"truncate": False})
            case LongRoPEScalingParams():
                return {
                    "rope_type": "longrope", "short_factor": list(scaling.short_factor),
                    "long_factor": list(scaling.long_factor), "attention_factor": self.magnitude,
                    "original_max_position_embeddings": scaling.original_max_position,
                }  # fmt: skip
            case Proportional():
                return {
                    "rope_type": "proportional", "partial_rotary_factor": scaling.share,
                    "factor": scaling.factor,
                }  # fmt: skip
        raise UserInputError(
            f"cannot write config.json: RoPE with {type(scaling).__name__} is not supported"
        )

    def _freqs(self, width: int, length: int = 0) -> np.ndarray:
        if isinstance(self.scaling, Proportional):
            return self.scaling.freqs(width, self.theta)
        return inv_freqs(width, self.theta, self.scaling, length=length)


def same_until(rotary_embeddings: Sequence[Rope], lengths: Any) -> jax.Array:
    """Return the largest length of a text with the same frequencies as texts of the given lengths.

    All keys that a token attends to have the frequencies of one length: a text that grows beyond this
    one must be read again.

    Args:
        rotary_embeddings: the Ropes of a model.
        lengths: integers ``[...]``, an array or a number.

    Returns:
        int32 ``[...]``; ``NO_LIMIT`` where the frequencies stay the same.

    Example:
        >>> rope = Rope(scaling=LongRoPEScalingParams([1.0], [2.0], 8, 64))
        >>> (same_until([rope], [5, 8, 9]) == jnp.array([8, 8, NO_LIMIT])).all().item()
        True
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    found = jnp.full_like(lengths, NO_LIMIT)
    for scaling in (rope.scaling for rope in rotary_embeddings):
        if isinstance(scaling, LongRoPEScalingParams):
            border = min(scaling.original_max_position, NO_LIMIT)
            found = jnp.where(lengths > border, found, jnp.minimum(found, border))
        elif isinstance(scaling, DynamicScalingParams):
            border = min(scaling.max_position_embeddings, NO_LIMIT)
            found = jnp.minimum(found, jnp.maximum(lengths, border))
    return found


def reading_length(rotary_embeddings: Sequence[Rope], prompt: int, limit: int) -> int:
    """Return the length whose frequencies a prompt is read with, if its text will have at most ``limit`` tokens.

    With LongRoPE, this is the present length. Dynamic NTK has other frequencies for each length, so the
    text keeps those of its largest length.

    Example:
        >>> reading_length([Rope(scaling=DynamicScalingParams(2.0, 8))], 5, 20)
        20
    """
    return limit if is_dynamic(rotary_embeddings) else prompt


def is_dynamic(rotary_embeddings: Sequence[Rope]) -> bool:
    """Return whether one of the Ropes is dynamic NTK, which is for texts of any length."""
    return any(isinstance(rope.scaling, DynamicScalingParams) for rope in rotary_embeddings)


@dataclass(frozen=True)
class Proportional:
    """RoPE that does not rotate the pairs with the lowest frequencies (Gemma 4).

    Unlike with ``Rope.part``, pairs are formed over the whole head.

    Attributes:
        share: share of the pairs that are rotated.
        factor: divisor of their frequencies.

    Example:
        >>> Proportional(0.5).freqs(8, 16.0).tolist()
        [1.0, 0.5, 0.0, 0.0]
    """

    share: float
    factor: float = 1.0

    def freqs(self, width: int, theta: float) -> np.ndarray:
        """The frequency of each pair of a head, float32 ``[width / 2]``."""
        found = inv_freqs(width, theta, None) / np.float32(self.factor)
        found[int(self.share * width // 2) :] = 0
        return found


@dataclass(frozen=True)
class QueryScaling:
    """A factor of queries that grows with their position, for contexts longer than in training.

    The factor is ``1 + beta · log(1 + ⌊(position + offset) / length⌋)``: Llama 4's
    ``attn_temperature_tuning`` and Ministral 3's ``llama_4_scaling_beta``.

    Example:
        >>> QueryScaling(0.5, 4).factors(jnp.arange(0, 8, 2)).round(3).tolist()
        [1.0, 1.0, 1.347..., 1.347...]
    """

    beta: float
    length: float
    offset: float = 0.0

    def factors(self, positions: jax.Array) -> jax.Array:
        """The factor of the query at each position, float32 of the same shape."""
        steps = jnp.floor((positions.astype(jnp.float32) + self.offset) / self.length)
        return 1.0 + self.beta * jnp.log1p(steps)


def read_rope(
    raw: Mapping[str, Any],
    context: int,
    default_theta: float = DEFAULT_THETA,
    *,
    part: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """Reads the Rope of a configuration.

    Args:
        raw: content of ``config.json``.
        context: ``max_position_embeddings``.
        default_theta: theta if the file has none.
        part: share of each head that is rotated if the file has no ``partial_rotary_factor``. None:
            the family rotates complete heads, and a file with another share is refused.
        interleaved: whether neighbouring features form pairs.

    Raises:
        UnsupportedModelError: the kind of scaling is not supported.
        ValueError: a value is missing, of the wrong type or out of range; the message names the key.

    Example:
        >>> read_rope({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, 64)
        Rope(theta=500000.0, scaling=LinearScalingParams(factor=2.0), magnitude=1.0, part=1.0,
             interleaved=False, sections=(), sections_alternate=False)
        >>> read_rope({"partial_rotary_factor": 0.25}, 64, part=0.5).part
        0.25
    """
    name, given = rope_settings(raw)
    return rope_of(given, name, context, raw, default_theta, part=part, interleaved=interleaved)


def ropes_by_kind(
    raw: Mapping[str, Any],
    context: int,
    thetas: Mapping[str, float],
    bases: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Rope]:
    """Reads the Ropes of a configuration with separate settings for each kind of layer.

    ``rope_parameters`` holds one object for each kind. In the older spelling, each kind's base has its own
    key, and ``rope_scaling`` applies to the layers without a sliding window.

    Args:
        raw: content of ``config.json``.
        context: ``max_position_embeddings``.
        thetas: default base of each kind of layer ("full_attention", "sliding_attention").
        bases: older key of the base of each kind, if it is not ``rope_theta``.

    Raises:
        UnsupportedModelError, ValueError: as for :func:`read_rope`; or ``rope_parameters`` holds
            settings for all layers, which transformers ignores.

    Example:
        >>> by_kind = ropes_by_kind({"rope_theta": 5e5}, 64, dict.fromkeys(["full_attention"], 1e4))
        >>> by_kind["full_attention"].theta
        500000.0
    """
    given = object_of(raw, "rope_parameters")
    wrong = [str(key)[:60] for key in given if key not in thetas]
    if wrong:
        raise UnsupportedModelError(
            f"'rope_parameters' with {wrong[0]!r} for all layers: it must have one object each for "
            + " and ".join(map(repr, thetas))
        )
    found = {}
    for kind, theta in thetas.items():
        inner = object_of(given, kind)
        if kind == "full_attention":
            inner = {**inner, **object_of(raw, "rope_scaling")}
        keys = {key: key for key in _OUTER} | {"rope_theta": bases.get(kind, "rope_theta")}
        outer = {key: raw[name] for key, name in keys.items() if raw.get(name) is not None}
        found[kind] = rope_of({**outer, **inner}, "rope_parameters", context, raw, theta)
    return found


def ropes_to_hf(by_kind: Mapping[str, Rope]) -> dict[str, Any]:
    """Return the key ``rope_parameters`` with one object for each kind of layer: the inverse of :func:`ropes_by_kind`.

    Args:
        by_kind: the Rope of each kind of layer.

    Example:
        >>> ropes_to_hf({"full_attention": Rope(5e5)})
        {'rope_parameters': {'full_attention': {'rope_type': 'default', 'rope_theta': 500000.0}}}
    """
    found = {
        kind: {"rope_type": "default", "rope_theta": one.theta, **(one.scaling_to_hf() or {})}
        for kind, one in by_kind.items()
    }
    return {"rope_parameters": found}


def object_of(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key of a configuration, or an empty one if the key is missing.

    Raises:
        ValueError: the value is not an object.
    """
    found = raw.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"'{key}' must be an object, not {type(found).__name__}")
    return found


def rope_settings(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key of the RoPE settings in a configuration, in the spelling that it uses, and the settings.

    Raises:
        ValueError: the settings are not a JSON object.

    Example:
        >>> rope_settings({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}})
        ('rope_scaling', {'rope_theta': 500000.0, 'type': 'linear', 'factor': 2})
    """
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = object_of(raw, name)
    outer = {key: raw[key] for key in _OUTER if raw.get(key) is not None}
    return name, {**outer, **given}


def yarn_score_factor(raw: Mapping[str, Any]) -> float:
    """Return m, by whose square YaRN multiplies the scores of attention: 1 without the setting ``mscale_all_dim``.

    Raises:
        ValueError: ``factor`` or ``mscale_all_dim`` is not a positive number.

    Example:
        >>> yarn_score_factor({"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}})
        1.3688879454113936
    """
    _, given = rope_settings(raw)
    factor, all_dim = given.get("factor"), given.get("mscale_all_dim")
    if given.get("rope_type", given.get("type", "default")) == "default" or not all_dim:
        return 1.0
    good = isinstance(all_dim, (int, float)) and 0 < all_dim < 1e30
    if not (good and isinstance(factor, (int, float)) and 0 < factor < 1e30):
        raise ValueError("'factor' and 'mscale_all_dim' of the RoPE must be positive numbers")
    return yarn_mscale(factor, all_dim)


def rope_or(raw: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration, with ``given`` as its RoPE settings if it has no object of such settings.

    Example:
        >>> rope_or({"rope_theta": 5e5}, {"rope_type": "yarn"})["rope_parameters"]
        {'rope_type': 'yarn'}
    """
    if not given or raw.get("rope_parameters") or raw.get("rope_scaling"):
        return raw
    return ChainMap({"rope_parameters": given}, raw)  # type: ignore[arg-type]


def rope_of(
    given: Mapping[str, Any],
    name: str,
    context: int,
    raw: Mapping[str, Any] | None = None,
    default_theta: float = DEFAULT_THETA,
    *,
    part: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """:func:`read_rope` for one object of settings; error messages call it ``name``."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"'{name}' with separate settings for {key!r} is not supported"
            )
    found = _Given(given, name, context, raw or {})
    if given.get("rope_type") == "proportional":
        scaling = Proportional(found.number("partial_rotary_factor", 1.0), found.factor_or_one())
        return Rope(found.number("rope_theta", default_theta, minimum=1e-3), scaling)
    share = found.number("partial_rotary_factor", 1.0 if part is None else part)
    if part is None and share != 1:
        raise UnsupportedModelError(
            f"'partial_rotary_factor' {share:g}: only the rotation of complete heads is supported"
        )
    if share > 1:
        raise ValueError(f"'partial_rotary_factor' is {share:g}, more than a complete head")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise UnsupportedModelError(f"'{name}' of type {shown(kind)}: supported are {known}")
    theta = found.number("rope_theta", default_theta, minimum=1e-3)
    scaling, magnitude = _KINDS[kind](found)
    return Rope(theta, scaling, magnitude, share, interleaved)


class _Given:
    """An object of RoPE settings, whose values are checked as they are read."""

    def __init__(self, values: Mapping[str, Any], name: str, context: int, raw: Mapping[str, Any]):
        self.values, self.name, self.context, self.raw = values, name, context, raw

    def number(self, key: str, default: float | None = None, minimum: float = 1e-9) -> float:
        value = self.values.get(key)
        return self.checked(key, default if value is None else value, minimum)

    def maybe(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def checked(self, key: str, value: Any, minimum: float = 1e-9) -> float:
        if value is None:
            raise ValueError(f"'{self.name}' has no '{key}'")
        good = type(value) in (int, float) and minimum <= value <= 1e30
        if not good:
            raise ValueError(f"'{key}' in '{self.name}' is {shown(value)}, not a positive number")
        return float(value)

    def original(self) -> int:
        key = "original_max_position_embeddings"
        outside = self.raw.get(key)
        value = self.values.get(key, self.context) if outside is None else outside
        return int(self.checked(key, value, 1))

    def divisors(self, key: str) -> tuple[float, ...]:
        value = self.values.get(key)
        if not isinstance(value, (list, tuple)) or len(value) > 1 << 16:
            raise ValueError(f"'{key}' in '{self.name}' is not a list of numbers")
        return tuple(self.checked(key, item) for item in value)

    def factor_or_one(self) -> float:
        """The divisor of frequencies; 1 if there is none."""
        return self.number("factor", 1.0)

    def factor(self) -> float:
        """Factor by which the context is extended; by default the ratio of the two lengths."""
        found = self.maybe("factor")
        # This bound is far above any valid context, whose range is checked with the other settings.
        return min(self.context, 1 << 62) / self.original() if found is None else found


def _linear(given: _Given) -> tuple[Any, float]:
    return LinearScalingParams(given.number("factor")), 1.0


def _dynamic(given: _Given) -> tuple[Any, float]:
    return DynamicScalingParams(given.number("factor"), given.context), 1.0


def _llama3(given: _Given) -> tuple[Any, float]:
    factor = given.number("factor")
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    return Llama3RopeScalingParams(factor, low, high, given.original()), 1.0


def _yarn(given: _Given) -> tuple[Any, float]:
    factor, truncate = given.factor(), given.values.get("truncate")
    scaling = YarnScalingParams(
        factor, given.maybe("beta_fast") or 32.0, given.maybe("beta_slow") or 1.0,
        given.original(), truncate is None or bool(truncate),
    )  # fmt: skip
    magnitude = given.maybe("attention_factor")
    if magnitude is None:
        above, below = (given.values.get(key) or 0 for key in ("mscale", "mscale_all_dim"))
        magnitude = yarn_mscale(factor)
        if above and below:
            above, below = given.number("mscale"), given.number("mscale_all_dim")
            magnitude = yarn_mscale(factor, above) / yarn_mscale(factor, below)
    return scaling, magnitude


def _longrope(given: _Given) -> tuple[Any, float]:
    original, magnitude = given.original(), given.maybe("attention_factor")
    if magnitude is None:
        factor = given.factor()
        magnitude = 1.0
        if factor > 1 and original > 1:
            magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = given.divisors("short_factor"), given.divisors("long_factor")
    return LongRoPEScalingParams(short, long, original, given.context), magnitude


_KINDS: dict[str, Callable[[_Given], tuple[Any, float]]] = {
    "default": lambda given: (None, 1.0),
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    # Sections of a head for the axes of images. A text token has the same position on each axis.
    "mrope": lambda given: (None, 1.0),
}
