"""Every family of decoders has a generator of random configurations, for ``scripts/random_decoders.py``."""

import numpy as np
import pytest

from maxjax.models import all_families
from tests.models.families import draws


def test_every_family_of_decoders_is_drawn():
    missing = set(draws.names()) - set(draws.OWN)
    assert not missing, f"tests/models/families/draws.py has no generator of {sorted(missing)}"
    assert not set(draws.OWN) - set(draws.names()), "generators of no family"
    for name in draws.names():
        case = draws.base_of(name)
        one = next(one for one in all_families() if one.model_type == name)
        assert not one.architectures or case.kind == one.architectures[0]


@pytest.mark.extra
@pytest.mark.oracle
@pytest.mark.parametrize("family", draws.names())
def test_draws_are_told_by_their_seed(family):
    one, again = (draws.draw(family, np.random.default_rng(3)) for _ in range(2))
    assert one == again
    assert one.case.settings["vocab_size"] >= 89
