"""Convert a checkpoint to GGUF and back, and find the same values."""

import tempfile
from pathlib import Path

import numpy as np

import maxjax

folder = Path(tempfile.mkdtemp())
model, tokenizer = maxjax.load("tiny")
maxjax.save_pretrained(model, folder / "hf", tokenizer=tokenizer)

maxjax.convert(folder / "hf", folder / "model.gguf")
maxjax.convert(folder / "model.gguf", folder / "back")

# A GGUF file needs nothing beside it: configuration and tokenizer are in its metadata.
packed, same_tokenizer = maxjax.load(folder / "model.gguf")
print(maxjax.generate(packed, same_tokenizer, "What is 37 + 48?"))

before, after = maxjax.load(folder / "hf")[0], maxjax.load(folder / "back")[0]
theirs = after.state_dict()
for name, value in before.state_dict().items():
    np.testing.assert_array_equal(np.asarray(value), np.asarray(theirs[name]), err_msg=name)
print(len(theirs), "tensors are the same")
