"""How many examples a property test tries.

Normally a test tries the same few examples each time, so that only a change of the code makes it fail.
A campaign (`scripts/property_tests.sh`) tries 1,000 other examples each time, to find more.
"""

import os

from hypothesis import settings

CAMPAIGN = int(os.environ.get("MAXJAX_PROPERTIES", "0"))
"""The examples of each property test in a campaign, 0 day by day."""

PROFILE = "campaign" if CAMPAIGN else "maxjax"


def register() -> None:
    """Loads hypothesis's profile for this run; tests have no deadline."""
    if CAMPAIGN:
        settings.register_profile(PROFILE, deadline=None, max_examples=CAMPAIGN, print_blob=True)
    else:
        settings.register_profile(PROFILE, deadline=None, derandomize=True)
    settings.load_profile(PROFILE)


def examples(usual: int) -> settings:
    """Settings of a test with ``usual`` examples; in a campaign it has as many as all others."""
    return settings(max_examples=CAMPAIGN or usual)
