"""Every family's logits against those of transformers that are kept here, and against it itself."""

import jax
import numpy as np
import pytest

import maxjax
from tests.models import goldens


@pytest.fixture(scope="module")
def kept():
    with np.load(goldens.FILE) as file:
        return dict(file)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", goldens.MODELS)
def test_logits(name, kept, tmp_path):
    goldens.write(name, tmp_path)
    model, _ = maxjax.load(tmp_path)
    found = np.asarray(jax.jit(lambda m, ids: m(ids))(model, goldens.IDS))
    spread = kept[name].std()
    np.testing.assert_allclose(found / spread, kept[name] / spread, rtol=0, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("name", goldens.MODELS)
def test_what_is_kept_is_what_transformers_says(name, kept, tmp_path):
    goldens.write(name, tmp_path)
    spread = kept[name].std()
    found = goldens.of_transformers(tmp_path)
    np.testing.assert_allclose(found / spread, kept[name] / spread, rtol=0, atol=2e-5)
