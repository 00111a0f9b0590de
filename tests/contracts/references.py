"""What the layers compute, in float64 NumPy: functions of the weights by name and the inputs."""

import itertools

import jax
import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    y = np.exp(x - x.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


def below(w, prefix):
    """The weights of the layer with this prefix, by their names in it."""
    return {name.removeprefix(prefix): w[name] for name in w if name.startswith(prefix)}


# --- linear layers -------------------------------------------------------------------------------


def linear(w, x):
    return x @ w["weight"].T + w.get("bias", 0)


def transposed_linear(w, x):
    return x @ w["weight"] + w["bias"]


def clipped_linear(limit):
    return lambda w, x: x @ np.clip(w["weight"], -limit, limit).T + w["bias"]


def parallel_linear(w, xs):
    """A linear layer in parts, each with its input; every device has the whole result."""
    parts = np.split(w["weight"], len(xs))
    y = np.concatenate([x @ part.T for x, part in zip(xs, parts, strict=True)], -1)
    return [y] * len(xs)


def together(*names):
    """Several linear layers of one input, side by side."""
    return lambda w, x: np.concatenate([linear(below(w, f"{name}."), x) for name in names], -1)


def in_turn(count):
    """Linear layers 0, 1, … one after the other."""

    def run(w, x):
        for i in range(count):
            x = linear(below(w, f"{i}."), x)
        return x

    return run


def embedding(w, ids):
    return w["weight"][ids]


def tied(w, ids):
    return linear(below(w, "body."), w["table.weight"][ids]) @ w["table.weight"].T


def mlp(w, x, act=silu):
    gate, up = (linear(below(w, f"{name}_proj."), x) for name in ("gate", "up"))
    return linear(below(w, "down_proj."), act(gate) * up)


def fused_mlp(w, x):
    gate, up = np.split(x @ w["gate_up_proj_fused"].T, 2, -1)
    return linear(below(w, "down_proj."), silu(gate) * up)


# --- norms ---------------------------------------------------------------------------------------


def normalised(x, axes, eps):
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + eps)


def layer_norm(w, x):
    return normalised(x, -1, 1e-5) * w["weight"] + w.get("bias", 0)


def rms_norm(w, x, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w["weight"]


def by_channel(values, x):
    """A value for each channel, axis 1 of ``x``."""
    return values.reshape(1, -1, *[1] * (x.ndim - 2))


def group_norm(groups):
    def run(w, x):
        y = normalised(x.reshape(len(x), groups, -1), -1, 1e-5).reshape(x.shape)
        return y * by_channel(w["weight"], x) + by_channel(w["bias"], x)

    return run


def batch_norm(w, x):
    mean, variance = (by_channel(w[f"running_{name}"], x) for name in ("mean", "var"))
    y = (x - mean) / np.sqrt(variance + 1e-5)
    return y * by_channel(w["weight"], x) + by_channel(w["bias"], x)


# --- convolutions --------------------------------------------------------------------------------


def conv(stride=1, padding=0, groups=1):
    """A convolution of ``[N, *places, C]`` with ``[*kernel, C / groups, O]``."""

    def run(w, x):
        kernel, axes = w["weight"], x.ndim - 2
        x = np.pad(x, [(0, 0), *[(padding, padding)] * axes, (0, 0)])
        sizes = [
            (n - k) // stride + 1 for n, k in zip(x.shape[1:-1], kernel.shape[:axes], strict=True)
        ]
        y = np.zeros((len(x), *sizes, kernel.shape[-1]))
        for taps in itertools.product(*map(range, kernel.shape[:axes])):
            places = tuple(
                slice(t, t + stride * (n - 1) + 1, stride) for t, n in zip(taps, sizes, strict=True)
            )
            parts = np.split(x[:, *places], groups, -1), np.split(kernel[taps], groups, -1)
            y += np.concatenate([a @ k for a, k in zip(*parts, strict=True)], -1)
        return y + w.get("bias", 0)

    return run


def channels_first(run):
    """A convolution whose input, kernel and result have torch's layouts."""

    def of_torch(w, x):
        kernel = np.moveaxis(w["weight"], (0, 1), (-1, -2))
        return np.moveaxis(run({**w, "weight": kernel}, np.moveaxis(x, 1, -1)), -1, 1)

    return of_torch


def conv_transpose(stride):
    """A transposed convolution of ``[N, L, C]`` with ``[kernel, O, C]``."""

    def run(w, x):
        kernel, (batch, length, _) = w["weight"], x.shape
        y = np.zeros((batch, (length - 1) * stride + len(kernel), kernel.shape[1]))
        for i, k in itertools.product(range(length), range(len(kernel))):
            y[:, i * stride + k] += x[:, i] @ kernel[k].T
        return y + w["bias"]

    return run


# --- recurrent layers ----------------------------------------------------------------------------


def lstm_cell(w, x, state, end=""):
    h, c = state
    i, f, g, o = np.split(_gates(w, x, h, end, "ih") + _gates(w, x, h, end, "hh"), 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def gru_cell(w, x, h, end=""):
    r, z, n = np.split(_gates(w, x, h, end, "ih"), 3, -1)
    hr, hz, hn = np.split(_gates(w, x, h, end, "hh"), 3, -1)
    r, z = sigmoid(r + hr), sigmoid(z + hz)
    return (1 - z) * np.tanh(n + r * hn) + z * h


def _gates(w, x, h, end, kind):
    return (x if kind == "ih" else h) @ w[f"weight_{kind}{end}"].T + w[f"bias_{kind}{end}"]


def lstm_both_ways(size):
    """One layer of an LSTM in both directions: hidden states, and the last state of each direction."""

    def run(w, x):
        zeros = np.zeros((len(x), size))
        found, last = [], []
        for end, steps in (("_l0", 1), ("_l0_reverse", -1)):
            state, each = (zeros, zeros), []
            for t in range(x.shape[1])[::steps]:
                state = lstm_cell(w, x[:, t], state, end)
                each.append(state[0])
            found.append(np.stack(each[::steps], 1))
            last.append(state)
        return np.concatenate(found, -1), tuple(np.stack(one) for one in zip(*last, strict=True))

    return run


def gru(layers, size):
    def run(w, x):
        last = []
        for number in range(layers):
            h, each = np.zeros((len(x), size)), []
            for t in range(x.shape[1]):
                h = gru_cell(w, x[:, t], h, f"_l{number}")
                each.append(h)
            x = np.stack(each, 1)
            last.append(h)
        return x, np.stack(last)

    return run


# --- attention -----------------------------------------------------------------------------------


def causal(length):
    return np.tri(length, dtype=bool)


def attention(q, k, v, mask=True, scale=None):
    """``[B, T or S, H, D]`` each → ``[B, T, H · D]``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = np.einsum("bthd,bshd->bhts", q, k) * scale
    shares = softmax(np.where(mask, scores, -np.inf))
    return np.einsum("bhts,bshd->bthd", shares, v).reshape(*q.shape[:2], -1)


def heads(x, width):
    return x.reshape(*x.shape[:-1], -1, width)


def multi_head_attention(count):
    """torch's layer."""

    def run(w, x):
        width = x.shape[-1] // count
        qkv = np.split(x @ w["in_proj_weight"].T + w["in_proj_bias"], 3, -1)
        return linear(below(w, "out_proj."), attention(*(heads(a, width) for a in qkv)))

    return run


def max_attention(count):
    """MAX's layer without rotary embedding."""

    def run(w, x):
        width = x.shape[-1] // count
        qkv = (heads(linear(below(w, f"{name}_proj."), x), width) for name in "qkv")
        return linear(below(w, "o_proj."), attention(*qkv))

    return run


def rope(x, theta=1e4, interleaved=True, stretch=1):
    """``x`` [..., T, H, D], whose pairs of features are rotated as complex numbers."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half) / stretch
    turn = np.exp(1j * np.arange(x.shape[-3])[:, None, None] * frequencies)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, -1)
    z = (a + 1j * b) * turn
    if interleaved:
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    return np.concatenate([z.real, z.imag], -1)


def rope_attention(count, kv_count, width, qk_norm=False):
    """Causal attention with rotary embedding; several heads of queries share heads of keys and values."""

    def run(w, x):
        if "qkv_proj.weight" in w:
            sizes = np.cumsum([count * width, kv_count * width])
            q, k, v = np.split(linear(below(w, "qkv_proj."), x), sizes, -1)
        else:
            q, k, v = (linear(below(w, f"{name}_proj."), x) for name in "qkv")
        q, k, v = (heads(a, width) for a in (q, k, v))
        if qk_norm:
            q, k = rms_norm(below(w, "q_norm."), q), rms_norm(below(w, "k_norm."), k)
        q, k = rope(q, interleaved=False), rope(k, interleaved=False)
        k, v = (np.repeat(a, count // kv_count, -2) for a in (k, v))
        return linear(below(w, "o_proj."), attention(q, k, v, causal(x.shape[-2])))

    return run


def latent_attention(count, nope, width, values):
    """Attention whose keys and values are projections of one latent vector of each token."""

    def run(w, x):
        (rank,) = w["kv_a_layernorm.weight"].shape
        q = x @ w["q_a_proj.weight"].T
        q = rms_norm(below(w, "q_a_layernorm."), q) @ w["q_b_proj.weight"].T
        q = heads(q, nope + width)
        both = x @ w["kv_a_proj_with_mqa.weight"].T
        latents = rms_norm(below(w, "kv_a_layernorm."), both[..., :rank])
        kv = heads(latents @ w["kv_b_proj.weight"].T, nope + values)
        shared = np.repeat(rope(both[..., None, rank:]), count, -2)
        k = np.concatenate([kv[..., :nope], shared], -1)
        q = np.concatenate([q[..., :nope], rope(q[..., nope:])], -1)
        y = attention(q, k, kv[..., nope:], causal(x.shape[-2]))
        return linear(below(w, "o_proj."), y)

    return run


def block(attend):
    """A block of a decoder: attention and an MLP, each after a norm and added to its input."""

    def run(w, x):
        y = rms_norm(below(w, "input_layernorm."), x)
        x = x + attend(below(w, "self_attn."), y)
        return x + mlp(below(w, "mlp."), rms_norm(below(w, "post_attention_layernorm."), x))

    return run


# --- mixtures of experts -------------------------------------------------------------------------


def gate(count, shares=lambda best: best):
    """The indices of the experts with the highest scores, and their shares."""

    def run(w, x):
        scores = linear(below(w, "gate_score."), x)
        chosen = np.argsort(-scores, -1, kind="stable")[..., :count]
        return chosen, shares(np.take_along_axis(scores, chosen, -1))

    return run


def sigmoid_router(count):
    """Scores that are sigmoids, with a bias that affects only the choice."""

    def run(w, x):
        scores = sigmoid(linear(below(w, "gate_score."), x))
        order = np.argsort(-scores - w["e_score_correction_bias"], -1, kind="stable")
        best = np.take_along_axis(scores, order[..., :count], -1)
        return order[..., :count], best / best.sum(-1, keepdims=True)

    return run


def mixture(x, chosen, shares, expert):
    """``Σ share · expert(number, token)`` for each token."""
    y = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        for number, share in zip(chosen[place], shares[place], strict=True):
            y[place] += share * expert(number, x[place])
    return y


def experts(w, x, chosen, shares):
    return mixture(x, chosen, shares, lambda number, one: mlp(below(w, f"{number}."), one))


def moe(count):
    """Mixtral's mixture, with an expert that all tokens use."""

    def run(w, x):
        chosen, shares = gate(count, softmax)(below(w, "gate."), x)
        y = experts(below(w, "experts."), x, chosen, shares)
        return y + mlp(below(w, "shared_experts."), x)

    return run


def stacked_moe(count):
    def run(w, x):
        chosen, shares = gate(count)(below(w, "gate."), x)

        def expert(number, one):
            gate_up = one @ w["experts.gate_up_proj"][number]
            first, up = np.split(gate_up + w["experts.gate_up_proj_bias"][number], 2, -1)
            found = (silu(first) * up) @ w["experts.down_proj"][number]
            return found + w["experts.down_proj_bias"][number]

        return mixture(x, chosen, shares, expert)

    return run


# --- others --------------------------------------------------------------------------------------


def causal_conv(w, x):
    """Each channel by its own kernel, and the last inputs."""
    taps = w["weight"].shape[-1]
    padded = np.pad(x, [(0, 0), (taps - 1, 0), (0, 0)])
    y = sum(padded[:, k : k + x.shape[1]] * w["weight"][:, 0, k] for k in range(taps))
    return y + w["bias"], padded[:, x.shape[1] :]


def gated_norm(groups):
    def run(w, x, gate):
        parts = x.reshape(*x.shape[:-1], groups, -1)
        y = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-5)
        return y.reshape(x.shape) * w["weight"] * silu(gate)

    return run


def dropout(p, seed):
    """Drops the elements that JAX's generator chooses."""

    def run(w, x):
        kept = jax.random.bernoulli(jax.random.key(seed), 1 - p, x.shape)
        return x * np.asarray(kept) / (1 - p)

    return run


def hyper_connection(streams, iterations, eps=1e-6):
    """The gates of several residual streams, and the input of the layer that they surround."""

    def run(w, x):
        flat = x.reshape(len(x), -1)
        size = np.sqrt((flat**2).mean(-1, keepdims=True) + eps)
        scale = np.repeat(w["hc_scale"], [streams, streams, streams**2])
        gates = flat @ w["hc_fn"].T / size * scale + w["hc_base"]
        take, give, mix = np.split(gates, [streams, 2 * streams], -1)
        mix = softmax(mix.reshape(-1, streams, streams)) + eps
        for number in range(iterations):
            if number:
                mix = mix / (mix.sum(-1, keepdims=True) + eps)
            mix = mix / (mix.sum(-2, keepdims=True) + eps)
        collapsed = ((sigmoid(take) + eps)[..., None] * x).sum(1)
        return 2 * sigmoid(give), mix, collapsed

    return run
