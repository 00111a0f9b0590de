"""Checkpoints of one architecture are one kind of tree, whatever else their files say."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import maxjax
from maxjax.checkpoint import save
from maxjax.errors import UserInputError
from maxjax.models import BertConfig, BertModel
from tests.models import goldens

UNREAD = {"transformers_version": "9.9", "_name_or_path": "org/name", "use_cache": False, "initializer_range": 0.3,
          "eos_token_id": 7, "max_position_embeddings": 128}  # fmt: skip
IDS = jnp.asarray(goldens.IDS[:, :3])
mean = lambda a, b: (a + b) / 2


def checkpoint(directory, name="llama", /, **changes):
    directory.mkdir()
    goldens.write(name, directory)
    config = goldens.config_of(name) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def opened(path):
    return maxjax.load(path, tokenizer=False)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two models whose files differ only in what no call reads."""
    folder = tmp_path_factory.mktemp("pair")
    one, two = checkpoint(folder / "one"), checkpoint(folder / "two", **UNREAD)
    settings = {"do_sample": True, "temperature": 0.3, "eos_token_id": 3}
    (two / "generation_config.json").write_text(json.dumps(settings))
    return opened(one), opened(two)


@pytest.mark.parametrize("name", goldens.MODELS)
def test_keys_that_no_call_reads_are_not_compared(name, tmp_path):
    unread = dict(UNREAD)
    if name in ("llama-dynamic", "gpt2"):  # whose RoPE, and table of positions, have this length
        del unread["max_position_embeddings"]
    one = opened(checkpoint(tmp_path / "one", name))
    two = opened(checkpoint(tmp_path / "two", name, **unread))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(two))


def test_keys_of_encoders_that_no_call_reads_are_not_compared(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
             "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip
    config = {"architectures": ["BertModel"], "model_type": "bert", **sizes}
    model = maxjax.init(BertModel(BertConfig.from_dict(config), "float32"), jax.random.key(0))
    unread = {
        "hidden_dropout_prob": 0.3,
        "pad_token_id": 3,
        "id2label": {str(i): str(i) for i in range(5)},
    }
    for name, changes in (("one", {}), ("two", unread)):
        (tmp_path / name).mkdir()
        save_file(
            {n: np.asarray(v) for n, v in model.state_dict().items()},
            tmp_path / name / "model.safetensors",
        )
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "two" / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 8, "pooling_mode_cls_token": True}
    (tmp_path / "two" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
    assert not maxjax.tree.differences(one, two)
    assert jax.tree.structure(one) == jax.tree.structure(two) == jax.tree.structure(model)
    assert jax.tree.map(mean, two, one).config.num_labels == 5


def test_models_of_two_checkpoints_are_taken_together(pair):
    one, two = pair
    for found in (jax.tree.map(mean, one, two), optax.incremental_update(one, two, 0.5)):
        np.testing.assert_allclose(found.lm_head.weight.value, one.lm_head.weight.value, rtol=1e-6)
    chosen = jax.lax.cond(jnp.array(True), lambda a, b: a, lambda a, b: b, one, two)
    assert jax.tree.structure(chosen) == jax.tree.structure(two)
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, two)
    logits = jax.vmap(lambda model: model(IDS))(ensemble)
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-6)


def test_a_compiled_function_is_not_compiled_again(pair):
    count = 0

    @jax.jit
    def run(model, ids):
        nonlocal count
        count += 1
        return model(ids)

    for model in pair:
        run(model, IDS)
    assert count == 1


def test_each_model_keeps_its_own_settings(pair):
    one, two = pair
    for model, other in ((one, two), (two, one)):
        copy = jax.tree.map(lambda leaf: leaf, model)
        assert copy.hf_config == model.hf_config != other.hf_config
        assert copy.generation == model.generation != other.generation
        assert copy.config.max_position_embeddings == model.max_length != other.max_length
        assert jax.tree.map(mean, model, other).hf_config == model.hf_config
        assert jax.jit(lambda m: m)(model).generation == model.generation
        gradient = jax.jit(jax.grad(lambda m: m(IDS).sum()))(model)
        assert jax.tree.map(lambda a, g: a - g, model, gradient).hf_config == model.hf_config
    two.hf_config = {**two.hf_config, "license": "mit"}
    assert "license" in jax.tree.map(mean, two, one).hf_config and "license" not in one.hf_config


def test_a_model_without_a_config_gets_none_from_another(pair):
    bare = type(pair[0])(pair[0].config)
    copy = jax.tree.map(lambda leaf: leaf, bare)
    assert jax.tree.structure(bare) == jax.tree.structure(pair[0])
    assert copy.hf_config is None and not hasattr(copy, "generation")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "qwen3-moe"])
def test_every_way_of_loading_gives_one_kind_of_tree(name, tmp_path):
    directory = checkpoint(tmp_path / "files", name)
    model = opened(directory)
    tensors, config = load_file(directory / "model.safetensors"), goldens.config_of(name)
    save(tmp_path / "orbax", model)
    ways = {
        "orbax": lambda: opened(tmp_path / "orbax"),
        "build": lambda: maxjax.build(maxjax.load_weights(directory)),
        "init": lambda: maxjax.init(
            maxjax.build(maxjax.load_weights(directory)), jax.random.key(0)
        ),
        "from_torch": lambda: maxjax.from_torch(tensors, config=config | UNREAD),
        "config": lambda: type(model)(model.config),
        "saved": lambda: opened(
            maxjax.save_pretrained(model, tmp_path / "saved") or tmp_path / "saved"
        ),
    }
    for way, make in ways.items():
        assert not maxjax.tree.differences(model, make()), way


def test_a_gguf_file_gives_the_tree_of_the_files_it_was_made_of(tmp_path):
    directory = tmp_path / "files"
    shutil.copytree(maxjax.storage.hub.find_model("tiny"), directory)
    config = json.loads((directory / "config.json").read_text()) | {"rms_norm_eps": 3e-6}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "maxjax_digests.json").unlink()
    maxjax.convert(directory, tmp_path / "model.gguf")
    model = opened(directory)
    assert jax.tree.structure(model) == jax.tree.structure(opened(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e-5}, r"two Llamas differ in config\.rms_norm_eps: 1e-06 and 1e-05"),
        ({"rope_theta": 5.0}, r"differ in config\.rope_parameters\.theta: 10000\.0 and 5\.0"),
    ],
)
def test_what_differs_is_named(changes, message, tmp_path):
    one = opened(checkpoint(tmp_path / "one"))
    two = opened(checkpoint(tmp_path / "two", **changes))
    for a, b in ((one, two), ([one], [two])):
        with pytest.raises(UserInputError, match=message):
            maxjax.tree.map(mean, a, b)
    with pytest.raises(ValueError, match=r"maxjax\.tree\.map says in what two differ"):
        jax.tree.map(mean, one, two)


def test_differences_of_weights_are_named(tmp_path):
    directory = checkpoint(tmp_path / "one")
    model, narrow = opened(directory), maxjax.load(directory, tokenizer=False, dtype="bfloat16")[0]
    with pytest.raises(
        UserInputError, match=r"dtype of \S+ and \d+ more weights: float32 and bfloat16"
    ):
        maxjax.tree.map(mean, model, narrow)
    stacked = opened(directory).to(maxjax.make_mesh(model=2))
    with pytest.raises(UserInputError, match=r"sharding of \S+ and"):
        maxjax.tree.map(mean, model, stacked)
    adapted = maxjax.lora.add(model, rank=2, key=jax.random.key(0))
    with pytest.raises(
        UserInputError, match=r"lora\S*, which only the second has|that only the second has"
    ):
        maxjax.tree.map(mean, model, adapted)


def test_an_error_of_the_function_is_its_own(pair):
    def fail(a, b):
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="^of its own$"):
        maxjax.tree.map(fail, *pair)
    with pytest.raises(ValueError, match="different types"):
        maxjax.tree.map(mean, pair[0], 3)
