"""Written for files of Modular MAX: InferenceSession and Model, re-exported at MAX's path.

maxjax itself does not import it.
"""

from .session import InferenceSession as InferenceSession
from .session import Model as Model
