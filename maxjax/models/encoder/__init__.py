"""The figure that text encoders share: token ids → a hidden state of each token, which sees all the others.

``config`` are the settings, ``attention`` what tokens see of one another, ``block`` the embeddings, the
MLP and the layer, ``model`` the whole with its pooler and the head of a reranker. A family gives the names
of its files and what differs.
"""
