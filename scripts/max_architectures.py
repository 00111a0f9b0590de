"""Whole architectures of MAX's own files on maxjax, against transformers: `python scripts/max_architectures.py`.

    pip install max==26.7.0 msgspec                          # into an environment of its own
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
largest difference. Of encoders the hidden states are compared, of two texts in one batch. Of models that see, the
text half runs under the model's name, and the vision encoder under this name with ``-images``.
Needs torch and transformers (scripts/setup.sh --oracles).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
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
        narrow: pattern of the names of weights that MAX's files declare in bfloat16, whatever the model's
            dtype is; their values are rounded to bfloat16 on both sides.
        wide: modules of MAX's files in which bfloat16 is replaced by float32 (:class:`Wide`).
        keys: function of the configuration, which returns attributes that MAX's files read there and transformers'
            configuration does not have, by their paths.
        folder: name of the folder of MAX's files, if it is not that of the architecture.
        is_encoder: whether it gives hidden states of whole texts instead of logits.
        named: name of the architecture in MAX's file, if it is not ``kind``.
        hub: function of transformers' tensors by name, which returns those of the files that MAX's adapters read.
    """

    kind: str
    settings: dict[str, Any] = {}
    narrow: str = "(?!)"
    folder: str = ""
    is_encoder: bool = False
    named: str = ""
    hub: Callable[[dict[str, Any]], dict[str, Any]] = dict
    keys: Callable[[Any], dict[str, Any]] = lambda config: {}
    wide: tuple[str, ...] = ()


# transformers' MPNet counts positions from a padding index of 1, whatever pad_token_id is.
ENCODER = {"num_hidden_layers": 2, "pad_token_id": 1}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
WHOLE_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16, "truncate": False}  # fmt: skip
# MAX scales with mscale what transformers scales with mscale_all_dim; in DeepSeek's files they are equal.
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
          "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1,
          "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True},
          "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "pretraining_tp": 1,
          "seq_aux": True}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
# No prompt has this token.
IMAGE = VOCAB
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 32, "patch_size": 8}  # fmt: skip
QWEN_TOKENS = {"image_token_id": IMAGE, "video_token_id": IMAGE, "vision_start_token_id": IMAGE,
               "vision_end_token_id": IMAGE}  # fmt: skip


def renamed(tensors: dict[str, Any], parts: Mapping[str, str]) -> dict[str, Any]:
    """Tensors by name, with parts of the names replaced."""
    found = {}
    for name, value in tensors.items():
        for old, new in parts.items():
            name = name.replace(old, new)
        found[name] = value
    return found


def internvl_file(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of an InternVL model as its own files have them, from those of transformers."""
    import torch

    found = renamed(tensors, {
        "vision_tower.": "vision_model.", "encoder.layer.": "encoder.layers.", "cls_token": "class_embedding",
        "patch_embeddings.projection": "patch_embedding", "position_embeddings": "position_embedding",
        "attention.projection_layer": "attn.proj", "lambda_": "ls", "layernorm_before": "norm1",
        "layernorm_after": "norm2", "multi_modal_projector.layer_norm": "mlp1.0",
        "multi_modal_projector.linear_1": "mlp1.1", "multi_modal_projector.linear_2": "mlp1.3",
    })  # fmt: skip
    for name in [name for name in found if ".attention.q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    return found


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
        narrow=r"norm\.weight$",
    ),
    "mistral": Architecture("MistralForCausalLM", {"head_dim": 32, "sliding_window": None}),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        {"head_dim": 32, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": YARN},
        narrow=r"router\.(weight|bias)$",
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
        narrow=r"router\.weight$"),
    "bert": Architecture("BertModel", ENCODER, is_encoder=True),
    "mpnet": Architecture("MPNetModel", ENCODER, is_encoder=True, named="MPNetForMaskedLM"),
    # It has no cache, and gives the states of all tokens.
    "qwen3_embedding": Architecture("Qwen3ForCausalLM", {"head_dim": 32}, is_encoder=True),
    # MAX's files have one gate for each element, and RoPE over the whole head, as Laguna M.1.
    "laguna": Architecture("LagunaForCausalLM", {
        "head_dim": 32, "gating": "per-element", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
        "rope_parameters": {"full_attention": WHOLE_ROPE, "sliding_attention": WHOLE_ROPE}}),
    "deepseekV2": Architecture("DeepseekV2ForCausalLM", LATENT | {
        "scoring_func": "softmax", "topk_method": "greedy"}),
    "deepseekV3": Architecture("DeepseekV3ForCausalLM", LATENT | {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 2, "topk_group": 1},
        narrow=r"self_attn\.(\w+_proj|kv_a_proj_with_mqa)\.weight$|(mlp|shared_experts)\.(gate|up|down)_proj\.weight$"),
    "lfm2": Architecture("Lfm2ForCausalLM", {
        "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "nemotron_h": Architecture("NemotronHForCausalLM", {
        "head_dim": 32, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8}),
    "qwen3_5": Architecture("Qwen3_5ForCausalLM"),
    # The text halves of models that see.
    "mistral3": Architecture("Mistral3ForConditionalGeneration", {
        "tie_word_embeddings": False, "vision_config": VISION | {"model_type": "pixtral"},
        "text_config": {"model_type": "mistral", "head_dim": 32, "sliding_window": None}}),
    "pixtral": Architecture("LlavaForConditionalGeneration", {
        "text_config": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16, "hidden_act": "silu"},
        "image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "idefics3": Architecture("Idefics3ForConditionalGeneration", {
        "text_config": {"model_type": "llama"}, "vision_config": VISION, "scale_factor": 2,
        "image_token_id": IMAGE}, wide=("model",)),
    "gemma3multimodal": Architecture("Gemma3ForConditionalGeneration", {
        "text_config": {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2,
                        "query_pre_attn_scalar": 32},
        "vision_config": VISION | {"vision_use_head": False}, "mm_tokens_per_image": 4,
        "image_token_index": IMAGE},
        narrow=r"(^|\.)vision_tower|norm\.weight$|projection_weight$",
        hub=lambda tensors: renamed(tensors, {"vision_tower.": "vision_tower.vision_model."})),
    "gemma4": Architecture("Gemma4ForConditionalGeneration", {
        "text_config": {"head_dim": 32, "global_head_dim": 32, "sliding_window": 8,
                        "layer_types": ["sliding_attention", "full_attention"] * 2,
                        "hidden_size_per_layer_input": 0},
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        "image_token_id": IMAGE}, keys=lambda config: {"text_config.global_head_dim": 32}),
    "internvl": Architecture("InternVLForConditionalGeneration", {
        "tie_word_embeddings": False, "text_config": {"model_type": "qwen2"},
        "vision_config": VISION | {"image_size": [32, 32], "patch_size": [8, 8]}, "image_token_id": IMAGE},
        wide=("internvl",), named="InternVLChatModel", hub=internvl_file, keys=lambda config: {
            "llm_config": config.text_config, "vision_config.image_size": 32, "vision_config.patch_size": 8,
            "vision_config.norm_type": "layer_norm", "vision_config.qk_normalization": False}),
    "qwen2_5vl": Architecture("Qwen2_5_VLForConditionalGeneration", QWEN_TOKENS | {
        "text_config": {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3]}},
        "vision_config": VISION | {"out_hidden_size": 64, "depth": 2, "num_heads": 2, "fullatt_block_indexes": [1]}},
        wide=("weight_adapters", "nn.decoder")),
    "qwen3vl_moe": Architecture("Qwen3VLForConditionalGeneration", QWEN_TOKENS | {
        "text_config": {"head_dim": 32, "rope_parameters": MROPE | {"mrope_section": [6, 5, 5]}},
        "vision_config": VISION | {"out_hidden_size": 64, "depth": 2, "num_heads": 2,
                                   "deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
        wide=("weight_adapters", "nn.decoder")),
}  # fmt: skip


# --- transformers ------------------------------------------------------------------------------


def theirs_of(one: Architecture, settings: Mapping[str, Any] | None = None) -> Any:
    """transformers' small model, with random weights; by default with the architecture's settings."""
    import torch
    import transformers

    kind = getattr(transformers, one.kind)
    settings = SMALL | one.settings if settings is None else settings
    if "text_config" in settings:
        settings = one.settings | {"text_config": SMALL | one.settings["text_config"]}
    config = kind.config_class(**settings, attn_implementation="eager")
    model = kind(config).eval().to(torch.float32)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.3
            drawn = torch.tensor(rng.normal(0, 1.5 * scale, tuple(value.shape)))
            if value.ndim == 1 and "norm" in name and "Gemma" not in one.kind:
                drawn = 1 + drawn
            if re.search(one.narrow, name):
                drawn = drawn.to(torch.bfloat16)
            value.copy_(drawn)
    return model


def checkpoint_of(theirs: Any, one: Architecture, directory: Path) -> Path:
    """Writes the weights of a model as transformers does, those of ``narrow`` in bfloat16."""
    import safetensors.torch
    import torch

    theirs.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = one.hub(safetensors.torch.load_file(file))
    for name, value in tensors.items():
        if re.search(one.narrow, name):
            tensors[name] = value.to(torch.bfloat16)
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
        runtime=SimpleNamespace(
            ep_size=devices if apart else 1, max_batch_input_tokens=sum(LENGTHS), ep_use_allreduce=False,
            ep_fuse_ffn_combine_send=False, pipeline_role="prefill_and_decode", max_batch_size=len(LENGTHS),
            max_batch_total_tokens=None, enable_chunked_prefill=False,
            experimental_device_graph_synthesis=False,
        ),
    )  # fmt: skip


def pipeline_of(
    one: Architecture, folder: str, config: Any, file: Path, devices: int, apart: bool
) -> Any:
    """MAX's pipeline without its server: its own methods read, adapt, build and load the model."""
    from maxjax.driver import CPU
    from maxjax.graph import DeviceRef
    from maxjax.graph.weights import load_weights
    from maxjax.nn.transformer import ReturnHiddenStates, ReturnLogits

    for path in one.wide:
        module = importlib.import_module(f"maxjax.pipelines.architectures.{folder}.{path}")
        vars(module)["DType"] = Wide()
    config = copy.deepcopy(config)
    for path, value in one.keys(config).items():
        *parts, name = path.split(".")
        setattr(functools.reduce(getattr, parts, config), name, value)
    file_of = importlib.import_module(f"maxjax.pipelines.architectures.{folder}.arch")
    found = [a for a in vars(file_of).values() if type(a).__name__ == "SupportedArchitecture"]
    arch = next(a for a in found if a.name == (one.named or one.kind))
    adapter = arch.weight_adapters.get(max_name("graph.weights.WeightsFormat").safetensors)
    pipeline = object.__new__(arch.pipeline_model)
    vars(pipeline).update(
        pipeline_config=settings_of(config, file, devices, apart), weights=load_weights([file]),
        _batch_processor=None, devices=[CPU(i) for i in range(devices)],
        adapter=adapter,
        device_refs=[DeviceRef.CPU(i) for i in range(devices)], max_batch_size=len(LENGTHS),
        return_logits=ReturnLogits.ALL, return_hidden_states=ReturnHiddenStates.NONE,
        memory_plan=SimpleNamespace(
            planned_max_length=SMALL["max_position_embeddings"],
            planned_max_batch_total_tokens=len(LENGTHS) * SMALL["max_position_embeddings"],
        ),
    )  # fmt: skip
    pipeline.kv_cache_config = pipeline.pipeline_config.model.kv_cache
    return pipeline


def as_buffer(data: Any) -> Any:
    """The tensor of a checkpoint with its values in a Buffer."""
    data.to_buffer()
    return data


class Wide:
    """MAX's DType for modules that compute in bfloat16, whatever the model's dtype is: its bfloat16 is float32.

    Results in bfloat16 agree to two digits only, which tells little.
    """

    def __getattr__(self, name: str) -> Any:
        from maxjax.dtype import DType

        return getattr(DType, "float32" if name == "bfloat16" else name)


def cache_settings(pipeline: Any) -> Any:
    """The settings of the caches, as MAX's constructor of a pipeline makes them."""
    cache = pipeline.kv_cache_config
    find = max_name("pipelines.kv_cache.config.cache_dtype_for_encoding")
    return type(pipeline).get_kv_params(
        huggingface_config=pipeline.huggingface_config,
        pipeline_config=pipeline.pipeline_config,
        devices=pipeline.device_refs,
        kv_cache_config=cache,
        cache_dtype=find(pipeline._resolved_encoding, cache.kv_cache_format),
    )


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
        from maxjax.graph import BufferType

        pipeline = pipeline_of(one, folder, config, file, devices, apart)
        pipeline.kv_params = cache_settings(pipeline)
        state = pipeline._load_state_dict()
        model_config = pipeline._create_model_config(state)
        # Subgraphs cannot take pages, so the layers are traced one by one.
        for settings in (model_config, getattr(model_config, "llm_config", model_config)):
            settings.use_subgraphs = False
        session = InferenceSession()
        if (experts := getattr(model_config, "ep_config", None)) is not None:
            experts.combine_dtype = experts.dispatch_dtype  # MAX's files have bfloat16
        if hasattr(pipeline, "_init_distributed_runtime"):
            pipeline._init_distributed_runtime(session, model_config)
        self.kv_params = pipeline.kv_params
        self.apart = apart
        if (
            hasattr(pipeline, "_build_graph_for_compile")
            and type(pipeline)._build_graph_for_compile
            is not max_name(
                "pipelines.lib.interfaces.pipeline_model.GraphPipelineModelWithKVCache"
            )._build_graph_for_compile
        ):
            graph, registry = pipeline._build_graph_for_compile(session, state, model_config)
            self.types = [value.type for value in graph.inputs]
            self.run = session.load(graph, weights_registry=registry).execute
        else:
            spec = pipeline.graph_specs(model_config)["decoder"]
            self.types = [of_text(kind) for kind in spec.input_types]
            spec = dataclasses.replace(spec, input_types=self.types)
            if apart:
                self.run = eagerly(spec)
            else:
                graph = spec.trace()
                self.run = session.load(graph, weights_registry=spec.weights_registry()).execute
        self.each = list(cache_inputs(self.kv_params.get_symbolic_inputs()))
        kinds = [kind for _, one in self.each for kind in leaves(one)]
        places = range(len(self.types))
        self.first = next(i for i in places if self.types[i : i + len(kinds)] == kinds)
        on = {leaves(one)[0].device.id for _, one in self.each}
        if on != set(range(devices)):
            raise ValueError(f"the caches are on devices {sorted(on)} of {devices}")
        # What a program takes and gives back: its buffers, and states that are ordinary tensors.
        self.buffers = [i for i in places if isinstance(self.types[i], BufferType)]
        self.states = [i for i in places if str(self.types[i].shape[0]) == "conv_batch"]
        self.kept: dict[int, Any] = {
            i: self.initial(self.types[i]) for i in self.buffers + self.states
        }
        place = self.first
        for _, one in self.each:
            self.kept[place] = self.empty(one)
            place += len(leaves(one))

    def initial(self, kind: Any) -> np.ndarray:
        """Zeros for a pool or tensor of states, with one row for each sequence."""
        rows = [len(LENGTHS)] if str(kind.shape[0]) in ("conv_batch", "max_slots") else []
        return zeros(kind, *rows)

    def empty(self, one: Any) -> np.ndarray:
        """Pages of a cache, filled with NaN, so that a read of unwritten slots is noticed; zeros for states."""
        kind, rows = leaves(one)[0], len(LENGTHS) * self.pages
        if is_state(one):
            rows = len(LENGTHS) * int(one.live_row_ids.shape[0])
        return np.full(
            [rows, *map(int, list(kind.shape)[1:])], 0 if is_state(one) else np.nan, kind.dtype.np
        )

    @property
    def pages(self) -> int:
        """The number of pages of a sequence."""
        return -(-(max(LENGTHS) + STEPS) // PAGE)

    def step(self, tokens: list[np.ndarray], cached: list[int]) -> list[np.ndarray]:
        """The logits of each sequence's new tokens, ``[tokens, VOCAB]``; some models give only the last one's."""
        lengths = [len(one) for one in tokens]
        table = np.random.default_rng(1).permutation(len(tokens) * self.pages)
        splits = np.arange(len(tokens) + 1)  # where the batch is split between devices
        values = {
            "total_seq_len": np.concatenate(tokens),
            "input_row_offsets_len": np.cumsum([0, *lengths]),
            "return_n_logits": np.ones(1),
            "data_parallel_splits_len": splits,
            str(len(splits)): splits,
            "3 total_seq_len": np.broadcast_to(
                np.concatenate([i + np.arange(n) for i, n in zip(cached, lengths, strict=True)]),
                [3, sum(lengths)],
            ),  # positions along the axes of M-RoPE
            "batch_size": np.arange(len(tokens)),  # rows of the pools of states
            "has_initial_state_len": np.array(cached) > 0,
        }
        inputs: list[Any] = []
        for kind in self.types:
            sizes = [str(size) for size in kind.shape]
            value = values.get(" ".join(sizes), values.get(sizes[0], zeros(kind)))
            inputs.append(np.asarray(value, kind.dtype.np))
        tables = table.reshape(len(tokens), -1)
        place = self.first
        for device, one in self.each:
            mine = slice(device, device + 1) if self.apart else slice(None)
            before, new = cached[mine], max(lengths[mine])
            if is_state(one):
                layers = int(one.live_row_ids.shape[0])
                given = [np.arange(layers)[:, None] + layers * np.arange(len(tokens))[None, mine]]
            else:
                # In MAX's order: lengths of the caches, page tables, the longest prompt, the longest cache.
                given = [before, tables[mine], [new], [max(before) + new]]
            for i, value in enumerate(given, place + 1):
                inputs[i] = np.asarray(value, self.types[i].dtype.np)
            place += 1 + len(given)
        for i, value in self.kept.items():
            inputs[i] = value
        outputs = list(self.run(*inputs))
        for i in reversed(self.buffers):
            self.kept[i] = outputs.pop()
        for i in reversed(self.states):
            self.kept[i] = outputs.pop()
        logits = np.asarray(outputs[min(1, len(outputs) - 1)].to_numpy())
        sizes = lengths if len(logits) == sum(lengths) else [1] * len(lengths)
        return np.split(logits, np.cumsum(sizes)[:-1])


def is_state(one: Any) -> bool:
    """Whether these inputs are of recurrent states, and not of a paged cache."""
    return hasattr(one, "live_row_ids")


def leaves(one: Any) -> tuple[Any, ...]:
    """The types of the inputs of one cache."""
    return one.__tree_flatten__()[0]


def cache_inputs(tree: Any) -> Iterator[tuple[int, Any]]:
    """The inputs of each cache in a tree of them, with the number of its device."""
    if isinstance(tree, Mapping):
        for one in tree.values():
            yield from cache_inputs(one)
        return
    for device, one in enumerate(tree):
        yield from ((device, leaf) for leaf in getattr(one, "leaves", [one]))


def zeros(kind: Any, *first: int) -> np.ndarray:
    """An array of a type, with zeros; sizes without a number are 0."""
    sizes = [int(size) if str(size).isdigit() else 0 for size in kind.shape]
    return np.zeros([*first, *sizes[len(first) :]], kind.dtype.np)


def of_text(kind: Any) -> Any:
    """The type of an input for a batch of text, which has no rows for images: named dimensions have no size 0."""
    name = str(kind.shape[0]) if len(kind.shape) else ""
    if "image" in name or "vision" in name:
        return type(kind)(kind.dtype, [0, *list(kind.shape)[1:]], kind.device)
    return kind


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


# The end of the name of an architecture whose vision encoder is run.
IMAGES = "-images"


class Tower(NamedTuple):
    """How the vision encoder of an architecture is run.

    Attributes:
        inputs: function of an image ``[3, side, side]``, which returns the inputs of MAX's graph.
        features: function of transformers' model and the image as a torch tensor ``[1, 3, side, side]``, which returns
            the states that replace the tokens of an image.
    """

    inputs: Callable[[np.ndarray], list[np.ndarray]]
    features: Callable[[Any, Any], Any]


def patches(image: np.ndarray) -> np.ndarray:
    """The patches of an image, ``[rows, columns, 3, size, size]``."""
    size = VISION["patch_size"]
    count = image.shape[1] // size
    return image.reshape(3, count, size, count, size).transpose(1, 3, 0, 2, 4)


def flat_patches(image: np.ndarray) -> list[np.ndarray]:
    """The patches of one image as vectors, their mask, and their positions."""
    each = patches(image)
    count = each.shape[0] * each.shape[1]
    return [each.reshape(count, -1), np.zeros([1, 1, count, count]), np.arange(count)]


TOWERS = {
    "pixtral": Tower(
        flat_patches,
        lambda model, image: model.get_image_features(
            image, image_sizes=[image.shape[2:]]
        ).pooler_output[0],
    ),
    "idefics3": Tower(
        lambda image: [image[None]],
        lambda model, image: model.get_image_features(image[None]).pooler_output[0],
    ),
    "internvl": Tower(
        lambda image: [patches(image)[None]],
        lambda model, image: model.get_image_features(image).pooler_output[0],
    ),
}


def compare_tower(name: str) -> dict[str, Any]:
    """Runs the vision encoder of one architecture: the largest difference for one image; it decodes nothing."""
    import torch

    from maxjax.engine import InferenceSession

    one = ARCHITECTURES[name]
    theirs = theirs_of(one)
    image = np.random.default_rng(2).standard_normal([3, *[VISION["image_size"]] * 2], np.float32)
    with torch.no_grad():
        wanted = TOWERS[name].features(theirs, torch.tensor(image[None])).numpy()
    with tempfile.TemporaryDirectory() as directory:
        file = checkpoint_of(theirs, one, Path(directory))
        pipeline = pipeline_of(one, one.folder or name, theirs.config, file, 1, False)
        pipeline.kv_params = cache_settings(pipeline)
        config = pipeline._create_model_config(pipeline._load_state_dict())
        spec = pipeline.graph_specs(config)["vision"]
        program = InferenceSession().load(spec.trace(), weights_registry=spec.weights_registry())
        inputs = TOWERS[name].inputs(image)
        given = [
            np.asarray(x, kind.dtype.np) for x, kind in zip(inputs, spec.input_types, strict=False)
        ]
        given += [zeros(kind) for kind in spec.input_types[len(given) :]]
        found = program.execute(*given)[0].to_numpy()
    error = np.abs(found.reshape(wanted.shape) - wanted).max()
    return {
        "name": name + IMAGES,
        "prefill": float(error),
        "decode": 0.0,
        "spread": float(np.std(wanted)),
    }


class Part(NamedTuple):
    """The settings for the run of a part of a pipeline, which has no architecture of its own in MAX's files.

    Attributes:
        kind: name of transformers' class of the model.
        settings: settings of its configuration.
        build: function of the configuration and the weights, which returns MAX's Module, its weights and the types of
            its inputs.
        inputs: function of the configuration and a random generator, which returns the inputs of MAX's Module.
        wanted: function of transformers' model and the inputs as torch tensors, which returns what is wanted.
    """

    kind: str
    settings: dict[str, Any]
    build: Any
    inputs: Any
    wanted: Any


def umt5(config: Any, weights: Any) -> tuple[Any, Any, list[Any]]:
    """MAX's text encoder of Wan."""
    from maxjax.driver import CPU
    from maxjax.dtype import DType
    from maxjax.graph import DeviceRef, TensorType

    settings = max_name("pipelines.architectures.umt5.model_config.UMT5Config").generate(
        config.to_dict(), "float32", [CPU()]
    )
    build = max_name("pipelines.architectures.umt5.umt5.UMT5EncoderModel")
    state = max_name("pipelines.architectures.umt5.model._prepare_state_dict")(weights)
    kinds = [TensorType(DType.int64, ["batch", "length"], DeviceRef.CPU())] * 2
    return build(settings, dtype=DType.float32, device=DeviceRef.CPU()), state, kinds


def padded_texts(config: Any, rng: np.random.Generator) -> list[np.ndarray]:
    """Two texts in one batch, and the mask of their tokens."""
    ids = rng.integers(2, config.vocab_size, [2, max(LENGTHS)])
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    return [np.where(mask, ids, 0), mask.astype(np.int64)]


def whisper(config: Any, weights: Any) -> tuple[Any, Any, list[Any]]:
    """MAX's audio encoder of Whisper, which has no adapter of weights."""
    from maxjax.dtype import DType
    from maxjax.graph import DeviceRef, TensorType

    config.n_heads = config.encoder_attention_heads
    build = max_name("pipelines.architectures.whisper.encoder.WhisperEncoder")
    module = build(config, DType.float32, DeviceRef.CPU())
    names = {"self_attn.out_proj": "attention.wo", "self_attn_layer_norm": "attention_norm",
             "final_layer_norm": "mlp_norm", "fc1": "mlp.fc1", "fc2": "mlp.fc2", "encoder.layer_norm": "norm",
             **{f"self_attn.{n}_proj": f"attention.w{n}" for n in "qkv"}}  # fmt: skip
    state = {}
    for name, weight in weights.items():
        if not name.startswith("encoder."):
            continue
        value = np.asarray(weight.data().data)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        state[name.removeprefix("encoder.")] = value if value.ndim < 3 else value.transpose(2, 1, 0)
    length = 2 * config.max_source_positions
    return (
        module,
        state,
        [TensorType(DType.float32, [2, length, config.num_mel_bins], DeviceRef.CPU())],
    )


PARTS = {
    "whisper": Part(
        "WhisperModel",
        {"vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "num_mel_bins": 16,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
         "max_source_positions": 20, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1},
        whisper,
        lambda config, rng: [rng.standard_normal([2, 40, 16], np.float32)],
        lambda model, sound: model.encoder(sound.swapaxes(1, 2)).last_hidden_state,
    ),
    "umt5": Part(
        "UMT5EncoderModel",
        {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        umt5, padded_texts,
        lambda model, ids, mask: [
            model(row[keep][None])[0][0] for row, keep in zip(ids, mask.bool(), strict=True)
        ],
    ),
}  # fmt: skip


def compare_part(name: str) -> dict[str, Any]:
    """Runs a part of a pipeline: the largest difference of its results; it decodes nothing."""
    import torch

    from maxjax.engine import InferenceSession
    from maxjax.graph import Graph
    from maxjax.graph.weights import load_weights

    part = PARTS[name]
    one = Architecture(part.kind)
    theirs = theirs_of(one, part.settings)
    with tempfile.TemporaryDirectory() as directory:
        weights = load_weights([checkpoint_of(theirs, one, Path(directory))])
        module, state, kinds = part.build(theirs.config, weights)
        module.load_state_dict(state)
        graph = Graph(name, module, input_types=kinds)
        program = InferenceSession().load(graph, weights_registry=module.state_dict())
        inputs = part.inputs(theirs.config, np.random.default_rng(2))
        given = [np.asarray(x, kind.dtype.np) for x, kind in zip(inputs, kinds, strict=True)]
        found = program.execute(*given)[0].to_numpy()
    with torch.no_grad():
        wanted = [one.numpy() for one in part.wanted(theirs, *map(torch.tensor, inputs))]
    errors = [
        np.abs(got[: len(want)] - want).max() for got, want in zip(found, wanted, strict=True)
    ]
    return {
        "name": name,
        "prefill": float(np.max(errors)),
        "decode": 0.0,
        "spread": float(np.std(wanted[0])),
    }


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
    towers = [name + IMAGES for name in TOWERS]
    names = options.names or [*ARCHITECTURES, *PARTS, *towers]
    if unknown := set(names) - ARCHITECTURES.keys() - PARTS.keys() - set(towers):
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
    site = installation(options.max)
    if site is None:
        print(HOW, file=sys.stderr)
        return 2
    sys.path.append(str(site))  # other packages that MAX's files import
    sys.meta_path.insert(0, MaxFiles(site / "max"))
    from maxjax.graph.weights import SafetensorWeights

    # MAX's reader gives Buffers, and some adapters check that.
    read = SafetensorWeights.data
    SafetensorWeights.data = lambda self: as_buffer(read(self))  # type: ignore[method-assign]
    if options.table:
        print(
            "| architecture | prompts | tokens after them | standard deviation of the logits |\n|---|---|---|---|"
        )
    failed = False
    for name in names:
        try:
            if name.endswith(IMAGES):
                one = compare_tower(name.removesuffix(IMAGES))
            elif name in PARTS:
                one = compare_part(name)
            elif ARCHITECTURES[name].is_encoder:
                one = compare_encoder(name)
            else:
                one = compare(name, options.devices, options.apart)
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
