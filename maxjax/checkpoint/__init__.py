"""Floor 6. Checkpoints: models written, restored and converted, without losing what was there."""

from .convert import Converted as Converted
from .convert import convert as convert
from .manager import CheckpointManager as CheckpointManager
from .orbax import restore as restore
from .orbax import save as save
from .orbax import save_async as save_async
from .pretrained import save_pretrained as save_pretrained
from .saving import Response as Response
