"""Pictures as the inputs of vision models: the image half of a checkpoint's processor, in NumPy and Pillow.

``decode`` turns files, bytes, ``data:`` addresses, Pillow's images and arrays into RGB pixels. ``processor`` resizes,
crops, tiles and normalizes them as ``preprocessor_config.json`` says, with ``settings`` for that file, ``kinds`` for
what each class of processors in transformers does, and ``prompt`` for the tokens of a picture in a text.
Nothing of it needs JAX. Pillow is an extra: ``pip install maxjax[images]``.
"""

from .decode import decode as decode
from .decode import is_image as is_image
from .inputs import ImageInputs as ImageInputs
from .processor import ImageProcessor as ImageProcessor
