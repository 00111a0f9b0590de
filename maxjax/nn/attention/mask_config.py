"""Written for files of Modular MAX: the variants of attention masks, at MAX's path.

maxjax itself does not import it.
"""

import enum


class MHAMaskVariant(enum.StrEnum):
    """The mask that attention applies in addition to an explicit one. Names and values are MAX's."""

    CAUSAL_MASK = "0"
    NULL_MASK = "2"
    CHUNKED_CAUSAL_MASK = "3"
    SLIDING_WINDOW_CAUSAL_MASK = "4"
    SLIDING_WINDOW_NONCAUSAL_MASK = "5"


class AttentionMaskVariant(enum.StrEnum):
    """The same masks, and that of a tensor, by the names in MAX's configurations."""

    NULL_MASK = "null"
    CAUSAL_MASK = "causal"
    TENSOR_MASK = "tensor_mask"
    CHUNKED_CAUSAL_MASK = "chunked_causal"
    SLIDING_WINDOW_CAUSAL_MASK = "sliding_window_causal"
    SLIDING_WINDOW_NONCAUSAL_MASK = "sliding_window_noncausal"
