"""Re-exports from ``interpolation.py`` under MAX's path."""

from .interpolation import InterpolationMode as InterpolationMode
from .interpolation import resize as resize
from .interpolation import resize_bicubic as resize_bicubic
from .interpolation import resize_linear as resize_linear
from .interpolation import resize_nearest as resize_nearest
