"""flax nnx modules filled from checkpoints, with torch, transformers and NumPy as oracles."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxjax.errors import CheckpointMismatchError, CheckpointMissingError, UserInputError
from maxjax.graph.weights import load_weights
from maxjax.graph.weights.cursor import CheckpointSource
from maxjax.interop.nnx.interchange import AS_IS, OIHW_TO_HWIO, T, load, tensors
from maxjax.interop.nnx.torch_layers import torch_rules
from tests.oracles.models import OracleModel
from tests.oracles.recorded import recorded, torch

nnx = pytest.importorskip("flax.nnx")
orbax_checkpoint = pytest.importorskip("orbax.checkpoint")
safetensors_numpy = pytest.importorskip("safetensors.numpy")


@pytest.fixture(autouse=True)
def strict_jax():
    """flax itself mixes dtypes and ranks."""


def rngs():
    return nnx.Rngs(0)


def saved(path, values):
    safetensors_numpy.save_file({k: np.ascontiguousarray(v) for k, v in values.items()}, path)
    return path


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class MLP(nnx.Module):
    """Lists, dicts and plain containers of layers."""

    def __init__(self, rngs, width=4, depth=2):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.heads = nnx.Dict(a=nnx.Linear(width, 3, rngs=rngs), b=nnx.LayerNorm(width, rngs=rngs))
        self.plain = nnx.data({"x": [nnx.Linear(width, 2, use_bias=False, rngs=rngs)]})
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def mlp_values(width=4, depth=2, dtype=np.float32):
    values = {}
    for i in range(depth):
        values[f"layers.{i}.weight"] = numbers(width, width, seed=i)
        values[f"layers.{i}.bias"] = numbers(width, seed=i + 10)
    values["heads.a.weight"], values["heads.a.bias"] = numbers(3, width, seed=20), numbers(3)
    values["heads.b.weight"], values["heads.b.bias"] = numbers(width, seed=30), numbers(width)
    values["plain.x.0.weight"] = numbers(2, width, seed=40)
    return {name: value.astype(dtype) for name, value in values.items()}


def snapshot(module):
    flat = nnx.to_flat_state(nnx.state(module, nnx.Variable))
    return {path: variable.get_raw_value() for path, variable in flat}


# --- one layer of each kind, against torch ------------------------------------------------------

LAYERS = {
    "linear": (lambda: torch.nn.Linear(3, 5), lambda: nnx.Linear(3, 5, rngs=rngs()), (2, 3)),
    "no bias": (
        lambda: torch.nn.Linear(3, 3, bias=False),
        lambda: nnx.Linear(3, 3, use_bias=False, rngs=rngs()),
        (2, 3),
    ),
    "norm": (
        lambda: torch.nn.LayerNorm(6, eps=1e-6),
        lambda: nnx.LayerNorm(6, rngs=rngs()),
        (2, 6),
    ),
    "rms": (lambda: torch.nn.RMSNorm(6, eps=1e-6), lambda: nnx.RMSNorm(6, rngs=rngs()), (2, 6)),
    "conv1": (lambda: torch.nn.Conv1d(3, 4, 3), lambda: conv(1, 3, 4, 3), (2, 3, 9)),
    "conv2": (lambda: torch.nn.Conv2d(3, 4, (3, 2)), lambda: conv(2, 3, 4, (3, 2)), (2, 3, 9, 7)),
    "conv3": (lambda: torch.nn.Conv3d(2, 3, 2), lambda: conv(3, 2, 3, (2, 2, 2)), (1, 2, 4, 5, 3)),
    "grouped": (
        lambda: torch.nn.Conv2d(4, 6, 3, groups=2),
        lambda: conv(2, 4, 6, (3, 3), feature_group_count=2),
        (2, 4, 5, 5),
    ),
    "transposed": (
        lambda: torch.nn.ConvTranspose2d(3, 4, (3, 2)),
        lambda: conv(2, 3, 4, (3, 2), nnx.ConvTranspose),
        (2, 3, 5, 6),
    ),
    "transposed, turned": (
        lambda: torch.nn.ConvTranspose2d(3, 4, 3),
        lambda: conv(2, 3, 4, (3, 3), nnx.ConvTranspose, transpose_kernel=True),
        (2, 3, 5, 6),
    ),
    "group norm": (
        lambda: torch.nn.GroupNorm(2, 6, eps=1e-6),
        lambda: nnx.GroupNorm(6, num_groups=2, rngs=rngs()),
        (2, 6, 5),
    ),
    "batch norm": (
        lambda: torch.nn.BatchNorm1d(6).eval(),
        lambda: nnx.BatchNorm(6, use_running_average=True, rngs=rngs()),
        (2, 6, 5),
    ),
    "prelu": (lambda: torch.nn.PReLU(init=0.3), lambda: nnx.PReLU(), (2, 3)),
    "embedding": (
        lambda: torch.nn.Embedding(7, 5),
        lambda: nnx.Embed(7, 5, rngs=rngs()),
        "ids",
    ),
    "general": (
        lambda: torch.nn.Linear(6, 10),
        lambda: nnx.LinearGeneral((2, 3), (5, 2), axis=(-2, -1), rngs=rngs()),
        (4, 6),
    ),
}


def conv(rank, ins, outs, size, kind=nnx.Conv, **options):
    del rank
    options.setdefault("padding", "VALID")
    return kind(ins, outs, size if isinstance(size, tuple) else (size,), rngs=rngs(), **options)


def run(module, x):
    """Channels last for flax; torch's first again."""
    if isinstance(module, nnx.LinearGeneral):
        return np.asarray(module(x.reshape(4, 2, 3))).reshape(4, 10)
    channels = (nnx.Conv, nnx.ConvTranspose, nnx.GroupNorm, nnx.BatchNorm)
    if not isinstance(module, channels):
        return np.asarray(module(x))
    return np.moveaxis(np.asarray(module(np.moveaxis(x, 1, -1))), -1, 1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_torch(name, tmp_path):
    make, ours, shape = LAYERS[name]
    x = np.array([[1, 6, 0]], np.int32) if shape == "ids" else numbers(*shape)

    def answer():
        torch.manual_seed(0)
        oracle = make().eval()
        with torch.no_grad():
            for one in [*oracle.parameters(), *oracle.buffers()]:
                if one.dtype.is_floating_point:
                    one.copy_(torch.rand_like(one) + 0.1)
            values = {k: v.numpy().copy() for k, v in oracle.state_dict().items()}
            return [values, oracle(torch.tensor(x)).numpy()]

    module = ours()
    values, expected = recorded(answer)
    path = saved(tmp_path / "m.safetensors", values)
    load(module, path, rename=torch_rules(module))
    np.testing.assert_allclose(run(module, x), expected, rtol=2e-5, atol=2e-5)
    back = tensors(module, rename=torch_rules(module))
    values.pop("num_batches_tracked", None)
    assert set(back) == set(values)
    for key, value in values.items():
        np.testing.assert_array_equal(back[key], value)


@pytest.mark.parametrize("fused", [False, True])
def test_attention(tmp_path, fused):
    x, y = numbers(2, 5, 12), numbers(2, 7, 12, seed=1)

    def answer():
        torch.manual_seed(0)
        oracle = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
        with torch.no_grad():
            for one in oracle.parameters():
                one.copy_(torch.randn_like(one))
            values = {k: v.numpy().copy() for k, v in oracle.state_dict().items()}
            return [values, oracle(*map(torch.tensor, (x, y, y)))[0].numpy()]

    values, expected = recorded(answer)
    if not fused:
        for kind in ("weight", "bias"):
            three = np.split(values.pop(f"in_proj_{kind}"), 3)
            values |= {
                f"{n}.{kind}": a for n, a in zip(["query", "key", "value"], three, strict=True)
            }
            values[f"out.{kind}"] = values.pop(f"out_proj.{kind}")
    module = nnx.eval_shape(lambda: nnx.MultiHeadAttention(3, 12, decode=False, rngs=rngs()))
    rules = torch_rules(module, fused=fused)
    load(module, saved(tmp_path / "m.safetensors", values), rename=rules)
    np.testing.assert_allclose(module(x, y), expected, rtol=1e-4, atol=1e-4)
    back = tensors(module, rename=rules)
    assert set(back) == set(values)
    for key, value in values.items():
        np.testing.assert_array_equal(back[key], value)


# --- a model ------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, width, heads, wide, rngs):
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.up = nnx.Linear(width, wide, rngs=rngs)
        self.down = nnx.Linear(wide, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)

    def __call__(self, x, mask):
        x = self.norm1(x + self.attn(x, mask=mask))
        return self.norm2(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class Bert(nnx.Module):
    def __init__(self, rngs, depth=2, width=32, vocab=99):
        self.words = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Embed(40, width, rngs=rngs)
        self.types = nnx.Embed(2, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.blocks = nnx.List([Block(width, 4, 37, rngs) for _ in range(depth)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, width, rngs=rngs)
        self.head_norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.logits = nnx.Param(jnp.zeros(vocab))

    def __call__(self, ids, mask):
        x = self.words(ids) + self.positions(jnp.arange(ids.shape[1])) + self.types(ids * 0)
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :].astype(bool))
        x = self.head_norm(nnx.gelu(self.head(x), approximate=False))
        return self.words.attend(x) + self.logits


NAMES = {
    "bert.embeddings.word_embeddings": "words",
    "bert.embeddings.position_embeddings": "positions",
    "bert.embeddings.token_type_embeddings": "types",
    "bert.embeddings.LayerNorm": "norm",
    "bert.encoder.layer.*.attention.self": "blocks.*.attn",
    "bert.encoder.layer.*.attention.output.dense": "blocks.*.attn.out",
    "bert.encoder.layer.*.attention.output.LayerNorm": "blocks.*.norm1",
    "bert.encoder.layer.*.intermediate.dense": "blocks.*.up",
    "bert.encoder.layer.*.output.dense": "blocks.*.down",
    "bert.encoder.layer.*.output.LayerNorm": "blocks.*.norm2",
    "cls.predictions.transform.dense": "head",
    "cls.predictions.transform.LayerNorm": "head_norm",
}
REST = {
    "cls.predictions.bias": "logits",
    "cls.predictions.decoder.*": None,
    "**.position_ids": None,
    "bert.pooler.**": None,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """(directory, transformers' model)"""
    directory = tmp_path_factory.mktemp("bert")
    settings = {
        "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 37, "max_position_embeddings": 40, "initializer_range": 0.3,
    }  # fmt: skip
    oracle = OracleModel("BertForMaskedLM", "BertConfig", settings, draw=drawn)
    oracle.save(directory)
    return directory, oracle


def drawn(rng, name, shape):
    """Values of a tensor; ones and zeros would hide a mistake."""
    return rng.random(shape) + 0.2 if len(shape) == 1 else 0.3 * rng.standard_normal(shape)


def test_a_bert_gives_torch_s_logits(bert):
    directory, oracle = bert
    model = nnx.eval_shape(lambda: Bert(rngs()))
    load(model, directory, rename=REST | torch_rules(model, NAMES))
    ids = np.random.default_rng(0).integers(0, 99, (3, 11)).astype(np.int32)
    mask = (np.arange(11)[None] < np.array([11, 4, 7])[:, None]).astype(np.int32)

    def answer(model):
        with torch.no_grad():
            logits = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
        return logits.numpy()[..., ::3].copy()

    found = np.asarray(model(ids, mask))[..., ::3]
    np.testing.assert_allclose(found, oracle.ask("logits", answer), rtol=1e-4, atol=2e-4)


def test_a_bert_goes_back_under_its_names(bert):
    directory, oracle = bert
    model = Bert(rngs())
    rules = REST | torch_rules(model, NAMES)
    load(model, directory, rename=rules)
    back = tensors(model, rename=rules)
    with load_weights(directory) as weights:
        there = {name: np.asarray(place.data().data) for name, place in weights.items()}
    assert set(back) == set(there) and len(there) > 30
    for name, value in there.items():
        np.testing.assert_array_equal(back[name], value)


def test_a_cursor_below_the_root(bert):
    directory, oracle = bert
    model = nnx.Embed(99, 32, rngs=rngs())
    with load_weights(directory) as weights:
        load(model, weights.bert.embeddings.word_embeddings, rename={"weight": "embedding"})
        assert weights.bert.embeddings.LayerNorm.weight.exists()  # still open
    expected = oracle.tensors["bert.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(model.embedding[...], expected)


# --- tables, dtypes, formats ---------------------------------------------------------------------

PATTERNS = {
    "layers.*.weight": ("layers.*.kernel", T),
    "heads.a.weight": ("heads.a.kernel", T),
    "heads.b.weight": "heads.b.scale",
    "plain.x.*.weight": ("plain.x.*.kernel", T),
}


def test_three_tables_that_say_the_same(tmp_path):
    values = mlp_values()
    path = saved(tmp_path / "m.safetensors", values)
    by_rules = MLP(rngs())
    load(by_rules, path, rename=torch_rules(by_rules))
    names = {k: v[0] if isinstance(v, tuple) else v for k, v in PATTERNS.items()}
    tables = [
        ({"rename": PATTERNS}),
        ({"rename": names, "transform": {"**.kernel": T}}),
        ({"rename": lambda name: torch_rules(MLP(rngs())).get(name, name)}),
    ]
    for options in tables:
        model = MLP(rngs())
        assert load(model, path, **options) == ((), ())
        for key, value in snapshot(by_rules).items():
            if "rngs" not in key:
                np.testing.assert_array_equal(snapshot(model)[key], value)
    np.testing.assert_array_equal(by_rules.layers[1].kernel[...], values["layers.1.weight"].T)
    np.testing.assert_array_equal(by_rules.heads["b"].scale[...], values["heads.b.weight"])


def test_a_module_s_own_names_need_no_table(tmp_path):
    model, other = MLP(rngs()), MLP(nnx.Rngs(5))
    load(other, saved(tmp_path / "m.safetensors", tensors(model)))
    for key, value in snapshot(model).items():
        if "rngs" not in key:
            np.testing.assert_array_equal(snapshot(other)[key], value)


def test_a_state_that_orbax_wrote(tmp_path):
    model, other = MLP(rngs()), MLP(nnx.Rngs(5))
    with orbax_checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            tmp_path / "state", nnx.state(model)
        )  # arrays at *.value, and those of Rngs
    stream = other.drop.rngs.key[...]
    load(other, tmp_path / "state")
    assert other.drop.rngs.key[...] is stream
    for key, value in snapshot(model).items():
        if "rngs" not in key:
            np.testing.assert_array_equal(snapshot(other)[key], value)


def test_tensors_are_the_module_s_own_arrays():
    model = nnx.Linear(2, 3, rngs=rngs())
    assert tensors(model)["kernel"] is model.kernel.get_raw_value()


class Foreign:
    """An array of a library that is not known: it has a shape, a dtype and DLPack."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_by_name_are_copied():
    given = {"kernel": numbers(2, 3), "bias": numbers(3)}
    model = nnx.Linear(2, 3, rngs=rngs())
    expected = given["kernel"].copy()
    load(model, given)
    given["kernel"][:] = 0
    np.testing.assert_array_equal(model.kernel[...], expected)
    same = {"kernel": model.kernel[...], "bias": Foreign(np.ones(3, np.float32))}
    other = nnx.Linear(2, 3, rngs=rngs())
    load(other, same)
    assert other.kernel[...].unsafe_buffer_pointer() == model.kernel[...].unsafe_buffer_pointer()
    np.testing.assert_array_equal(other.bias[...], np.ones(3))


@pytest.mark.oracle
def test_bf16_of_torch():
    import torch

    model = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=rngs())
    value = torch.randn(3, 2).to(torch.bfloat16)
    load(model, {"weight": value}, rename={"weight": ("kernel", T)}, strict=False)
    np.testing.assert_array_equal(np.asarray(model.kernel[...], np.float32), value.float().T)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_casts(tmp_path, stored):
    values = mlp_values(dtype=stored)
    path = tmp_path / "m.npz"
    if stored is ml_dtypes.bfloat16:
        path = saved(tmp_path / "m.safetensors", values)
    else:
        np.savez(path, **values)
    model = MLP(rngs())
    before = snapshot(model)
    with pytest.raises(CheckpointMismatchError, match="9 of another dtype.*cast=True") as caught:
        load(model, path, rename=PATTERNS)
    assert {one.name for one in caught.value.diff.dtypes} >= {"layers.0.kernel", "heads.b.bias"}
    assert all(value is before[key] for key, value in snapshot(model).items())
    load(model, path, rename=PATTERNS, cast=True)
    expected = values["layers.1.weight"].astype(np.float32).T
    np.testing.assert_array_equal(model.layers[1].kernel[...], expected)


def test_integers_that_do_not_fit():
    class Counts(nnx.Module):
        def __init__(self):
            self.n = nnx.Param(jnp.zeros(3, jnp.int32))

    model = Counts()
    load(model, {"n": np.array([1, 2, 3], np.int64)}, cast=True)
    np.testing.assert_array_equal(model.n[...], [1, 2, 3])
    with pytest.raises(CheckpointMismatchError, match="'n': holds integers from 0 to 4294967296"):
        load(model, {"n": np.array([0, 2, 1 << 32], np.int64)}, cast=True)
    np.testing.assert_array_equal(model.n[...], [1, 2, 3])


def test_packed_blocks_are_decoded_if_asked(tmp_path):
    gguf = pytest.importorskip("gguf")
    values = numbers(6, 64)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "nothing-known")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = nnx.Linear(64, 6, use_bias=False, rngs=rngs())
    rename = {"w": ("kernel", T)}
    with pytest.raises(CheckpointMismatchError, match="'kernel' .from 'w'. is .*Q8_0.* must be "):
        load(model, tmp_path / "m.gguf", rename=rename)
    load(model, tmp_path / "m.gguf", rename=rename, cast=True)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(model.kernel[...], expected.T)


def test_a_gguf_file_has_hugging_face_s_names(minilm, tmp_path):
    from tests.engine.test_load_gguf import write

    model = nnx.Linear(384, 1536, rngs=rngs())
    names = {"encoder.layer.3.intermediate.dense": ""}
    load(model, write(tmp_path / "m.gguf", minilm), rename=torch_rules(model, names), strict=False)
    there = safetensors_numpy.load_file(minilm / "model.safetensors")
    expected = there["encoder.layer.3.intermediate.dense.weight"].T.astype(np.float32)
    np.testing.assert_array_equal(model.kernel[...], expected)


def test_functions():
    model = nnx.Linear(2, 3, rngs=rngs())
    weight = numbers(3, 2)
    rename = {"w": ("kernel", (lambda w: 2 * w.T, lambda k: k.T / 2)), "b": ("bias", np.negative)}
    load(model, {"w": weight, "b": np.ones(3, np.float32)}, rename=rename)
    np.testing.assert_array_equal(model.kernel[...], 2 * weight.T)
    np.testing.assert_array_equal(model.bias[...], -np.ones(3))
    with pytest.raises(UserInputError, match="'bias' is made by a function"):
        tensors(model, rename=rename)
    del rename["b"]
    np.testing.assert_array_equal(tensors(model, rename=rename)["w"], weight)
    with pytest.raises(UserInputError, match="no inverse"):
        tensors(model, rename=str.upper)


def test_a_function_that_gives_another_shape_changes_nothing():
    model = nnx.Linear(2, 3, rngs=rngs())
    before = snapshot(model)
    weights = {"bias": np.zeros(3, np.float32), "w": numbers(3, 2)}
    with pytest.raises(
        CheckpointMismatchError, match=r"'w'.*'kernel' .expected \[2, 3\], found \[3, 2"
    ):
        load(model, weights, rename={"w": ("kernel", np.array)})
    assert all(value is before[key] for key, value in snapshot(model).items())


def test_a_tensor_that_is_two_arrays():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 3, rngs=rngs)
            self.head = nnx.Linear(3, 5, use_bias=False, rngs=rngs)

    model, table = Tied(rngs()), numbers(5, 3)
    rename = {"wte": ["embed.embedding", ("head.kernel", T)]}
    load(model, {"wte": table}, rename=rename)
    np.testing.assert_array_equal(model.embed.embedding[...], table)
    np.testing.assert_array_equal(model.head.kernel[...], table.T)
    with pytest.raises(UserInputError, match="two arrays of the module the name 'wte'"):
        tensors(model, rename=rename)


def test_a_variable_in_two_places():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(5, 3, rngs=rngs)
            self.head = nnx.Embed(5, 3, rngs=rngs)
            self.head.embedding = self.embed.embedding
            self.again = self.embed
            self.itself = self

    table = numbers(5, 3)
    for name in ("embed.weight", "head.weight", "again.weight"):
        model = Tied(rngs())
        load(model, {name: table}, rename=torch_rules(model))
        np.testing.assert_array_equal(model.embed.embedding[...], table)
        assert model.head.embedding is model.embed.embedding
    both = {"embed.weight": table, "head.weight": table.copy()}
    load(model, both, rename=torch_rules(model))
    assert len(tensors(model)) == 1
    with pytest.raises(CheckpointMismatchError, match="'embed.weight' and 'head.weight' are both"):
        load(model, both | {"head.weight": table + 1}, rename=torch_rules(model))


def test_stacked_layers(tmp_path):
    class Stacked(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda r: nnx.Linear(4, 6, rngs=r), in_axes=0, out_axes=0)
            self.up = make(rngs.split(3))

    values = {f"l.{i}.up.weight": numbers(6, 4, seed=i) for i in range(3)}
    values |= {f"l.{i}.up.bias": numbers(6, seed=i) for i in range(3)}
    path = saved(tmp_path / "m.safetensors", values)
    model = Stacked(rngs())
    rules = torch_rules(model, {"l.*.up": "up"})
    assert rules["l.*.up.weight"] == ("up.kernel", "o i -> * i o")
    load(model, path, rename=rules)
    for i in range(3):
        np.testing.assert_array_equal(model.up.kernel[i], values[f"l.{i}.up.weight"].T)
        np.testing.assert_array_equal(model.up.bias[i], values[f"l.{i}.up.bias"])
    back = tensors(model, rename=rules)
    assert set(back) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value)
    less = {k: v for k, v in values.items() if not k.startswith("l.1.")}
    with pytest.raises(CheckpointMismatchError, match="no tensor for layers 1, 'up.bias' has 3"):
        load(model, less, rename=rules)
    more = values | {"l.3.up.bias": numbers(6)}
    with pytest.raises(
        CheckpointMismatchError, match="'up.bias' has 3 layers, .* for more: l.3.up.bias"
    ):
        load(model, more, rename=rules)
    with pytest.raises(UserInputError, match="has an axis of layers"):
        torch_rules(model)
    with pytest.raises(UserInputError, match="has no axis of layers"):
        torch_rules(nnx.Linear(2, 2, rngs=rngs()), {"l.*": ""})


# --- what is left alone --------------------------------------------------------------------------


def test_other_state_is_left_alone():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.cache = nnx.Cache(jnp.ones(2))
            self.array = jnp.arange(3)
            self.note = "text"

    model = Net(rngs())
    before = snapshot(model)
    weights = {"norm.weight": numbers(3), "norm.bias": numbers(3)}
    load(model, weights, rename=torch_rules(model))
    after = snapshot(model)
    changed = {key for key in before if after[key] is not before[key]}
    assert changed == {("norm", "scale"), ("norm", "bias")}
    load(model, weights | {"norm.running_mean": numbers(3)}, rename=torch_rules(model))
    np.testing.assert_array_equal(model.norm.mean[...], numbers(3))
    assert not any("rngs" in name for name in tensors(model))
    abstract = nnx.eval_shape(lambda: Net(rngs()))
    with pytest.raises(CheckpointMismatchError) as caught:
        load(abstract, weights, rename=torch_rules(abstract))
    assert set(caught.value.diff.missing) == {"norm.mean", "norm.var", "cache"}


# --- what does not fit ---------------------------------------------------------------------------


def test_all_that_differs_is_in_one_error(tmp_path):
    values = mlp_values()
    values["heads.a.wieght"] = values.pop("heads.a.weight")
    values["layers.0.bias"] = numbers(5)
    values["layers.1.bias"] = values["layers.1.bias"].astype(np.float16)
    values["plain.x.0.weight"] = numbers(4, 2)
    values["stray"] = numbers(1)
    path = saved(tmp_path / "m.safetensors", values)
    model = MLP(rngs())
    before = snapshot(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        load(model, path, rename=torch_rules(model))
    error, text = caught.value, str(caught.value)
    assert error.diff.missing == ("heads.a.kernel",)
    assert set(error.diff.unexpected) == {"heads.a.wieght", "stray"}
    assert {(d.name, d.expected, d.found) for d in error.diff.shapes} == {
        ("layers.0.bias", (4,), (5,)), ("plain.x.0.kernel", (2, 4), (4, 2)),
    }  # fmt: skip
    assert [(d.name, d.found) for d in error.diff.dtypes] == [("layers.1.bias", "DType.float16")]
    assert text.startswith(f"{path}: the checkpoint does not fit the module: 1 missing: ")
    assert "'heads.a.kernel' (from 'heads.a.weight') (is it 'heads.a.wieght'?)" in text
    assert "2 unexpected: 'heads.a.wieght', 'stray'" in text
    assert "'plain.x.0.kernel' (from 'plain.x.0.weight') is [4, 2] and must be [2, 4]" in text
    assert "cast=True" in text and "Nothing was changed." in text and "\n" not in text
    assert all(value is before[key] for key, value in snapshot(model).items())


def test_a_name_that_was_meant():
    model = nnx.List([nnx.LayerNorm(4, rngs=rngs())])
    values = {"0.weigth": numbers(4), "0.bais": numbers(4)}
    with pytest.raises(CheckpointMismatchError) as caught:
        load(model, values, rename=torch_rules(model))
    assert "'0.scale' (from '0.weight') (is it '0.weigth'?)" in str(caught.value)
    assert "'0.bias' (is it '0.bais'?)" in str(caught.value)


def test_checksums_are_compared_where_asked(tmp_path):
    import zipfile

    from maxjax.errors import CheckpointCorruptError

    path = tmp_path / "m.npz"
    np.savez(path, kernel=numbers(64, 64))
    with zipfile.ZipFile(path) as file:
        offset = file.infolist()[0].header_offset
    data = bytearray(path.read_bytes())
    data[offset + 1000] ^= 1
    path.write_bytes(data)
    model = nnx.Linear(64, 64, use_bias=False, rngs=rngs())
    before = snapshot(model)
    with pytest.raises(CheckpointCorruptError, match="'kernel'"):
        load(model, path, verify=True)
    assert all(value is before[key] for key, value in snapshot(model).items())
    load(model, path, verify=False)
    assert not np.array_equal(model.kernel[...], numbers(64, 64))


def test_a_lenient_load(tmp_path):
    values = mlp_values()
    del values["heads.a.bias"]
    values["stray"] = numbers(1)
    model = MLP(rngs())
    found = load(model, values, rename=torch_rules(model), strict=False)
    assert found.missing == ("heads.a.bias",) and found.unexpected == ("stray",)
    np.testing.assert_array_equal(model.layers[0].kernel[...], values["layers.0.weight"].T)
    with pytest.raises(CheckpointMismatchError, match="must be"):
        load(model, values | {"layers.0.bias": numbers(7)}, rename=torch_rules(model), strict=False)


def test_many_differences_are_counted():
    model = nnx.eval_shape(lambda: MLP(rngs(), depth=30))
    with pytest.raises(CheckpointMismatchError, match="65 missing: .* and 55 more") as caught:
        load(model, {})
    assert len(caught.value.diff.missing) == 65 and len(str(caught.value)) < 2000


@pytest.mark.parametrize("options", [{"ref": True}, {"hijax": True}], ids=str)
def test_variables_of_other_kinds(options):
    with nnx.var_defaults(**options):
        model = nnx.Linear(2, 3, rngs=rngs())
    assert {key: getattr(model.kernel, key) for key in options} == options
    weight = numbers(3, 2)
    load(model, {"weight": weight, "bias": numbers(3)}, rename=torch_rules(model))
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), weight.T)
    np.testing.assert_allclose(model(np.eye(2, dtype=np.float32)), weight.T + numbers(3), rtol=1e-6)
    np.testing.assert_array_equal(tensors(model, rename=torch_rules(model))["weight"], weight)


def test_a_square_kernel_is_not_taken_as_it_lies():
    model = nnx.Linear(3, 3, use_bias=False, rngs=rngs())
    weight = numbers(3, 3)
    with pytest.raises(CheckpointMismatchError, match="give its layout"):
        load(model, {"weight": weight}, rename={"weight": "kernel"})
    load(model, {"weight": weight}, rename={"weight": ("kernel", AS_IS)})
    np.testing.assert_array_equal(model.kernel[...], weight)


def test_a_layout_for_other_axes():
    model = nnx.Linear(3, 3, use_bias=False, rngs=rngs())
    with pytest.raises(CheckpointMismatchError, match="'kernel' has 2 axes, and .* gives it 4"):
        load(model, {"weight": numbers(3, 3)}, rename={"weight": ("kernel", OIHW_TO_HWIO)})


def test_a_failed_read_changes_nothing(tmp_path, monkeypatch):
    path = saved(tmp_path / "m.safetensors", mlp_values())
    model = MLP(rngs())
    before = snapshot(model)

    def fails(self, parts):
        raise OSError("gone")

    monkeypatch.setattr(CheckpointSource, "read_parts", fails)
    with pytest.raises(OSError, match="gone"):
        load(model, path, rename=torch_rules(model))
    assert all(value is before[key] for key, value in snapshot(model).items())


def test_wrong_arguments(tmp_path):
    model = nnx.Linear(2, 3, rngs=rngs())
    with pytest.raises(UserInputError, match="expected a flax nnx module, not int"):
        load(3, {})
    with pytest.raises(UserInputError, match="weights are a path"):
        load(model, 3)
    with pytest.raises(UserInputError, match="'kernel' is a str"):
        load(model, {"kernel": "text"})
    with pytest.raises(UserInputError, match="rename is a table"):
        load(model, {}, rename=3)
    with pytest.raises(CheckpointMissingError):
        load(model, tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="'bias' has no value"):
        tensors(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=rngs())))
    with pytest.raises(UserInputError, match="stars do not carry over"):
        torch_rules(model, {"a": "b.*"})


def test_parts_that_are_not_all_there():
    model = nnx.Linear(2, 3, use_bias=False, rngs=rngs())
    with pytest.raises(UserInputError, match=r"'w' has 2 parts.* none for \[1\]"):
        tensors(model, rename={"w": ("kernel", "(0/2 o) i -> i o")})


def test_parts_that_are_not_alike():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(2, 3, use_bias=False, rngs=rngs)
            self.b = nnx.Linear(3, 2, use_bias=False, rngs=rngs)

    rename = {"w": [("a.kernel", "(0/2 o) i -> i o"), ("b.kernel", "(1/2 o) i -> i o")]}
    with pytest.raises(UserInputError, match="the parts of 'w' differ"):
        tensors(Two(rngs()), rename=rename)
    rename = {"w": ("a.kernel", "a b c -> a b c")}
    with pytest.raises(UserInputError, match="'a.kernel' has 2 axes"):
        tensors(Two(rngs()), rename=rename)


def test_parts_of_stacked_layers():
    class Pair(nnx.Module):
        def __init__(self):
            self.gate = nnx.Param(jnp.zeros((3, 4, 2)))
            self.up = nnx.Param(jnp.zeros((3, 4, 2)))

    values = {f"l.{i}.gate_up": numbers(4, 4, seed=i) for i in range(3)}
    rename = {"l.*.gate_up": [("gate", "(0/2 o) i -> * i o"), ("up", "(1/2 o) i -> * i o")]}
    model = Pair()
    load(model, values, rename=rename)
    np.testing.assert_array_equal(model.up[2], values["l.2.gate_up"][2:].T)
    back = tensors(model, rename=rename)
    assert set(back) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value)


# --- several devices -----------------------------------------------------------------------------

TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def spread(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(TYPES[kind],) * 2)


class Sharded(nnx.Module):
    def __init__(self, rngs):
        def meta(*spec):
            return {"out_sharding": spec}

        self.up = nnx.Linear(16, 32, rngs=rngs, kernel_metadata=meta("data", "model"),
                             bias_metadata=meta("model"))  # fmt: skip
        self.attn = nnx.LinearGeneral(16, (8, 4), rngs=rngs, kernel_metadata=meta(None, "model", None),
                                      bias_metadata=meta("model", None))  # fmt: skip
        self.odd = nnx.LinearGeneral(16, (8, 4), use_bias=False, rngs=rngs,
                                     kernel_metadata=meta("data", None, "model"))  # fmt: skip
        self.norm = nnx.LayerNorm(16, rngs=rngs)


def sharded_values(dtype=np.float32):
    return {
        "up.weight": numbers(32, 16, dtype=dtype), "up.bias": numbers(32, seed=1, dtype=dtype),
        "attn.weight": numbers(32, 16, seed=2, dtype=dtype), "attn.bias": numbers(32, seed=3, dtype=dtype),
        "odd.weight": numbers(32, 16, seed=4, dtype=dtype),
        "norm.weight": numbers(16, seed=5, dtype=dtype), "norm.bias": numbers(16, seed=6, dtype=dtype),
    }  # fmt: skip


def check_sharded(model, values, mesh, **options):
    for path, spec, expected in [
        ("up.kernel", P("data", "model"), values["up.weight"].T),
        ("up.bias", P("model"), values["up.bias"]),
        ("attn.kernel", P(None, "model", None), values["attn.weight"].T.reshape(16, 8, 4)),
        ("attn.bias", P("model", None), values["attn.bias"].reshape(8, 4)),
        ("odd.kernel", P("data", None, "model"), values["odd.weight"].T.reshape(16, 8, 4)),
    ]:
        layer, name = path.split(".")
        array = getattr(getattr(model, layer), name).get_raw_value()
        assert array.sharding == NamedSharding(mesh, spec), path
        np.testing.assert_array_equal(np.asarray(array), expected.astype(np.float32))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("is_abstract", [True, False], ids=["abstract", "full"])
@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_each_device_reads_its_own(tmp_path, monkeypatch, kind, is_abstract, stored):
    mesh, values = spread(kind), sharded_values(stored)
    path = saved(tmp_path / "m.safetensors", values)
    read, total = [], sum(v.nbytes for v in values.values())
    original = CheckpointSource.read_parts

    def counted(self, parts):
        read.extend(part.memory.nbytes for part in parts)
        return original(self, parts)

    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: Sharded(rngs())) if is_abstract else Sharded(rngs())
        monkeypatch.setattr(CheckpointSource, "read_parts", counted)
        load(model, path, rename=torch_rules(model), cast=True)
    check_sharded(model, values, mesh)
    # A head's width over "model" is in no rectangle: each of four devices reads all the heads.
    assert sum(read) == total + 3 * values["odd.weight"].nbytes
    assert max(read) <= values["odd.weight"].nbytes // 2
    with jax.set_mesh(mesh):
        back = tensors(model, rename=torch_rules(model))
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(back[name]), value.astype(np.float32))


def test_arrays_by_name_onto_devices():
    mesh, values = spread("auto"), sharded_values()
    with jax.set_mesh(mesh):
        model = Sharded(rngs())
    load(model, values, rename=torch_rules(model))  # the values say where they lie
    check_sharded(model, values, mesh)


def test_a_mesh_that_is_not_there(tmp_path):
    with jax.set_mesh(spread("auto")):
        model = nnx.eval_shape(lambda: Sharded(rngs()))
    with pytest.raises(UserInputError, match=r"'.*' was made for a mesh .* jax.set_mesh"):
        load(model, sharded_values(), rename=torch_rules(model))


def test_an_abstract_state_with_shardings(tmp_path):
    mesh, values = spread("auto"), sharded_values()
    graph, state = nnx.get_abstract_model(lambda: Sharded(rngs()), mesh)
    model = nnx.merge(graph, state)
    load(model, saved(tmp_path / "m.safetensors", values), rename=torch_rules(model))
    check_sharded(model, values, mesh)


def test_a_stack_over_devices(tmp_path):
    mesh = spread("auto")
    values = {f"l.{i}.weight": numbers(8, 4, seed=i) for i in range(4)}
    place = NamedSharding(mesh, P("data", None, "model"))

    class Stack(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jax.ShapeDtypeStruct((4, 4, 8), jnp.float32, sharding=place))

    model = Stack()
    rename = {"l.*.weight": ("kernel", "o i -> * i o")}
    load(model, saved(tmp_path / "m.safetensors", values), rename=rename)
    array = model.kernel.get_raw_value()
    assert array.sharding == place
    expected = np.stack([values[f"l.{i}.weight"].T for i in range(4)])
    np.testing.assert_array_equal(np.asarray(array), expected)


def test_one_device_that_was_chosen():
    device = jax.devices()[3]
    model = nnx.Linear(2, 3, rngs=rngs())
    model.kernel.set_raw_value(jax.device_put(model.kernel.get_raw_value(), device))
    load(model, {"kernel": numbers(2, 3), "bias": numbers(3)})
    assert model.kernel[...].devices() == {device} and model.kernel[...].committed
    assert not model.bias[...].committed


def test_two_variables_of_one_path_are_refused():
    inner = nnx.Dict({"b": nnx.Param(jnp.ones(2))})
    module = nnx.Dict({"a.b": nnx.Param(jnp.zeros(2)), "a": inner})
    with pytest.raises(UserInputError, match=r"two arrays are both 'a\.b'"):
        tensors(module)


def test_a_numpy_variable_of_64_bits_takes_no_values_that_jax_cannot_hold():
    module = nnx.Dict({"a": nnx.Variable(np.zeros(2, np.int64))})
    with pytest.raises(CheckpointMismatchError, match="'a'.*DType.int64.*DType.int32"):
        load(module, {"a": np.array([1 << 40, 2])})
    with pytest.raises(CheckpointMismatchError, match="do not fit int32"):
        load(module, {"a": np.array([1 << 40, 2])}, cast=True)
