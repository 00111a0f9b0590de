"""The options that ``generate``, ``chat``, ``bench`` and ``eval`` share, and the loading of their model."""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from typing import Any, NamedTuple

from ..errors import UserInputError, closest
from ..progress import last_part, task
from .options import (
    TINY,
    auto_or_float,
    device_mesh,
    file_path,
    import_jax,
    positive,
    power_of_two,
    seed,
    setting,
    text,
    variable,
)
from .terminal import warn

# Settings of Sampling with their texts for --help.
_SAMPLING = {
    "temperature": "sampling temperature; 0 is greedy",
    "top_k": "sample from the X most probable tokens (0: off)",
    "top_p": "sample from the most probable tokens whose probabilities add up to X (1: off)",
    "min_p": "sample from tokens at least X times as probable as the most probable one (0: off)",
    "repetition_penalty": "make tokens that are in the prompt or the answer less probable (1: off)",
    "presence_penalty": "subtract X from the logits of tokens that are in the answer (0: off)",
    "frequency_penalty": "subtract X from a token's logit each time it is in the answer (0: off)",
    "min_new_tokens": "do not end an answer before X tokens (0: off)",
    "typical_p": "sample from the most typical tokens whose probabilities add up to X (1: off)",
    "top_n_sigma": "sample from tokens within X standard deviations of the largest logit (0: off)",
    "xtc_probability": "how often XTC leaves out all probable tokens but the last (0: off)",
    "no_repeat_ngram_size": "never write the same X tokens twice (0: off)",
    "dry_multiplier": "strength of the DRY penalty on repetitions (0: off)",
}
# Words of the language of templates, which are no variables.
_KEYWORDS = frozenset(
    "and block break call continue defined elif else endblock endcall endfilter endfor endif endmacro endset filter "
    "for from if import in include is macro none not or recursive set true false with endwith".split()
)
_FILTERS = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")


def model_arguments(
    parser: argparse.ArgumentParser, *, generates: bool = True, is_positional: bool = False
) -> None:
    """Declares the options that choose the model and how it runs.

    Args:
        parser: the parser of a command.
        generates: whether the command generates text, with a KV cache.
        is_positional: whether the model is an argument, and not an option.
    """
    group = parser.add_argument_group("model")
    place: dict[str, Any] = {"nargs": "?"} if is_positional else {}
    group.add_argument("model" if is_positional else "--model", default=TINY,
                       metavar="MODEL" if is_positional else "PATH", **place,
                       help="a directory, a GGUF file, or org/name on the Hugging Face hub"
                       " (default: tiny, a small model in the package)")  # fmt: skip
    group.add_argument("--revision", metavar="R", help="a branch, tag or commit on the hub")
    group.add_argument("--mesh", type=device_mesh, metavar="AXIS=N,…",
                       help="the mesh to shard over, as in model=4 or model=4,data=2; -1 is all"
                       " devices that remain")  # fmt: skip
    group.add_argument("--dtype", default="auto", type=auto_or_float, metavar="TYPE",
                       help="float32, bfloat16, float16 (default: the checkpoint's)")  # fmt: skip
    group.add_argument("--activations", choices=["int8", "float"],
                       help="activations that a CPU multiplies with quantised weights"
                       " (default: int8)")  # fmt: skip
    if not generates:
        return
    group.add_argument("--cache-dtype", choices=["int8", "float32", "bfloat16", "float16"],
                       help="dtype of the KV cache (default: the model's)")  # fmt: skip
    group.add_argument("--chunk", type=power_of_two, default=512, metavar="N",
                       help="prompt tokens per prefill step, power of 2 (default 512)")  # fmt: skip


def sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of sampling and of reports."""
    group = parser.add_argument_group(
        "answer", "Defaults: generation_config.json, or greedy without that file."
    )
    group.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="maximum number of tokens"
    )
    group.add_argument("--stop", action="append", type=text, metavar="TEXT",
                       help="stop before this text; may be repeated")  # fmt: skip
    for name, help_text in _SAMPLING.items():
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=setting(name), metavar="X", help=help_text)
    group.add_argument("--seed", type=seed, metavar="N",
                       help="the same seed gives the same text (default: random)")  # fmt: skip
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group.add_argument("--template-arg", action="append", type=variable, default=[],
                       metavar="NAME=VALUE", help="a variable of the chat template, such as"
                       " enable_thinking=false; may be repeated")  # fmt: skip
    group = parser.add_argument_group("reports")
    group.add_argument(
        "--stats",
        "--verbose",
        action="store_true",
        help="print times, seed and finish reason on stderr",
    )
    group.add_argument("--debug-nans", action="store_true",
                       help="name the first layer that produces a NaN")  # fmt: skip


def server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of a command that can ask a server instead of a model."""
    group = parser.add_argument_group("a server instead of a model")
    group.add_argument("--url", type=text, metavar="URL",
                       help="address of a server of OpenAI's API, such as http://127.0.0.1:8000")  # fmt: skip
    group.add_argument("--served-name", type=text, metavar="NAME",
                       help="name of its model (default: the first that it lists)")  # fmt: skip
    group.add_argument("--api-key", type=file_path, metavar="FILE",
                       help="a file whose first line is the API key")  # fmt: skip


class LoadedModel(NamedTuple):
    """A model, its tokenizer, and the seconds it took to load them."""

    model: Any
    tokenizer: Any
    seconds: float


def open_model(
    options: argparse.Namespace, *, tokenizer: bool = True, generates: bool = True
) -> LoadedModel:
    """Loads the model that the options choose, and shows that on a terminal.

    Args:
        options: the parsed options of :func:`model_arguments`.
        tokenizer: whether a tokenizer is needed.
        generates: whether it must be a language model.

    Raises:
        UserInputError: the model is not a language model or has no tokenizer, or the mesh needs
            more devices than there are.
        CheckpointError, UnsupportedModelError: the same errors as for ``maxjax.load``.
    """
    import_jax()
    import jax

    from ..engine.generate.checks import check_model
    from ..engine.load import load

    try:
        jax.devices()  # starts the backend, which is not to count as loading time
    except RuntimeError as error:
        raise UserInputError(f"JAX has no device: {error}") from error
    grid = None if options.mesh is None else _mesh(options.mesh)
    began = time.perf_counter()
    with task(f"loading {last_part(options.model)}", reads=True):
        model, found = load(
            options.model, dtype=options.dtype, mesh=grid, revision=options.revision,
            tokenizer=tokenizer, activations=options.activations,
        )  # fmt: skip
    if generates:
        check_model(model)
    if tokenizer and found is None:
        raise UserInputError(
            f"{options.model} has no tokenizer: there is no tokenizer.json beside the weights, and"
            " neither vocab.json with merges.txt nor vocab.txt. Put one of them there"
        )
    return LoadedModel(model, found, time.perf_counter() - began)


def _mesh(text: str) -> Any:
    import jax

    from ..engine.plan.options import read_axes
    from ..graph.placement.mesh import make_mesh

    sizes: dict[str, Any] = dict(read_axes(text))
    needed, devices = math.prod(map(abs, sizes.values())), jax.devices()
    if needed > len(devices):
        kind = devices[0].platform
        cpu = "" if kind == "cpu" else "JAX_PLATFORMS=cpu "
        raise UserInputError(
            f"--mesh {text} needs {needed} devices, and there {'is' if len(devices) == 1 else 'are'}"
            f" {len(devices)} ({kind}). To try it on one CPU, set {cpu}JAX_NUM_CPU_DEVICES={needed}"
        )
    return make_mesh(**sizes)


def sampling_values(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of Sampling among the options that were given."""
    import_jax()
    return {name: getattr(options, name) for name in (*_SAMPLING, "logprobs")
            if getattr(options, name, None) is not None}  # fmt: skip


def template_variables(options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """The variables of --template-arg; warns of those that no template of the model reads."""
    found = dict(options.template_arg)
    words = set(re.findall(r"[A-Za-z_]\w*", " ".join(tokenizer.chat_templates.values())))
    for name in found.keys() - words:
        like = closest(name, words - _KEYWORDS)
        hint = f": did you mean {like}?" if like else ""
        warn(f"--template-arg {name} has no effect: the chat template does not read it{hint}")
    return found


def chosen_key(options: argparse.Namespace, sampling: Any) -> tuple[int | None, Any]:
    """The seed and its random key, None for greedy sampling; warns of options that have no effect."""
    if not sampling.is_greedy:
        import jax

        given = options.seed
        number = int.from_bytes(os.urandom(4), "little") if given is None else given
        return number, jax.random.key(number)
    off = type(sampling)()
    given = {name: getattr(options, name) for name in _FILTERS}
    idle = [name for name, value in given.items() if value not in (None, getattr(off, name))]
    if idle:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        warn(f"{names} has no effect, since sampling is greedy: give --temperature")
    return None, None


def system_message(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A list with the message of --system; empty without it."""
    return [] if options.system is None else [{"role": "system", "content": options.system}]
