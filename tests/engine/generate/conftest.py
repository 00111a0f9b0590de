"""A Llama of transformers, and the same one here."""

import pytest

from tests.models import decoders
from tests.models.decoders import ours


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def theirs(directory):
    return decoders.oracle("Llama", directory)


@pytest.fixture(scope="module")
def model(theirs, directory):
    return ours(directory)
