"""The text encoder that all encoder families share: token ids → hidden states, with bidirectional attention.

``attention`` holds self-attention, ``block`` the embeddings, the MLP and the
layer, ``model`` the complete model with its pooler and the classification head of a reranker. Each
family changes parts of it, and the attribute names, in its own file.
"""
