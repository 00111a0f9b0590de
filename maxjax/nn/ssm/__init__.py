"""The arithmetic of layers with a recurrent state: prefill in chunks, in time linear in the tokens, and decode steps.

``convolution`` is the causal convolution that precedes such a state, ``delta`` the gated delta rule of linear
attention, ``ssd`` the state space model of Mamba 2, ``selective`` that of Mamba 1. All are functions of arrays, with
the state as argument and result.
"""
