"""Embed sentences and compare them: any encoder or decoder gives embeddings."""

import numpy as np

import maxjax

# "tiny" writes sums, so it must be told how to pool its states; an encoder's files say how.
model, tokenizer = maxjax.load("tiny")
texts = ["What is 37 + 48?", "What is 37 + 47?", "Hello there"]
vectors = np.asarray(maxjax.embed(model, tokenizer, texts, pooling="mean"))  # [3, hidden size]

norms = np.linalg.norm(vectors, axis=1, keepdims=True)
cosines = (vectors / norms) @ (vectors / norms).T
for text, row in zip(texts, cosines, strict=True):
    print(f"{text:20}", *(f"{value:6.3f}" for value in row))
assert cosines[0, 1] > cosines[0, 2]
