"""MAX\'s path of latent attention in float8, which raises NotImplementedError with advice when it is used."""

from ...absent import absent as _absent

__getattr__ = _absent(__name__)
