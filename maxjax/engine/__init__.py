"""Floor 6. Programs that run: load a model, embed texts. Each file is named as its function."""

from ..graph.program import Model as Model
from .session import InferenceSession as InferenceSession
