"""Zip archives, read with every length checked: ``directory``, ``deflate``, ``archive``."""
