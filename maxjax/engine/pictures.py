"""Pictures: what the pictures of a prompt are to the model: features in place of tokens, and positions.

Shapes: T tokens of the prompt, N rows of features, E features; B texts of a call, with W tokens each.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import UserInputError
from ..nn.layer.observe.frames import current_observers
from .isolation import isolated


class PictureSpan(NamedTuple):
    """The tokens of a picture: from ``start`` to just before ``end``; ``digest`` is of the picture's content."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a prompt.

    Attributes:
        rows: features ``[N, E]``, of one picture after the other.
        at: the row of each token, int32 ``[T]``; -1 for a token of text.
        spans: the tokens of each picture; one of all tokens where these attend to all of the prompt.
        positions: positions of the tokens for RoPE, int32 ``[T, 3]``; None: they are numbered.
        deepstack: features ``[n, N, E]`` that are added after each of the first n layers; None: none are.
        blocks: the number of the block of each token, int32 ``[T]``, whose tokens attend to each other; -1 for none.
            A block is within a span. None: there are no blocks.

    Example:
        >>> spans = (PictureSpan(1, 3, b""),)
        >>> at = np.array([-1, 0, 1, -1], np.int32)
        >>> pictures = Pictures(np.ones((2, 4), np.float32), at, spans, blocks=at.clip(max=0))
        >>> pictures.uncut(2), pictures.uncut(3), pictures.offset
        (1, 3, 0)
    """

    rows: np.ndarray
    at: np.ndarray
    spans: tuple[PictureSpan, ...]
    positions: np.ndarray | None = None
    deepstack: np.ndarray | None = None
    blocks: np.ndarray | None = None

    @property
    def are_whole(self) -> bool:
        """Whether all tokens of a span are read at once."""
        return self.blocks is not None

    @cached_property
    def offset(self) -> int:
        """By how much the position of the first token after the prompt exceeds the number of the prompt's tokens."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.at)

    def uncut(self, end: int) -> int:
        """The number of first tokens, at most ``end``, after which no picture is cut that must be whole."""
        if not self.are_whole:
            return end
        return next((one.start for one in self.spans if one.start < end < one.end), end)

    def piece_end(self, start: int, count: int) -> int:
        """Where a piece of about ``count`` tokens ends, which begins at ``start``."""
        end = self.uncut(start + count)
        if end > start:
            return end
        return next(one.end for one in self.spans if one.start == start)

    def digest(self, start: int, end: int) -> bytes:
        """What besides their ids decides the content of the tokens from ``start`` to just before ``end``."""
        found = [one for one in self.spans if one.start < end and one.end > start]
        return b"".join(one.digest for one in found)

    def common(self, other: Pictures | None) -> int:
        """The number of first tokens in which two prompts with the same ids are the same."""
        theirs = () if other is None else other.spans
        pairs = zip(self.spans, [*theirs, *[None] * len(self.spans)], strict=False)
        found = next((one.start for one, two in pairs if one != two), len(self.at))
        rest = theirs[len(self.spans) :]
        return min([found, *(one.start for one in rest)])


class Inputs(NamedTuple):
    """What stands in place of the tokens of a call; a pytree. The arguments of a language model's call."""

    features: Any
    at: Any
    positions: Any = None
    deepstack: Any = None
    blocks: Any = None

    @staticmethod
    def of(
        pieces: Sequence[tuple[Pictures | None, int, int]], width: int, model: Any
    ) -> Inputs | None:
        """The inputs of a call; None if no text has pictures.

        Args:
            pieces: of each text, its pictures, and from which token on how many are read.
            width: W.
            model: the language model.
        """
        there = [one for one, _, _ in pieces if one is not None]
        if not there:
            return None
        batch, size = len(pieces), model.config.hidden_size
        has_axes, deep = model.config.has_axes, there[0].deepstack
        rows = np.zeros((batch * width, size), there[0].rows.dtype)
        at = np.full((batch, width), -1, np.int32)
        positions = np.zeros((batch, width, 3), np.int32) if has_axes else None
        are_whole = there[0].are_whole
        blocks = np.full((batch, width), -1, np.int32) if are_whole else None
        added = None if deep is None else np.zeros((len(deep), batch * width, size), deep.dtype)
        for b, (pictures, start, count) in enumerate(pieces):
            place = np.arange(start, start + count)
            if positions is not None:
                positions[b, :count] = place[:, None]
            if pictures is None:
                continue
            read = place[place < len(pictures.at)]  # the others are of the answer
            source, target = pictures.at[read], b * width + np.arange(len(read))
            is_in = source >= 0
            at[b, : len(read)] = np.where(is_in, target, -1)
            rows[target[is_in]] = pictures.rows[source[is_in]]
            if added is not None and pictures.deepstack is not None:
                added[:, target[is_in]] = pictures.deepstack[:, source[is_in]]
            if blocks is not None and pictures.blocks is not None:
                blocks[b, : len(read)] = pictures.blocks[read]
            if positions is not None:
                positions[b, :count] += pictures.offset
                if pictures.positions is not None:
                    positions[b, : len(read)] = pictures.positions[read]
        return Inputs(rows, at, positions, added, blocks)


# --- from messages to features


# Kinds of parts of a message that are pictures, in Hugging Face's form and in OpenAI's.
_KINDS = ("image", "image_url", "input_image")
# The number of pictures whose features are kept.
_KEPT = 64


def pictures_in(messages: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The messages of a chat as templates take them, and the pictures in them, in order.

    Example:
        >>> content = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]
        >>> messages, pictures = pictures_in([{"role": "user", "content": content}])
        >>> messages[0]["content"][0], pictures
        ({'type': 'image'}, [{'type': 'image', 'image': 'cat.png'}])
    """
    found: list[Any] = []

    def taken(part: Any) -> dict[str, str]:
        found.append(part)
        return {"type": "image"}

    return with_pictures(messages, taken), found


def with_pictures(messages: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
    """The messages of a chat with other parts in place of their pictures.

    Args:
        messages: the messages.
        change: the function from the part with a picture to the other one.
    """
    done = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
            pairs = zip(content, kinds, strict=True)
            message = {**message, "content": [change(p) if k in _KINDS else p for p, k in pairs]}
        done.append(message)
    return done


class SeenPictures:
    """The features of the pictures that a model has seen last, by their content: a picture is encoded once."""

    def __init__(self) -> None:
        self._features: OrderedDict[bytes, Any] = OrderedDict()
        self._lock = threading.Lock()

    @isolated()
    def features(self, model: Any, inputs: Any, digest: bytes) -> Any:
        """The features of a picture (``PictureFeatures``)."""
        if current_observers(model.vision):  # what a patch changes is not kept
            return model.vision.encode(inputs, _run)
        with self._lock:
            found = self._features.pop(digest, None)
        if found is None:
            found = model.vision.encode(inputs, _run)
        with self._lock:
            self._features[digest] = found
            while len(self._features) > _KEPT:
                self._features.popitem(last=False)
        return found


def _run(part: Any, *args: Any) -> Any:
    # A capture or a patch sees calls of the part itself, not those inside a compiled program.
    call = part if current_observers(part) else partial(_encode, part)
    return jax.device_get(call(*args))


@jax.jit
def _encode(part: Any, *args: Any) -> Any:
    """What a vision part makes of pixels."""
    return part(*args)


def read_pictures(model: Any, tokenizer: Any, items: Sequence[Any]) -> list[Any]:
    """What the image processor makes of each picture.

    Raises:
        UserInputError: the model takes no pictures, its folder has no settings for them, or one is not a picture.
    """
    if getattr(model, "vision", None) is None:
        raise UserInputError(
            f"a message has a picture, and this {type(model).__name__} takes text alone"
        )
    processor = getattr(tokenizer, "images", None)
    if processor is None:
        raise UserInputError(
            "a message has a picture, and the model's folder has no preprocessor_config.json, which says how pictures "
            "are resized: put it there"
        )
    return [processor([item], of=len(items)) for item in items]


def placed_pictures(
    model: Any, ids: Sequence[int], inputs: Sequence[Any], seen: SeenPictures
) -> Pictures:
    """The pictures of a prompt with these token ids, in which each has its placeholder tokens.

    Raises:
        UserInputError: the placeholders are not as many as the features.
    """
    part, tokens = model.vision, np.asarray(ids, np.int32)
    places = np.flatnonzero(tokens == part.image_token)
    counts = [int(one.counts.sum()) for one in inputs]
    if sum(counts) != len(places):
        raise UserInputError(
            f"the prompt has {len(places)} placeholder tokens of pictures, and its {len(inputs)} pictures need "
            f"{sum(counts)}: each picture must be where its placeholder is"
        )
    digests = [_digest(one) for one in inputs]
    found = [seen.features(model, one, digest) for one, digest in zip(inputs, digests, strict=True)]
    rows = np.concatenate([one.rows for one in found])
    if len(rows) != len(places):
        raise UserInputError(f"the vision part made {len(rows)} features for {len(places)} tokens")
    at = np.full(len(tokens), -1, np.int32)
    at[places] = np.arange(len(places))
    spans, first = [], 0
    for count, digest in zip(counts, digests, strict=True):
        own = places[first : first + count]
        spans.append(PictureSpan(int(own[0]), int(own[-1]) + 1, digest))
        first += count
    if part.sees_prompt:
        whole = hashlib.blake2b(tokens.tobytes() + b"".join(digests), digest_size=16)
        spans = [PictureSpan(0, len(tokens), whole.digest())]
    deep = [one.deepstack for one in found if one.deepstack is not None]
    return Pictures(
        rows, at, tuple(spans), part.positions(tokens, list(inputs)),
        np.concatenate(deep, axis=1) if deep else None, part.blocks(at),
    )  # fmt: skip


def _digest(inputs: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for name in ("pixels", "sizes", "grids", "layouts"):
        array = getattr(inputs, name, None)
        if array is not None:
            found.update(repr((name, array.shape, str(array.dtype))).encode())
            found.update(np.ascontiguousarray(array).view(np.uint8))
    return found.digest()
