"""safetensors files (https://huggingface.co/docs/safetensors): ``reader`` and ``writer``."""
