"""Load a model, generate text, stream it, and sample."""

import jax

import maxjax

model, tokenizer = maxjax.load("tiny")
print(maxjax.generate(model, tokenizer, "What is 37 + 48?"))

# Several prompts are one batch.
print(maxjax.generate(model, tokenizer, ["What is 5 + 6?", "What is 20 + 21?"]))

# Piece by piece, as it comes.
for piece in maxjax.stream(model, tokenizer, "What is 12 + 30?"):
    print(piece, end="", flush=True)
print()

# Sampled: the same key gives the same text.
sampling = maxjax.Sampling(temperature=0.8, top_p=0.95)
key = jax.random.key(0)
print(maxjax.generate(model, tokenizer, "What is 8 + 9?", sampling=sampling, key=key))
