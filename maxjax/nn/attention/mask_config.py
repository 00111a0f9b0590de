"""MHAMaskVariant: the masks that attention applies in addition to the one it is given."""

import enum


class MHAMaskVariant(enum.StrEnum):
    """Which keys a query attends to, in addition to its mask. MAX's names and values."""

    CAUSAL_MASK = "0"
    NULL_MASK = "2"
    CHUNKED_CAUSAL_MASK = "3"
    SLIDING_WINDOW_CAUSAL_MASK = "4"
    SLIDING_WINDOW_NONCAUSAL_MASK = "5"
