"""Re-exports from ``norms.py`` under MAX's path."""

from .norms import RMSNorm as RMSNorm
