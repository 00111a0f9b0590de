"""The names that maxjax has for settings of other libraries, for errors about unknown arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from .absent import hidden_arguments
from .errors import UnknownArgumentError, closest


def _named(**groups: str) -> Mapping[str, str]:
    """Name in another library → maxjax's name, from maxjax's name → names in other libraries."""
    return {name: own for own, names in groups.items() for name in names.split()}


# Arguments that have another name here: of generate and similar functions, of load, of embed, and of lora.add.
_GENERATE = _named(
    max_new_tokens="max_tokens max_length max_completion_tokens max_output_tokens n_predict max_gen_len",
    min_new_tokens="min_tokens min_length min_completion_tokens",
    stop="stop_strings stop_sequences stop_words",
    eos_ids="eos_token_id eos_token_ids stop_token_ids",
    logprobs="top_logprobs num_logprobs prompt_logprobs",
    n="num_return_sequences",
    draft="assistant_model draft_model",
    banned="suppress_tokens",
    bad_words="bad_words_ids",
    top_n_sigma="nsigma top_nsigma",
    typical_p="typ_p",
    temperature="temp tau",
    repetition_penalty="repeat_penalty repetition_context_penalty",
)
_LOAD = _named(
    dtype="torch_dtype param_dtype compute_dtype",
    token="use_auth_token hf_token auth_token api_key",
    cache_dir="download_dir cache_folder",
    local_files_only="offline",
    filename="gguf_file model_file file weights_file subfolder",
    tie="tie_word_embeddings tie_weights",
    limits="max_header_size",
)
_EMBED = _named(
    normalize="normalize_embeddings",
    truncate="truncation max_seq_length",
    pooling="pooling_mode pooling_strategy",
    prompt="instruction",
)
_FILL_MASK = _named(top="top_k")
_TAG = _named(aggregation="aggregation_strategy")
_CLASSIFY = _named(
    top="top_k return_all_scores",
    activation="function_to_apply",
    truncate="truncation",
)
_ANSWER = _named(max_length="max_seq_len", stride="doc_stride")
_LORA = _named(
    patterns="target_modules target_parameters layers_pattern layers_to_transform",
    rank="r lora_rank lora_r",
    alpha="lora_alpha",
    rslora="use_rslora",
    dora="use_dora",
)
# Names, separated by spaces → what to do instead of passing such an argument.
_ADVICE = {
    "do_sample": "temperature=: 0 is greedy, a larger value samples",
    "seed generator rng random_seed": "key=jax.random.key(seed)",
    "num_beams beam_size best_of early_stopping length_penalty":
        "num_beams= of maxjax.generate, which alone has beam search",
    "num_beam_groups penalty_alpha":
        "nothing: maxjax does not have it",
    "device_map device devices tensor_parallel_size n_gpu_layers max_memory":
        "mesh=maxjax.make_mesh(…) of maxjax.load",
    "load_in_8bit load_in_4bit quantization bnb_config":
        "maxjax.quantize(model), or a checkpoint that is quantised",
    "quantization_config": "a checkpoint that is quantised (maxjax convert --quantize)",
    "trust_remote_code use_safetensors low_cpu_mem_usage attn_implementation use_flash_attention_2 use_cache "
    "pad_token_id attention_mask use_fast force_download resume_download gpu_memory_utilization verbose "
    "convert_to_numpy convert_to_tensor return_tensors": "nothing: leave it out",
    "show_progress_bar progress_bar use_tqdm progress": "the environment: MAXJAX_PROGRESS=0 or 1",
    "n_ctx max_model_len max_seq_len":
        "nothing: the cache grows with the text, up to the model's context",
    "proxies endpoint": "the environment: HTTPS_PROXY, HF_ENDPOINT",
    "lora_dropout dropout": "nothing: LoRA has no dropout here",
    "modules_to_save": "maxjax.partition(model, …), which selects the weights that are trained",
    "prompt_lookup_num_tokens prompt_lookup_max num_speculative_tokens speculative_config speculative_model":
        'speculation="lookup", or draft= a smaller model',
    "system system_prompt": 'messages=[{"role": "system", "content": …}] of maxjax.Conversation',
    "variant": "filename= of maxjax.load, with the whole name of the file",
    "sampling_params": "sampling=maxjax.Sampling(…)",
    "generation_config": "sampling=maxjax.Sampling.from_generation_config(…)",
    "stream streamer": "maxjax.stream(…)",
    "messages": "the messages in place of the prompt, or maxjax.Conversation(model, tokenizer, messages)",
    "tools documents enable_thinking chat_template add_generation_prompt continue_final_message chat_template_kwargs":
        "template_kwargs={…}",
    "ignore_chat_template apply_chat_template raw": "chat=False",
}  # fmt: skip
_INSTEAD = {name: advice for names, advice in _ADVICE.items() for name in names.split()}
_LAYERS = _named(
    has_bias="bias use_bias",
    in_dim="in_features input_size input_dim d_in",
    out_dim="out_features output_size output_dim d_out features",
    hidden_dim="embedding_dim",
    vocab_size="num_embeddings",
    eps="epsilon layer_norm_eps",
    num_heads="num_attention_heads",
)
# The keys of one setting in the configurations of different models; the first is that of most.
_SETTINGS = [
    names.split()
    for names in (
        "hidden_size n_embd",
        "intermediate_size n_inner ffn_dim ffn_hidden_size",
        "num_hidden_layers num_layers n_layer n_layers",
        "num_attention_heads num_heads n_head n_heads",
        "num_key_value_heads num_kv_heads n_head_kv n_kv_heads",
        "max_position_embeddings n_positions",
        "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps",
        "hidden_act hidden_activation activation_function activation",
    )
]
_CONFIG = {name: names[0] for names in _SETTINGS for name in names[1:]}
_HOMES = (
    ("maxjax.generate", _GENERATE), ("maxjax.load", _LOAD), ("maxjax.embed", _EMBED), ("maxjax.fill_mask", _FILL_MASK),
    ("maxjax.tag", _TAG), ("maxjax.classify", _CLASSIFY), ("maxjax.answer", _ANSWER), ("maxjax.lora.add", _LORA),
    ("maxjax.nn.Linear", _LAYERS), ("maxjax.models.LlamaConfig", _CONFIG),
)  # fmt: skip
# Calls that do different things with texts: one is no advice for another.
_TEXT_CALLS = frozenset(
    f"maxjax.{name}" for name in "embed rerank fill_mask tag classify answer".split()
)
# Methods of PyTorch's modules and of transformers' models → what to write instead, after "use" or as a sentence.
_METHODS = {
    "half float16": 'load it in this dtype: maxjax.load(path, dtype="float16")',
    "bfloat16": 'load it in this dtype: maxjax.load(path, dtype="bfloat16")',
    "float float32": 'load it in this dtype: maxjax.load(path, dtype="float32")',
    "double": "maxjax computes in float32 or narrower",
    "eval train": "a model has no mode to set: call it as it is; dropout acts only where it gets a key=",
    "parameters": "jax.tree.leaves(model) are the arrays, model.state_dict() has them by name",
    "named_parameters buffers named_buffers": "model.state_dict() has the arrays by name",
    "modules children named_children": "model.named_modules() yields the layers by name",
    "requires_grad_ freeze": 'trained, frozen = maxjax.partition(model, "layers.*") splits the weights',
    "zero_grad backward": "gradients are results: jax.grad(loss)(model, …)",
    "generate": "maxjax.generate(model, tokenizer, prompt)",
    "cuda gpu cpu": "model.to(jax.devices()[0]) or model.to(mesh)",
    "forward": "call the model itself: model(…)",
    "save_pretrained save push_to_hub": 'maxjax.save_pretrained(model, "directory")',
    "register_forward_hook register_forward_pre_hook": "maxjax.add_layer_hook, or maxjax.capture(model, …)",
    "merge_and_unload": "maxjax.lora.merge(model)",
    "encode embed": "maxjax.embed(model, tokenizer, texts)",
    "chat": "maxjax.Conversation(model, tokenizer)",
    "set_submodule add_module register_module": "assign the layer: model.name = layer",
    "register_buffer register_parameter": "assign a Weight: model.name = Weight(…)",
    "gradient_checkpointing_enable": "jax.checkpoint(lambda x: layer(x))",
    "apply": "in Flax's sense call the model itself: model(…)",
}  # fmt: skip
METHODS = {name: advice for names, advice in _METHODS.items() for name in names.split()}
# The same of transformers' tokenizers.
TOKENIZER_METHODS = {
    "apply_chat_template": "maxjax.apply_chat_template(tokenizer, messages)",
    "tokenize": "tokenizer.tokens([text])",
    "batch_encode_plus": "tokenizer.batch(texts)",
    "encode_plus": "tokenizer.batch([text])",
    "batch_decode": "[tokenizer.decode(ids) for ids in batch]",
    "eos_token_id": "tokenizer.eos_ids, which may be several",
    "bos_token_id": "tokenizer.bos_id",
    "pad_token_id": "tokenizer.pad_id",
    "mask_token_id": 'tokenizer.special_id("mask_token")',
    "convert_ids_to_tokens": "tokenizer.pieces(ids)",
    "model_max_length": "tokenizer.max_length",
    "save_pretrained": 'maxjax.save_pretrained(model, "directory", tokenizer=tokenizer)',
}


def meant(name: str, names: Iterable[str], call: str = "") -> str:
    """A hint for an unknown argument: what to write instead; "" if nothing is similar.

    Args:
        name: the unknown name.
        names: the names of the arguments that exist.
        call: the function that was called, as "maxjax.load".

    Example:
        >>> meant("max_tokens", ["max_new_tokens"]), meant("temprature", ["temperature"])
        (': did you mean max_new_tokens=?', ': did you mean temperature=?')
        >>> meant("hidden_size", ["vocab_size", "n_embd"])
        ': did you mean n_embd=?'
        >>> meant("torch_dtype", ["temperature"])
        ': use dtype= of maxjax.load'
    """
    names = list(names)
    for keys in _SETTINGS:
        if name in keys and (own := next((key for key in keys if key in names), None)):
            return f": did you mean {own}=?"
    for _, table in _HOMES:
        if table.get(name) in names:
            return f": did you mean {table[name]}=?"
    homes = [one for one in _HOMES if not {call, one[0]} <= _TEXT_CALLS]
    for home, table in homes:
        if name in table:
            return f": use {table[name]}= of {home}"
    if name in _INSTEAD:
        instead = _INSTEAD[name].removesuffix(f" of {call}")
        said = instead.removeprefix("nothing: ")
        return f": use {instead}" if said == instead else f": {said}"
    # An argument that another function of maxjax has.
    own = {home: {*table.values()} for home, table in homes}
    if home := next((home for home in own if name in own[home]), None):
        return f": it is an argument of {home}"
    like = closest(name, names)
    return f": did you mean {like}=?" if like else ""


def check_keywords(cls: type, given: Iterable[str]) -> None:
    """Raises UnknownArgumentError for a keyword argument that a class does not take, with its name here.

    Example:
        >>> class Config:
        ...     def __init__(self, num_hidden_layers): ...
        >>> check_keywords(Config, ["num_layers"])
        Traceback (most recent call last):
        ...
        maxjax.errors.UnknownArgumentError: Config() got an unexpected keyword argument 'num_layers':
        did you mean num_hidden_layers=?
    """
    try:
        parameters = _signature(cls.__init__).parameters
    except (TypeError, ValueError):  # a class whose __init__ has no signature
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    names = list(parameters)[1:]
    hidden = hidden_arguments(cls.__init__)
    for name in given:
        if name not in names and name not in hidden:
            hint = meant(name, names) or f"; it takes {', '.join(names) or 'none'}"
            raise UnknownArgumentError(
                f"{cls.__name__}() got an unexpected keyword argument {name!r}{hint}"
            )


def either(default: bool, **given: bool | None) -> bool:
    """The value of an argument that has two names; the default if neither is given.

    Raises:
        TypeError: both names are given, with different values.

    Example:
        >>> either(False, has_bias=None, bias=True), either(True, use_bias=None, bias=None)
        (True, True)
        >>> either(False, has_bias=False, bias=True)
        Traceback (most recent call last):
        TypeError: has_bias=False and bias=True are two names of one argument: pass one of them
    """
    values = {name: value for name, value in given.items() if value is not None}
    if len({bool(value) for value in values.values()}) > 1:
        shown = " and ".join(f"{name}={value}" for name, value in values.items())
        raise TypeError(f"{shown} are two names of one argument: pass one of them")
    return bool(next(iter(values.values()), default))


_signature = lru_cache(maxsize=4096)(inspect.signature)


def unknown_argument(
    function: Callable[..., Any], name: str, home: str = "maxjax"
) -> UnknownArgumentError:
    """The error for a keyword argument that a function of ``maxjax``, or of its module ``home``, does not have.

    Example:
        >>> def load(path, *, mesh=None, dtype="auto"): ...
        >>> print(unknown_argument(load, "device_map"))
        maxjax.load() got an unexpected keyword argument 'device_map': use mesh=maxjax.make_mesh(…)
    """
    call, parameters = f"{home}.{function.__name__}", inspect.signature(function).parameters
    names = [name for name, one in parameters.items() if one.default is not one.empty]
    hint = meant(name, names, call) or f"; it takes {', '.join(names)}"
    return UnknownArgumentError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
