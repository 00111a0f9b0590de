"""The decoder that all causal language models here are made of, in the order of the figure.

``config`` is what a configuration must say, ``rope`` the rotary position embedding, ``attention``
self-attention, ``block`` one layer with its MLP, ``model`` the whole; ``experts`` replaces the MLP
by a mixture of experts. A family (``maxjax/models/llama.py`` and its neighbours) changes parts of it:
its file says which.
"""
