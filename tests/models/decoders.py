"""Small random decoders as transformers writes them, read by us; and a greedy loop."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

import maxjax
from maxjax.graph.weights import load_weights
from maxjax.models import build
from maxjax.models.parts.rotary import reading_length
from maxjax.text.tokenizer.tokenizer import Tokenizer
from tests.oracles.models import OracleModel
from tests.oracles.recorded import torch

VOCAB = 96
EVERY = 4  # of so many tokens of the vocabulary the logits of one are kept
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
HEADS = {"mha": 4, "gqa": 2, "mqa": 1}


def ids_of(batch, length, seed=0):
    return np.random.default_rng(seed).integers(1, VOCAB, (batch, length)).astype(np.int32)


def one_character_each(**options):
    """A tokenizer for these models: token i is the character 33 + i, and nothing else."""
    words = {chr(33 + i): i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="!"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, **options)


def drawn(rng, name, shape):
    """Values of a tensor of a decoder; ones and zeros in norms would hide a mistake."""
    normal = rng.normal(0, 1.5, shape)
    if "norm" in name or ".ln_" in name:
        return 0.3 * normal + name.endswith("weight")
    return normal * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)


def drawn_of_gemma(rng, name, shape):
    """The same where 1 is added to the weights of norms."""
    return drawn(rng, name, shape) - ("norm" in name)


def drawn_of_gpt2(rng, name, shape):
    """The same where maps have weights [in, out]."""
    return drawn(rng, name, shape[::-1]).T if "c_" in name else drawn(rng, name, shape)


def spread(model):
    """The deviation of the logits that transformers' model has before any cap."""
    settings = model.config
    cap = getattr(settings, "final_logit_softcapping", None)
    if cap is not None:
        settings.final_logit_softcapping = 1e9  # not None, which not all classes of settings take
    ids = ids_of(4, min(24, getattr(settings, "max_position_embeddings", 24))) % settings.vocab_size
    with torch.no_grad():
        found = float(model(torch.tensor(ids).long()).logits.std())
    if cap is not None:
        settings.final_logit_softcapping = cap
    return found


def oracle(kind, directory=None, seed=0, file="models", **settings):
    """transformers' model of one kind ("Llama"), in the directory as well; logits of deviation 1."""
    if kind == "GPT2":
        return gpt2_oracle(directory, seed, **{**SMALL, **settings})
    one = np.float32(kind.startswith("Gemma"))

    def scaled(tensors, by):
        norm = (tensors["model.norm.weight"] + one) / np.float32(by) - one
        return {**tensors, "model.norm.weight": norm}

    config = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    draw = drawn_of_gemma if one else drawn
    made = OracleModel(
        f"{kind}ForCausalLM", config, {**SMALL, **settings},
        draw=draw, seed=seed, measure=spread, scale=scaled, file=file,
    )  # fmt: skip
    if directory is not None:
        made.save(directory)
    return made


def gpt2_oracle(directory=None, seed=0, **settings):
    """The same of a GPT-2."""

    def scaled(tensors, by):
        last = [f"transformer.ln_f.{part}" for part in ("weight", "bias")]
        return tensors | {name: tensors[name] / np.float32(by) for name in last}

    made = OracleModel(
        "GPT2LMHeadModel", "GPT2Config", settings,
        draw=drawn_of_gpt2, seed=seed, measure=spread, scale=scaled,
    )  # fmt: skip
    if directory is not None:
        made.save(directory)
    return made


def change_config(directory, **changes):
    """Other settings in ``config.json``; None takes one away."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def ours(path, *, stacked=True, devices=1, **options):
    """Our model of a checkpoint."""
    weights = load_weights(path)
    model = build(weights, stacked=stacked, **options)
    if devices > 1:
        model.to(maxjax.make_mesh(model=devices))
    model.load_state_dict(weights)
    return model


def logits_of(model, ids):
    """transformers' logits ``[B, T, V / EVERY]``."""
    return model.logits(ids, EVERY)


call = jax.jit(lambda model, ids: model(ids))


@functools.partial(jax.jit, donate_argnums=2)
def last(model, ids, cache, lengths):
    """The logits of each row's last token, and the next cache."""
    return model(ids, cache, lengths=lengths, last=True)


def same(found, expected, atol=1e-4):
    """The figure of this library: 1e-4 where the logits have a deviation of 1.

    What is expected may be the logits of one in EVERY tokens of the vocabulary.
    """
    assert 0.5 < np.std(expected) < 2
    np.testing.assert_allclose(like(found, expected), expected, rtol=0, atol=atol)


def like(found, expected):
    """Logits of all tokens, or of one in EVERY if what is expected has no others."""
    found = np.asarray(found)
    return found if found.shape == expected.shape else found[..., ::EVERY]


def sampled(array, count=64):
    """Some of the values, at random places: enough of a gradient to keep."""
    array = np.ravel(array)
    places = np.random.default_rng(0).permutation(array.size)[:count]
    return array[places].copy()


def padded(prompts, width=0):
    """Rows of one length, at least ``width``, padded to the right, and the lengths."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    rows = np.zeros((len(prompts), max(width, lengths.max())), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows, lengths


def chosen(model, prompts, texts, width=0):
    """The tokens that the logits of the whole texts choose, in the places of those written."""
    rows, lengths = padded([[*p, *t] for p, t in zip(prompts, texts, strict=True)], width)
    best = np.asarray(call(model, rows)).argmax(-1).tolist()
    return [tuple(r[len(p) - 1 : n - 1]) for r, p, n in zip(best, prompts, lengths, strict=True)]


def greedy(model, prompts, new, chunk=None):
    """Prefill, in chunks if wanted, and one token after the other: ``[B, new]``."""
    rows, lengths = padded(prompts)
    ropes = model.config.ropes_by_length
    read = [reading_length(ropes, int(n), int(n) + new) for n in lengths]
    cache = model.cache(len(prompts), rows.shape[1] + new).for_texts(read)
    width = chunk or rows.shape[1]
    logits = np.zeros((len(prompts), model.config.vocab_size), np.float32)
    for start in range(0, rows.shape[1], width):
        part = rows[:, start : start + width]
        part = np.pad(part, ((0, 0), (0, width - part.shape[1])))
        counts = np.clip(lengths - start, 0, width)
        found, cache = last(model, part, cache, counts)
        logits = np.where((counts > 0)[:, None], np.asarray(found), logits)
    tokens = [logits.argmax(-1)]
    one = np.ones(len(prompts), np.int32)
    while len(tokens) < new:
        found, cache = last(model, tokens[-1][:, None].astype(np.int32), cache, one)
        tokens.append(np.asarray(jnp.argmax(found, -1)))
    return np.stack(tokens, 1)


def generated(model, prompts, new):
    """What transformers generates for the same prompts, which it pads to the left."""
    return model.generated(prompts, new)
