"""How many examples a property test tries.

Day by day it is the same few, so that a change is what makes a test fail. The same ones for ever
would find nothing more: a campaign (`scripts/property_tests.sh`) tries 1,000 others each time.
"""

import os

from hypothesis import settings

CAMPAIGN = int(os.environ.get("MAXJAX_PROPERTIES", "0"))
"""The examples of each property test in a campaign, 0 day by day."""

PROFILE = "campaign" if CAMPAIGN else "maxjax"


def register() -> None:
    """Makes the profile of this run the one that tests have; none fails for being slow."""
    if CAMPAIGN:
        settings.register_profile(PROFILE, deadline=None, max_examples=CAMPAIGN, print_blob=True)
    else:
        settings.register_profile(PROFILE, deadline=None, derandomize=True)
    settings.load_profile(PROFILE)


def examples(usual: int) -> settings:
    """So many examples day by day; in a campaign as many as all others."""
    return settings(max_examples=CAMPAIGN or usual)
