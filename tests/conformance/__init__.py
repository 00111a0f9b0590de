"""The same scenarios, run against Modular MAX 26.7 (recorded) and against maxjax.

`scenarios.py` and `expected_max.json` are kept as they were run and recorded. For the scenarios
marked `quirk`, `expected_maxjax.json` holds what maxjax gives instead of the defect.
`python -m tests.conformance.run --target max` records anew where MAX is installed.
"""
