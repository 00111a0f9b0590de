"""Image encoders, and models that embed images and texts in one space: one file per architecture."""
