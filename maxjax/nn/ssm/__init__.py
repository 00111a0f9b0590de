"""What layers with a recurrent state compute: prefill in chunks, in time linear in the tokens, and steps.

``convolution`` is the causal convolution before them, ``delta`` the gated delta rule of linear
attention, ``ssd`` the state space model of Mamba 2. All are functions of arrays: the state comes in and goes out.
"""
