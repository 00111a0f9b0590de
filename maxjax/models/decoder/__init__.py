"""The decoder that all causal language models of maxjax share.

``config`` holds the settings, ``rope`` the rotary position embedding, ``attention`` self-attention,
``block`` one layer with its MLP, ``model`` the complete model; ``experts`` replaces the MLP by a
mixture of experts. Each family (``maxjax/models/llama.py`` and its neighbours) changes parts of this
decoder in its own file.
"""
