"""Whole architectures of MAX's own files on maxjax, against transformers: `python scripts/max_architectures.py`.

    pip install max==26.7.0                                  # into an environment of its own
    python scripts/max_architectures.py --max ENV/lib/python3.11/site-packages
    python scripts/max_architectures.py --max … --table      # as the table of docs/coming-from-max.md
    python scripts/max_architectures.py --max … llama3 phi3  # only these
    python scripts/max_architectures.py --max … --devices 2 llama3  # over two devices, which a CPU pretends to be
    python scripts/max_architectures.py --max … --devices 2 --apart qwen3_moe  # a sequence on each device

For each architecture the files below ``max/pipelines/architectures`` are imported with ``max`` changed to
``maxjax`` (``max_import``; none of their lines is kept). transformers makes a small model with random weights
and writes it as a checkpoint. Then MAX's own code reads the settings, adapts the weights, builds the model,
loads it and traces its Graph; maxjax compiles that. Two sequences of different lengths run: their prompts in
one ragged batch, then token after token, with paged caches whose pages are in random order. Every logit of the
prompts and of the last tokens is compared with transformers, which runs each sequence alone; the figure is the
largest difference. Of encoders the hidden states are compared, of two texts in one batch.
Needs torch and transformers (scripts/setup.sh --oracles).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.max_import import HOW, MaxFiles, installation

LARGEST = 1e-4
LENGTHS, STEPS, PAGE = (13, 6), 4, 4
VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


class Architecture(NamedTuple):
    """The settings for the run of one architecture.

    Attributes:
        kind: name of transformers' class of the model.
        settings: settings of its configuration in addition to SMALL.
        narrow: endings of the names of weights that MAX's files declare in bfloat16, whatever the model's
            dtype is; their values are rounded to bfloat16 on both sides.
        folder: name of the folder of MAX's files, if it is not that of the architecture.
        is_encoder: whether it gives hidden states of whole texts instead of logits.
        named: name of the architecture in MAX's file, if it is not ``kind``.
    """

    kind: str
    settings: dict[str, Any] = {}
    narrow: tuple[str, ...] = ()
    folder: str = ""
    is_encoder: bool = False
    named: str = ""


# transformers' MPNet counts positions from a padding index of 1, whatever pad_token_id is.
ENCODER = {"num_hidden_layers": 2, "pad_token_id": 1}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
WHOLE_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16, "truncate": False}  # fmt: skip
ARCHITECTURES = {
    "llama3": Architecture("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": Architecture("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": True},
        folder="qwen3",
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
        narrow=("norm.weight",),
    ),
    "mistral": Architecture("MistralForCausalLM", {"head_dim": 32, "sliding_window": None}),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        {"head_dim": 32, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": YARN},
        narrow=("router.weight", "router.bias"),
    ),
    # MAX's olmo2 normalises queries and keys with an epsilon of 1e-6, whatever rms_norm_eps is.
    "olmo2": Architecture("Olmo2ForCausalLM", {"rms_norm_eps": 1e-6}),
    "granite": Architecture(
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
         "logits_scaling": 2.0},
    ),
    "phi3": Architecture("Phi3ForCausalLM"),
    # On several devices its experts are divided between them (nn.comm.ep).
    "hy_v3": Architecture(
        "HYV3ForCausalLM",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "rms_norm_eps": 1e-6, "first_k_dense_replace": 1, "route_norm": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "olmo": Architecture("OlmoForCausalLM"),
    "llama4": Architecture("Llama4ForCausalLM", {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0]},
        narrow=("router.weight",)),
    "bert": Architecture("BertModel", ENCODER, is_encoder=True),
    "mpnet": Architecture("MPNetModel", ENCODER, is_encoder=True, named="MPNetForMaskedLM"),
    # It has no cache, and gives the states of all tokens.
    "qwen3_embedding": Architecture("Qwen3ForCausalLM", {"head_dim": 32}, is_encoder=True),
    # MAX's files have one gate for each element, and RoPE over the whole head, as Laguna M.1.
    "laguna": Architecture("LagunaForCausalLM", {
        "head_dim": 32, "gating": "per-element", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
        "rope_parameters": {"full_attention": WHOLE_ROPE, "sliding_attention": WHOLE_ROPE}}),
}  # fmt: skip


# --- transformers ------------------------------------------------------------------------------


def theirs_of(one: Architecture) -> Any:
    """transformers' small model, with random weights."""
    import torch
    import transformers

    kind = getattr(transformers, one.kind)
    config = kind.config_class(**SMALL | one.settings, attn_implementation="eager")
    model = kind(config).eval().to(torch.float32)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3
            drawn = torch.tensor(rng.normal(0, 1.5 * scale, tuple(value.shape)))
            if value.ndim == 1 and "norm" in name and "Gemma" not in one.kind:
                drawn = 1 + drawn
            if name.endswith(one.narrow):
                drawn = drawn.to(torch.bfloat16)
            value.copy_(drawn)
    return model


def checkpoint_of(theirs: Any, one: Architecture, directory: Path) -> Path:
    """Writes the weights of a model as transformers does, those of ``narrow`` in bfloat16."""
    import safetensors.torch
    import torch

    theirs.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name in tensors:
        if name.endswith(one.narrow):
            tensors[name] = tensors[name].to(torch.bfloat16)
    safetensors.torch.save_file(tensors, file)
    return file


# --- MAX's files -------------------------------------------------------------------------------


def max_name(path: str) -> Any:
    """The object of MAX's files with this dotted path below ``max``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"maxjax.{module}"), name)


def settings_of(config: Any, file: Path, devices: int, apart: bool) -> SimpleNamespace:
    """The settings of MAX's server that MAX's files read."""
    from maxjax.driver import DeviceSpec

    cache = max_name("pipelines.kv_cache.config.KVCacheConfig").model_construct(
        kv_cache_page_size=PAGE, kv_cache_format=None
    )
    model = SimpleNamespace(
        huggingface_config=config, quantization_encoding="float32", _resolved_dtype_cast=(None, None),
        kv_cache=cache, device_specs=[DeviceSpec.cpu(i) for i in range(devices)], default_device_spec=DeviceSpec.cpu(),
        data_parallel_degree=devices if apart else 1, use_subgraphs=False, weight_path=[file], rope_type=None,
        enable_echo=False, pool_embeddings=False,
        model_path=str(file.parent), max_length=SMALL["max_position_embeddings"],
    )  # fmt: skip
    return SimpleNamespace(
        model=model, speculative=None, lora=None,
        runtime=SimpleNamespace(ep_size=devices if apart else 1, max_batch_input_tokens=sum(LENGTHS)),
    )  # fmt: skip


def pipeline_of(
    one: Architecture, folder: str, config: Any, file: Path, devices: int, apart: bool
) -> Any:
    """MAX's pipeline without its server: its own methods read, adapt, build and load the model."""
    from maxjax.driver import CPU
    from maxjax.graph.weights import load_weights
    from maxjax.nn.transformer import ReturnHiddenStates, ReturnLogits

    file_of = importlib.import_module(f"maxjax.pipelines.architectures.{folder}.arch")
    found = [a for a in vars(file_of).values() if type(a).__name__ == "SupportedArchitecture"]
    arch = next(a for a in found if a.name == (one.named or one.kind))
    pipeline = object.__new__(arch.pipeline_model)
    vars(pipeline).update(
        pipeline_config=settings_of(config, file, devices, apart), weights=load_weights([file]),
        _batch_processor=None, devices=[CPU(i) for i in range(devices)],
        adapter=arch.weight_adapters[max_name("graph.weights.WeightsFormat").safetensors],
        return_logits=ReturnLogits.ALL, return_hidden_states=ReturnHiddenStates.NONE,
        memory_plan=SimpleNamespace(planned_max_length=SMALL["max_position_embeddings"]),
    )  # fmt: skip
    return pipeline


class Ours:
    """An architecture of MAX's files, built, loaded and compiled.

    Args:
        one: settings of the run.
        folder: name of the architecture's folder.
        config: transformers' configuration.
        file: path of the checkpoint.
        devices: number of devices.
        apart: whether each device has one sequence and a part of the experts. MAX's files then split the
            batch at indices that are values, which a compiled program cannot do, so it runs eagerly.
    """

    def __init__(
        self, one: Architecture, folder: str, config: Any, file: Path, devices: int, apart: bool
    ):
        from maxjax.engine import InferenceSession

        pipeline = pipeline_of(one, folder, config, file, devices, apart)
        state = pipeline._load_state_dict()
        model_config = pipeline._create_model_config(state)
        # Subgraphs cannot take pages, so the layers are traced one by one.
        model_config.use_subgraphs = False
        session = InferenceSession()
        if (experts := getattr(model_config, "ep_config", None)) is not None:
            experts.combine_dtype = experts.dispatch_dtype  # MAX's files have bfloat16
        if hasattr(pipeline, "_init_distributed_runtime"):
            pipeline._init_distributed_runtime(session, model_config)
        self.kv_params = model_config.kv_params
        pipeline.kv_params = self.kv_params
        (spec,) = pipeline.graph_specs(model_config).values()
        self.types, self.apart = list(spec.input_types), apart
        if apart:
            self.run = eagerly(spec)
        else:
            graph = spec.trace()
            self.run = session.load(graph, weights_registry=spec.weights_registry()).execute
        on = {kind.device.id for kind in self.cache_types()}
        if on != set(range(devices)):
            raise ValueError(f"the caches are on devices {sorted(on)} of {devices}")
        self.caches = [self.empty(kind) for kind in self.cache_types()]

    def cache_types(self) -> list[Any]:
        """The types of the pages of every cache."""
        from maxjax.graph import BufferType

        tail = self.types[-len(self.kv_params.flattened_kv_inputs()) :]
        return [kind for kind in tail if isinstance(kind, BufferType)]

    def empty(self, kind: Any) -> np.ndarray:
        """Pages of a cache, filled with NaN, so that a read of unwritten slots is noticed."""
        pages = len(LENGTHS) * self.pages
        return np.full([pages, *map(int, list(kind.shape)[1:])], np.nan, kind.dtype.np)

    @property
    def pages(self) -> int:
        """The number of pages of a sequence."""
        return -(-(max(LENGTHS) + STEPS) // PAGE)

    def step(self, tokens: list[np.ndarray], cached: list[int]) -> list[np.ndarray]:
        """The logits of each sequence's new tokens, ``[tokens, VOCAB]``; some models give only the last one's."""
        from maxjax.graph import BufferType

        lengths = [len(one) for one in tokens]
        table = np.random.default_rng(1).permutation(len(tokens) * self.pages)
        splits = np.arange(len(tokens) + 1)  # where the batch is split between devices
        values = {
            "total_seq_len": np.concatenate(tokens),
            "input_row_offsets_len": np.cumsum([0, *lengths]),
            "return_n_logits": np.ones(1),
            "data_parallel_splits_len": splits,
            str(len(splits)): splits,
        }
        count = len(self.kv_params.flattened_kv_inputs())
        inputs: list[Any] = []
        for kind in self.types[:-count]:
            name = str(kind.shape[0])
            inputs.append(np.asarray(values.get(name, np.zeros(0)), kind.dtype.np))
        tables = table.reshape(len(tokens), -1)
        device, tensors = -1, 0
        for kind in self.types[-count:]:
            if isinstance(kind, BufferType):
                device, tensors = device + 1, 0
                inputs.append(self.caches[device])
                continue
            mine = slice(device, device + 1) if self.apart else slice(None)
            before, new = cached[mine], max(lengths[mine])
            # In MAX's order: lengths of the caches, page tables, the longest prompt, the longest cache.
            value = [before, tables[mine], [new], [max(before) + new]][tensors]
            inputs.append(np.asarray(value, kind.dtype.np))
            tensors += 1
        found = self.run(*inputs)
        self.caches = found[-len(self.caches) :]
        outputs = found[: -sum(isinstance(kind, BufferType) for kind in self.types)]
        logits = np.asarray(outputs[min(1, len(outputs) - 1)].to_numpy())
        sizes = lengths if len(logits) == sum(lengths) else [1] * len(lengths)
        return np.split(logits, np.cumsum(sizes)[:-1])


def eagerly(spec: Any) -> Any:
    """The function that a GraphSpec traces, as a function that is called with arrays on their devices.

    As a compiled program does, it returns the results and then the content of the buffers.
    """
    import jax

    from maxjax.graph import BufferType, BufferValue, TensorValue, ops

    kept: list[Any] = []
    home = sys.modules[type(spec.module).__module__]
    with mock.patch.object(home, "Graph", lambda name, forward, **_: kept.append(forward)):
        spec.trace()
    (forward,) = kept

    def run(*inputs: Any) -> list[Any]:
        values = []
        for kind, value in zip(spec.input_types, inputs, strict=True):
            array = jax.device_put(np.asarray(value), kind.device.to_jax())
            values.append((BufferValue if isinstance(kind, BufferType) else TensorValue)(array))
        found = list(forward(*values))
        return found + [ops.buffer_load(one) for one in values if isinstance(one, BufferValue)]

    return run


# --- the comparison ----------------------------------------------------------------------------


def compare(name: str, devices: int = 1, apart: bool = False) -> dict[str, Any]:
    """Runs one architecture: the largest differences for the prompts and for the tokens after them."""
    import torch

    one = ARCHITECTURES[name]
    theirs = theirs_of(one)
    with tempfile.TemporaryDirectory() as directory:
        file = checkpoint_of(theirs, one, Path(directory))
        ours = Ours(one, one.folder or name, theirs.config, file, devices, apart)
        rng = np.random.default_rng(2)
        sequences = [rng.integers(1, VOCAB, length + STEPS) for length in LENGTHS]
        with torch.no_grad():
            wanted = [theirs(torch.tensor(s[None])).logits[0].numpy() for s in sequences]
        found = ours.step(
            [s[:n] for s, n in zip(sequences, LENGTHS, strict=True)], [0] * len(LENGTHS)
        )
        prefill = [
            np.abs(got - want[n - len(got) : n]).max()
            for got, want, n in zip(found, wanted, LENGTHS, strict=True)
        ]
        decode = []
        for step in range(STEPS):
            places = [n + step for n in LENGTHS]
            found = ours.step(
                [s[i : i + 1] for s, i in zip(sequences, places, strict=True)], places
            )
            for got, want, i in zip(found, wanted, places, strict=True):
                decode.append(np.abs(got[0] - want[i]).max())
    # NumPy's maximum, because Python's ignores NaN.
    return {"name": name, "prefill": float(np.max(prefill)), "decode": float(np.max(decode)),
            "spread": float(np.std(wanted[0]))}  # fmt: skip


def compare_encoder(name: str) -> dict[str, Any]:
    """Runs one encoder: the largest difference of the hidden states of two texts in one batch; it decodes nothing."""
    import torch

    from maxjax.engine import InferenceSession

    one = ARCHITECTURES[name]
    theirs = theirs_of(one)
    with tempfile.TemporaryDirectory() as directory:
        file = checkpoint_of(theirs, one, Path(directory))
        pipeline = pipeline_of(one, one.folder or name, theirs.config, file, 1, False)
        pipeline.arch_config = type(pipeline).model_config_cls.initialize(
            pipeline.pipeline_config, max_seq_len=SMALL["max_position_embeddings"]
        )
        config = pipeline._create_model_config(pipeline._load_state_dict())
        (spec,) = pipeline.graph_specs(config).values()
        program = InferenceSession().load(spec.trace(), weights_registry=spec.weights_registry())
        rng = np.random.default_rng(2)
        texts = [rng.integers(2, VOCAB, length) for length in LENGTHS]
        with torch.no_grad():
            states = [
                theirs.base_model(torch.tensor(text[None])).last_hidden_state[0].numpy()
                for text in texts
            ]
        found = _states(program, spec.input_types, texts)
    errors = [np.abs(got - want).max() for got, want in zip(found, states, strict=True)]
    return {"name": name, "prefill": float(np.max(errors)), "decode": 0.0,
            "spread": float(np.std(states[0]))}  # fmt: skip


def _states(program: Any, types: Any, texts: list[np.ndarray]) -> list[np.ndarray]:
    """The states of each text, from a program for a padded batch with a mask, or for a ragged one."""
    lengths = [len(text) for text in texts]
    if len(types[0].shape) == 1:
        offsets = np.cumsum([0, *lengths])
        inputs = [np.concatenate(texts), offsets, np.ones(1)][: len(types)]
        values = [np.asarray(v, kind.dtype.np) for v, kind in zip(inputs, types, strict=True)]
        return np.split(program.execute(*values)[0].to_numpy(), offsets[1:-1])
    ids = np.stack([np.pad(text, (0, max(lengths) - len(text))) for text in texts])
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    values = [np.asarray(v, kind.dtype.np) for v, kind in zip((ids, mask), types, strict=True)]
    states = program.execute(*values)[0].to_numpy()
    return [one[:length] for one, length in zip(states, lengths, strict=True)]


def line(one: Mapping[str, Any], table: bool) -> str:
    cells = [f"{one[key]:.1e}" for key in ("prefill", "decode")] + [f"{one['spread']:.1f}"]
    if table:
        return f"| `{one['name']}` | {' | '.join(cells)} |"
    return f"{one['name']:8} prefill {cells[0]}, decode {cells[1]} (deviation of the logits: {cells[2]})"


def main() -> int:
    parser = argparse.ArgumentParser(description="MAX's own architectures on maxjax.")
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--max", metavar="SITE", help="the site-packages that max is installed in")
    parser.add_argument(
        "--trace", action="store_true", help="end at the first error, with its trace"
    )
    parser.add_argument("--table", action="store_true", help="print the table of the docs")
    parser.add_argument("--devices", type=int, default=1, help="number of devices")
    parser.add_argument(
        "--apart", action="store_true", help="a sequence and some of the experts on each device"
    )
    options = parser.parse_args()
    if options.apart and options.devices != len(LENGTHS):
        parser.error(f"--apart needs --devices {len(LENGTHS)}, one for each sequence")
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    names = options.names or list(ARCHITECTURES)
    if unknown := set(names) - ARCHITECTURES.keys():
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
    site = installation(options.max)
    if site is None:
        print(HOW, file=sys.stderr)
        return 2
    sys.path.append(str(site))  # other packages that MAX's files import
    sys.meta_path.insert(0, MaxFiles(site / "max"))
    if options.table:
        print(
            "| architecture | prompts | tokens after them | standard deviation of the logits |\n|---|---|---|---|"
        )
    failed = False
    for name in names:
        try:
            one = (
                compare_encoder(name)
                if ARCHITECTURES[name].is_encoder
                else compare(name, options.devices, options.apart)
            )
        except Exception as error:  # the other architectures still run
            if options.trace:
                raise
            text = (str(error).splitlines() or [""])[0]
            print(f"{name:8} {type(error).__name__}: {text}", file=sys.stderr, flush=True)
            failed = True
            continue
        print(line(one, options.table), flush=True)
        failed |= not np.max([one["prefill"], one["decode"]]) <= LARGEST
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
