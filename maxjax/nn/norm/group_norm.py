"""Re-exports from ``norms.py`` under MAX's path."""

from .norms import GroupNorm as GroupNorm
