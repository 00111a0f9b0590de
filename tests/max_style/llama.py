"""A Llama decoder as a MAX user writes it; only the imports say maxjax.

Weight names are those of the Hugging Face checkpoint. The layers run as one subgraph that
is called with each layer's weights.
"""

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, TensorType, TensorValue, Weight, ops
from maxjax.nn import Embedding, LayerList, Linear, Module


class RMSNorm(Module):
    def __init__(self, dim: int, dtype: DType, eps: float):
        super().__init__()
        self.weight = Weight("weight", dtype, [dim], DeviceRef.CPU())
        self.eps = eps

    def __call__(self, x: TensorValue) -> TensorValue:
        scale = ops.rsqrt(ops.mean(x.cast(DType.float32) ** 2, axis=-1) + self.eps)
        return (x.cast(DType.float32) * scale).cast(x.dtype) * self.weight.to(x.device)


class Rope(Module):
    """Rotates halves: angles are positions times frequencies."""

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def __call__(self, x: TensorValue) -> TensorValue:
        seq_len = x.shape[1]
        half = self.head_dim // 2
        device = x.device
        steps = ops.range(0, half, 1, out_dim=half, dtype=DType.float32, device=device)
        inverse = ops.constant(self.theta, DType.float32, device) ** (
            steps * (-2.0 / self.head_dim)
        )
        positions = ops.range(0, seq_len, 1, out_dim=seq_len, dtype=DType.float32, device=device)
        angles = ops.outer(positions, inverse)
        cos = ops.unsqueeze(ops.cos(angles), 1)  # [seq, 1, half]
        sin = ops.unsqueeze(ops.sin(angles), 1)
        first, second = ops.split(x, [half, half], axis=-1)
        return ops.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(Module):
    def __init__(self, config):
        super().__init__()
        dtype, device = DType.float32, DeviceRef.CPU()
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.n_heads
        kv_dim = self.n_kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, config.hidden_size, dtype, device)
        self.k_proj = Linear(config.hidden_size, kv_dim, dtype, device)
        self.v_proj = Linear(config.hidden_size, kv_dim, dtype, device)
        self.o_proj = Linear(config.hidden_size, config.hidden_size, dtype, device)
        self.rope = Rope(self.head_dim, config.rope_parameters["rope_theta"])

    def __call__(self, x: TensorValue) -> TensorValue:
        batch, seq_len = x.shape[0], x.shape[1]
        xq = self.rope(self.q_proj(x).reshape((batch, seq_len, self.n_heads, self.head_dim)))
        xk = self.rope(self.k_proj(x).reshape((batch, seq_len, self.n_kv_heads, self.head_dim)))
        xv = self.v_proj(x).reshape((batch, seq_len, self.n_kv_heads, self.head_dim))
        repeats = self.n_heads // self.n_kv_heads
        xk = ops.repeat_interleave(xk, repeats, axis=2)
        xv = ops.repeat_interleave(xv, repeats, axis=2)
        xq, xk, xv = (v.transpose(1, 2) for v in (xq, xk, xv))
        scores = (xq @ xk.transpose(2, 3)) * (self.head_dim**-0.5)
        rows = ops.range(0, seq_len, 1, out_dim=seq_len, dtype=DType.int32, device=x.device)
        causal = ops.greater_equal(ops.unsqueeze(rows, 1), ops.unsqueeze(rows, 0))
        lowest = ops.constant(-1e30, DType.float32, x.device)
        scores = ops.where(
            causal.broadcast_to(scores.shape), scores, lowest.broadcast_to(scores.shape)
        )
        out = ops.softmax(scores) @ xv
        return self.o_proj(
            out.transpose(1, 2).reshape((batch, seq_len, self.n_heads * self.head_dim))
        )


class MLP(Module):
    def __init__(self, config):
        super().__init__()
        dim, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(dim, hidden, DType.float32, DeviceRef.CPU())
        self.up_proj = Linear(dim, hidden, DType.float32, DeviceRef.CPU())
        self.down_proj = Linear(hidden, dim, DType.float32, DeviceRef.CPU())

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.down_proj(ops.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, DType.float32, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, DType.float32, config.rms_norm_eps
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, DType.float32, DeviceRef.CPU()
        )
        self.layers = LayerList([Block(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, DType.float32, config.rms_norm_eps)

    def __call__(self, ids: TensorValue) -> TensorValue:
        h = [self.embed_tokens(ids)]
        input_types = [hidden.type for hidden in h]
        subgraph = self.layers[0].build_subgraph(
            "block", input_types=input_types, weight_prefix="model.layers.0."
        )
        for idx in range(len(self.layers)):
            outputs = ops.call(subgraph, *h, prefix=f"model.layers.{idx}.")
            h = [x.tensor for x in outputs]
        return self.norm(h[0])


class Llama(Module):
    def __init__(self, config):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, DType.float32, DeviceRef.CPU())

    def __call__(self, ids: TensorValue) -> TensorValue:
        return self.lm_head(self.model(ids))


INPUT_TYPES = [TensorType(DType.int64, ["batch", "seq_len"], DeviceRef.CPU())]
