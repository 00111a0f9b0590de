"""Nemotron-H (also Nemotron Nano 2 and Nemotron 3): a layer is Mamba 2, attention without RoPE, an MLP or experts.

::

    x = embeddings[ids]
    in each layer:
        x = x + mixer(norm(x))
    logits = lm_head(norm_f(x))

where the mixer is, for normalised hidden states h, one of

::

    Mamba 2:    z, u, dt = in_proj(h)                        gate, inputs, time steps
                u, b, c = silu(conv1d(u))                    a causal convolution of each channel
                dt = max(softplus(dt + dt_bias), time_step_min)
                S ← exp(-exp(A_log) dt) S + (dt u) ⊗ b       for each head, token after token
                y = S c + D u
                out_proj(norm(y · silu(z)))
    attention:  o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
    MLP:        down_proj(relu(up_proj(h))²)
    experts:    fc2_latent_proj(Σ share · expert(fc1_latent_proj(h))) + shared_experts(h)
                shares = sigmoid(gate(h)), divided by their sum, · factor, of the k experts with the highest
                sigmoid(gate(h)) + a bias that balances them; an expert is such an MLP, of h itself in models
                without latent projections

Sources: arXiv:2504.03624 (Nemotron-H), arXiv:2512.20848 (Nemotron 3); transformers' ``modeling_nemotron_h``.

Shapes: B sequences, T tokens, hidden size E. Attention has H query heads and K key-value heads of width D; Mamba 2
has H heads of P features (I = H P), G groups of heads, N features of the state, and C = I + 2 G N channels of the
convolution. X experts with F inner features, k experts for each token, L features of latent vectors. A decode step,
with one token per sequence, has no axis T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.split import REPLICATED, ROWS
from ..graph.weight.weight import Weight
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, check_experts, route
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from ..nn.ssm.gated_norm import GatedNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.config.read import Config, Shapes
from .gguf.metadata import MAX_EXPERTS, Settings, unsupported
from .gguf.names import KEYS, QUERIES, STACK, Rule
from .gguf.ssm import (
    SSM_KEYS,
    check_both_kinds,
    has_tensor,
    read_ssm_sizes,
    ssm_names,
    write_ssm_sizes,
)
from .gguf.table import GGUFTable
from .names import ROPE_TABLES, Drop, Headless, Names, Prefix
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    attend,
    config_field,
    constant,
    layers,
    merge_heads,
    replicate_over_mesh,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.aliases import alias
from .parts.mamba import check_mamba, mamba_states
from .parts.recurrent import automatic_axes, convolve, per_feature, ssd

MAMBA, ATTENTION, MLP, SPARSE = "mamba", "attention", "mlp", "moe"
# Other names of the kinds: letters of a pattern, and transformers' names.
_NAMES = {
    "M": MAMBA, "*": ATTENTION, "-": MLP, "E": SPARSE,
    "linear_attention": MAMBA, "full_attention": ATTENTION,
}  # fmt: skip
# Keys of sizes that files have although no layer is of the kind.
_SIZES = {
    MLP: ["intermediate_size"],
    SPARSE: ["n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
             "moe_shared_expert_intermediate_size", "moe_latent_size", "n_group", "topk_group"],
}  # fmt: skip


def _kinds(raw: Mapping[str, Any]) -> list[str]:
    """Return the kinds of a file's layers, which it may give as letters; raise ValueError if it gives neither."""
    kinds, letters = raw.get("layers_block_type"), raw.get("hybrid_override_pattern")
    kinds = raw.get("layer_types") if kinds is None else kinds
    if kinds is None and letters is None:  # as transformers
        return [MAMBA, SPARSE, ATTENTION, MLP]
    if kinds is None:
        if not isinstance(letters, str):
            raise ValueError("'hybrid_override_pattern' is not a string")
        kinds = list(letters)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError("'layers_block_type' is not a list of strings")
    return [_NAMES[kind] if kind in _NAMES else kind for kind in kinds]


@dataclass(frozen=True)
class NemotronHConfig(LanguageModelConfig):
    """The settings of a Nemotron-H.

    Attributes:
        layers_block_type: kind of each layer: "mamba", "attention", "mlp" or "moe" (experts).
        mlp_hidden_act, mamba_hidden_act: activation functions of MLPs and experts, and of Mamba 2 after the
            convolution.
        mamba_num_heads, mamba_head_dim, n_groups, ssm_state_size, conv_kernel: sizes of Mamba 2.
        time_step_min: minimum length of a time step.
        mlp_bias: whether MLPs and latent projections have biases.
        n_routed_experts, num_experts_per_tok: X and k.
        moe_intermediate_size, moe_shared_expert_intermediate_size: F, and inner features of the MLP that every
            token goes through.
        moe_latent_size: L; None: experts compute from the hidden states themselves.
        norm_topk_prob: whether the shares of the chosen experts are divided by their sum.
        routed_scaling_factor: factor of the shares.
        n_group, topk_group: number of groups of experts, and of those that a token chooses from.
    """

    model_type = "nemotron_h"
    unused = ("n_shared_experts",)  # the shared ones are one MLP, whose size another key says

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(128)
    layers_block_type: tuple[str, ...] = config_field((), choices=(MAMBA, ATTENTION, MLP, SPARSE))
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    max_position_embeddings: int = config_field(4096, minimum=1)
    layer_norm_epsilon: float = 1e-5
    mamba_num_heads: int = size(128)
    mamba_head_dim: int = size(64)
    n_groups: int = size(8, aliases=("mamba_n_groups",))
    ssm_state_size: int = size(128)
    conv_kernel: int = size(4, minimum=2, aliases=("mamba_d_conv",))
    use_conv_bias: bool = config_field(True, aliases=("mamba_conv_bias",))
    use_bias: bool = False
    time_step_min: float = config_field(0.001, aliases=("mamba_dt_min",))
    attention_bias: bool = constant(False)
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    n_routed_experts: int = size(8, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(2)
    moe_intermediate_size: int = size(7688)
    moe_shared_expert_intermediate_size: int = size(7688)
    moe_latent_size: int | None = size(None)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = size(1)
    topk_group: int = size(1)

    def _fill_in(self) -> None:
        if not self.layers_block_type:
            self._set("layers_block_type", (MAMBA,) * self.num_hidden_layers)
        super()._fill_in()

    def _check(self) -> None:
        if len(self.layers_block_type) != self.num_hidden_layers:
            raise ValueError(
                f"'layers_block_type' has {len(self.layers_block_type)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        check_mamba(self.mamba_num_heads, self.n_groups)
        if SPARSE in self.layers_block_type:
            groups = self.n_group, self.topk_group
            try:
                check_experts(self.n_routed_experts, self.num_experts_per_tok, *groups)
            except ValueError as error:
                raise ValueError(
                    "'n_routed_experts', 'num_experts_per_tok', 'n_group' and 'topk_group' do not fit together: "
                    f"{error}"
                ) from None
        super()._check()

    @property
    def inner_size(self) -> int:
        """I, the features of all heads of Mamba 2."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        return self.inner_size + 2 * self.n_groups * self.ssm_state_size

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return self.layers_block_type

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.layers_block_type[layer] == SPARSE

    def states(self, layer: int) -> Mapping[str, Any]:
        """The states of Mamba 2, the keys and values of attention, or nothing for an MLP or experts."""
        kind = self.layers_block_type[layer]
        if kind != MAMBA:
            return super().states(layer) if kind == ATTENTION else {}
        return mamba_states(
            taps=self.conv_kernel, channels=self.channels, heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim, state_size=self.ssm_state_size,
        )  # fmt: skip

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings to compare with the tensors: sizes of MLPs and of experts only if a layer has them."""
        try:
            kinds = _kinds(raw)
        except ValueError:  # from_dict reports it
            return raw
        unused = [key for kind, keys in _SIZES.items() if kind not in kinds for key in keys]
        return {key: raw[key] for key in raw if key not in unused}

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, whose layers may be given as letters."""
        raw = with_defaults(raw, {"num_key_value_heads": 8})
        kinds = _kinds(raw)
        found = {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}
        return super().from_hf(raw.replaced(found), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings; the list of the layers has their number."""
        found = super().to_hf()
        del found["num_hidden_layers"]
        return found


class NemotronHMamba(Module):
    """Mamba 2: one input projection, a convolution, the recurrence, and a gated norm."""

    def __init__(self, config: NemotronHConfig, dtype: DType):
        super().__init__()
        H, G = config.mamba_num_heads, config.n_groups
        self.heads, self.head_dim = H, config.mamba_head_dim
        self.groups, self.state_size = G, config.ssm_state_size
        self.act, self.time_step_min = config.mamba_hidden_act, config.time_step_min
        E, inner, channels = config.hidden_size, config.inner_size, config.channels
        self.in_proj = Linear(E, inner + channels + H, dtype, has_bias=config.use_bias)
        self.conv1d = CausalConv(channels, config.conv_kernel, dtype, config.use_conv_bias)
        self.A_log, self.D, self.dt_bias = (
            Weight(name, dtype, (H,), DeviceRef.CPU()) for name in ("A_log", "D", "dt_bias")
        )
        self.norm = GatedNorm(inner, dtype, config.layer_norm_epsilon, G, gate_first=True)
        self.out_proj = Linear(inner, E, dtype, has_bias=config.use_bias)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        inner, group = self.heads * self.head_dim, self.groups * self.state_size  # I, G N
        y = self.in_proj(x).astype(x.dtype)  # [B, T, I + C + H]
        # On a mesh, shards of the projection do not end where its parts do.
        y = replicate_last_axis(y, self.in_proj.weight, 0)
        z, u, dt = jnp.split(y, (inner, 2 * inner + 2 * group), axis=-1)
        u, cache = convolve(self.conv1d, u, cache, "mamba")  # [B, T, C]
        u, b, c = jnp.split(activation(self.act)(u), (inner, inner + group), axis=-1)
        u = split_heads(u, self.head_dim)  # [B, T, H, P]
        b, c = split_heads(b, self.state_size), split_heads(c, self.state_size)  # [B, T, G, N]
        dt = jax.nn.softplus(dt.astype(jnp.float32) + per_feature(self.dt_bias, dt))
        dt = jnp.clip(dt, self.time_step_min, math.inf)  # [B, T, H]
        decay = dt * -jnp.exp(per_feature(self.A_log, dt))
        y, cache = ssd(u * dt[..., None], decay, b, c, cache, "mamba")  # [B, T, H, P]
        y = merge_heads(y + u * per_feature(self.D, dt)[..., None])
        return self.out_proj(self.norm(y, z).astype(x.dtype)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``in_proj`` along its rows, and ``out_proj`` between heads."""
        return {
            "in_proj": ROWS,
            **split_heads_over_mesh({}, {"out_proj": self.heads}, self.head_dim),
            **dict.fromkeys(["A_log", "D", "dt_bias", "norm.weight"], REPLICATED),
        }


class NemotronHAttention(Module):
    """Attention without positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: NemotronHConfig, dtype: DType):
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, K * D, dtype)
        self.v_proj = Linear(E, K * D, dtype)
        self.o_proj = Linear(H * D, E, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class NemotronHMLP(Module):
    """An MLP without a gate."""

    def __init__(self, config: NemotronHConfig, F: int, dtype: DType):
        super().__init__()
        E, bias = config.hidden_size, config.mlp_bias
        self.act = config.mlp_hidden_act
        self.up_proj = Linear(E, F, dtype, has_bias=bias)
        self.down_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(activation(self.act)(self.up_proj(x)))  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["up_proj"], ["down_proj"])


class NemotronHRouter(Linear):
    """The router, with a bias ``[X]`` that affects which experts are chosen, and not their shares."""

    def __init__(self, config: NemotronHConfig, dtype: DType):
        super().__init__(config.hidden_size, config.n_routed_experts, dtype)
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (config.n_routed_experts,), DeviceRef.CPU()
        )


class NemotronHSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k chosen experts, and an MLP for every token."""

    def __init__(self, config: NemotronHConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        L, bias = config.moe_latent_size, config.mlp_bias
        self.top_k, self.groups, self.top_groups = (
            config.num_experts_per_tok, config.n_group, config.topk_group
        )  # fmt: skip
        self.normalised, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.gate = NemotronHRouter(config, dtype)
        names = ("up_proj", "down_proj")  # an expert has no gate
        self.experts = Experts(E if L is None else L, F, X, dtype, names, config.mlp_hidden_act)
        self.shared_experts = NemotronHMLP(
            config, config.moe_shared_expert_intermediate_size, dtype
        )
        self.fc1_latent_proj = None if L is None else Linear(E, L, dtype, has_bias=bias)
        self.fc2_latent_proj = None if L is None else Linear(L, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x.astype(jnp.float32))  # [B, T, X]
        bias = jnp.asarray(self.gate.e_score_correction_bias)
        chosen, shares = route(
            scores, self.top_k, "sigmoid", normalised=self.normalised, factor=self.factor,
            groups=self.groups, top_groups=self.top_groups, bias=bias,
        )  # [B, T, k]  # fmt: skip
        h = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x).astype(x.dtype)
        y = self.experts(h, chosen, shares)  # [B, T, L or E]
        y = y if self.fc2_latent_proj is None else self.fc2_latent_proj(y)  # [B, T, E]
        return y + self.shared_experts(x)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router and the latent projections."""
        latent = [] if self.fc1_latent_proj is None else ["fc1_latent_proj", "fc2_latent_proj"]
        return replicate_over_mesh("gate", *latent)


class NemotronHBlock(Module):
    """One layer: Mamba 2, attention, an MLP or experts, added to the hidden states."""

    def __init__(self, config: NemotronHConfig, layer: int, dtype: DType):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, dtype, config.layer_norm_epsilon)
        kind = config.layers_block_type[layer]
        self.has_state = kind in (MAMBA, ATTENTION)
        kinds = {MAMBA: NemotronHMamba, ATTENTION: NemotronHAttention, SPARSE: NemotronHSparseMLP}
        self.mixer: Any = (
            NemotronHMLP(config, config.intermediate_size, dtype)
            if kind == MLP
            else kinds[kind](config, dtype)
        )

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        h = self.norm(x)
        if self.has_state:
            y, cache = self.mixer(h, cache)
        else:
            y = self.mixer(h)
        return x + y.astype(x.dtype), cache


class NemotronHModel(Module):
    """The model without its head: ``backbone`` in the files."""

    embed_tokens = alias("embeddings")

    def __init__(self, config: NemotronHConfig, dtype: DType):
        super().__init__()
        self.dtype = dtype
        self.embeddings = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers: Any = LayerList(
            NemotronHBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm_f = RMSNorm(config.hidden_size, dtype, config.layer_norm_epsilon)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embeddings(ids).astype(self.dtype.np)  # [B, T, E]
        x, cache = run_layers(self.layers, x, cache)
        return self.norm_f(x), cache


class NemotronH(LanguageModel):
    """A Nemotron-H language model.

    Example:
        >>> config = NemotronHConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2, mamba_num_heads=4,
        ...     mamba_head_dim=4, n_groups=2, ssm_state_size=6, layers_block_type=("mamba", "mlp", "attention"))
        >>> cache = NemotronH(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, cache.more["mamba"].layers
        (1, 1)
    """

    model = alias("backbone")

    def __init__(
        self, config: NemotronHConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.backbone = NemotronHModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ----------------------------------------------------------------------------------

# For each kind of layer except MLPs, a tensor that only this kind has.
_TENSOR_OF_KIND = {"M": "ssm_in.weight", "*": "attn_q.weight", "E": "ffn_gate_inp.weight"}
# The minimum time step in transformers, which GGUF files do not hold and llama.cpp does not apply.
_TIME_STEP_MIN = 0.001


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the sizes of Mamba 2 and of the experts, and the kinds of the layers."""
    names = {
        "heads": "mamba_num_heads", "width": "mamba_head_dim", "groups": "n_groups",
        "state": "ssm_state_size", "taps": "conv_kernel", "expand": "expand",
    }  # fmt: skip
    kinds = _TENSOR_OF_KIND.items()
    letters = [
        next((letter for letter, name in kinds if f"blk.{i}.{name}" in tensors), "-")
        for i in range(config["num_hidden_layers"])
    ]
    groups = given.count("expert_group_count", 1, maximum=MAX_EXPERTS)
    return {
        **read_ssm_sizes(given, names), "hybrid_override_pattern": "".join(letters),
        "intermediate_size": config["intermediate_size"] or config["hidden_size"],
        "n_group": groups, "topk_group": given.count("expert_group_used_count", groups, maximum=groups),
        "use_conv_bias": has_tensor("ssm_conv1d.bias", tensors) or "M" not in letters,
        "use_bias": has_tensor("ssm_in.bias", tensors),
        "mlp_bias": has_tensor("ffn_up.bias", tensors),
    }  # fmt: skip


def _write_gguf(config: NemotronHConfig) -> dict[str, Any]:
    """Return further metadata; the numbers of KV heads and of MLP features give each layer's kind."""
    kinds, kv_heads = config.layers_block_type, config.num_key_value_heads
    check_both_kinds([one == MAMBA for one in kinds], [one == ATTENTION for one in kinds])
    if MLP in kinds and SPARSE in kinds:
        raise unsupported("a model with both MLPs and experts in a GGUF file")
    inner = config.moe_intermediate_size if SPARSE in kinds else config.intermediate_size
    found: dict[str, Any] = {}
    if SPARSE in kinds:
        found["expert_shared_count"] = 1
        if config.n_group > 1:
            found["expert_group_count"] = config.n_group
            found["expert_group_used_count"] = config.topk_group
    return {
        **found,
        **write_ssm_sizes(
            taps=config.conv_kernel, state_size=config.ssm_state_size, groups=config.n_groups,
            heads=config.mamba_num_heads, inner=config.inner_size, conv_bias=config.use_conv_bias,
            act=config.mamba_hidden_act, limit=(config.time_step_min, math.inf), least=_TIME_STEP_MIN,
        ),
        "attention.head_count_kv": [kv_heads * (kind == ATTENTION) for kind in kinds],
        "feed_forward_length": [inner * (kind in (MLP, SPARSE)) for kind in kinds],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,  # llama.cpp asks for it, too
    }  # fmt: skip


_NAMES_GGUF = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    ".attn_norm": "norm",
    **ssm_names("mixer"),
    ".attn_q": Rule("mixer.q_proj", QUERIES),
    ".attn_k": Rule("mixer.k_proj", KEYS),
    ".attn_v": "mixer.v_proj",
    ".attn_output": "mixer.o_proj",
    ".ffn_up": "mixer.up_proj",
    ".ffn_down": "mixer.down_proj",
    ".ffn_gate": None,
    ".ffn_norm": None,
}
_ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")
_FIXED = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "time_step_min": _TIME_STEP_MIN}
_WRITTEN = (*SSM_KEYS, "attention.layer_norm_epsilon")
_table = partial(
    GGUFTable, read=_read_gguf, write=_write_gguf, layer="backbone.layers.*.", has_rope=False,
    epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
)  # fmt: skip
NEMOTRON_H_MOE_GGUF = _table(
    "nemotron_h_moe",
    {
        **_NAMES_GGUF, ".ffn_up": None, ".ffn_down": None, ".ffn_gate_inp": "mixer.gate",
        ".exp_probs_b": Rule("mixer.gate.e_score_correction_bias", only="bias"),
        ".ffn_up_exps": Rule("mixer.experts.#.up_proj", STACK),
        ".ffn_down_exps": Rule("mixer.experts.#.down_proj", STACK),
        ".ffn_up_shexp": "mixer.shared_experts.up_proj",
        ".ffn_down_shexp": "mixer.shared_experts.down_proj",
        ".ffn_latent_down": "mixer.fc1_latent_proj", ".ffn_latent_up": "mixer.fc2_latent_proj",
    },
    keys={
        "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
        "moe_latent_size": "moe_latent_size",
    },
    constants={**_FIXED, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    written=(*_WRITTEN, "expert_shared_count", "expert_group_count", "expert_group_used_count"),
    biases=(*_ATTENTION_BIASES, "exp_probs_b", "ssm_conv1d", "ssm_dt"),
    computed=("intermediate_size",),  # of MLPs, which such a model does not have
)  # fmt: skip
NEMOTRON_H_GGUF = _table(
    "nemotron_h", _NAMES_GGUF, constants=_FIXED, written=_WRITTEN,
    biases=(*_ATTENTION_BIASES, "ffn_up", "ffn_down", "ssm_conv1d", "ssm_dt"),
    instead=lambda config: ("nemotron_h_moe", {}) if SPARSE in config.layers_block_type else None,
    variants=(NEMOTRON_H_MOE_GGUF,),
)  # fmt: skip

NEMOTRON_H = NemotronH.family = Family.of(
    NemotronH,
    NemotronHConfig,
    names=Names(
        Prefix({"model.": "backbone."}, in_modules=True),
        FusedExperts(
            "mixer.experts.#.*.weight",
            ("up_proj", "down_proj"),
            gate_up=("mixer.experts.up_proj",),
            down=("mixer.experts.down_proj",),
        ),
        Drop("mtp.*", kept=True),
        ROPE_TABLES,
        Headless("backbone.", ("embeddings.", "layers.", "norm_f.")),
    ),
    tied=("lm_head.weight", "backbone.embeddings.weight"),
    gguf=NEMOTRON_H_GGUF,
)
