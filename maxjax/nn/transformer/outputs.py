"""The outputs of a decoder of ragged batches: logits of some or all tokens, and hidden states."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

from ...dtype import DType
from ...graph import ops
from ...graph.value import TensorValue
from .sequence import forward_sharded_layers


class ReturnLogits(enum.StrEnum):
    """The tokens of each sequence whose logits are returned: the last, the last few, or all."""

    LAST_TOKEN = "last_token"
    VARIABLE = "variable"
    ALL = "all"


class ReturnHiddenStates(enum.StrEnum):
    """The hidden states that are returned in addition to the logits.

    ``LAST`` means those of each sequence's last token, ``LAST_PER_DEVICE`` the same for each device, ``ALL`` those of
    all tokens, ``ALL_NORMALIZED`` these after the last norm, and ``SELECTED_LAYERS`` those after selected layers.
    """

    NONE = "none"
    LAST = "last"
    LAST_PER_DEVICE = "last_per_device"
    ALL_NORMALIZED = "all_normalized"
    ALL = "all"
    SELECTED_LAYERS = "selected_layers"


def extract_hs(
    return_hidden_states: ReturnHiddenStates,
    last_token_hs_distributed: Sequence[TensorValue],
    all_hs_distributed: Sequence[TensorValue],
    normalizer: Sequence[Callable[[TensorValue], TensorValue]] | None = None,
    capture_hidden_states: Sequence[Sequence[TensorValue]] | None = None,
) -> tuple[TensorValue, ...]:
    """Selects the hidden states to return.

    Args:
        return_hidden_states: the hidden states that are wanted.
        last_token_hs_distributed, all_hs_distributed: hidden states of the last tokens and of all tokens, one array
            for each device.
        normalizer: the last norm, one for each device; needed for ``ALL_NORMALIZED``.
        capture_hidden_states: for each selected layer, its hidden states on each device; needed for
            ``SELECTED_LAYERS``, which returns those of all layers on the first device, then on the second, and so on.

    Raises:
        ValueError: ``normalizer`` or ``capture_hidden_states`` is needed and missing.
    """
    match return_hidden_states:
        case ReturnHiddenStates.LAST:
            return (last_token_hs_distributed[0],)
        case ReturnHiddenStates.LAST_PER_DEVICE:
            return tuple(last_token_hs_distributed)
        case ReturnHiddenStates.ALL:
            return tuple(all_hs_distributed)
        case ReturnHiddenStates.ALL_NORMALIZED:
            if normalizer is None:
                raise ValueError("ReturnHiddenStates.ALL_NORMALIZED needs the normalizer")
            return tuple(forward_sharded_layers(normalizer, all_hs_distributed))
        case ReturnHiddenStates.SELECTED_LAYERS:
            if not capture_hidden_states:
                raise ValueError("ReturnHiddenStates.SELECTED_LAYERS needs capture_hidden_states")
            return tuple(
                one for device in zip(*capture_hidden_states, strict=True) for one in device
            )
    return ()


def captures_by_device(values: Sequence[TensorValue], num_devices: int) -> list[list[TensorValue]]:
    """Groups the hidden states that :func:`extract_hs` returned for ``SELECTED_LAYERS`` by device.

    Raises:
        ValueError: the number of values is 0 or not a multiple of the number of devices.

    Example:
        >>> captures_by_device([1, 2, 3, 4], 2)  # of two layers on two devices
        [[1, 2], [3, 4]]
    """
    if not values or len(values) % num_devices:
        raise ValueError(
            f"{len(values)} captured hidden states are not the same number for each of {num_devices} devices"
        )
    each = len(values) // num_devices
    return [list(values[start : start + each]) for start in range(0, len(values), each)]


def fuse_captured_hidden_states(
    captures_per_device: Sequence[Sequence[TensorValue]],
) -> list[TensorValue]:
    """The captured hidden states of each device, concatenated along the last axis."""
    return [
        one[0] if len(one) == 1 else ops.concat(list(one), axis=-1) for one in captures_per_device
    ]


def _before_last(input_row_offsets: Any, count: Any) -> Any:
    """Indices of the last ``count`` tokens of each sequence, in order: ``[B * count]``."""
    back = ops.range(
        count,
        0,
        -1,
        out_dim="return_n_logits_range",
        dtype=DType.int64,
        device=input_row_offsets.device,
    )
    ends = ops.unsqueeze(input_row_offsets[1:].cast(back.dtype), -1)
    return ops.reshape(ends - back, (-1,))


def logits_postprocess(
    h: TensorValue,
    input_row_offsets: TensorValue,
    return_n_logits: TensorValue,
    norm: Callable[[TensorValue], TensorValue],
    lm_head: Callable[[TensorValue], TensorValue],
    return_logits: ReturnLogits,
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
    logits_scaling: float = 1.0,
    capture_hidden_states: Sequence[Sequence[TensorValue]] | None = None,
) -> tuple[TensorValue, ...]:
    """The logits of a ragged batch, in float32.

    Args:
        h: hidden states after the last block, ``[tokens, hidden_size]``.
        input_row_offsets: offsets ``[B + 1]``: where each sequence begins, and where the last one ends.
        return_n_logits: number of tokens of each sequence with logits, ``[1]``, for ``ReturnLogits.VARIABLE``.
        norm, lm_head: final norm and output layer.
        return_logits: the tokens whose logits are returned in addition to those of the last tokens.
        return_hidden_states, capture_hidden_states: as for :func:`extract_hs`.
        logits_scaling: number by which logits are divided.

    Returns:
        The logits of the last tokens, ``[B, vocab_size]``; unless ``return_logits`` is ``LAST_TOKEN``, the logits
        of the further tokens and the offsets of their sequences; and the hidden states that are wanted.
    """
    return distributed_logits_postprocess(
        [h], [input_row_offsets], return_n_logits, lambda xs, _: [lm_head(xs[0])], (), return_logits, None, [norm],
        return_hidden_states, logits_scaling, capture_hidden_states=capture_hidden_states,
    )  # fmt: skip


def distributed_logits_postprocess(
    h: Sequence[TensorValue],
    input_row_offsets: Sequence[TensorValue],
    return_n_logits: TensorValue,
    lm_head: Callable[..., Sequence[TensorValue]],
    signal_buffers: Sequence[Any],
    return_logits: ReturnLogits,
    device: Any,
    norm_shards: Sequence[Callable[[TensorValue], TensorValue]] | None = None,
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
    logits_scaling: float = 1.0,
    logit_softcapping: float | None = None,
    capture_hidden_states: Sequence[Sequence[TensorValue]] | None = None,
) -> tuple[TensorValue, ...]:
    """:func:`logits_postprocess` for hidden states in a list with one entry for each device.

    Args:
        h, input_row_offsets: lists of hidden states and offsets, one for each device.
        lm_head: output layer, called with a list and ``signal_buffers``; the first of its results is used.
        signal_buffers, device: argument of ``lm_head``, and one that is ignored.
        norm_shards: the final norm, one for each device.
        logit_softcapping: cap ``c`` of the logits, ``c · tanh(logits / c)``.
    """

    def logits_of(xs: Sequence[TensorValue]) -> TensorValue:
        normed = list(xs) if norm_shards is None else forward_sharded_layers(norm_shards, xs)
        logits = ops.cast(lm_head(normed, signal_buffers)[0], DType.float32)
        if logits_scaling != 1.0:
            logits = logits / logits_scaling
        if logit_softcapping is not None:
            logits = ops.tanh(logits / logit_softcapping) * logit_softcapping
        return logits

    last_h = [
        ops.gather(x, offsets[1:] - 1, axis=0)
        for x, offsets in zip(h, input_row_offsets, strict=True)
    ]
    found: tuple[TensorValue, ...] = (logits_of(last_h),)
    if return_logits == ReturnLogits.VARIABLE:
        count = return_n_logits[0]
        indices = [_before_last(offsets, count) for offsets in input_row_offsets]
        tokens = [ops.gather(x, i, axis=0) for x, i in zip(h, indices, strict=True)]
        ends = ops.range(
            0, TensorValue(indices[0].shape[0]) + count, count,
            out_dim="logit_offsets", dtype=DType.int64, device=h[0].device,
        )  # fmt: skip
        found += logits_of(tokens), ends
    elif return_logits == ReturnLogits.ALL:
        found += logits_of(h), input_row_offsets[0]
    return found + extract_hs(return_hidden_states, last_h, h, norm_shards, capture_hidden_states)


class LogitsPostprocessMixin:
    """Adds :func:`logits_postprocess` as a method to a decoder with ``norm``, ``lm_head`` and ``return_logits``."""

    norm: Callable[[TensorValue], TensorValue]
    lm_head: Callable[[TensorValue], TensorValue]
    return_logits: ReturnLogits
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE
    logits_scaling: float = 1.0

    def _postprocess_logits(
        self,
        h: TensorValue,
        input_row_offsets: TensorValue,
        return_n_logits: TensorValue,
        capture_hidden_states: Sequence[Sequence[TensorValue]] | None = None,
    ) -> tuple[TensorValue, ...]:
        return logits_postprocess(
            h, input_row_offsets, return_n_logits, self.norm, self.lm_head, self.return_logits,
            self.return_hidden_states, self.logits_scaling, capture_hidden_states,
        )  # fmt: skip


class DistributedLogitsPostprocessMixin:
    """Adds :func:`distributed_logits_postprocess` as a method to a decoder with ``norm_shards`` and ``devices``."""

    norm_shards: Sequence[Callable[[TensorValue], TensorValue]]
    lm_head: Callable[..., Sequence[TensorValue]]
    return_logits: ReturnLogits
    devices: list[Any]
    return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE
    logits_scaling: float = 1.0
    logit_softcapping: float | None = None

    def _postprocess_logits(
        self,
        h: Sequence[TensorValue],
        input_row_offsets: Sequence[TensorValue],
        return_n_logits: TensorValue,
        signal_buffers: Sequence[Any],
        capture_hidden_states: Sequence[Sequence[TensorValue]] | None = None,
    ) -> tuple[TensorValue, ...]:
        return distributed_logits_postprocess(
            h, input_row_offsets, return_n_logits, self.lm_head, signal_buffers, self.return_logits,
            self.devices[0], self.norm_shards, self.return_hidden_states, self.logits_scaling,
            self.logit_softcapping, capture_hidden_states,
        )  # fmt: skip
