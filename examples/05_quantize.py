"""Quantise a model, and measure what it costs."""

import maxjax

model, tokenizer = maxjax.load("tiny")
text = "One and one is two. " * 20

before = maxjax.perplexity(model, tokenizer, text)
for kind in ("q8_0", "q4_0"):
    small, report = maxjax.quantize(model, kind)
    after = maxjax.perplexity(small, tokenizer, text)
    print(report)
    print(f"{kind}: perplexity {before.perplexity:.3f} -> {after.perplexity:.3f}")
    print(maxjax.generate(small, tokenizer, "What is 37 + 48?"))
