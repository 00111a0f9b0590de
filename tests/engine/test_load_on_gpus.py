"""load() where the devices are GPUs, as which the tests' CPUs are given out: the layers stay separate.

Everything that comes after, texts, vectors, programs and files, is what the stacked form gives.
"""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import maxjax
from maxjax.graph import DeviceRef
from maxjax.graph.placement import arrays, stacking
from maxjax.graph.placement.arrays import platform_of
from maxjax.graph.weight import stacked as stacked_module
from maxjax.graph.weights import load_weights
from maxjax.models import LanguageModel, Llama, LlamaConfig, all_families, build
from maxjax.models.parts import layer_loop
from maxjax.nn import LayerList, LayerStack
from maxjax.storage.hub import find_model
from tests.models import goldens

RUN = jax.jit(lambda m, ids: m(ids))


@pytest.fixture
def platform(monkeypatch):
    """Sets the platform that all devices seem to be of, while a model is loaded."""
    return lambda name: monkeypatch.setattr(layer_loop, "platform_of", lambda place: name)


@pytest.fixture
def gpu(platform):
    platform("gpu")


def kept():
    with np.load(goldens.FILE) as file:
        return dict(file)


def form(model):
    return type(model.model.layers)


def contents(model):
    weights = model.raw_state_dict()
    return {name: (w.dtype, np.asarray(w.value).tobytes()) for name, w in weights.items()}


# --- which form ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("gpu", LayerList),
        ("cuda", LayerList),
        ("rocm", LayerList),
        ("tpu", LayerStack),
        ("cpu", LayerStack),
    ],
)
def test_the_platform_decides(platform, name, want):
    platform(name)
    model, _ = maxjax.load("tiny", tokenizer=False)
    assert form(model) is want
    assert form(maxjax.load("tiny", tokenizer=False, mesh=maxjax.make_mesh(model=2))[0]) is want


def test_the_platform_is_that_of_the_mesh(monkeypatch):
    """The default device counts only where no place is given."""
    seen = []
    monkeypatch.setattr(layer_loop, "platform_of", lambda place: seen.append(place) or "cpu")
    mesh = maxjax.make_mesh(model=2)
    maxjax.load("tiny", tokenizer=False, mesh=mesh)
    maxjax.load("tiny", tokenizer=False)
    assert seen == [mesh, None]


class Device:
    platform = "there"


def test_platforms(monkeypatch):
    first, here = jax.devices()[0], jax.devices()[0].platform
    mesh = maxjax.make_mesh(data=2, model=2)
    for place in (
        first, DeviceRef.CPU(), mesh, SingleDeviceSharding(first), NamedSharding(mesh, PartitionSpec()),
    ):  # fmt: skip
        assert platform_of(place) == here
    monkeypatch.setattr(arrays, "default_device", Device)
    assert platform_of(None) == "there" and platform_of(mesh) == here


def test_it_is_decided_before_anything_is_read(gpu, monkeypatch):
    """No value is stacked or taken from a stack, and the form is there when the values come."""
    made, forms = [], []
    for name in ("stack", "unstack"):
        monkeypatch.setattr(stacked_module, name, lambda *args: made.append(args))
    fill = LanguageModel.load_state_dict

    def watched(self, *args, **options):
        forms.append(form(self))
        assert all(w.value is None for w in self.raw_state_dict().values())
        return fill(self, *args, **options)

    monkeypatch.setattr(LanguageModel, "load_state_dict", watched)
    maxjax.load("tiny", tokenizer=False)
    assert forms == [LayerList] and not made
    assert stacking.stack is not stacked_module.stack  # what was watched is what is used


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"fsdp": 2, "model": 2}], ids=str)
def test_gathered_weights_stay_stacked(gpu, axes):
    mesh = maxjax.make_mesh(**axes)
    assert form(maxjax.load("tiny", tokenizer=False, mesh=mesh)[0]) is LayerStack


def test_an_axis_of_one_device_gathers_nothing(gpu):
    mesh = maxjax.make_mesh(fsdp=1, model=2)
    assert form(maxjax.load("tiny", tokenizer=False, mesh=mesh)[0]) is LayerList


def test_nothing_else_changes_the_form(gpu):
    config = LlamaConfig(64, 16, 24, num_hidden_layers=2, num_attention_heads=4)
    assert form(Llama(config)) is LayerStack
    assert form(build(load_weights(find_model("tiny", None)))) is LayerStack
    for stacked, want in ((True, LayerStack), (False, LayerList)):
        model = Llama(config, stacked=stacked).to(maxjax.make_mesh(model=2))
        assert form(model) is want
        assert form(model.to(jax.devices()[0])) is want


def test_every_family_says_whether_it_is_separate():
    kinds = {family.model_type: family.config for family in all_families()}
    assert {"mixtral", "qwen3_moe"} < set(kinds)

    def subclasses(cls):
        return {cls}.union(*map(subclasses, cls.__subclasses__()))

    separate = {cls.__name__: cls.separate_on_gpus for cls in subclasses(LanguageModel)}
    assert {"Llama", "Gemma3", "GPT2", "Mixtral", "Qwen3MoE"} < set(separate)
    assert all(separate.values())


def test_programs_do_not_see_the_number_of_a_layer():
    """If they did, XLA would compile each layer's kernels anew, and copy caches that it writes to."""
    model = Llama(
        LlamaConfig(64, 16, 24, num_hidden_layers=3, num_attention_heads=4), stacked=False
    )
    ids = jax.ShapeDtypeStruct((2, 1), np.int32)
    text = jax.jit(lambda m, ids: m(ids, m.cache(2, 8))).lower(model, ids).as_text()
    hidden = re.findall(r"stablehlo.optimization_barrier %\S+ : tensor<i32>", text)
    assert len(hidden) == 3


# --- what it gives -------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", goldens.MODELS)
def test_logits_of_every_family(gpu, name, tmp_path):
    goldens.write(name, tmp_path)
    model, _ = maxjax.load(tmp_path)
    assert form(model) is LayerList
    found, want = np.asarray(RUN(model, goldens.IDS)), kept()[name]
    spread = want.std()
    np.testing.assert_allclose(found / spread, want / spread, rtol=0, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt2"])
def test_logits_on_a_mesh(gpu, name, kind, tmp_path):
    goldens.write(name, tmp_path)
    mesh = maxjax.make_mesh(data=2, model=4, axis_types=kind)
    model, _ = maxjax.load(tmp_path, mesh=mesh)
    assert form(model) is LayerList
    found, want = np.asarray(RUN(model, goldens.IDS)), kept()[name]
    spread = want.std()
    np.testing.assert_allclose(found / spread, want / spread, rtol=0, atol=1e-4)
    cached, _ = jax.jit(lambda m, ids: m(ids, m.cache(2, 16)))(model, goldens.IDS)
    np.testing.assert_allclose(np.asarray(cached) / spread, want / spread, rtol=0, atol=1e-4)


@pytest.fixture
def two(platform):
    """The tiny model in both forms, in float32, and its tokenizer."""
    stacked, tokenizer = maxjax.load("tiny", dtype="float32")
    platform("gpu")
    separate, _ = maxjax.load("tiny", dtype="float32")
    assert (form(stacked), form(separate)) == (LayerStack, LayerList)
    return stacked, separate, tokenizer


def test_names_and_values_are_the_same(two):
    stacked, separate, _ = two
    assert contents(stacked) == contents(separate)
    assert maxjax.plan(stacked).bytes_per_device == maxjax.plan(separate).bytes_per_device


@pytest.mark.extra
def test_texts_and_vectors_are_the_same(two):
    stacked, separate, tokenizer = two
    prompts = ["Once upon a time", "The little rabbit"]
    texts = [maxjax.generate(model, tokenizer, prompts, max_new_tokens=12) for model in two[:2]]
    assert texts[0] == texts[1] and all(texts[0])
    streamed = "".join(maxjax.stream(separate, tokenizer, prompts[0], max_new_tokens=12))
    assert streamed == texts[1][0]
    vectors = [maxjax.embed(m, tokenizer, prompts, pooling="mean") for m in (stacked, separate)]
    np.testing.assert_allclose(vectors[1], vectors[0], rtol=0, atol=1e-6)


def test_files_are_the_same_and_open_in_both_forms(two, tmp_path, platform):
    stacked, separate, _ = two
    for name, model in (("stacked", stacked), ("separate", separate)):
        maxjax.save_pretrained(model, tmp_path / name)
        maxjax.checkpoint.save(tmp_path / f"{name}-orbax", model)
    files = [
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("stacked", "separate")
    ]
    assert files[0] == files[1] and "model.safetensors" in files[0]
    want = contents(stacked)
    for source, name, expected in (("stacked", "gpu", LayerList), ("separate", "cpu", LayerStack)):
        model = build(load_weights(tmp_path / source), stacked=name == "cpu")
        maxjax.checkpoint.restore(tmp_path / f"{source}-orbax", model)
        assert contents(model) == want
        platform(name)
        for path in (tmp_path / source, tmp_path / f"{source}-orbax"):
            model, _ = maxjax.load(path, tokenizer=False)
            assert form(model) is expected and contents(model) == want


def test_exported_programs_take_the_same_weights(two, tmp_path):
    stacked, separate, _ = two
    ids = np.array([[5, 7, 9]], np.int32)
    spec = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    logits = []
    for i, model in enumerate((stacked, separate)):
        maxjax.export(model, spec, tmp_path / f"{i}.program")
        program = maxjax.load_exported(tmp_path / f"{i}.program")
        assert set(program.names) == set(stacked.state_dict())
        for source in (stacked, separate):
            logits.append(np.asarray(program(source.state_dict(), ids)))
    assert logits[0].tobytes() == logits[1].tobytes() and logits[2].tobytes() == logits[3].tobytes()
    np.testing.assert_allclose(logits[2], logits[0], rtol=0, atol=2e-5)


def test_packed_weights_and_casts(tmp_path, platform):
    maxjax.checkpoint.convert(find_model("tiny", None), tmp_path / "tiny.gguf", quantize="Q8_0")
    models = []
    for name in ("cpu", "gpu"):
        platform(name)
        models.append(maxjax.load(tmp_path / "tiny.gguf", tokenizer=False)[0])
        models.append(maxjax.load("tiny", dtype="bfloat16", tokenizer=False)[0])
    assert [form(model) for model in models] == [LayerStack] * 2 + [LayerList] * 2
    assert contents(models[0]) == contents(models[2])
    assert contents(models[1]) == contents(models[3])


@pytest.mark.extra
def test_gradients_go_through_separate_layers(platform):
    """In float64: in float32 those of queries and keys are rounded by 1e-4 of their largest number."""
    ids = np.array([[5, 7, 9]], np.int32)
    found = []
    with jax.enable_x64(True):
        for name, expected in (("cpu", LayerStack), ("gpu", LayerList)):
            platform(name)
            model, _ = maxjax.load("tiny", dtype="float64", tokenizer=False)
            assert form(model) is expected
            gradient = jax.grad(lambda m: jax.nn.log_softmax(m(ids))[..., 0].sum())(model)
            found.append(gradient.raw_state_dict())
    for name, gradient in found[0].items():
        scale = float(abs(np.asarray(gradient.value)).max())
        np.testing.assert_allclose(found[1][name].value, gradient.value, rtol=0, atol=1e-5 * scale)
