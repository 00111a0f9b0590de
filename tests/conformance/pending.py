"""The scenarios that wait for a later step of the plan, each by name."""

STEPS: dict[int, str] = {}
PENDING = {name: step for step, names in STEPS.items() for name in names.split()}
