"""Re-exports from ``session.py`` under MAX's path."""

from .session import InferenceSession as InferenceSession
from .session import Model as Model
