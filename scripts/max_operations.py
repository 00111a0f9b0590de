"""The operations and kernels in MAX's graphs, written in NumPy for ``max_oracle.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

OPS: dict[str, Callable[..., Any]] = {}
CUSTOM: dict[str, Callable[..., Any]] = {}


def operation(*names: str) -> Callable[[Any], Any]:
    """A decorator of the function ``(op, *arrays)`` that computes the operations with these names."""

    def keep(function: Any) -> Any:
        OPS.update(dict.fromkeys(names, function))
        return function

    return keep


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


UNARY: dict[str, Callable[[Any], Any]] = {
    "Abs": np.abs, "Neg": np.negative, "Negative": np.negative, "Exp": np.exp, "Log": np.log, "Log1p": np.log1p,
    "Sqrt": np.sqrt, "Rsqrt": lambda x: 1 / np.sqrt(x), "Isqrt": lambda x: 1 / np.sqrt(x), "Sin": np.sin, "Cos": np.cos,
    "Tanh": np.tanh, "Atanh": np.arctanh, "Acos": np.arccos, "Erf": _erf,
    "Floor": np.floor, "Ceil": np.ceil, "Round": np.round,
    "Trunc": np.trunc, "Not": np.logical_not, "IsNan": np.isnan, "IsInf": np.isinf, "Sigmoid": _sigmoid,
    "Silu": lambda x: x * _sigmoid(x), "Relu": lambda x: np.maximum(x, 0),
    "Gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "GeluTanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "GeluQuick": lambda x: x * _sigmoid(1.702 * x),
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum, "Pow": np.power,
    "Div": lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a / b).astype(a.dtype),
    "Mod": np.mod, "FloorDiv": np.floor_divide, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
    "Equal": np.equal, "NotEqual": np.not_equal, "Greater": np.greater, "GreaterEqual": np.greater_equal,
    "Less": np.less, "LessEqual": np.less_equal, "Matmul": np.matmul, "BatchMatmul": np.matmul, "Outer": np.outer,
}  # fmt: skip
REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceAdd": np.sum, "ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceMul": np.prod,
    "Mean": np.mean, "ReduceMean": np.mean, "ReduceArgMax": np.argmax, "ReduceArgMin": np.argmin,
    "ReduceAny": np.any, "ReduceAll": np.all,
}  # fmt: skip
for _name, _function in UNARY.items():
    OPS[_name] = lambda op, x, _f=_function: _f(x)
for _name, _function in BINARY.items():
    OPS[_name] = lambda op, x, y, _f=_function: _f(x, y)
for _name, _function in REDUCE.items():
    OPS[_name] = lambda op, x, _f=_function: _f(x, axis=int(op.axis), keepdims=True)


@operation("ReduceSoftmax", "Softmax")
def _softmax(op: Any, x: Any) -> Any:
    e = np.exp(x - x.max(op.axis, keepdims=True))
    return e / e.sum(op.axis, keepdims=True)


@operation("ReduceLogsoftmax", "Logsoftmax")
def _logsoftmax(op: Any, x: Any) -> Any:
    return np.log(_softmax(op, x))


@operation("Cast", "Rebind", "Transfer", "ShapeToTensor", "IndexToTensor", "ShapeFromTensor")
def _same(op: Any, x: Any, *rest: Any) -> Any:
    return x


@operation("DistributedBroadcast")
def _distributed(op: Any, x: Any) -> Any:
    return (x,) * op.count


@operation("DistributedAllreduceSum")
def _all_summed(op: Any, *xs: Any) -> Any:
    return (sum(xs),) * op.count


@operation("StaticReshape", "Reshape", "SqueezeShape", "UnsqueezeShape")
def _reshape(op: Any, x: Any, *rest: Any) -> Any:
    if type(op).__name__.endswith("ShapeOp") and "queeze" in type(op).__name__:
        return np.zeros(op.sizes[0], np.int64)  # the result's type determines the shape
    return x.reshape(op.sizes)


@operation("StaticBroadcastTo")
def _broadcast(op: Any, x: Any, *rest: Any) -> Any:
    return np.broadcast_to(x, op.sizes)


@operation("BroadcastTo")
def _broadcast_to(op: Any, x: Any, shape: Any) -> Any:
    return np.broadcast_to(x, tuple(map(int, shape)))


@operation("ShapeOf")
def _shape_of(op: Any, x: Any) -> Any:
    return np.array(x.shape, np.int64)


@operation("BroadcastShape")
def _broadcast_shape(op: Any, x: Any, y: Any) -> Any:
    return np.array(np.broadcast_shapes(tuple(x), tuple(y)), np.int64)


@operation("Transpose")
def _transpose(op: Any, x: Any, order: Any) -> Any:
    return x.transpose(tuple(map(int, order)))


@operation("Slice")
def _slice(op: Any, x: Any, start: Any, stop: Any, step: Any) -> Any:
    return x[tuple(slice(*map(int, one)) for one in zip(start, stop, step, strict=True))]


@operation("Concat")
def _concat(op: Any, *xs: Any) -> Any:
    return np.concatenate(xs, int(op.axis))


@operation("Split")
def _split(op: Any, x: Any, sizes: Any) -> Any:
    return tuple(np.split(x, np.cumsum(sizes)[:-1], int(op.axis)))


@operation("Gather")
def _gather(op: Any, x: Any, index: Any) -> Any:
    return np.take(x, index, int(op.axis))


@operation("GatherNd")
def _gather_nd(op: Any, x: Any, index: Any) -> Any:
    count = int(getattr(op, "batch_dims", 0))
    if not count:
        return x[tuple(np.moveaxis(index, -1, 0))]
    lead = x.shape[:count]
    flat = zip(
        x.reshape(-1, *x.shape[count:]), index.reshape(-1, *index.shape[count:]), strict=True
    )
    found = [one[tuple(np.moveaxis(at, -1, 0))] for one, at in flat]
    return np.stack(found).reshape(*lead, *found[0].shape)


@operation("ScatterNd")
def _scatter_nd(op: Any, x: Any, updates: Any, index: Any) -> Any:
    out = x.copy()
    out[tuple(np.moveaxis(index, -1, 0))] = updates
    return out


@operation("Scatter")
def _scatter(op: Any, x: Any, updates: Any, index: Any, *rest: Any) -> Any:
    out = x.copy()
    np.put_along_axis(
        out,
        index,
        updates,
        int(op.axis if hasattr(op, "axis") and isinstance(op.axis, int) else rest[0]),
    )
    return out


@operation("Range")
def _range(op: Any, start: Any, stop: Any, step: Any) -> Any:
    return np.arange(start, stop, step)


@operation("Select")
def _select(op: Any, which: Any, x: Any, y: Any) -> Any:
    return np.where(which, x, y)


@operation("Tile")
def _tile(op: Any, x: Any, counts: Any) -> Any:
    return np.tile(x, counts)


@operation("PadConstant")
def _pad(op: Any, x: Any, widths: Any, value: Any) -> Any:
    return np.pad(x, np.reshape(widths, (-1, 2)), constant_values=value)


@operation("PadRepeat")
def _pad_repeat(op: Any, x: Any, widths: Any) -> Any:
    return np.pad(x, np.reshape(widths, (-1, 2)), mode="edge")


@operation("PadReflect")
def _pad_reflect(op: Any, x: Any, widths: Any) -> Any:
    return np.pad(x, np.reshape(widths, (-1, 2)), mode="reflect")


@operation("TopK", "BottomK")
def _top_k(op: Any, x: Any, k: Any, axis: Any, *rest: Any) -> Any:
    sign = -1 if type(op).__name__.startswith("Top") else 1
    order = np.argsort(sign * x, int(axis), kind="stable").take(range(int(k)), int(axis))
    return np.take_along_axis(x, order, int(axis)), order


@operation("ArgSort")
def _argsort(op: Any, x: Any, *rest: Any) -> Any:
    return np.argsort(x if getattr(op, "ascending", True) else -x, kind="stable")


@operation("Cumsum")
def _cumsum(op: Any, x: Any) -> Any:
    axis = int(op.axis)
    if op.reverse:
        x = np.flip(x, axis)
    found = np.cumsum(x, axis)
    found = found - x if op.exclusive else found
    return np.flip(found, axis) if op.reverse else found


@operation("LinalgBandPart")
def _band_part(op: Any, x: Any, low: Any, high: Any, exclude: Any) -> Any:
    i, j = np.ogrid[: x.shape[-2], : x.shape[-1]]
    keep = ((low < 0) | (i - j <= low)) & ((high < 0) | (j - i <= high))
    return np.where(keep ^ bool(exclude), x, 0)


@operation("ReduceRmsNorm")
def _rms_norm(op: Any, x: Any, weight: Any) -> Any:
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + number(op.epsilon))
    return x * scale * (weight + number(op.weight_offset))


@operation("ReduceLayerNorm")
def _layer_norm(op: Any, x: Any, gamma: Any, beta: Any, epsilon: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + epsilon
    ) * gamma + beta


@operation("ReduceGroupNorm")
def _group_norm(op: Any, x: Any, gamma: Any, beta: Any, epsilon: Any, groups: Any) -> Any:
    parts = x.reshape(x.shape[0], int(groups), -1)
    parts = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(
        parts.var(-1, keepdims=True) + epsilon
    )
    axes = (1, -1, *[1] * (x.ndim - 2))
    return parts.reshape(x.shape) * gamma.reshape(axes) + beta.reshape(axes)


@operation("Conv", "StaticConv")
def _conv(
    op: Any, x: Any, kernel: Any, strides: Any, dilations: Any, paddings: Any, groups: Any = 1
) -> Any:
    """A convolution of NHWC with RSCF, or FCRS if the filter's type says so, with two or three spatial axes."""
    groups, spatial = int(np.reshape(groups, -1)[0]), x.ndim - 2
    written = str(op.operands[1].value.type)
    if "FCRS" in written or "FCQRS" in written:
        kernel = np.moveaxis(kernel, (0, 1), (-1, -2))
    if "CFRS" in written:
        raise NotImplementedError("filters of CFRS")
    pads = np.reshape(paddings, (-1, 2))[-spatial:]
    x = np.pad(x, [(0, 0), *map(tuple, pads), (0, 0)])
    window = [(k - 1) * int(d) + 1 for k, d in zip(kernel.shape[:spatial], dilations, strict=True)]
    out = np.lib.stride_tricks.sliding_window_view(x, window, axis=tuple(range(1, spatial + 1)))
    out = out[(slice(None), *(slice(None, None, int(s)) for s in strides), slice(None),
               *(slice(None, None, int(d)) for d in dilations))]  # fmt: skip
    letters = "rst"[:spatial]
    parts = []
    for c, k in zip(np.split(out, groups, spatial + 1), np.split(kernel, groups, -1), strict=True):
        parts.append(
            np.einsum(f"n{'xyz'[:spatial]}c{letters},{letters}cf->n{'xyz'[:spatial]}f", c, k)
        )
    return np.concatenate(parts, -1)


@operation("AvgPool", "AvgPoolCeilModeTrue")
def _avg_pool(
    op: Any, x: Any, shape: Any, strides: Any, dilations: Any, paddings: Any, *rest: Any
) -> Any:
    if np.any(paddings):
        raise NotImplementedError("padding in pooling")
    out = np.lib.stride_tricks.sliding_window_view(x, tuple(map(int, shape)), axis=(1, 2))
    return out[:, :: int(strides[0]), :: int(strides[1])].mean((-1, -2))


def number(attribute: Any) -> float:
    """The number in an attribute such as `#M.dense_array<1.0> : tensor<f32>`."""
    text = str(attribute)
    return float(text[text.index("<") + 1 : text.index(">")])


def custom(*names: str) -> Callable[[Any], Any]:
    """A decorator of the function ``(params, *arrays)`` that computes MAX's kernels with these names."""

    def keep(function: Any) -> Any:
        CUSTOM.update(dict.fromkeys(names, function))
        return function

    return keep


def _mask(shape: tuple[int, int], kind: str, window: int) -> Any:
    """Which keys a query sees, for a mask that is given by its name in MAX."""
    i, j = np.ogrid[: shape[0], : shape[1]]
    i = i + shape[1] - shape[0]
    seen = np.ones(shape, bool) if kind == "null" else j <= i
    return seen & (i - j < window) if window > 0 else seen


def attention(q: Any, k: Any, v: Any, scale: Any, kind: str = "null", window: int = -1) -> Any:
    """Attention of [B, T, H, D] with grouped keys."""
    k, v = (np.repeat(one, q.shape[2] // one.shape[2], 2) for one in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * float(scale)
    scores = np.where(_mask(scores.shape[-2:], kind, window), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v)


@custom("mo.mha.no_cache", "mo.mha.padded.no_cache")
def _mha(params: dict[str, Any], q: Any, k: Any, v: Any, scale: Any, *rest: Any) -> Any:
    kind = str(params.get("mask_str", "null"))
    return attention(q, k, v, scale, kind, int(params.get("local_window_size", -1)))


@custom("mo.mha.ragged.no_cache")
def _mha_ragged(
    params: dict[str, Any], q: Any, k: Any, v: Any, offsets: Any, longest: Any, scale: Any
) -> Any:
    del longest
    parts = [_mha(params, q[None, a:b], k[None, a:b], v[None, a:b], scale)[0]
             for a, b in zip(offsets, offsets[1:], strict=False)]  # fmt: skip
    return np.concatenate(parts)


@custom("repeat_interleave")
def _repeat_interleave(params: dict[str, Any], x: Any, counts: Any, axis: Any) -> Any:
    return np.repeat(
        x, counts if np.size(counts) > 1 else int(np.reshape(counts, -1)[0]), int(axis)
    )


@custom("mo.composite.masked_flash_attention_gpu", "masked_flash_attention_gpu")
def _masked(
    params: dict[str, Any], q: Any, k: Any, v: Any, mask: Any, scale: Any, *rest: Any
) -> Any:
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * float(scale) + mask
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v)


@operation("ResizeNearest")
def _resize_nearest(op: Any, x: Any, size: Any) -> Any:
    for axis, n in enumerate(map(int, size)):
        if n % x.shape[axis]:
            raise NotImplementedError("nearest with a factor that is not whole")
        x = np.repeat(x, n // x.shape[axis], axis)
    return x


@operation("CompositeMaskedFlashAttentionGpu")
def _composite_masked(op: Any, q: Any, k: Any, v: Any, mask: Any, scale: Any, *rest: Any) -> Any:
    return _masked({}, q, k, v, mask, scale)


def _turned(x: Any, c: Any, interleaved: bool) -> Any:
    """x of shape [T, H, D], rotated by the cosines and sines c of shape [T, D/2, 2]."""
    c, out, n = c[:, None], np.empty_like(x), x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :n], x[..., n:])
    first, second = a * c[..., 0] - b * c[..., 1], a * c[..., 1] + b * c[..., 0]
    if interleaved:
        out[..., 0::2], out[..., 1::2] = first, second
    else:
        out[..., :n], out[..., n:] = first, second
    return out


def _is_interleaved(params: dict[str, Any]) -> bool:
    return bool(params.get("interleaved"))  # true is -1, a signed integer of one bit


@custom("mo.rope.ragged.with_position_id")
def _rope_positions(
    params: dict[str, Any], x: Any, offsets: Any, start: Any, freqs: Any, at: Any
) -> Any:
    if len(at) > 1:
        raise NotImplementedError("positions of several axes")
    return _turned(x, freqs[at[0]].reshape(len(x), -1, 2), _is_interleaved(params))


@custom("mo.rope.ragged")
def _rope_ragged(params: dict[str, Any], x: Any, offsets: Any, start: Any, freqs: Any) -> Any:
    at = np.concatenate(
        [np.arange(b - a) + s for a, b, s in zip(offsets, offsets[1:], start, strict=False)]
    )
    return _turned(x, freqs[at].reshape(len(at), -1, 2), _is_interleaved(params))


@custom("mo.moe.router.group.limited", "mo.moe.single.group.router")
def _group_limited(params: dict[str, Any], scores: Any, bias: Any, factor: Any) -> Any:
    """Chooses the groups whose two best experts have the largest sums, then their best experts by score plus bias."""
    k, groups = int(params["n_experts_per_tok"]), int(params.get("n_groups", 1))
    with_bias = scores + bias
    parts = with_bias.reshape(len(scores), groups, -1)
    if groups > 1:
        order = np.argsort(-np.sort(parts, -1)[..., -2:].sum(-1), -1, kind="stable")
        closed = order[:, int(params["topk_group"]) :]
        np.put_along_axis(parts, closed[..., None], -np.inf, 1)
    chosen = np.argsort(-parts.reshape(scores.shape), -1, kind="stable")[:, :k]
    shares = np.take_along_axis(scores, chosen, -1)
    if groups == 1 or params["norm_weights"]:
        shares = shares / shares.sum(-1, keepdims=True)
    return chosen, shares * factor


@custom("mo.hyper_connection.gates")
def _gates(params: dict[str, Any], mix: Any, bias: Any, scale: Any, epsilon: Any) -> Any:
    """Xie et al., arXiv:2512.24880, equation 8: two sigmoids, and a softmax made doubly stochastic."""
    n, steps = int(params["hc_mult"]), int(params["hc_sinkhorn_iters"])
    bands = np.split(mix, [n, 2 * n], -1), np.split(bias, [n, 2 * n])
    pre, post, comb = (x * s + b for x, b, s in zip(*bands, scale, strict=True))
    comb = comb.reshape(-1, n, n)
    comb = np.exp(comb - comb.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + epsilon
    for step in range(steps):
        for axis in (-1, -2)[step == 0 :]:
            comb = comb / (comb.sum(axis, keepdims=True) + epsilon)
    return _sigmoid(pre) + epsilon, 2 * _sigmoid(post), comb.reshape(len(mix), -1)


def _cubic(distance: Any, a: float = -0.75) -> Any:
    """Keys's cubic convolution kernel."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    return np.where(d <= 1, near, np.where(d < 2, a * (((d - 5) * d + 8) * d - 4), 0))


def _resized(x: Any, size: int, axis: int) -> Any:
    """An axis resized by cubic convolution; the values at its ends are repeated beyond them."""
    old = x.shape[axis]
    centres = (np.arange(size) + 0.5) * old / size - 0.5
    near = np.floor(centres)[:, None] + np.arange(-1, 3)
    weights = _cubic(centres[:, None] - near)
    matrix = np.zeros((size, old))
    np.add.at(matrix, (np.arange(size)[:, None], np.clip(near, 0, old - 1).astype(int)), weights)
    return np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)


@custom("learnable_2d_interp_pos_emb")
def _interpolated(params: dict[str, Any], x: Any, weight: Any, grids: Any, frames: Any) -> Any:
    parts = []
    for t, h, w in grids.astype(int):
        place = weight if weight.shape[:2] == (h, w) else _resized(_resized(weight, h, 0), w, 1)
        place = np.repeat(place.reshape(1, h * w, -1), t, 0)
        parts.append((place + frames[:t, None] if t > 1 else place).reshape(t * h * w, -1))
    return x + np.concatenate(parts)
