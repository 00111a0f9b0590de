"""maxjax.calibrate against a model run layer by layer, and the file of its matrix against llama.cpp's format."""

import gguf
import jax
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.checkpoint import convert
from maxjax.engine.quantize.importance import Importance, load_importance
from maxjax.errors import CheckpointFormatError, UserInputError
from maxjax.graph import DeviceRef
from maxjax.models import GLM4, GPT2, Gemma4, Gemma4Config, Mixtral, MixtralConfig, Phi3
from maxjax.storage.blocks import decode, encode
from tests.fill import filled

TEXTS = [
    f"What is {a} + {b}? {a} + {b} = {a + b}. " for a in range(3, 40, 7) for b in range(5, 60, 9)
]


@pytest.fixture(scope="module")
def tiny():
    return maxjax.load("tiny")


@pytest.fixture(scope="module")
def matrix(tiny):
    return maxjax.calibrate(*tiny, TEXTS[::2], length=64)


def seen_by(model, ids, take):
    """What ``take(layer, arguments)`` gives of each call of a layer, with its weight's name; seen by a hook.

    With hooks the layers run one by one, in one program here.
    """

    @jax.jit
    def run(model, ids):
        seen = {}
        names = {id(weight): name for name, weight in model.raw_state_dict().items()}

        def hook(layer, args, kwargs, outputs):
            if (found := take(layer, args)) is not None:
                seen[names.get(id(getattr(layer, "weight", None)), len(seen))] = found

        with maxjax.layer_hook(hook):
            model(ids)
        return seen

    return jax.tree.map(np.asarray, run(model, ids))


def inputs(model, ids) -> dict[str, np.ndarray]:
    """The inputs of each linear layer."""
    found = seen_by(
        model, ids, lambda layer, args: args[0] if isinstance(layer, nn.Linear) else None
    )
    return {name: x.astype(np.float64).reshape(-1, x.shape[-1]) for name, x in found.items()}


def test_it_is_the_mean_of_squared_inputs():
    model, tokenizer = maxjax.load("tiny", dtype="float32")
    ids = tokenizer.encode(TEXTS[0])
    found = maxjax.calibrate(model, None, [ids])
    seen = inputs(model, np.array([ids]))
    assert set(found) == set(seen) and len(found) == 15
    for name, x in seen.items():
        np.testing.assert_allclose(found[name], (x**2).mean(0), rtol=1e-3, atol=1e-6, err_msg=name)
    assert (found.chunks, found.chunk_size) == (1, len(ids))


def test_chunks_are_added_up(tiny):
    model, tokenizer = tiny
    ids = [token for text in TEXTS[:8] for token in tokenizer.encode(text)]
    whole = maxjax.calibrate(model, tokenizer, TEXTS[:8], length=16)
    parts = [maxjax.calibrate(model, None, [ids[i : i + 16]]) for i in range(0, len(ids) - 15, 16)]
    assert whole.chunks == len(parts) > 2
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_allclose(whole[name], np.mean([p[name] for p in parts], axis=0), rtol=1e-4)


def test_errors_on_texts_that_it_has_not_seen_are_smaller(tiny, matrix):
    """Of the outputs of all layers, on other sums than the matrix was made with."""
    model, tokenizer = tiny
    ids = [token for text in TEXTS[1::2] for token in tokenizer.encode(text)][:256]
    seen = inputs(model, np.array([ids]))
    # sum((x @ w.T) ** 2) is sum((w @ x.T @ x) * w).
    squares = {name: x.T @ x for name, x in seen.items()}
    size = lambda name, w: ((w @ squares[name]) * w).sum()
    weights = model.raw_state_dict()
    exact = {name: np.asarray(weights[name].value).astype(np.float64) for name in seen}
    whole = {name: size(name, w) for name, w in exact.items()}
    for kind in ("q4_k", "q4_0"):
        lost = []
        for importance in (None, matrix):
            quantised, _ = maxjax.quantize(model, kind, importance=importance)
            total = {}
            for name, w in exact.items():
                blocks = np.asarray(quantised.raw_state_dict()[name].value)
                total[name] = size(name, decode(kind.upper(), blocks) - w) / whole[name]
            lost.append(total)
        assert sum(lost[1].values()) < 0.9 * sum(lost[0].values())
        assert sum(lost[1][name] < lost[0][name] for name in seen) >= len(seen) - 2


def test_experts_count_the_tokens_that_chose_them():
    config = MixtralConfig(
        100,
        32,
        64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = Mixtral(config)
    model.model.layers = model.model.layers.stack()
    filled(model)
    ids = list(range(40))
    found = maxjax.calibrate(model, None, [ids])
    mlp = model.model.layers[0].block_sparse_moe
    take = lambda layer, args: args[0] if type(layer) is type(mlp) else None
    first, *_ = seen_by(model, np.array([ids]), take).values()
    x = first.astype(np.float64).reshape(40, -1)
    scores = x @ np.asarray(mlp.gate.weight.value, np.float64).T
    chosen = np.argsort(-scores, axis=1)[:, :2]
    for expert in range(4):
        mine = x[(chosen == expert).any(1)]
        name = f"model.layers.0.block_sparse_moe.experts.{expert}"
        assert found.counts[f"{name}.w1.weight"] == len(mine)
        np.testing.assert_allclose(found[f"{name}.w3.weight"], (mine**2).mean(0), rtol=1e-3)
        gate, up, _ = (
            np.asarray(one.weight.value, np.float64) for one in mlp.experts[expert].linears
        )
        g = mine @ gate.T
        inner = g / (1 + np.exp(-g)) * (mine @ up.T)
        np.testing.assert_allclose(found[f"{name}.w2.weight"], (inner**2).mean(0), rtol=1e-3)
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    assert gate not in found or found.counts[gate] == 40


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


GPT2_KEYS = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
}  # fmt: skip


@pytest.mark.parametrize("family", [Phi3, GLM4, GPT2], ids=lambda one: one.__name__)
def test_fused_and_transposed_layers_are_counted_too(family):
    sizes = (
        {GPT2_KEYS.get(key, key): size for key, size in SMALL.items()} if family is GPT2 else SMALL
    )
    model = filled(family(family.family.config(**sizes)))
    found = maxjax.calibrate(model, None, [list(range(20))])
    tables = ("embed_tokens", "lm_head", "wte", "wpe", "norm", "ln_")
    wanted = {
        name for name, weight in model.raw_state_dict().items()
        if weight.rank == 2 and not any(part in name for part in tables)
    }  # fmt: skip
    assert wanted and wanted <= set(found)


GEMMA = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8, "sliding_window": 6, "enable_moe_block": True,
    "layer_types": ["sliding_attention", "full_attention"], "num_experts": 4, "top_k_experts": 2,
    "moe_intermediate_size": 16, "hidden_size_per_layer_input": 0,
}  # fmt: skip


def test_experts_of_gemma_4_are_counted_by_its_router():
    config = Gemma4Config.from_dict(GEMMA)
    model = filled(Gemma4(config))
    layer = model.model.layers[0].moe
    take = lambda one, args: args[1] if type(one) is type(layer) else None
    scored, *_ = seen_by(model, np.arange(20)[None], take).values()
    scores = jax.jit(lambda layer, x: layer.router(x))(layer, scored.reshape(20, -1))
    chosen = np.argsort(-np.asarray(scores), axis=1)[:, :2]
    found = maxjax.calibrate(model, None, [list(range(20))])
    counts = [
        found.counts[name] for name in found if "layers.0.moe.experts" in name and "down" in name
    ]
    assert counts == [(chosen == i).any(1).sum() for i in range(len(counts))]
    # Names that are the model's already stay.
    model.load_state_dict(model.state_dict())


def test_the_old_format_of_llama_imatrix_is_named(tmp_path):
    (tmp_path / "imatrix.dat").write_bytes(b"\x91\x00\x00\x00\x13\x00\x00\x00blk.0.attn_q.weight")
    with pytest.raises(UserInputError, match="an older .dat file"):
        load_importance(tmp_path / "imatrix.dat")


def test_the_file_is_llama_cpps(matrix, tmp_path):
    matrix.save(tmp_path / "imatrix.gguf")
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.chunk_count"].contents() == matrix.chunks
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    sums = tensors["blk.1.ffn_down.weight.in_sum2"]
    assert sums.shape == (1, 512) and sums.dtype == np.float32
    assert tensors["blk.1.ffn_down.weight.counts"].item() == matrix.chunks * 64
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_allclose(sums[0] / (matrix.chunks * 64), matrix[name], rtol=1e-5)
    again = load_importance(tmp_path / "imatrix.gguf")
    assert (again.chunks, again.chunk_size, len(again)) == (matrix.chunks, 64, len(matrix))
    np.testing.assert_allclose(again["blk.1.ffn_down.weight"], matrix[name], rtol=1e-5)


def test_experts_in_a_file(tmp_path):
    names = {f"e.{i}.weight": ("blk.0.ffn_up_exps.weight", i) for i in range(3)}
    sums = {name: np.full(4, 6.0 * (i + 1)) for i, name in enumerate(names)}
    counts = {"e.0.weight": np.array(2.0), "e.1.weight": np.array(0.0), "e.2.weight": np.array(3.0)}
    Importance(sums, counts, names, 1, 5).save(tmp_path / "m.gguf")
    found = load_importance(tmp_path / "m.gguf")
    assert found["blk.0.ffn_up_exps.weight"].tolist() == [[3] * 4, [1] * 4, [6] * 4]
    assert {n: a.tolist() for n, a in found.of_checkpoint(names).items()} == {
        "e.0.weight": [3] * 4, "e.1.weight": [1] * 4, "e.2.weight": [6] * 4,
    }  # fmt: skip
    with pytest.raises(UserInputError, match="3.*blk.0.ffn_up_exps.weight.*e.7"):
        found.of_checkpoint({"e.7.weight": ("blk.0.ffn_up_exps.weight", 7)})


def test_conversion_and_quantisation_use_it(tiny, matrix, tmp_path):
    model, tokenizer = tiny
    maxjax.save_pretrained(model, tmp_path / "hf", tokenizer=tokenizer)
    matrix.save(tmp_path / "imatrix.gguf")
    for given in (matrix, tmp_path / "imatrix.gguf"):
        convert(
            tmp_path / "hf",
            tmp_path / "m.gguf",
            quantize="q4_k_m",
            importance=given,
            overwrite=True,
        )
        loaded, _ = maxjax.load(tmp_path / "m.gguf")
        quantised, _ = maxjax.quantize(model, "q4_k_m", importance=matrix)
        theirs = loaded.raw_state_dict()
        for name, weight in quantised.raw_state_dict().items():
            if weight.quantization_encoding is not None:
                ours, other = np.asarray(weight.value), np.asarray(theirs[name].value)
                np.testing.assert_array_equal(ours, other, err_msg=name)
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.asarray(model.raw_state_dict()[name].value).astype(np.float32)
    blocks = encode("Q4_K", values, importance=matrix[name])
    kinds = {w.quantization_encoding.name for w in theirs.values() if w.quantization_encoding}
    assert kinds == {"q4_k", "q6_k"}
    assert (encode("Q4_K", values) != blocks).mean() > 0.01


def test_experts_of_a_gguf_file_have_their_own(tmp_path):
    from maxjax.checkpoint.conversion.to_gguf import _quantised
    from maxjax.graph.weights import WeightData

    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 5, 256)).astype(np.float32)
    weights = rng.random((3, 256)).astype(np.float32)
    one = _quantised("x", WeightData.from_numpy(values, "x"), None, "Q4_K", {"x": weights})
    found = np.frombuffer(b"".join(map(bytes, one.pieces())), np.uint8)
    np.testing.assert_array_equal(found, encode("Q4_K", values, importance=weights).reshape(-1))
    with pytest.raises(
        UserInputError, match="importance of tensor 'x' is \\[1, 32\\], and 3 x 256"
    ):
        _quantised("x", WeightData.from_numpy(values, "x"), None, "Q4_K", {"x": np.ones((1, 32))})


def test_negative_counts_are_refused(tmp_path):
    name = "blk.0.ffn_up.weight"
    Importance({name: np.ones(4)}, {name: np.array(-1.0)}, {}, 1, 5).save(tmp_path / "m.gguf")
    with pytest.raises(CheckpointFormatError, match="negative or not finite"):
        load_importance(tmp_path / "m.gguf")


def test_chunks_are_no_longer_than_the_context(tiny):
    model, _ = tiny
    longest = model.max_length
    assert longest < 512
    found = maxjax.calibrate(model, None, [[1] * (2 * longest)])
    assert (found.chunks, found.chunk_size) == (2, longest)


def test_what_cannot_be_calibrated(tiny, tmp_path):
    model, tokenizer = tiny
    with pytest.raises(UserInputError, match="there are no tokens"):
        maxjax.calibrate(model, tokenizer, [])
    for wrong in (-1, model.config.vocab_size):
        with pytest.raises(UserInputError, match=f"token id {wrong}, which is outside the model's"):
            maxjax.calibrate(model, None, [[1, wrong]])
    with pytest.raises(TypeError, match="float"):
        maxjax.calibrate(model, None, [[1, 1.5]])
    for texts in (None, [1, 2], 5):
        with pytest.raises(TypeError, match="texts are a text, or a list of texts or of lists"):
            maxjax.calibrate(model, tokenizer, texts)
    for length in (0, "5", 2.5):
        with pytest.raises(
            UserInputError, match="length is .*: it must be an integer of at least 1"
        ):
            maxjax.calibrate(model, tokenizer, "text", length=length)
    with pytest.raises(UserInputError, match="texts need a tokenizer"):
        maxjax.calibrate(model, None, "text")
    with pytest.raises(UserInputError, match="only language models .* Linear"):
        maxjax.calibrate(nn.Linear(2, 2, "float32", DeviceRef.CPU()), None, [[1]])
    maxjax.save_pretrained(model, tmp_path / "hf", tokenizer=tokenizer)
    convert(tmp_path / "hf", tmp_path / "m.gguf")
    with pytest.raises(CheckpointFormatError, match="no importance matrix"):
        load_importance(tmp_path / "m.gguf")
    with pytest.raises(UserInputError, match="an importance matrix is for quantising"):
        convert(tmp_path / "hf", tmp_path / "n.gguf", importance=tmp_path / "m.gguf")
    other = Importance({"blk.0.x.weight": np.ones(4)}, {"blk.0.x.weight": np.array(1.0)})
    with pytest.raises(UserInputError, match="has none of the tensors of this model"):
        convert(tmp_path / "hf", tmp_path / "n.gguf", quantize="q4_k", importance=other)
