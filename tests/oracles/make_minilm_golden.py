"""Records MiniLM's embeddings as transformers and torch compute them.

    python -m tests.oracles.make_minilm_golden

writes `tests/engine/goldens/minilm.npz`: texts (JSON as bytes), their numbers of tokens, and
their embeddings, float32 of length 1. The tests that are run without torch compare with it.
"""

import json
import sys
from pathlib import Path

import numpy as np

from scripts.minilm import minilm_directory
from tests.oracles.sentences import ODD, sentences

GOLDEN = Path(__file__).parent.parent / "engine" / "goldens" / "minilm.npz"


def reference(directory: Path, attention: str = "eager"):
    """(tokenizer, model) of transformers in float32; "eager" is attention in plain torch."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(
        directory, attn_implementation=attention, dtype=torch.float32
    )
    return tokenizer, model.eval()


def embeddings(directory: Path, texts: list[str], batch_size: int = 16) -> np.ndarray:
    """The mean over each text's tokens, scaled to length 1; batches padded to their longest."""
    import torch

    tokenizer, model = reference(directory)
    found = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(
            texts[start : start + batch_size],
            padding=True, truncation=True, max_length=256, return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            states = model(**batch).last_hidden_state  # [B, T, E]
        mask = batch["attention_mask"][..., None].float()
        mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        found.append(torch.nn.functional.normalize(mean, dim=1).numpy())
    return np.concatenate(found)


def main() -> None:
    """Writes the file."""
    directory = minilm_directory()
    if directory is None:
        sys.exit("the MiniLM checkpoint is not installed: run scripts/setup.sh")
    texts = [*ODD, *sentences()[len(ODD) :: 5]]
    tokenizer, _ = reference(directory)
    np.savez_compressed(
        GOLDEN,
        texts=np.frombuffer(json.dumps(texts).encode(), np.uint8),
        tokens=np.array([len(tokenizer(text)["input_ids"]) for text in texts], np.int32),
        embeddings=embeddings(directory, texts).astype(np.float32),
    )
    print(f"{GOLDEN}: {len(texts)} texts, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
