"""MHAMaskVariant: the masks that attention applies by itself, in addition to an explicit mask."""

import enum


class MHAMaskVariant(enum.StrEnum):
    """The mask that attention applies in addition to an explicit one. Names and values are MAX's."""

    CAUSAL_MASK = "0"
    NULL_MASK = "2"
    CHUNKED_CAUSAL_MASK = "3"
    SLIDING_WINDOW_CAUSAL_MASK = "4"
    SLIDING_WINDOW_NONCAUSAL_MASK = "5"
