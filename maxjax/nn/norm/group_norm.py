"""MAX's path of what ``norms.py`` has."""

from .norms import GroupNorm as GroupNorm
