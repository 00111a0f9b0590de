"""Floor 6. Programs that run: load a model, embed texts. Each file is named as its function."""
