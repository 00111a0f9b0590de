"""What is run of MAX's own model files, by name: see ``kit``."""

from scripts.max_recipes import decoders, diffusion, text, vision
from scripts.max_recipes.kit import RECIPES, typed, weight_value

__all__ = ["RECIPES", "decoders", "diffusion", "text", "typed", "vision", "weight_value"]
