"""Small random decoders of transformers, saved by it and read by us; and a greedy loop."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import torch
import transformers

import maxjax
from maxjax.graph.weights import load_weights
from maxjax.models import build
from maxjax.text.tokenizer.tokenizer import Tokenizer

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 96
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


def oracle(kind, directory, seed=0, **settings):
    """transformers' model of one kind ("Llama"), in the directory as well; logits of deviation 1."""
    if kind == "GPT2":
        return gpt2_oracle(directory, seed, **{**SMALL, **settings})
    settings_of = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    config = getattr(transformers, settings_of)(**{**SMALL, **settings})
    cap = getattr(config, "final_logit_softcapping", None)
    one = float(kind.startswith("Gemma"))  # what it adds to weights of norms
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            size = 1 / np.sqrt(weight.shape[-1]) if weight.ndim == 2 else 0.3
            weight.normal_(0, 1.5 * size)
            if "norm" in name:  # ones and zeros would hide a mistake
                weight.add_(1.0 - one)
        if cap is not None:  # it is 1 before the cap
            config.final_logit_softcapping = None
        spread = model(torch.tensor(ids_of(4, 32)).long()).logits.std()
        model.model.norm.weight.add_(one).div_(spread).sub_(one)
        if cap is not None:
            config.final_logit_softcapping = cap
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    return model


def gpt2_oracle(directory, seed=0, **settings):
    """The same of a GPT-2, whose maps have weights [in, out]."""
    config = transformers.GPT2Config(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            size = 1 / np.sqrt(weight.shape["c_" not in name]) if weight.ndim == 2 else 0.3
            weight.normal_(0, 1.5 * size)
            if ".ln_" in name and name.endswith("weight"):
                weight.add_(1.0)
        ids = ids_of(4, min(24, config.n_positions)) % config.vocab_size
        spread = model(torch.tensor(ids).long()).logits.std()
        for weight in model.transformer.ln_f.parameters():
            weight.div_(spread)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    return model


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
    with torch.no_grad():
        return model(torch.tensor(ids).long()).logits.numpy()


call = jax.jit(lambda model, ids: model(ids))


@functools.partial(jax.jit, donate_argnums=2)
def last(model, ids, cache, lengths):
    """The logits of each row's last token, and the next cache."""
    return model(ids, cache, lengths=lengths, last=True)


def same(found, expected, atol=1e-4):
    """The figure of this library: 1e-4 where the logits have a deviation of 1."""
    assert 0.5 < np.std(expected) < 2
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=atol)


def padded(prompts):
    """Rows of one length, padded to the right, and the lengths."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    rows = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows, lengths


def greedy(model, prompts, new, chunk=None):
    """Prefill, in chunks if wanted, and one token after the other: ``[B, new]``."""
    rows, lengths = padded(prompts)
    cache = model.cache(len(prompts), rows.shape[1] + new)
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
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(p)) + list(map(int, p)) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        found = model.generate(
            rows, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new
        )
    return found[:, width:].numpy()
