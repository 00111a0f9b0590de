"""A KV cache in pages, of 40 lines, runs the architectures' files as they are: they know only write and attend."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax.kernels.attention import attention
from maxjax.models import GPT2, Gemma2, Gemma2Config, GPT2Config, Llama, LlamaConfig
from maxjax.models.parts import LayerCache
from maxjax.models.parts.cache import ForwardContext

PAGE, PAGES = 4, 10


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache(LayerCache):
    """Keys and values of all sequences in one pool of pages ``[L, P, PAGE, K, D]``.

    Attributes:
        table: number of the page that holds tokens ``i · PAGE`` and on of each sequence, ``[B, S / PAGE]``.
    """

    table: jax.Array = None

    def attend(self, q, mask, scores, group=None):
        keys, values = self.states["keys"], self.states["values"]
        positions = jnp.broadcast_to(
            self.context.rows_of_positions, (q.shape[0], self.context.length)
        )
        rows = jnp.arange(q.shape[0])[:, None]
        page, slot = self.table[rows, positions // PAGE], positions % PAGE
        k, v = (a[:, None] if a.ndim == 3 else a for a in self.new)
        keys = keys.at[self.layer, page, slot].set(k)
        values = values.at[self.layer, page, slot].set(v)
        k, v = (a[self.layer, self.table] for a in (keys, values))  # [B, S / PAGE, PAGE, K, D]
        k, v = (a.reshape(a.shape[0], -1, *a.shape[3:]) for a in (k, v))  # [B, S, K, D]
        distance = positions[:, :, None] - jnp.arange(k.shape[1])[None, None, :]
        sees = (distance >= 0) & (distance < (mask.window or k.shape[1]))
        y = attention(
            q[:, None] if q.ndim == 3 else q,
            k,
            v,
            sees,
            scale=scores.scale,
            soft_cap=scores.soft_cap,
        )
        states = {"keys": keys, "values": values}
        return y.reshape(q.shape), dataclasses.replace(self, states=states, new=None)


def paged(model, table, states, start, length):
    """The cache of a call with ``length`` tokens at position ``start``."""
    starts = jnp.full(len(table), start, jnp.int32)
    context = ForwardContext(
        starts,
        None,
        starts + length,
        None,
        None,
        length,
        length == 1,
        PAGE * table.shape[1],
        None,
        (),
    )
    return PagedCache(context, states, table=table)


SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "model",
    [
        lambda: Llama(LlamaConfig(96, 32, 40, **SIZES)),
        lambda: Gemma2(Gemma2Config(96, 32, 40, **SIZES, head_dim=8, sliding_window=5)),
        lambda: GPT2(GPT2Config(96, n_embd=32, n_layer=3, n_head=4, n_positions=64)),
    ],
    ids=["llama", "gemma2 with windows and caps", "gpt2"],
)
def test_pages_in_any_order_give_the_same_logits(model):
    model = maxjax.init(model(), jax.random.key(0))
    config = model.config
    ids = np.random.default_rng(0).integers(0, 96, (2, 17)).astype(np.int32)
    # Pages of the two sequences lie among each other, in no order.
    table = jnp.asarray(np.random.default_rng(1).permutation(PAGES).reshape(2, -1))
    shape = (config.num_hidden_layers, PAGES, PAGE, config.num_key_value_heads, config.head_dim)
    states, found = {"keys": jnp.zeros(shape), "values": jnp.zeros(shape)}, []
    for start, end in ((0, 9), (9, 15), (15, 16), (16, 17)):
        cache = paged(model, table, states, start, end - start)
        part = ids[:, start] if end - start == 1 else ids[:, start:end]
        x, cache = model.hidden_states(jnp.asarray(part), cache)
        states = cache.states
        found.append(model.logits(x).reshape(2, end - start, -1))
    np.testing.assert_allclose(jnp.concatenate(found, 1), model(ids), rtol=1e-4, atol=1e-5)
