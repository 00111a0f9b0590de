"""Small random language models with a tokenizer, written to a directory by ourselves."""

import io
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from maxjax.cli import application as cli
from maxjax.models import Llama, LlamaConfig

END = 0
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
)


def tokenizer():
    """Each byte is a token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": END} | {c: i for i, c in enumerate(alphabet, 1)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def write_model(
    directory,
    *,
    seed=0,
    template: str | None = TEMPLATE,
    text=True,
    context=256,
    nan=False,
    **generation,
):
    """A Llama whose logits have a deviation of some units; it writes bytes of ASCII mostly."""
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": context, "tie_word_embeddings": False, "eos_token_id": END,
    }  # fmt: skip
    draw = np.random.default_rng(seed)
    arrays = {}
    for name, weight in (
        Llama(LlamaConfig.from_dict(settings), stacked=False).raw_state_dict().items()
    ):
        shape = tuple(map(int, weight.shape))
        arrays[name] = draw.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        if "norm" in name:
            arrays[name][:] = 1
    arrays["lm_head.weight"][:90] *= 5
    arrays["lm_head.weight"][END] = 0
    if nan:
        arrays["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan
    directory.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(settings))
    given = {"eos_token_id": END} | generation
    (directory / "generation_config.json").write_text(json.dumps(given))
    if text:
        tokenizer().save(str(directory / "tokenizer.json"))
        found = {"eos_token": "<end>"} | ({"chat_template": template} if template else {})
        (directory / "tokenizer_config.json").write_text(json.dumps(found))
    return directory


def here(*arguments: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """``maxjax`` in this process, as `subprocess.run` would give it: no start of Python, no import of JAX.

    Each command has at least one test that runs it in a process of its own.
    """
    files = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    given = io.TextIOWrapper(io.BytesIO(stdin.encode("utf-8", "surrogateescape")))
    with pytest.MonkeyPatch.context() as patch:
        for name, file in zip(("stdin", "stdout", "stderr"), (given, *files), strict=True):
            patch.setattr(sys, name, file)
        try:
            code: Any = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    texts = [file.buffer.getvalue().decode() for file in files]  # pyright: ignore
    return subprocess.CompletedProcess(arguments, code or 0, *texts)


def in_process(*arguments: Any, stdin: str = "") -> tuple[int, str, str]:
    """As :func:`here`: code, stdout, stderr."""
    done = here(*arguments, stdin=stdin)
    return done.returncode, done.stdout, done.stderr
