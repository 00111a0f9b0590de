"""Attention maps: how much each token attends to each other token, as one image per head."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from ..errors import UserInputError
from .picture import image, png_url, shades
from .rendered import boxed
from .row import short

_MOST_HEADS, _MOST_LABELS, _MOST_ROWS = 32, 64, 24
# Larger maps are shrunk, and with few labels each token has room for its text.
_MOST_PIXELS, _ALL_PIXELS = 256, 200_000


@dataclass(frozen=True)
class AttentionMap:
    """Attention weights with their tokens, which show themselves as images.

    Attributes:
        weights: attention weights ``[heads, queries, keys]``.
        tokens: texts of the keys; empty if they are not known.
        query_tokens: texts of the queries; empty if they are not known.
        names: name of each head.
    """

    weights: np.ndarray
    tokens: tuple[str, ...]
    query_tokens: tuple[str, ...]
    names: tuple[str, ...]

    def __repr__(self) -> str:
        heads, queries, keys = self.weights.shape
        lines = [f"AttentionMap({heads} heads, {queries} queries, {keys} keys)"]
        mean = self.weights.mean(0)
        step = -(-queries // _MOST_ROWS), -(-keys // (3 * _MOST_ROWS))
        small = _shrunk(mean, *step)
        marks = shades(small, 0.0, float(np.nanmax(small, initial=0.0)))
        width = 0 if not self.query_tokens else min(12, max(map(_width, self.query_tokens)))
        for i, line in enumerate(marks):
            name = self.query_tokens[i * step[0]] if self.query_tokens else ""
            lines.append(f"  {short(name, 12):>{width}} │{line}│".rstrip())
        if queries or keys:
            lines.append(f"  {'':>{width}}  mean of the heads; rows are queries, columns keys")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads, queries, keys = self.weights.shape
        shown = min(heads, _MOST_HEADS)
        figures = "".join(self._figure(i) for i in range(shown))
        more = f"<div><s>… and {heads - shown} more heads</s></div>" if heads > shown else ""
        title = f"<b>Attention: {heads} heads, {queries} queries × {keys} keys</b>"
        flow = f'<div style="display:flex;flex-wrap:wrap;gap:12px">{figures}</div>'
        return boxed(f"{title}{flow}{more}")

    def _figure(self, head: int) -> str:
        values = self.weights[head]
        side = min(_MOST_PIXELS, math.isqrt(_ALL_PIXELS // min(len(self.weights), _MOST_HEADS)))
        step = max(1, -(-max(values.shape) // side))
        values = _shrunk(values, step, step)
        rows, columns = values.shape
        scale = max(1.0, min(14.0, 180 / max(rows, columns, 1)))
        wide, high = scale * columns, scale * rows
        top = float(np.nanmax(np.where(np.isfinite(values), values, 0), initial=0.0))
        url = png_url(values, 0.0, top)
        if self.tokens and scale >= 9 and columns <= _MOST_LABELS:
            picture = self._labelled(url, wide, high, scale)
        else:
            picture = image(url, wide, high)
        caption = f"<s>{html.escape(short(self.names[head], 40))}, up to {top:.3g}</s>"
        return f"<div>{caption}<div>{picture}</div></div>"

    def _labelled(self, url: str, wide: float, high: float, scale: float) -> str:
        """The image with a token at each row and each column."""
        left = min(90.0, 6.2 * max((_width(t) for t in self.query_tokens), default=0)) + 6
        top = min(90.0, 6.2 * max(map(_width, self.tokens), default=0)) + 6
        x, y = [f"{left + (i + 0.5) * scale:.1f}" for i in range(len(self.tokens))], top - 4
        texts = [
            f'<text x="{left - 4:.0f}" y="{top + (i + 0.5) * scale:.1f}" text-anchor="end">{_label(text)}</text>'
            for i, text in enumerate(self.query_tokens)
        ]
        texts += [
            f'<text transform="translate({at} {y:.0f}) rotate(-90)">{_label(text)}</text>'
            for at, text in zip(x, self.tokens, strict=True)
        ]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide:.0f}" height="{top + high:.0f}" '
            f'font-size="10" fill="currentColor" dominant-baseline="central">{"".join(texts)}'
            f'<image href="{url}" x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{high:.0f}" '
            'preserveAspectRatio="none" style="image-rendering:pixelated"/></svg>'
        )


def draw_attention(
    weights: Any,
    tokens: Sequence[str] | None = None,
    *,
    batch: int = 0,
    heads: Sequence[int] | None = None,
    query_tokens: Sequence[str] | None = None,
) -> AttentionMap:
    """Draws attention weights as maps, one for each head.

    Args:
        weights: attention weights ``[heads, queries, keys]``, ``[B, heads, queries, keys]`` or
            ``[queries, keys]``, which are copied from the device.
        tokens: text of each key.
        batch: index of the row to draw, if the weights are ``[B, …]``.
        heads: numbers of the heads to draw; by default all.
        query_tokens: text of each query; by default those of the last keys, as many as there are queries.

    Raises:
        UserInputError: the weights are no real numbers, or the number of axes is not 2 to 4; there are not as
            many texts as keys or queries; or there is no such row or head; or an argument is no list of texts
            or numbers.

    Example:
        >>> import numpy as np
        >>> draw_attention(np.tril(np.ones((2, 3, 3))) / 3, ["a", "b", "c"])
        AttentionMap(2 heads, 3 queries, 3 keys)
          a │█  │
          b │██ │
          c │███│
             mean of the heads; rows are queries, columns keys
    """
    try:
        found: Any = np.asarray(weights)
    except ValueError:  # rows of several lengths
        found = np.empty(0)
    if found.ndim not in (2, 3, 4) or not found.size:
        raise UserInputError(
            "attention weights have the shape [heads, queries, keys] or [B, heads, queries, keys], "
            f"and not {list(found.shape) if found.size else 'none, or rows of several lengths'}"
        )
    if found.dtype.kind in "cOSUmM" or found.dtype.names:
        raise UserInputError(f"attention weights are real numbers, not {found.dtype}")
    found = found.astype(np.float32)
    if found.ndim == 4:
        if not isinstance(batch, Integral) or not -found.shape[0] <= batch < found.shape[0]:
            raise UserInputError(f"batch={batch}: the weights have {found.shape[0]} rows")
        found = found[batch]
    found = found[None] if found.ndim == 2 else found
    count, queries, keys = found.shape
    chosen = list(range(count) if heads is None else _listed("heads", heads))
    if not chosen or not all(isinstance(head, Integral) for head in chosen):
        raise UserInputError(f"heads are the numbers of heads, such as [0, 3], not {heads!r}")
    if bad := [head for head in chosen if not 0 <= head < count]:
        raise UserInputError(f"there is no head {bad[0]}: there are {count}, counted from 0")
    texts = () if tokens is None else tuple(map(str, _listed("tokens", tokens)))
    if tokens is not None and len(texts) != keys:
        raise UserInputError(f"{len(texts)} tokens for {keys} keys: pass the text of each key")
    if query_tokens is not None:
        rows = tuple(map(str, _listed("query_tokens", query_tokens)))
        if len(rows) != queries:
            raise UserInputError(f"{len(rows)} query_tokens for {queries} queries")
    else:
        rows = texts[keys - queries :] if queries <= keys else ()
    return AttentionMap(found[chosen], texts, rows, tuple(f"head {head}" for head in chosen))


def _listed(name: str, given: Any) -> list[Any]:
    if not isinstance(given, Iterable):
        raise UserInputError(f"{name} is a list, not {given!r}")
    return list(given)


def _shrunk(values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The largest value in each block of ``rows`` × ``columns`` values."""
    if rows <= 1 and columns <= 1:
        return values
    starts = (
        np.arange(0, values.shape[0], max(rows, 1)),
        np.arange(0, values.shape[1], max(columns, 1)),
    )
    return np.maximum.reduceat(np.maximum.reduceat(values, starts[0], 0), starts[1], 1)


def _width(text: str) -> int:
    return len(short(text, 12))


def _label(text: str) -> str:
    return html.escape(short(text, 12))
