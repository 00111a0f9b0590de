"""A model of maxjax as a layer inside equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp

import maxjax

model, tokenizer = maxjax.load("tiny")
vocabulary = model.config.vocab_size


class Judge(eqx.Module):
    language: maxjax.Module
    head: eqx.nn.Linear

    def __call__(self, ids):
        logits = self.language(ids[None])[0, -1]
        return self.head(logits.astype(jnp.float32))


judge = Judge(model, eqx.nn.Linear(vocabulary, 2, key=jax.random.key(0)))
ids = jnp.asarray(tokenizer.encode("What is 37 + 48?"))
print(eqx.filter_jit(judge)(ids))
gradient = eqx.filter_grad(lambda judge: judge(ids).sum())(judge)
print(type(gradient.language).__name__, gradient.head.weight.shape)
