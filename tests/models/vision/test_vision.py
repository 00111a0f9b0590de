"""Every model of images against transformers: states, vectors and logits, files, meshes, dtypes, other sizes."""

import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.models.written import config_of
from tests.models.vision.cases import (
    CASES,
    answer_of,
    compare,
    each,
    inputs,
    loaded,
    oracle_of,
    result_of,
)


@each()
def test_results_and_files(tmp_path, kind, config, settings):
    oracle = oracle_of(kind, config, settings)
    oracle.save(tmp_path / "a")
    model, (pixels, ids) = loaded(tmp_path / "a"), inputs(oracle.config)
    assert type(model).__name__ == kind
    expected = oracle.ask("results", answer_of(pixels, ids))
    compare(result_of(model, pixels, ids), expected)
    maxjax.save_pretrained(model, tmp_path / "b")
    written = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == oracle.tensors.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, oracle.tensors[name], err_msg=name)
    again = maxjax.models.read_object(tmp_path / "b" / "config.json")
    assert model.family.config.from_dict(again) == model.config
    made = model.family.make(model.config, (), "float32", "float32")  # of no file
    assert made.family.config.from_dict(config_of(made)) == model.config


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("number", range(len(CASES)))
def test_meshes_and_what_transformers_opens(tmp_path, number):
    from tests.oracles.models import opened

    _, kind, config, settings = CASES[number]
    oracle = oracle_of(kind, config, settings)
    oracle.save(tmp_path / "a")
    pixels, ids = inputs(oracle.config, 4)
    expected = answer_of(pixels, ids)(oracle.live())
    for mesh in (maxjax.make_mesh(model=4), maxjax.make_mesh(data=2, model=2, fsdp=2)):
        split, _ = maxjax.load(tmp_path / "a", mesh=mesh, tokenizer=False)
        compare(result_of(split, pixels, ids), expected)
    maxjax.save_pretrained(split, tmp_path / "b")
    again = opened(kind, tmp_path / "b")
    for name, value in oracle.live().state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), value.numpy(), err_msg=name)
